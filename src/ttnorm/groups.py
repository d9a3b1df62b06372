"""Groups of consecutive samples: between values per sample, (N, C), and per group, (groups, C).

Where N is no multiple of the group size, the last group is smaller and counts like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool_moments(mean: Tensor, var: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Moments of groups from the moments of their samples (law of total variance: stable)."""
    means, variances = [], []
    for m, v in zip(_split(mean, group_size), _split(var, group_size), strict=True):
        between, pooled = torch.var_mean(m, 1, correction=0)
        means.append(pooled)
        variances.append(v.mean(1) + between)
    return torch.cat(means), torch.cat(variances)


def group_sum(per_sample: Tensor, group_size: int) -> Tensor:
    return torch.cat([part.sum(1) for part in _split(per_sample, group_size)])


def per_sample(per_group: Tensor, samples: int, group_size: int) -> Tensor:
    """Every sample gets its group's row."""
    if group_size == 1:
        return per_group
    return per_group.repeat_interleave(group_size, 0)[:samples]


def values_per_moment(x: Tensor, group_size: int | None, like: Tensor) -> Tensor:
    """How many values each of x's moments averages: (), or (groups, 1) with groups."""
    values = x.numel() // (x.shape[0] * x.shape[1])
    if group_size is None:
        return like.new_tensor(x.shape[0] * values)
    counts = like.new_full((like.shape[0], 1), group_size * values)
    counts[-1] = (x.shape[0] - (like.shape[0] - 1) * group_size) * values
    return counts


def _split(t: Tensor, group_size: int) -> list[Tensor]:
    """(N, C) as (groups, group_size, C) and, where there is a rest, (1, rest, C)."""
    whole = t.shape[0] // group_size * group_size
    parts = [t[:whole].unflatten(0, (-1, group_size))] if whole else []
    if whole < t.shape[0]:
        parts.append(t[whole:].unsqueeze(0))
    return parts
