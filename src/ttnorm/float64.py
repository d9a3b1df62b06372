"""Sums that float32 would round too much, also where a device has nothing better."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICES_WITHOUT = ("mps",)


def in_float64(x: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has none.

    Example:
        >>> in_float64(torch.ones(2))
        tensor([1., 1.], dtype=torch.float64)
    """
    device = "cpu" if x.device.type in DEVICES_WITHOUT else x.device
    return x.to(device).to(torch.float64)
