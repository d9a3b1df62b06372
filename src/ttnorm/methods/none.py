"""No adaptation beyond the normalisation: a plain forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..mixnorm import MixNorm
from ..surgery import isolated


class NoAdaptation:
    """The network as it is, batches of `batch_size` normalised each on its own."""

    window: int | None = None

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.model, MixNorm):  # it knows no batches
            return self.model(x)
        with isolated(self.model, self.batch_size):
            return self.model(x)

    def reset(self) -> None:
        if isinstance(self.model, MixNorm):
            self.model.reset()
