"""Folding: a layer that (almost) ignores the batch becomes part of the convolution before it.

With alpha = 0 a layer is BatchNorm in eval mode, an affine map with fixed numbers, and so is a
convolution. Folded, it costs nothing, and needs no statistics of the batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from .float64 import in_float64
from .layers import TTNormAct2d, TTNormBase
from .surgery import eval_mode, refuse_stream
from .tracing import has_hooks, trace
from .tree import CLASSES, CONTENT, known_of, remember_, ttn_layers, unwrap

_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@torch.inference_mode(False)  # so that what is folded can be trained on
@torch.no_grad()
def fold_(model: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Fold every layer whose alphas are all at most `tolerance` into what comes before it.

    That is a convolution whose output goes nowhere else. What is folded uses the source's
    statistics alone, as if its alphas were 0; it is gone for good, so fold last, but for `fuse`: a
    fused copy shares its convolutions, so fold before it is made. Layers with hooks or
    parametrizations are left as they are.

    Args:
        model: a converted network that torch.fx can trace.
        tolerance: the largest alpha that counts as 0.

    Returns:
        The names of the layers that were folded.

    Example:
        >>> from ttnorm import convert_
        >>> model = convert_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), alpha=0.0)
        >>> fold_(model), model[1]
        (['1'], Identity())
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance is {tolerance}, expected a number in [0, 1].")
    model = unwrap(model)
    refuse_stream(model, "fold_")
    quiet = {
        name: layer
        for name, layer in ttn_layers(model).items()
        if bool((layer.alpha <= tolerance).all())
    }
    if not quiet:
        return []
    with eval_mode(model):  # a network may do other things in training
        graph = trace(model)
    pairs = _preceding(model, graph)
    folded = [name for name in quiet if name in pairs]
    _forget(model, graph, [quiet[name] for name in folded])
    places = list(model.named_modules(remove_duplicate=False))
    for name in folded:
        _fold(pairs[name], quiet[name])
        remains = _what_remains(quiet[name])
        for place, module in places:  # a module may have several names
            if module is quiet[name]:
                model.set_submodule(place, remains)
    return folded


def _forget(model: nn.Module, graph: Graph, folded: Sequence[TTNormBase]) -> None:
    """What streams know of the norms that go."""
    content, classes = (known_of(model, known) for known in (CONTENT, CLASSES))
    if content is not None:
        modules = dict(model.named_modules(remove_duplicate=False))
        called = [modules[node.target] for node in graph.nodes if node.op == "call_module"]
        norms = [module for module in called if isinstance(module, TTNormBase)]
        ends = itertools.accumulate(2 * norm.running_mean.numel() for norm in norms)
        described = [n for n, end in zip(norms, ends, strict=True) if end <= len(content.mean)]
        if any(norm in folded for norm in described):
            remember_(model, CONTENT, None)
    if classes is not None:
        stays = [
            torch.full(layer.running_mean.shape, layer not in folded)
            for layer in ttn_layers(model).values()
        ]
        directions = classes.directions[:, torch.cat([*stays, *stays])]
        remember_(model, CLASSES, classes._replace(directions=directions))


def _preceding(model: nn.Module, graph: Graph) -> dict[str, nn.Module]:
    """The foldable layer right before each norm, where there is one that serves nothing else."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {id(module): name for name, module in model.named_modules()}
    nodes = [node for node in graph.nodes if node.op == "call_module"]
    calls = Counter(id(modules[node.target]) for node in nodes)
    read = [node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"]
    touched = {id(modules[name]) for name in read if name in modules}
    found: dict[str, nn.Module] = {}
    for node in nodes:
        norm, before = modules[node.target], _only_input(node)
        if not isinstance(norm, TTNormBase) or before is None or before.op != "call_module":
            continue
        layer = modules[before.target]
        used_once = calls[id(layer)] == calls[id(norm)] == len(before.users) == 1
        untouched = not {id(layer), id(norm)} & touched
        if used_once and untouched and _foldable(layer, norm):
            found[names[id(norm)]] = layer
    return found


def _foldable(layer: nn.Module, norm: TTNormBase) -> bool:
    """A plain convolution with the norm's channels, and nobody watching either of the two."""
    if not isinstance(layer, _FOLDABLE) or layer.out_channels != norm.running_mean.numel():
        return False
    return "weight" in layer._parameters and not (has_hooks(layer) or has_hooks(norm))


def _only_input(node: Any) -> Any:
    inputs = node.all_input_nodes
    return inputs[0] if len(inputs) == 1 else None


def _fold(layer: nn.Module, norm: TTNormBase) -> None:
    """weight and bias of a layer such that it does what it and the norm did."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    scale = torch.rsqrt(in_float64(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * in_float64(norm.weight)
    shift = -in_float64(norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + in_float64(norm.bias)
    if bias is not None:
        assert isinstance(bias, Tensor)
        shift = shift + in_float64(bias) * scale
    per_output = scale.view(-1, *[1] * (weight.dim() - 1))
    layer.weight = nn.Parameter((in_float64(weight) * per_output).to(weight), weight.requires_grad)
    layer.bias = nn.Parameter(shift.to(weight), weight.requires_grad)


def _what_remains(norm: TTNormBase) -> nn.Module:
    if isinstance(norm, TTNormAct2d):
        return nn.Sequential(norm.drop, norm.act)
    return nn.Identity()
