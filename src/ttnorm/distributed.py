"""What the library needs to know of torch.distributed, and sane answers without it."""

from __future__ import annotations

import torch.distributed as dist


def world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if _initialised() else 1


def rank() -> int:
    return dist.get_rank() if _initialised() else 0


def group_to_reduce(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group or that of all ranks; None where there is nobody to reduce with."""
    if world_size(group) == 1:
        return None
    return group or dist.group.WORLD


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
