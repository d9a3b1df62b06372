"""The frames of a forward in progress: whose they are, and which of them may be remembered."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from .functional import Moments

Places = tuple[Tensor, Tensor]  # rows and slots of the state


@dataclasses.dataclass
class Frames:
    """A forward in progress.

    Args:
        group: which memory a sample belongs to: of an active stream, or at one of `places`, (N,).
        counts: 1, or 0 for a sample that is not to be remembered, (N,).
        share: of each sample in its memory's part of the batch, (memories, N).
        places: of the memories that are used, where streams have several: rows and slots.
        described: what a sample was routed by, (N, D).
        mixing: whether any batch has a say in its own statistics.
        per_layer: mean and variance of source and memory, alpha of the batch, (memories, C) each,
            and the source's mean and standard deviation, (C,).
        moments: of every sample, (N, C), by layer, of each of its uses.
    """

    group: Tensor
    counts: Tensor
    share: Tensor
    places: Places | None
    described: Tensor | None
    mixing: bool
    per_layer: list[tuple[Tensor, ...]]
    moments: dict[int, list[Moments]] = dataclasses.field(default_factory=dict)


def usable(x: Tensor) -> Tensor:
    """Which samples may be remembered: not those that are not finite, or of one colour.

    That is, of one value in each of their channels, however images were normalised; where a channel
    has no pixels, of one value altogether; a sample that is a single value may be any.

    Args:
        x: (N,), (N, C) or (N, C, ...).
    """
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat = x.reshape(x.shape[0], -1)
    finite = torch.isfinite(flat).all(1)
    if flat.shape[1] == 1:
        return finite
    pixels = x.flatten(2) if x.dim() > 2 else flat[:, None]
    if pixels.shape[2] == 1:
        pixels = flat[:, None]
    return finite & (pixels.amax(2) > pixels.amin(2)).any(1)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Without autocast: in bfloat16 a memory would forget small changes, and see many domains."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
