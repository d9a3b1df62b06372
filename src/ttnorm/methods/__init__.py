"""Adaptation methods: what, if anything, changes between one batch and the next.

A method is made with a network that has its normalisation already. It is called with samples of one
or many consecutive batches and gives their outputs; `reset()` makes it as it was when it was made.
`window` says how many samples it can take at once, None being any number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from .none import NoAdaptation


class Method(Protocol):
    """What the evaluation calls."""

    window: int | None

    def __call__(self, x: Tensor) -> Tensor: ...

    def reset(self) -> None: ...


METHODS: dict[str, Callable[[nn.Module, int], Method]] = {"none": NoAdaptation}


def method_named(name: str) -> Callable[[nn.Module, int], Method]:
    if name not in METHODS:
        raise ValueError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    return METHODS[name]
