"""What each table and figure of the paper's evaluation runs, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..data.corruptions import CORRUPTIONS
from ..norms import norm_named
from .job import Job
from .paper import BATCH_SIZES
from .variants import OF_KIND

Row = tuple[str, str]  # norm and method

BOTH = ("cifar10", "cifar100")
NORMS: tuple[Row, ...] = tuple(
    (norm, "none") for norm in ("source", "tbn", "adaptive-bn", "alpha-bn", "mixnorm", "ttn")
)
DEAR = ("cotta", "ttn-online", "sliding")  # methods that take hours on everything
SMALL = 10  # a batch whose streams are divided
DIVIDED = ("mixed", "alternating")  # scenarios, by what their names begin with
FIRST = 1000  # images of a domain, which then stand for all of them
STREAMS: tuple[Row, ...] = tuple((norm, "none") for norm in ("ttn-stream", "ttn-pool", "ema"))
COUNTED: Row = ("ttn-counted", "none")  # not in the paper
METHODS: tuple[Row, ...] = tuple(
    (norm, method) for method in ("tent", "swr") for norm in ("tbn", "ttn")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure.

    Args:
        title: what it shows.
        rows: norms and methods that are scored.
        variants: of post-training, each scored as the norm "ttn": see `variants`.
        datasets: of which networks.
        scenarios: in which streams.
        batch_sizes: of test batches.
        repeated: whether post-training is run with several seeds.
        each_corruption: whether it shows TTN under every corruption, and not their mean alone.
        streams: that images are divided among, where a norm remembers, domains mix or alternate,
            and batches are small: one such stream takes too many steps one after another.
    """

    title: str
    rows: tuple[Row, ...] = ()
    variants: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ("cifar10",)
    scenarios: tuple[str, ...] = ("single",)
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    repeated: bool = True
    each_corruption: bool = False
    streams: int = 1


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(title="single domain", rows=(*NORMS, COUNTED, *METHODS), datasets=BOTH),
    "table2": Experiment(
        title="continual",
        rows=(("source", "none"), ("ttn", "none"), COUNTED, *METHODS, ("tbn", "cotta")),
        datasets=BOTH,
        scenarios=("continual",),
    ),
    "table3": Experiment(
        title="mixed",
        rows=(*NORMS, COUNTED, *METHODS),
        datasets=BOTH,
        scenarios=("mixed-once", "mixed"),  # the paper does not say how long its mixture is
    ),
    "table4": Experiment(
        title="source domain",
        rows=(("source", "none"), ("tbn", "none"), ("ttn", "none"), COUNTED, *METHODS),
        scenarios=("source",),
    ),
    "table5": Experiment(
        title="class-sorted",
        rows=(("source", "none"), ("tbn", "none"), ("ttn", "none"), COUNTED),
        scenarios=("class-sorted",),
    ),
    "table6": Experiment(
        title="segmentation",
        rows=(("source", "none"), ("tbn", "none"), ("ttn", "none"), *METHODS),
        datasets=("camvid",),
        batch_sizes=(2, 4, 8),  # 4 and 8 are in a table of the appendix
    ),
    "table7": Experiment(
        title="components",
        variants=(
            "random-mse",
            "random-ce",
            "random-ce-mse",
            "prior-alone",
            "prior-ce",
            "default",
        ),
    ),
    "table8": Experiment(
        title="granularity", variants=("default", "layer-mean", "constant-mean", "layer")
    ),
    "table9": Experiment(
        title="strength of the regulariser",
        variants=("prior-ce", "lambda-0.1", "default", "lambda-10"),
    ),
    "table10": Experiment(
        title="constant alpha",
        rows=tuple((f"constant-{tenth / 10:g}", "none") for tenth in range(11)),
    ),
    "table11": Experiment(
        title="variants for small batches",
        rows=(
            ("ttn", "none"),
            ("ttn-scaled", "none"),
            COUNTED,
            ("ttn-dynamic", "none"),
            ("ttn", "ttn-online"),
        ),
        scenarios=("single", "continual", "mixed"),
    ),
    "table12": Experiment(
        title="types of augmentation",
        variants=(
            "prior-jitter",
            "prior-grayscale",
            "default",
            "prior-blur",
            "prior-flip",
            "alpha-jitter",
            "alpha-affine",
            "alpha-blur",
        ),
        batch_sizes=(200,),
    ),
    "table13": Experiment(
        title="ImageNet-C",
        rows=(*(row for row in NORMS if row[0] != "mixnorm"), ("ttn-stream", "none"), *METHODS),
        datasets=("imagenet",),
        batch_sizes=BATCH_SIZES[1:],
    ),
    "table14": Experiment(title="each corruption", rows=(("ttn", "none"),), each_corruption=True),
    # not in the paper
    "prior-strength": Experiment(
        title="strength of the prior's shift", variants=("default", "prior-strong"), datasets=BOTH
    ),
    "mixed-pairs": Experiment(
        title="two domains in every batch",
        rows=NORMS + METHODS,
        datasets=BOTH,
        scenarios=("mixed-pairs",),
    ),
    "streams": Experiment(
        title="streams",
        rows=(*NORMS, *STREAMS),
        datasets=BOTH,
        scenarios=("single", "class-sorted", "dirichlet", "continual", "mixed"),
        repeated=False,
        streams=10,
    ),
    "streams-methods": Experiment(
        title="adapting over streams",
        rows=(("ttn-stream", "tent"), ("ttn-stream", "swr")),
        batch_sizes=BATCH_SIZES[:3],
        repeated=False,
    ),
    "sliding": Experiment(
        title="the last 200 inputs run again with every batch",
        rows=(("tbn", "sliding"),),
        repeated=False,
    ),
    "streams-source": Experiment(
        title="streams of the source domain",
        rows=(*NORMS, *STREAMS),
        datasets=BOTH,
        scenarios=("source",),
        repeated=False,
    ),
    "streams-alternating": Experiment(
        title="streams in which domains alternate",
        rows=(*NORMS, *STREAMS),
        datasets=BOTH,
        scenarios=("alternating-10", "alternating-50", "alternating-200"),
        batch_sizes=(10, 1),
        repeated=False,
        streams=10,
    ),
    "figure1": Experiment(title="error against batch size", rows=NORMS[:2] + NORMS[-1:] + METHODS),
    "figure4": Experiment(title="alpha over depth", variants=("default",), datasets=BOTH),
    "figure5": Experiment(
        title="true corruptions as augmentation",
        variants=tuple(f"{what}-{c}" for what in ("prior", "alpha") for c in CORRUPTIONS),
        batch_sizes=(200,),
        repeated=False,
    ),
}


def is_dear(norm: str, method: str) -> bool:
    """Whether it is run on the first images of a domain alone."""
    # what adapts over a memory goes from batch to batch, and not from window to window
    return method in DEAR or (method != "none" and norm_named(norm).remembers)


def experiments_named(names: Sequence[str]) -> dict[str, Experiment]:
    """Those of these names; "all" is all of them."""
    if "all" in names:
        return dict(EXPERIMENTS)
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(
                f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)} and all."
            )
    return {name: EXPERIMENTS[name] for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Only:
    """A part of an experiment; what is empty leaves nothing out.

    Args:
        rows: norms, methods ("tent") or with a norm ("tent+ttn"), and variants of post-training.
        scenarios, batch_sizes: see `Experiment`.
    """

    rows: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()

    def of_all(self, experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
        """That part of those that have any of it; what none of them has is an error."""
        for what, wanted, place in (
            ("row", self.rows, 0),
            ("scenario", self.scenarios, 1),
            ("batch size", self.batch_sizes, 2),
        ):
            there = dict.fromkeys(v for e in experiments.values() for v in _choices(e)[place])
            missing = [value for value in wanted if value not in there]
            if missing:
                raise ValueError(
                    f"{', '.join(experiments)} {'have' if len(experiments) > 1 else 'has'} no "
                    f"{what} {missing[0]}; there is {', '.join(map(str, there))}."
                )
        parts = {name: self._of(experiment) for name, experiment in experiments.items()}
        left = {
            name: part
            for name, part in parts.items()
            if (part.rows or part.variants) and part.scenarios and part.batch_sizes
        }
        if not left:
            raise ValueError(f"No one of {', '.join(experiments)} has all of that together.")
        return left

    def _of(self, experiment: Experiment) -> Experiment:
        rows = {_text(*row): row for row in experiment.rows}
        kept = self.rows or (*rows, *experiment.variants)
        return dataclasses.replace(
            experiment,
            rows=tuple(row for text, row in rows.items() if text in kept),
            variants=tuple(v for v in experiment.variants if v in kept),
            scenarios=_kept(experiment.scenarios, self.scenarios),
            batch_sizes=_kept(experiment.batch_sizes, self.batch_sizes),
        )


def _choices(experiment: Experiment) -> tuple[tuple[Any, ...], ...]:
    """Its rows, scenarios and batch sizes."""
    rows = tuple(_text(*row) for row in experiment.rows)
    return (*rows, *experiment.variants), experiment.scenarios, experiment.batch_sizes


def _text(norm: str, method: str) -> str:
    """As tables have it: a method's name alone is the method over batch statistics."""
    if method == "none":
        return norm
    return method if norm == "tbn" else f"{method}+{norm}"


def _kept(there: tuple[Any, ...], wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in there if value in wanted) if wanted else there


@dataclasses.dataclass(frozen=True)
class Part:
    """Jobs that are run with the same alpha.

    Args:
        dataset: "cifar10", "cifar100", "imagenet" or "camvid".
        variant: of post-training, or None where no job needs an alpha file.
        seed: of that post-training.
        jobs: what is run.
        images: of a domain, the first ones; None for all.
    """

    dataset: str
    variant: str | None
    seed: int
    jobs: tuple[Job, ...]
    images: int | None = None


def parts(experiment: Experiment, seeds: int, batch_sizes: Sequence[int] = ()) -> Iterator[Part]:
    """What an experiment consists of.

    Where post-training is random and nothing adapts besides, there is a part for every seed.

    Args:
        experiment: see `EXPERIMENTS`.
        seeds: of post-training.
        batch_sizes: others than the experiment's.
    """
    sizes = batch_sizes or experiment.batch_sizes
    for dataset in experiment.datasets:
        for norm, method in experiment.rows:
            kind = norm_named(norm).alpha_file
            variant = None if kind is None else OF_KIND[kind]
            remembers = norm_named(norm).remembers and method == "none"
            jobs = tuple(
                Job(
                    norm=norm,
                    method=method,
                    scenario=scenario,
                    batch_size=size,
                    streams=experiment.streams
                    if remembers and size <= SMALL and scenario.startswith(DIVIDED)
                    else 1,
                )
                for scenario in experiment.scenarios
                for size in sizes
            )
            random = variant is not None and method == "none" and experiment.repeated
            repeats = seeds if random else 1
            for seed in range(repeats):
                yield Part(dataset, variant, seed, jobs, FIRST if is_dear(norm, method) else None)
        for variant in experiment.variants:
            jobs = tuple(Job(norm="ttn", batch_size=size) for size in sizes)
            for seed in range(seeds if experiment.repeated else 1):
                yield Part(dataset, variant, seed, jobs)
