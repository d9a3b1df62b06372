"""Groups of consecutive samples: between values per sample, (N, C), and per group, (groups, C).

Where N is no multiple of the group size, the last group is smaller and counts like any other. There
is no branch on N here, so that a compiled network needs no new graph for another batch size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_moments(mean: Tensor, var: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Moments of groups from the moments of their samples (law of total variance: stable)."""
    size = _sizes(mean, group_size)
    pooled = group_sum(mean, group_size) / size
    distance = mean - per_sample(pooled, mean.shape[0], group_size)
    return pooled, group_sum(var + distance.square(), group_size) / size


def group_sum(values: Tensor, group_size: int) -> Tensor:
    rest = -values.shape[0] % group_size
    padded = F.pad(values, (0, 0, 0, rest))
    return padded.view(-1, group_size, *values.shape[1:]).sum(1)


def per_sample(per_group: Tensor, samples: int, group_size: int) -> Tensor:
    """Every sample gets its group's row."""
    if group_size == 1:
        return per_group
    return per_group.repeat_interleave(group_size, 0)[:samples]


def values_per_moment(x: Tensor, group_size: int | None, like: Tensor) -> Tensor:
    """How many values each of x's moments averages: (), or (groups, 1) with groups."""
    values = x.numel() // (x.shape[0] * x.shape[1])
    if group_size is None:
        return like.new_full((), x.shape[0] * values)
    return _sizes(x, group_size).to(like.dtype) * values


def _sizes(x: Tensor, group_size: int) -> Tensor:
    """Samples in each group, (groups, 1)."""
    starts = torch.arange(0, x.shape[0], group_size, device=x.device)
    return (x.shape[0] - starts).clamp_max(group_size).unsqueeze(1)
