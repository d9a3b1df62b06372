"""What the library needs to know of torch.distributed, and sane answers without it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if _initialised() else 1


def rank() -> int:
    return dist.get_rank() if _initialised() else 0


def group_to_reduce(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group or that of all ranks; None where there is nobody to reduce with."""
    if world_size(group) == 1:
        return None
    return group or dist.group.WORLD


def merge_moments(
    group: dist.ProcessGroup, mean: Tensor, var: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments (C,) over the batches of all ranks, which may differ in size."""
    ours = torch.cat((mean, var, count.reshape(1)))
    gathered = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, ours, group=group)
    means, variances, counts = torch.stack(gathered).split((len(mean), len(var), 1), dim=1)
    share = counts / counts.sum()
    pooled = (share * means).sum(0)
    return pooled, (share * (variances + (means - pooled).square())).sum(0)


def sum_over_ranks(group: dist.ProcessGroup | None, *tensors: Tensor) -> list[Tensor]:
    """The sum of each tensor over all ranks, in one message; the tensors themselves without any."""
    if group is None:
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def of_rank_0(value: Any) -> Any:
    """What the first rank has, on all of them."""
    if world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
