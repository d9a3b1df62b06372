"""A network's layers as a graph: what comes before a norm, and what after it."""

from __future__ import annotations

from torch import fx, nn

from .layers import TTNormBase


class _Tracer(fx.Tracer):
    """Sees layers as wholes, ours included."""

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
