"""Domains made of source images, for the scripts that choose something: no test corruption."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def simulated(x: Tensor) -> dict[str, Tensor]:
    """Clean, inverted, solarized, posterized, shrunk and dark."""
    small = F.pad(F.interpolate(x, scale_factor=0.5, mode="area"), (8, 8, 8, 8), mode="replicate")
    return {
        "clean": x,
        "inverted": 1 - x,
        "solarized": torch.where(x > 0.5, 1 - x, x),
        "posterized": (3 * x).round() / 3,
        "shrunk": small,
        "dark": x.mean(1, keepdim=True).expand_as(x) ** 2.5,
    }
