"""A network's layers as a graph: what comes before a norm, and what after it."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from .layers import TTNormBase


class _Proxy(fx.Proxy):
    """torch.fx takes `x += y` for `x = x + y`, which leaves other names of x as they were."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(fx.Tracer):
    """Sees layers as wholes, ours included."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, TTNormBase) or super().is_leaf_module(module, name)


def trace(model: nn.Module) -> fx.Graph:
    """The graph of a converted network, or an error that says what cannot be known without it."""
    try:
        return _Tracer().trace(model)
    except Exception as error:  # torch.fx raises whatever the network's forward does
        raise ValueError(
            f"torch.fx cannot trace {type(model).__name__} ({error}), so it is not known what "
            "surrounds its layers. Use the traceable part of it on its own."
        ) from error


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody watches what goes in or comes out."""
    return any(module.__dict__[name] for name in module.__dict__ if "_hooks" in name)
