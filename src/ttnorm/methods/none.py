"""No adaptation beyond the normalisation: a plain forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .step import in_batches, memory_of


class NoAdaptation:
    """The network as it is, batches of `batch_size` normalised each on its own."""

    room: int | None = None

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model, self.batch_size, self.memory = model, batch_size, memory_of(model)
        self.began = self.state_dict()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return in_batches(self.model, x, self.batch_size)

    def reset(self) -> None:
        self.load_state_dict(self.began)

    def report(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.memory is None else {"norms": self.memory.memory_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"The state has {', '.join(sorted(state)) or 'nothing'}, which is no state of this "
                "method. Was it saved by another one?"
            )
        if self.memory is not None:
            self.memory.load_memory_state(state["norms"])
