"""In which order images arrive, and when an adapting method starts anew.

A scenario is a function `(domains, labels, batch_size, generator) -> segments`. A segment is a
stretch of the stream that is scored on its own and cut into batches from its beginning; the last
batch may be smaller and counts like any other. Every image of every domain arrives exactly once,
but in `mixed_once`, where every image arrives in one domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Generator, Tensor

CONCENTRATION = 0.1  # of the Dirichlet distribution that spreads classes over time


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of the stream.

    Args:
        domain: what it is called in a record.
        domains: the domain of each sample, as an index, in the order of arrival.
        images: which image of that domain it is.
        reset: whether an adapting method starts anew before it.
    """

    domain: str
    domains: Tensor
    images: Tensor
    reset: bool


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A scenario and what a record says about it."""

    function: Callable[..., list[Segment]]
    order: str
    reset: str
    needs_classes: bool = False

    @property
    def apart(self) -> bool:
        """Whether a domain's predictions are the same without the others."""
        return self.reset == "every domain"


def single(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """Domain after domain, starting anew at each; images in one random order for all of them."""
    order = torch.randperm(len(labels), generator=generator)
    return [_whole_domain(domains, index, order, reset=True) for index in range(len(domains))]


def continual(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """The stream of `single`, without ever starting anew."""
    segments = single(domains, labels, batch_size, generator)
    return [dataclasses.replace(s, reset=index == 0) for index, s in enumerate(segments)]


def class_sorted(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """Domain after domain, each sorted by class, so that most batches hold one class."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    return [_whole_domain(domains, index, order, reset=True) for index in range(len(domains))]


def mixed(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """All images of all domains in one random order: a large batch holds every domain."""
    order = torch.randperm(len(domains) * len(labels), generator=generator)
    return [_mixture("mixed", order, len(labels))]


def mixed_once(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """Every image once, in a random domain: a large batch holds every domain."""
    order = torch.randperm(len(labels), generator=generator)
    which = torch.randint(len(domains), (len(labels),), generator=generator)
    return [Segment("mixed", which, order, reset=True)]


def mixed_pairs(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """A batch is two halves of one random domain each; what fills no half comes last.

    At batch size 1 there are no halves and this is `mixed`.
    """
    if batch_size > 1 and batch_size % 2:
        raise ValueError(f"mixed-pairs has batch size {batch_size}, expected an even one, or 1.")
    return [_runs("mixed", domains, labels, max(1, batch_size // 2), generator)]


def alternating(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator, *, every: int
) -> list[Segment]:
    """A new random domain after every so many images."""
    return [_runs("alternating", domains, labels, every, generator)]


def dirichlet(
    domains: list[str],
    labels: Tensor,
    batch_size: int,
    generator: Generator,
) -> list[Segment]:
    """Domain after domain, in each of which classes come and go.

    There are as many stretches of time as classes. How a class is spread over them is drawn from a
    Dirichlet distribution: the lower its concentration, the fewer stretches a class comes in.
    """
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    classes = int(labels.max()) + 1
    stretches: list[list[Tensor]] = [[] for _ in range(classes)]
    for label in range(classes):
        order = torch.randperm(int((labels == label).sum()), generator=generator)
        images = torch.nonzero(labels == label).flatten()[order]
        spread = rng.dirichlet([CONCENTRATION] * classes).cumsum()[:-1]
        for stretch, part in zip(
            stretches, images.tensor_split((spread * len(images)).astype(int).tolist()), strict=True
        ):
            stretch.append(part)
    whole = [torch.cat(stretch) for stretch in stretches]
    order = torch.cat([s[torch.randperm(len(s), generator=generator)] for s in whole])
    return [_whole_domain(domains, index, order, reset=True) for index in range(len(domains))]


def _runs(
    name: str, domains: list[str], labels: Tensor, length: int, generator: Generator
) -> Segment:
    """Runs of one random domain each; what fills no run comes last."""
    count, whole = len(labels), len(labels) // length * length
    runs: list[Tensor] = []
    rest: list[Tensor] = []
    for index in range(len(domains)):
        order = torch.randperm(count, generator=generator) + index * count
        runs += order[:whole].split(length) if whole else ()
        rest.append(order[whole:])
    shuffled = torch.randperm(len(runs), generator=generator).tolist()
    return _mixture(name, torch.cat([*(runs[i] for i in shuffled), *rest]), count)


def _whole_domain(domains: list[str], index: int, order: Tensor, reset: bool) -> Segment:
    return Segment(domains[index], torch.full_like(order, index), order, reset)


def _mixture(name: str, order: Tensor, count: int) -> Segment:
    return Segment(name, order // count, order % count, reset=True)


SCENARIOS: dict[str, Scenario] = {
    "single": Scenario(single, "random", "every domain"),
    "continual": Scenario(continual, "random", "never"),
    "mixed": Scenario(mixed, "random over all domains", "never"),
    "mixed-once": Scenario(mixed_once, "random, each in a random domain", "never"),
    "mixed-pairs": Scenario(mixed_pairs, "halves of a batch from random domains", "never"),
    "class-sorted": Scenario(class_sorted, "by class", "every domain", needs_classes=True),
    "dirichlet": Scenario(
        dirichlet,
        f"classes come and go, concentration {CONCENTRATION}",
        "every domain",
        needs_classes=True,
    ),
    **{
        f"alternating-{every}": Scenario(
            partial(alternating, every=every), f"a new domain after every {every} images", "never"
        )
        for every in (10, 50, 200)
    },
    # the clean test set: the caller gives one domain, and it is met like any other
    "source": Scenario(single, "random", "every domain"),
}


def segments(
    scenario: str, domains: list[str], labels: Tensor, batch_size: int, seed: int
) -> list[Segment]:
    """The stream of a scenario; the same for the same seed on every machine.

    Example:
        >>> stream = segments("single", ["fog", "snow"], torch.arange(5), batch_size=2, seed=0)
        >>> [(s.domain, len(s.images)) for s in stream]
        [('fog', 5), ('snow', 5)]
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"There is no scenario {scenario!r}; there are {', '.join(SCENARIOS)}.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1.")
    generator = Generator().manual_seed(seed)
    return SCENARIOS[scenario].function(domains, labels, batch_size, generator)


def shards(
    scenario: str, domains: list[str], labels: Tensor, batch_size: int, seed: int, number: int
) -> list[list[Segment]]:
    """The scenario as so many streams, each with its share of every domain's images."""
    found = []
    for first in range(number):
        own = torch.arange(first, len(labels), number)
        stream = segments(scenario, domains, labels[own], batch_size, seed)
        found.append([dataclasses.replace(s, images=own[s.images]) for s in stream])
    return found


def apart(stream: Sequence[Segment]) -> list[list[Segment]]:
    """A stream cut where it starts anew, into parts that do not depend on each other.

    Example:
        >>> labels = torch.arange(5)
        >>> for scenario in ("single", "continual"):
        ...     stream = segments(scenario, ["fog", "snow"], labels, batch_size=2, seed=0)
        ...     print([[s.domain for s in part] for part in apart(stream)])
        [['fog'], ['snow']]
        [['fog', 'snow']]
    """
    parts: list[list[Segment]] = []
    for segment in stream:
        if segment.reset or not parts:
            parts.append([])
        parts[-1].append(segment)
    return parts


def joined(stream: Sequence[Segment]) -> Segment:
    """All segments as one, which starts anew."""
    return dataclasses.replace(
        stream[0],
        domains=torch.cat([segment.domains for segment in stream]),
        images=torch.cat([segment.images for segment in stream]),
        reset=True,
    )
