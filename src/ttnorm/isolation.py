"""`isolated`: groups of a batch that are normalised on their own, and the guards that see to it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .arguments import check_whole
from .layers import TTNormBase
from .surgery import refuse_stream
from .tree import M, ttn_layers, unwrap

_ENTERING = threading.Lock()  # one thread at a time enters or leaves


@contextlib.contextmanager
def isolated(model: M, group_size: int) -> Iterator[M]:
    """Inside, every consecutive `group_size` samples of a batch are normalised on their own.

    G batches of size B can then run as one of G * B samples and give the same numbers; the last
    group may be smaller. In a service, it keeps one caller's images out of another's statistics.
    It is a state of the model: threads may isolate it at the same time in groups of the same size,
    and those that want other sizes need models of their own.

    Raises:
        ValueError: in the forward, when a layer sees another number of samples than the model (a
            video's frames folded into the batch, say), for then groups would mix callers.

    Example:
        >>> import torch
        >>> from ttnorm import convert_
        >>> model = convert_(nn.Sequential(nn.BatchNorm1d(2)), alpha=1.0)
        >>> with isolated(model, 4):
        ...     together = model(torch.arange(16.0).view(8, 2))
        >>> torch.equal(together[:4], together[4:])
        True
    """
    size = check_whole("group_size", group_size, at_least=1)
    layers = ttn_layers(model)
    refuse_stream(model, "isolated")
    with _ENTERING:
        guards = _same_batch_everywhere(unwrap(model), layers)
        for layer in layers.values():
            # of all that isolate it now, after what it was before them
            sizes = layer.__dict__.setdefault("_group_sizes", [layer.group_size])
            sizes.append(size)
            layer.group_size = size
    try:
        yield model
    finally:
        with _ENTERING:
            for guard in guards:
                guard.remove()
            for layer in layers.values():
                _leave_group(layer, size)


def _leave_group(layer: nn.Module, size: int) -> None:
    """Have a layer the group size of those that still isolate it, or the one from before."""
    before, *sizes = layer.__dict__.pop("_group_sizes", (None, size))
    last = max(place for place, one in enumerate(sizes) if one == size)
    del sizes[last]  # who leaves first of several alike makes no difference
    if sizes:
        layer.__dict__["_group_sizes"] = [before, *sizes]
    if isinstance(layer, TTNormBase):  # and was not reverted inside
        layer.group_size = sizes[-1] if sizes else before


def _same_batch_everywhere(
    model: nn.Module, layers: Mapping[str, TTNormBase]
) -> list[RemovableHandle]:
    """Hooks that compare the number of samples every layer sees with those the model was given."""
    # of every thread: the lengths of what its forward in progress was called with
    in_progress = threading.local()

    # without kwargs where another thread, which leaves, has just taken the hook away
    def note(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
        lists = [v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple))]
        in_progress.given = [len(v) for v in (*tensors, *lists)]  # a list of images, say

    def forget(*_: Any) -> None:
        in_progress.given = []

    def compare(
        name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        samples = len(next(iter((*args, *(kwargs or {}).values()))))
        given: list[int] = getattr(in_progress, "given", [])
        if given and samples not in given:
            raise ValueError(
                f"{name!r} sees {samples} samples in a batch of {given[0]}: groups of samples "
                "there would not be groups of the model's. This network cannot be isolated."
            )

    # not always_call: a compiled network would be compiled anew for every such hook
    guards = [
        _hook_before(model, note),
        model.register_forward_hook(forget),
    ]
    guards += [_hook_before(layer, partial(compare, name)) for name, layer in layers.items()]
    return guards


def _hook_before(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """A forward pre-hook with keyword arguments, under a key that it has the next time as well.

    `register_forward_pre_hook` has a new one every time, and up to torch 2.10 a compiled network is
    compiled anew for each.
    """
    hooks, with_kwargs = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    handle = RemovableHandle(hooks, extra_dict=with_kwargs)
    handle.id = next(key for key in itertools.count(-1, -1) if key not in hooks)
    hooks[handle.id], with_kwargs[handle.id] = hook, True
    return handle
