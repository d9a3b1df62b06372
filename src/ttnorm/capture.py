"""Steps that are repeated thousands of times, recorded as CUDA graphs.

A small network's step is hundreds of short kernels, and starting them one by one takes longer than
running them. A graph starts them all at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

logger = logging.getLogger("ttnorm")


def record(
    step: Callable[[], Any],
    generators: Iterable[Generator] = (),
    *,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
) -> Callable[[], Any]:
    """One call of `step` as a graph; returns what replays it and gives the same tensors each time.

    Args:
        step: has run before on this device, and touches no CPU.
        generators: on the device, that it draws from.
        stream: the one it ran on before.
        pool: memory to share with graphs that never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # other threads, such as a loader's that pins memory, may go on meanwhile
    options = {"stream": stream, "pool": pool, "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graph, **options):
        output = step()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


class _Memory:
    """A stream to record on and what is allocated there, from the first use on."""

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()


class Repeated:
    """Calls a function of tensors; calls that repeat earlier shapes on a GPU replay a graph.

    What it returns is overwritten by the next call. A function that cannot be recorded is called.

    Args:
        function: from tensors to tensors; tensors it changes besides must stay where they are, and
            it must let go of the autograd graphs it makes.
        warm_up: plain calls of a shape before it is recorded.
        most: shapes that are recorded; others are called.
        beside: others that are never called at the same time, whose graphs' memory is shared.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        warm_up: int = 3,
        most: int = 8,
        beside: Repeated | None = None,
    ) -> None:
        self.function, self.warm_up, self.most = function, warm_up, most
        self.calls: Counter[Any] = Counter()
        self.recorded: dict[Any, tuple[tuple[Tensor, ...], Callable[[], Any]]] = {}
        self.memory: _Memory = _Memory() if beside is None else beside.memory

    def __call__(self, *tensors: Any) -> Any:
        if not all(isinstance(t, Tensor) and t.is_cuda for t in tensors):
            return self.function(*tensors)
        key = tuple((t.shape, t.dtype, t.stride(), t.device) for t in tensors)
        if key in self.recorded:
            static, replay = self.recorded[key]
            for ours, given in zip(static, tensors, strict=True):
                ours.copy_(given)
            return replay()
        with torch.cuda.device(tensors[0].device):
            self.calls[key] += 1
            if self.calls[key] > self.warm_up and len(self.recorded) < self.most:
                return self._record(key, tensors)
            return self._aside(tensors)

    def _aside(self, tensors: tuple[Tensor, ...]) -> Any:
        """A plain call on the stream that will be recorded: autograd remembers streams."""
        stream, current = self.memory.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            output = self.function(*tensors)
        current.wait_stream(stream)
        return output

    def _record(self, key: Any, tensors: tuple[Tensor, ...]) -> Any:
        static = tuple(t.clone() for t in tensors)
        before = torch.cuda.current_stream()
        try:
            memory = {"stream": self.memory.stream, "pool": self.memory.pool}
            replay = record(lambda: self.function(*static), **memory)
        except RuntimeError as error:  # such as a wait for the GPU in the middle
            torch.cuda.set_stream(before)
            logger.warning("not recorded as a CUDA graph, and called instead: %s", error)
            self.most = 0
            return self._aside(tensors)
        self.recorded[key] = (static, replay)
        return replay()
