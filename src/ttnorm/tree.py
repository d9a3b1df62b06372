"""A network's tree, as it is found: its norms by name, what it is wrapped in, and what it knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim.swa_utils import AveragedModel

from .layers import TTNormBase

M = TypeVar("M", bound=nn.Module)  # a network, of the class that its user gave it
STREAM = "_ttnorm_stream"  # the attribute of a network that remembers: see `stream`
# What a network may know: how its alpha was made, how source images vary (see `shallow`), and what
# their classes do to statistics (see `classes`)
CONFIG, CONTENT, CLASSES = "_ttnorm_config", "_ttnorm_content", "_ttnorm_classes"
_PRESERVED = "_user_preserved_attributes"  # torch's name, in the meta of a GraphModule


def unwrap(model: nn.Module) -> nn.Module:
    """The bare network inside DataParallel, DistributedDataParallel, torch.compile or an average of
    its weights."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model


def device_of(model: nn.Module) -> torch.device:
    return next(itertools.chain(model.parameters(), model.buffers())).device


def ttn_layers(model: nn.Module) -> dict[str, TTNormBase]:
    """Every test-time normalization layer by name; raises when there is none."""
    layers = {name: m for name, m in _modules(model) if isinstance(m, TTNormBase)}
    if not layers:
        raise ValueError(
            "The model has no test-time normalization layers. Call ttnorm.convert_, "
            "ttnorm.load_ or ttnorm.post_train_ first."
        )
    return layers


def batchnorm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every BatchNorm layer by name, converted or not; raises when there is none."""
    layers = {name: m for name, m in _modules(model) if _is_batchnorm(m)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no BatchNorm layers, so there are no statistics to adapt."
        )
    return layers


def check_statistics(name: str, layer: nn.Module) -> None:
    """Raise where a BatchNorm layer has no source to mix with."""
    if getattr(layer, "running_mean", None) is None:
        raise ValueError(
            f"{name or 'the model itself'} ({type(layer).__name__}) keeps no running statistics "
            "(track_running_stats=False), so there is no source to mix with. Train it with "
            "track_running_stats=True."
        )


def known_of(model: nn.Module, what: str) -> Any:
    """CONFIG, CONTENT or CLASSES: of a network, or of the one inside it that has all its layers."""
    return next((part.__dict__[what] for part in _knowing(model, what)), None)


def remember_(model: nn.Module, what: str, value: Any) -> None:
    """Have a network know this and nothing else of the kind; None is nothing."""
    owner = next(iter(_knowing(model, what)), unwrap(model))
    for part in unwrap(model).modules():
        part.__dict__.pop(what, None)
        _of_copies(part).pop(what, None)
    if value is not None:
        owner.__dict__[what] = value
        if isinstance(owner, GraphModule):
            owner.meta.setdefault(_PRESERVED, {})[what] = value


def _of_copies(part: nn.Module) -> dict[str, Any]:
    """The attributes that a copy of a graph has; it has no others."""
    return part.meta.get(_PRESERVED, {}) if isinstance(part, GraphModule) else {}


def _knowing(model: nn.Module, what: str) -> Iterator[nn.Module]:
    """The network and those inside it that know this of all its layers."""
    network = unwrap(model)
    layers = norms_in(network)
    yield from (m for m in network.modules() if what in m.__dict__ and norms_in(m) == layers)


def norms_in(module: nn.Module) -> list[TTNormBase]:
    return [m for m in module.modules() if isinstance(m, TTNormBase)]


# what torch.compile and the activation checkpoints of torch.distributed put into names
_OF_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """named_modules, under the names they have when nothing is wrapped or compiled."""
    for name, module in unwrap(model).named_modules():
        yield ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS), module


def _is_batchnorm(module: nn.Module) -> bool:
    """Anything that normalises with running statistics, whether we know the class or not."""
    if isinstance(module, _InstanceNorm):
        return False
    buffers = {name for name, _ in module.named_buffers(recurse=False)}  # of a scripted one as well
    return isinstance(module, _BatchNorm) or {"running_mean", "running_var"} <= buffers
