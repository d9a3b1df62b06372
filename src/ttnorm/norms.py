"""Every normalisation that is scored, by name: where alpha comes from, and of some, what is mixed.

A norm is a function `(network, batch_size, alpha_file, **options) -> network`. It changes the
network it is given, so give it one of its own. `apply_norm_` is the way in:

>>> from ttnorm.models import zoo
>>> model = apply_norm_(zoo.load("wrn40_2-cifar10"), "adaptive-bn", batch_size=16)
>>> round(model.bn1.alpha[0].item(), 3)
0.2
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from . import artefact
from .mixnorm import MixNorm
from .stream import stream_
from .surgery import alphas, convert_
from .tree import CONFIG, known_of, remember_

AlphaPath = str | os.PathLike[str]

# Schneider et al. (2020): how many samples the source counts for, by size of the test batch
ADAPTIVE_N = MappingProxyType({200: 256, 64: 128, 16: 64, 4: 32, 2: 32, 1: 16})


def constant(
    model: nn.Module,
    batch_size: int,
    alpha_file: AlphaPath | None,
    *,
    alpha: float,
    cross_term: bool = True,
) -> nn.Module:
    """The same alpha for every channel: 0 is the source's statistics, 1 is the batch's."""
    return convert_(model, alpha, cross_term=cross_term)


def adaptive_bn(
    model: nn.Module, batch_size: int, alpha_file: AlphaPath | None, *, cross_term: bool = False
) -> nn.Module:
    """alpha = B / (B + N): the source counts for N samples.

    N is the one published for the batch size B, or for the nearest size that has one.
    """
    nearest = min(ADAPTIVE_N, key=lambda size: abs(math.log(size / batch_size)))
    alpha = batch_size / (batch_size + ADAPTIVE_N[nearest])
    return convert_(model, alpha, cross_term=cross_term)


def mixnorm(
    model: nn.Module,
    batch_size: int,
    alpha_file: AlphaPath | None,
    *,
    scale: float,
    rate: float,
) -> nn.Module:
    """Moments of each sample and its mirror image, with an exponential average over the stream.

    moments = scale * local + (1 - scale) * global,  global <- (1 - rate) * global + rate * local
    """
    return MixNorm(model, scale=scale, rate=rate)


def exponential_average(
    model: nn.Module, batch_size: int, alpha_file: AlphaPath | None, *, momentum: float
) -> nn.Module:
    """Running statistics that follow the stream, as RoTTA's robust BatchNorm has them.

    running <- (1 - momentum) * running + momentum * batch's, and the batch is normalised with that
    """
    # a window of frames of which a whole batch leaves 1 - momentum
    window = 1 / (1 - (1 - momentum) ** (1 / batch_size))
    source = batch_size / momentum  # what the window then holds
    convert_(model, 1.0, cross_term=False)
    return stream_(model, memory="pool", window=window, source=source, between_frames=False)


def ttn(
    model: nn.Module,
    batch_size: int,
    alpha_file: AlphaPath | None,
    *,
    scale: float = 1.0,
    source: float | None = None,
) -> nn.Module:
    """scale * alpha, with the alpha that post-training learned for every channel (Eq. 2).

    With `source`, alpha * B / (B + source), as if the source counted for so many samples beside the
    batch's.
    """
    if alpha_file is None:
        raise ValueError("This norm needs an alpha file: ttnorm.post_train_ and ttnorm.save.")
    artefact.load_(model, alpha_file, source_count=source)
    if scale != 1:
        for alpha in alphas(model).values():
            alpha.mul_(scale)
        remember_(model, CONFIG, (known_of(model, CONFIG) or {}) | {"scale": scale})
    return model


def ttn_stream(
    model: nn.Module, batch_size: int, alpha_file: AlphaPath | None, **options: Any
) -> nn.Module:
    """alpha between the source and a memory of the stream instead of the batch: see `stream`."""
    return stream_(ttn(model, batch_size, alpha_file), **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation with its options fixed.

    Args:
        function: see the head of this file.
        options: its keyword arguments; they go into every record.
        alpha_file: the kind of alpha file it needs: see `models.zoo.alpha_files`.
        per_sample: whether an image's prediction is the same at every batch size.
        remembers: whether it has a memory of streams: see `stream`.
    """

    function: Callable[..., nn.Module]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alpha_file: str | None = None
    per_sample: bool = False
    remembers: bool = False

    @property
    def has_memory(self) -> bool:
        """Of any kind; MixNorm's is of one stream."""
        return self.remembers or self.function is mixnorm


NORMS: dict[str, Norm] = {
    "source": Norm(function=constant, options={"alpha": 0.0}, per_sample=True),
    "tbn": Norm(function=constant, options={"alpha": 1.0}),
    # as published, without the cross term
    "alpha-bn": Norm(function=constant, options={"alpha": 0.1, "cross_term": False}),
    "adaptive-bn": Norm(function=adaptive_bn, options={"cross_term": False}),
    "mixnorm": Norm(function=mixnorm, options={"scale": 0.05, "rate": 0.001}, per_sample=True),
    "ema": Norm(function=exponential_average, options={"momentum": 0.05}, remembers=True),
    "ttn": Norm(function=ttn, alpha_file="ttn"),
    "ttn-scaled": Norm(function=ttn, options={"scale": 0.4}, alpha_file="ttn"),
    # benchmarks/choose_count.py
    "ttn-counted": Norm(function=ttn, options={"source": 2.0}, alpha_file="strong"),
    "ttn-dynamic": Norm(function=ttn, alpha_file="dynamic"),
    **{
        name: Norm(
            function=ttn_stream,
            options={"memory": memory, "window": 200},
            alpha_file="ttn",
            remembers=True,
        )
        for name, memory in {
            "ttn-stream": "routed",
            "ttn-corrected": "corrected",
            "ttn-balanced": "balanced",
            "ttn-pool": "pool",
        }.items()
    },
}


def norm_named(name: str) -> Norm:
    """The norm of that name; `constant-0.3` is Eq. 2 with alpha = 0.3 everywhere."""
    prefix, _, value = name.partition("constant-")
    if not prefix and value:
        try:
            alpha = float(value)
        except ValueError:
            raise ValueError(f"{name!r} names no number, expected constant-0.3.") from None
        if not 0 <= alpha <= 1:
            raise ValueError(f"{name!r} has alpha {alpha}, expected a number in [0, 1].")
        if value != f"{alpha:g}":  # or one norm would have several names
            raise ValueError(f"{name!r} is called constant-{alpha:g}.")
        return Norm(function=constant, options={"alpha": alpha})
    if name not in NORMS:
        raise ValueError(
            f"There is no norm {name!r}; there are {', '.join(NORMS)} and constant-NUMBER."
        )
    return NORMS[name]


def apply_norm_(
    model: nn.Module, name: str, *, batch_size: int, alpha_file: AlphaPath | None = None
) -> nn.Module:
    """Give the network the norm of that name; returns what to call, mostly the network itself.

    Args:
        model: a network with BatchNorm layers; it is changed in place.
        name: one of NORMS, or constant-NUMBER.
        batch_size: of the test batches, for norms whose alpha depends on it.
        alpha_file: of the norms that were fitted.
    """
    norm = norm_named(name)
    return norm.function(model, batch_size, alpha_file, **norm.options)
