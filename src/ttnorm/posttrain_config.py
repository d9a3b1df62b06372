"""How alpha is fitted: the choices that a user has."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from .arguments import check_whole
from .augment import Per


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostTrainConfig:
    """Every choice of a post-training run; defaults are the paper's for CIFAR, where it has one.

    Args:
        epochs: passes over the loader.
        lr: Adam's step size.
        schedule: cosine to zero over all epochs, or constant.
        init: where alpha starts: the prior, uniformly random, or a number.
        ce: whether the cross-entropy counts.
        mse: whether the distance to the prior counts.
        lambda_: weight of that distance.
        granularity: what shares one alpha: nothing, the channels of a layer, or everything.
        average: average the optimised alpha afterwards over each layer, or over everything.
        dynamic_batch: draw every step's batch size from this range, both ends included, and use
            that many samples of the loader's batch; the paper's variant is (4, 200).
        group_sizes: cut every step's batch into groups of a size that is drawn from these, each
            normalised on its own, as smaller test batches are; no sample is left out. Groups are
            not shared between ranks.
        source_count: samples that the source counts for beside those of a batch: see `convert_`.
            With it, and with group_sizes, one alpha is fitted for all batch sizes.
        shift: one per batch, as a test batch is one domain, or one per image. Says nothing about
            an augmentation of your own.
        early_stop: stop when the MSE's relative change stays below this for `patience` epochs.
        patience: see early_stop.
        steps_per_epoch: end an epoch after that many batches.
        amp: autocast to this dtype.
        sync_statistics: in data-parallel runs, the batches of all ranks have common statistics.
        prior_samples: how many samples the prior looks at.
        seed: fixes the random initialisation, the augmentation and the loader's order.
    """

    epochs: int = 30
    lr: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    init: Literal["prior", "random"] | float = "prior"
    ce: bool = True
    mse: bool = True
    lambda_: float = 1.0
    granularity: Literal["channel", "layer", "constant"] = "channel"
    average: Literal["layer", "constant"] | None = None
    dynamic_batch: tuple[int, int] | None = None
    group_sizes: tuple[int, ...] | None = None
    source_count: float = 0.0
    shift: Per = "batch"
    early_stop: float | None = None
    patience: int = 3
    steps_per_epoch: int | None = None
    amp: Literal["bfloat16", "float16"] | None = None
    sync_statistics: bool = True
    prior_samples: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("schedule", self.schedule, ("cosine", "constant"))
        _check_choice("granularity", self.granularity, ("channel", "layer", "constant"))
        _check_choice("average", self.average, ("layer", "constant", None))
        _check_choice("shift", self.shift, ("batch", "image"))
        _check_choice("amp", self.amp, ("bfloat16", "float16", None))
        if isinstance(self.init, str):
            _check_choice("init", self.init, ("prior", "random"))
        elif not 0 <= self.init <= 1:
            raise ValueError(
                f"init is {self.init}, expected 'prior', 'random' or a number in [0, 1]."
            )
        if self.dynamic_batch is not None and not _is_range(self.dynamic_batch):
            raise ValueError(f"dynamic_batch is {self.dynamic_batch!r}, expected (low, high).")
        if self.group_sizes is not None and not _are_sizes(self.group_sizes):
            raise ValueError(
                f"group_sizes is {self.group_sizes!r}, expected whole numbers of at least 1, as in "
                "(1, 4, 16)."
            )
        for name in ("dynamic_batch", "group_sizes"):
            sizes = getattr(self, name)
            if sizes is not None:
                object.__setattr__(self, name, tuple(map(int, sizes)))
        for name in ("lr", "lambda_", "source_count", "init", "early_stop"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, float(value))  # NumPy's does not go into files
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}, expected a positive number.")
        for name in ("lambda_", "source_count", "early_stop"):
            value = getattr(self, name)
            if value is not None and not value >= 0:  # NaN is neither
                raise ValueError(f"{name} is {value}, expected at least 0.")
        for name, least in {"epochs": 0, "patience": 1, "prior_samples": 1, "seed": 0}.items():
            object.__setattr__(self, name, check_whole(name, getattr(self, name), at_least=least))
        if self.steps_per_epoch is not None:
            steps = check_whole("steps_per_epoch", self.steps_per_epoch, at_least=1)
            object.__setattr__(self, "steps_per_epoch", steps)
        if self.early_stop is not None and not self.needs_prior:
            raise ValueError(
                f"early_stop is {self.early_stop}, expected None: it watches the distance to the "
                "prior, and this configuration has none. Set mse=True or init='prior'."
            )

    @property
    def needs_prior(self) -> bool:
        return self.init == "prior" or self.mse


def as_json(config: PostTrainConfig) -> dict[str, Any]:
    """The config as it looks after a round trip through a file: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, (tuple, list)) or not value:
        return False
    try:
        return all(check_whole("a size", size, at_least=1) for size in value)
    except ValueError:
        return False


def _is_range(value: Any) -> bool:
    return _are_sizes(value) and len(value) == 2 and value[0] <= value[1]


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")
