"""How far a batch is trusted beside what its stream remembers: pure functions of moments.

Frames of one domain differ, and the means of two sets of them differ by chance, and by the classes
that are in them. Where batches differ from the memory by more, domains come and go faster than it
can follow, and a batch of b frames knows better than the memory of n:

tau^2 = E[(batch's mean - memory's)^2 - s^2 (1 / b + 1 / n)] - c^2
trust = tau^2 / (tau^2 + s^2 / b + c^2)

with s^2 the variance of frames within a batch, and c^2 what runs of classes do to a batch's mean.
Where domains stay, or mix within batches, tau is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOISE = 0.02  # what is measured as tau^2 / s^2 where there is none


class Unlike(NamedTuple):
    """How unlike its memory a batch is, for every memory: mean squares over channels.

    Args:
        excess: of the distance of their means over what chance makes of it; tau^2 + c^2.
        runs: c^2.
        within: s^2.
    """

    excess: Tensor
    runs: Tensor
    within: Tensor


def unknown(memories: Tensor) -> Unlike:
    """For memories that batches are not compared with: nothing speaks for the batch."""
    return Unlike(torch.zeros_like(memories), torch.zeros_like(memories), torch.ones_like(memories))


def compare(
    frames: Tensor,
    effects: Tensor,
    cells: Tensor,
    share: Tensor,
    new: Tensor,
    memory: Tensor,
    count: Tensor,
    weight: Tensor,
) -> Unlike:
    """Of batches of two frames or more.

    Args:
        frames: means of every frame without what its class does to them, (N, T).
        effects: what that is, likewise.
        cells: the memory of every frame, (N,).
        share, new: see `pooling.shares`.
        memory: the means that it remembers, (memories, T).
        count: frames that it is worth, (memories,).
        weight: of every channel, (T,); they sum to 1.
    """

    def within(values: Tensor, batch: Tensor) -> Tensor:
        variance = share @ ((values - batch[cells]).square() @ weight)
        return variance * new / (new - 1).clamp_min(1)

    batch, run = share @ frames, share @ effects
    chance, of_frames = 1 / new.clamp_min(1), within(frames, batch)
    excess = (batch - memory).square() @ weight - of_frames * (chance + 1 / count.clamp_min(1))
    return Unlike(excess, run.square() @ weight - within(effects, run) * chance, of_frames)


def trust(unlike: Unlike, new: Tensor, start: Tensor) -> Tensor:
    """In batches of `new` frames, by how unlike their memories batches have been.

    Args:
        start: tau^2 / s^2 that is taken for granted, as long as little has been seen.

    Example:
        >>> unlike = Unlike(*torch.tensor([[0.27, 0.27], [0.0, 0.27], [1.0, 1.0]]))
        >>> trust(unlike, torch.tensor([4.0, 4.0]), torch.tensor([0.0, 0.0]))
        tensor([0.5000, 0.0000])
    """
    within = unlike.within.clamp_min(1e-6)
    ratio = ((unlike.excess - unlike.runs) / within - NOISE).clamp_min(0) + start
    return new * ratio / (1 + new * (ratio + unlike.runs.clamp_min(0) / within))
