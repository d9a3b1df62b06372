"""The maths of statistics that are remembered: pure functions of moments.

A memory holds moments in cells. Every cell is an exponential window over the samples it was given:
it starts with a few pseudo-samples of the source, and forgets only when it is given new samples.
Moments are kept as mean and variance, never as sums of squares, and merged as mixtures: no digits
are lost however long a stream is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional import Moments, mix_moments

FARTHEST = 10.0  # standard deviations of the source: no frame's moments count as further away
MOST_BEYOND = 0.5  # of a layer's channels: a frame with more of them further away is no picture


def in_units(mean: Tensor, var: Tensor, source_mean: Tensor, unit: Tensor) -> Moments:
    """Moments in units of the source, within bounds.

    Args:
        unit: the source's standard deviation.

    Example:
        >>> mean, var, source_mean, unit = torch.tensor([[3.0], [4.0], [1.0], [2.0]])
        >>> in_units(mean, var, source_mean, unit)
        (tensor([1.]), tensor([1.]))
    """
    mean, var = (mean - source_mean) / unit, var / (unit * unit)
    # what is not a number counts as the source, and infinity as far away
    mean = mean.nan_to_num(0.0).clamp(-FARTHEST, FARTHEST)
    return mean, var.nan_to_num(1.0).clamp(0.0, FARTHEST**2)


def in_slots(kept: Tensor, slots: int) -> Tensor:
    """What is kept of streams, (S, slots * cells, ...), as (S, slots, cells, ...): a view.

    Example:
        >>> in_slots(torch.zeros(3, 8, 5), slots=4).shape
        torch.Size([3, 4, 2, 5])
    """
    # not unflatten, which compilers do not follow up to torch 2.8
    return kept.view(kept.shape[0], slots, kept.shape[1] // slots, *kept.shape[2:])


def plausible(mean: Tensor, var: Tensor, source_mean: Tensor, unit: Tensor, ends: Tensor) -> Tensor:
    """Which samples may be remembered, by their moments in all layers side by side, (N, T): (N,).

    Not those that are cut off by `in_units` in most channels of any one layer. No weather does that
    to a picture; a forgotten division by 255 does.

    Args:
        unit: see `in_units`.
        ends: where in T the layers end, (layers,).

    Example:
        >>> zero, one = torch.zeros(3), torch.ones(3)
        >>> mean = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 30.0]])
        >>> plausible(mean, torch.ones(2, 3), zero, one, torch.tensor([2, 3]))
        tensor([ True, False])
    """
    near = (mean - source_mean).abs() <= FARTHEST * unit  # NaN is not
    beyond = ~(near & (var <= (FARTHEST * unit).square()))
    # whole numbers, whose sums are the same every time on a GPU, too
    until = F.pad(beyond.cumsum(1, dtype=torch.long), (1, 0))
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return (until[:, ends] - until[:, ends - sizes] <= MOST_BEYOND * sizes).all(1)


def shares(cells: Tensor, counts: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The share of every sample in its cell, (number, N), and how many samples a cell has.

    Args:
        cells: the cell of every sample, (N,).
        counts: what a sample counts for, (N,): 0 if it is not to be remembered.
        number: of cells.

    Example:
        >>> share, new = shares(torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0, 1.0]), 2)
        >>> share, new
        (tensor([[0.0000, 1.0000, 0.0000],
                [0.5000, 0.0000, 0.5000]]), tensor([1., 2.]))
    """
    places = torch.arange(number, device=cells.device)
    member = (places[:, None] == cells) * counts
    new = member.sum(1)
    return member / new.clamp_min(1e-12)[:, None], new


def cell_moments(share: Tensor, cells: Tensor, mean: Tensor, var: Tensor) -> Moments:
    """Moments of all samples in a cell together, (number, T), from their own, (N, T).

    Args:
        share: see `shares`.
        cells: the cell of every sample.
        mean, var: finite, also of samples that do not count.
    """
    pooled = share @ mean
    return pooled, share @ (var + (mean - pooled[cells]).square())


def average(mean: Tensor, var: Tensor) -> Moments:
    """Moments of the even mixture of cells: (..., cells, T) to (..., T).

    Example:
        >>> mean, var = average(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
        >>> mean.item(), var.item()
        (1.0, 2.0)
    """
    middle = mean.mean(-2)
    return middle, (var + (mean - middle.unsqueeze(-2)).square()).mean(-2)


def share_of_new(count: Tensor, new: Tensor, window: float) -> tuple[Tensor, Tensor]:
    """What `new` samples are of a cell's window after it has taken them, and its new count.

    n' = (1 - 1 / window)^new * n + new,   share = new / n'

    Example:
        >>> share, count = share_of_new(torch.tensor(4.0), torch.tensor(1.0), 200.0)
        >>> round(share.item(), 3), round(count.item(), 3)
        (0.201, 4.98)
    """
    left = count * (1 - 1 / window) ** new
    total = left + new
    return new / total, total


def of_all_uses(uses: Sequence[Moments]) -> Moments:
    """Moments of samples, (N, C), in a layer that a forward uses several times."""
    if len(uses) == 1:
        return uses[0]
    means, variances = zip(*uses, strict=True)
    return average(torch.stack(means, 1), torch.stack(variances, 1))


def remember(
    count: Tensor,
    mean: Tensor,
    var: Tensor,
    new: Tensor,
    new_mean: Tensor,
    new_var: Tensor,
    *,
    window: float,
    cross_term: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of cells after they have taken new samples.

    Args:
        count: of the cells, (cells,).
        mean, var: of the cells, (cells, T).
        new: how many samples each is given, (cells,).
        new_mean, new_var: of these, (cells, T).
        window: how many samples a cell remembers, roughly.
        cross_term: see `functional.mix_moments`.
    """
    share, total = share_of_new(count, new, window)
    mean, var = mix_moments(share[:, None], mean, var, new_mean, new_var, cross_term=cross_term)
    return total, mean, var
