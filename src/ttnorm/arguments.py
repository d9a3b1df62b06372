"""What functions refuse, and what they say then."""

from __future__ import annotations

from operator import index
from typing import Any

from torch import Tensor


def check_whole(name: str, value: Any, *, at_least: int) -> int:
    """A whole number, NumPy's too, as Python's; raises on anything else, and on a smaller one."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else index(value)
    if number is None or number < at_least:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least {at_least}.")
    return number


def check_arguments(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    group_size: int | None,
) -> Tensor:
    """Raise on what `functional.test_time_norm` cannot normalise; return alpha as (C,)."""
    if not x.is_floating_point():
        raise TypeError(
            f"x is {x.dtype}, expected a floating point tensor. Convert it with .float()."
        )
    if not 2 <= x.dim() <= 5:
        raise ValueError(f"x has {x.dim()} dimensions, expected 2 to 5: (N, C, ...).")
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1, or None.")
    if alpha.dim() == 0:
        alpha = alpha.expand(x.shape[1])
    channels = x.shape[1]
    tensors = (running_mean, running_var, weight, bias, alpha)
    for place, t in enumerate(tensors):
        if t is not None and (t.numel() != channels or t.dim() != 1):
            name = ("running_mean", "running_var", "weight", "bias", "alpha")[place]
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected ({channels},): "
                f"x is {tuple(x.shape)}, so it has {channels} channels."
            )
    return alpha
