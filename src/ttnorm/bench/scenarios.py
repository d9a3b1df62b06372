"""In which order images arrive, and when an adapting method starts anew.

A scenario is a function `(domains, labels, batch_size, generator) -> segments`. A segment is a
stretch of the stream that is scored on its own and cut into batches from its beginning; the last
batch may be smaller and counts like any other. Every image of every domain arrives exactly once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Generator, Tensor


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

    function: Callable[[list[str], Tensor, int, Generator], list[Segment]]
    order: str
    reset: str


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


def mixed_pairs(
    domains: list[str], labels: Tensor, batch_size: int, generator: Generator
) -> list[Segment]:
    """A batch is two halves of one random domain each; what fills no half comes last.

    At batch size 1 there are no halves and this is `mixed`.
    """
    if batch_size > 1 and batch_size % 2:
        raise ValueError(f"mixed-pairs has batch size {batch_size}, expected an even one, or 1.")
    half = max(1, batch_size // 2)
    count = len(labels)
    halves, rest = [], []
    for index in range(len(domains)):
        order = torch.randperm(count, generator=generator) + index * count
        whole = count // half * half
        halves += order[:whole].split(half)
        rest.append(order[whole:])
    shuffled = torch.randperm(len(halves), generator=generator).tolist()
    order = torch.cat([*(halves[i] for i in shuffled), *rest])
    return [_mixture("mixed", order, count)]


def _whole_domain(domains: list[str], index: int, order: Tensor, reset: bool) -> Segment:
    return Segment(domains[index], torch.full_like(order, index), order, reset)


def _mixture(name: str, order: Tensor, count: int) -> Segment:
    return Segment(name, order // count, order % count, reset=True)


SCENARIOS: dict[str, Scenario] = {
    "single": Scenario(single, "random", "every domain"),
    "continual": Scenario(continual, "random", "never"),
    "mixed": Scenario(mixed, "random over all domains", "never"),
    "mixed-pairs": Scenario(mixed_pairs, "halves of a batch from random domains", "never"),
    "class-sorted": Scenario(class_sorted, "by class", "every domain"),
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
