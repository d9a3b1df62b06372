"""A sliding window: every batch is run again together with the last inputs of its stream.

The plain way to statistics for small batches, and a dear one: at batch size 1 with a window of 200
a frame costs 200 forwards. `stream_` remembers moments instead of inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..tree import ttn_layers
from .step import in_batches, memory_of

AT_ONCE = 2000  # samples of all windows that share a forward


class SlidingWindow:
    """Normalises every batch with the last `window` inputs, its own included.

    Args:
        model: with its normalisation in place, one that remembers nothing itself.
        batch_size: samples that arrive together.
        window: inputs that are kept.
    """

    def __init__(self, model: nn.Module, batch_size: int, *, window: int = 200) -> None:
        if memory_of(model) is not None:
            raise ValueError("A norm that remembers its stream needs no sliding window over it.")
        if window < batch_size:
            raise ValueError(f"window is {window}, expected at least the batch size, {batch_size}.")
        ttn_layers(model)  # or it says that there are none
        self.model, self.batch_size, self.window = model, batch_size, window
        self.room = max(1, AT_ONCE // window) * batch_size
        self.last: Tensor | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return self.model(x)
        return torch.cat([self._outputs(part) for part in x.split(self.room)])

    def _outputs(self, x: Tensor) -> Tensor:
        frames = x if self.last is None else torch.cat((self.last, x))
        earlier, sizes = len(frames) - len(x), [len(part) for part in x.split(self.batch_size)]
        ends = [earlier + end for end in itertools.accumulate(sizes)]
        windows = [range(max(0, end - self.window), end) for end in ends]
        outputs: list[Tensor] = []
        for length, alike in itertools.groupby(windows, len):  # only the first ones are shorter
            which = torch.tensor([list(window) for window in alike], device=x.device)
            outputs += in_batches(self.model, frames[which.flatten()], length).split(length)
        self.last = frames[-self.window :].clone()
        return torch.cat([out[-size:] for out, size in zip(outputs, sizes, strict=True)])

    def reset(self) -> None:
        self.last = None

    def report(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"last": None if self.last is None else self.last.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"last"}:
            raise ValueError(
                f"The state has {', '.join(sorted(state)) or 'nothing'}, expected last. Was it "
                "saved by another method?"
            )
        self.last = None if state["last"] is None else state["last"].clone()
