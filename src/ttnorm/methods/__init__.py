"""Adaptation methods: what, if anything, changes between one batch and the next.

A method is made with a network that has its normalisation already. It is called with samples of one
or many consecutive batches and gives their outputs; `reset()` makes it as it was when it was made,
and `state_dict` and `load_state_dict` carry it from one process to another. `room` says how many
samples it can take at once before it changes, None being any number; `report()`, how many updates
had to be undone since the last report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from . import cotta, swr, tent, ttn_online
from .none import NoAdaptation
from .setting import Setting
from .sliding import SlidingWindow


class Method(Protocol):
    """What the evaluation calls."""

    @property
    def room(self) -> int | None: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def reset(self) -> None: ...

    def report(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def _no_settings(setting: Setting) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method as the evaluation makes it.

    Args:
        make: called with the network, the batch size and options.
        settings: from where it is run to the paper's options.
        needs_agreement: whether it takes `weights` from source images: see `swr`.
        per_pixel: whether it adapts networks that predict a class for every pixel.
        over_memory: whether it runs over norms that remember their stream.
    """

    make: Callable[..., Method]
    settings: Callable[[Setting], dict[str, Any]] = _no_settings
    needs_agreement: bool = False
    per_pixel: bool = True
    over_memory: bool = True


METHODS: dict[str, MethodSpec] = {
    "none": MethodSpec(NoAdaptation),
    "tent": MethodSpec(tent.tent, tent.settings),
    "swr": MethodSpec(swr.swr, swr.settings, needs_agreement=True),
    "cotta": MethodSpec(cotta.cotta, cotta.settings, per_pixel=False),
    "ttn-online": MethodSpec(ttn_online.ttn_online, ttn_online.settings),
    "sliding": MethodSpec(SlidingWindow, over_memory=False),
}


def method_named(name: str) -> MethodSpec:
    if name not in METHODS:
        raise ValueError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    return METHODS[name]
