"""A pass through a network's first norms alone, to describe frames before they are normalised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Loader, batches
from .functional import Moments, batch_moments, normalise
from .layers import TTNormBase
from .pooling import in_units
from .routing import Content, describe, measure_content
from .surgery import borrowed, replaced
from .tree import device_of

DEPTH = 3  # norms that content is measured in
SAMPLES = 2048  # source images that content is measured with
WIDEST = 1024  # numbers for a frame: content is their square, and takes their cube of time
Entering = tuple[int, Moments]  # the number of a norm, and what enters it


class _Enough(Exception):
    """The pass has gone as far as it has to."""


@torch.no_grad()
def describe_frames(
    layers: Sequence[TTNormBase], forward: Callable[[], Any], *, size: int
) -> Tensor:
    """What enters the first norms that `forward` uses, with the source's statistics in them.

    Args:
        layers: all norms of the network.
        forward: calls the network with the frames; it is left once enough is known of them.
        size: numbers for a frame that are enough, as a `Content` has them.
    """

    found = entering(layers, forward, lambda found: _width(found) == size)
    return describe([moments for _, moments in found])


def _width(found: list[Entering]) -> int:
    """Numbers for a frame: a mean and a variance for every channel."""
    return sum(2 * mean.shape[1] for _, (mean, _) in found)


def entering(
    layers: Sequence[TTNormBase],
    forward: Callable[[], Any],
    enough: Callable[[list[Entering]], bool] = lambda found: False,
) -> list[Entering]:
    """The moments of every sample in units of the source, (N, C), where they enter norms.

    Args:
        layers: all norms of the network, which have the source's statistics meanwhile.
        forward: calls the network.
        enough: whether to leave it there.

    Returns:
        The number of the norm and its moments, in the order of their use.
    """
    found: list[Entering] = []
    # whose tracer loses its way where modules are left: nothing needs what they do from there on
    exporting = torch.compiler.is_exporting()

    def standardise(index: int, layer: TTNormBase, x: Tensor) -> Tensor:
        if not enough(found):
            unit = layer.running_var.clamp_min(1e-12).sqrt()
            found.append((index, in_units(*batch_moments(x, 1), layer.running_mean, unit)))
        if enough(found):
            if exporting:
                return x
            raise _Enough
        statistics = (layer.running_mean, layer.running_var)
        return normalise(x, *statistics, layer.weight, layer.bias, layer.eps)

    with replaced(layers, standardise), contextlib.suppress(_Enough):
        forward()
    return found


@torch.no_grad()
def _first(layers: Sequence[TTNormBase], forward: Callable[[], Any], depth: int) -> list[Moments]:
    """What enters the first norms, so many of them, or as many as are not too wide together."""

    def enough(found: list[Entering]) -> bool:
        return len(found) == depth or _width(found) > WIDEST

    found = entering(layers, forward, enough)
    return [moments for _, moments in (found[:-1] if _width(found) > WIDEST else found)]


def content_of(
    model: nn.Module, loader: Loader, *, samples: int = SAMPLES, depth: int = DEPTH
) -> Content | None:
    """How source images differ from each other where `describe_frames` looks.

    None without two images, where a norm sees other samples than the network is given, and where
    the first norm has too many channels by itself.

    Args:
        model: the network, converted or not; it is left as it was.
        loader: yields (x, y) of source images, as the network takes them.
        samples: images to look at.
        depth: norms to look at; a stream looks as deep as what is measured here says.
    """
    found: list[Tensor] = []
    with borrowed(model, alpha=0.0) as layers:
        for x, _ in batches(loader, device_of(model)):
            x = x[: samples - sum(map(len, found))]
            moments = _first(list(layers.values()), partial(model, x.clone()), depth)
            if not moments or any(len(mean) != len(x) for mean, _ in moments):
                return None
            found.append(describe(moments).cpu())
            if sum(map(len, found)) >= samples:
                break
    described = torch.cat(found) if found else torch.empty(0)
    return measure_content(described) if len(described) > 1 else None
