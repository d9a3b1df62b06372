"""What checkpoints of source networks have in common: how they are stored, and where they go."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..tree import M


def stored(model: nn.Module) -> dict[str, Tensor]:
    """A network's weights as files have them: of convolutions in float16, all else as it is."""
    return {
        name: (value.half() if value.dim() == 4 else value).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }


def placed(model: M, device: str) -> M:
    """A network on a device; on CUDA it lies channels last, what convolutions there are made for.

    Example:
        >>> placed(nn.Conv2d(3, 8, 1), "cpu").weight.device
        device(type='cpu')
    """
    last = torch.device(device).type == "cuda"
    layout = torch.channels_last if last else torch.contiguous_format
    return model.to(device).to(memory_format=layout)  # type: ignore[call-overload]
