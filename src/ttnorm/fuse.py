"""Fusing: a norm, the residual that is added to it and the ReLU after it, in one pass.

For inference on a GPU, where reading and writing activations is what time is spent on.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import kernels
from .arguments import check_arguments
from .layers import TTNormAct2d, TTNormBase
from .surgery import eval_mode, refuse_stream
from .tracing import has_hooks, trace
from .tree import CLASSES, CONFIG, CONTENT, known_of, remember_, ttn_layers, unwrap

_ADD = (operator.add, operator.iadd, torch.add)
_RELU = (F.relu, torch.relu, torch.relu_)
_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior")  # of operator


def fuse(model: nn.Module) -> fx.GraphModule:
    """A copy of the network's graph in which norms do what follows them in the same pass.

    That is a ReLU, or an addition and a ReLU. Parameters are shared with the network; outputs are
    the same to rounding. Where kernels cannot be used (on a CPU, or with gradients), the copy does
    the same step by step.

    Args:
        model: a converted network that torch.fx can trace.

    Example:
        >>> from ttnorm import convert_
        >>> model = convert_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), 0.1)
        >>> [type(m).__name__ for m in fuse(model).children() if isinstance(m, NormRelu)]
        ['NormRelu']
    """
    model = unwrap(model)
    refuse_stream(model, "fuse")
    if model._forward_pre_hooks or model._forward_hooks:
        raise ValueError(
            "The network has hooks of its own, which its copy would not call. Do what they do "
            "outside, or in a network around this one."
        )
    with eval_mode(model):  # a dropout that is traced in training mode would stay
        graph = trace(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    fused = fx.GraphModule(model, graph)
    for relu in [node for node in graph.nodes if _is_relu(node, modules)]:
        norm, residual = _norm_before(relu.all_input_nodes[0], modules)
        if norm is None:
            continue
        moved = [norm] if residual is None else [norm, relu.all_input_nodes[0]]
        inputs = (norm.all_input_nodes[0], *([] if residual is None else [residual]))
        if any(
            _changes(value, node, relu, moved, modules)
            for value, node in zip(inputs, moved, strict=True)
        ):
            continue
        target = str(norm.target)
        name = f"{target.replace('.', '_')}_relu"
        while name in modules:
            name += "_"
        modules[name] = NormRelu(modules[target])
        fused.add_submodule(name, modules[name])
        with graph.inserting_before(relu):
            relu.replace_all_uses_with(graph.call_module(name, inputs))
        for node in (relu, *reversed(moved)):
            graph.erase_node(node)
    graph.lint()
    fused.recompile()
    if list(ttn_layers(fused).values()) == list(ttn_layers(model).values()):
        for known in (CONFIG, CONTENT, CLASSES):  # by the order of layers
            remember_(fused, known, known_of(model, known))
    return fused


class NormRelu(nn.Module):
    """relu(norm(x) + residual), the residual being optional."""

    def __init__(self, norm: TTNormBase) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        norm = self.norm
        if not self._is_one_pass(x, residual):
            y = norm(x)
            return F.relu(y if residual is None else y + residual)
        tensors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        alpha = norm.alpha_for(min(norm.group_size or x.shape[0], x.shape[0]))
        alpha = check_arguments(x, *tensors, alpha, norm.group_size)
        return kernels.forward(
            x,
            norm.weight,
            norm.bias,
            alpha,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.group_size,
            norm.cross_term,
            residual=residual,
            relu=True,
        )[0]

    def _is_one_pass(self, x: Tensor, residual: Tensor | None) -> bool:
        norm = self.norm
        # who traces this copy is to see the norm and what follows; and hooks of the norm, such as
        # those of `isolated`, are run where it is called
        if isinstance(x, fx.Proxy) or norm._forward_pre_hooks or norm._forward_hooks:
            return False
        # next: an exporter is not to be asked for the size of a batch
        if torch.is_grad_enabled() or not kernels.usable(x):
            return False
        # it may have been reverted since, or a memory have taken its place
        if not isinstance(norm, TTNormBase) or "standardise" in norm.__dict__ or norm.sync:
            return False
        samples = x.shape[0]
        size = min(norm.group_size or samples, samples)
        if not size or (norm.source_count and samples % size):  # a last group with its own alpha
            return False
        return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not has_hooks(module)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU


def _norm_before(
    node: fx.Node, modules: dict[str, nn.Module]
) -> tuple[fx.Node | None, fx.Node | None]:
    """The norm whose output this is, alone or added to something, if it goes nowhere else."""
    if _is_norm(node, modules):
        return node, None
    added = node.op == "call_function" and node.target in _ADD and not node.kwargs
    if added and len(node.users) == 1 and len(node.all_input_nodes) == 2:
        first, second = node.all_input_nodes
        # what is added to in place is changed for all that use it later
        places = ((first, second), (second, first))[: 1 if node.target is operator.iadd else 2]
        for norm, other in places:
            if _is_norm(norm, modules):
                return norm, other
    return None, None


def _changes(
    value: fx.Node,
    first: fx.Node,
    last: fx.Node,
    but: list[fx.Node],
    modules: dict[str, nn.Module],
) -> bool:
    """Whether a value may be changed in place between two nodes: something else takes it there, or
    what may be a view of it."""
    node = first.next
    while node is not last:
        if node not in but and (value in node.all_input_nodes or _is_in_place(node, modules)):
            return True
        node = node.next
    return False


def _is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if node.op == "call_module":
        return getattr(modules[str(node.target)], "inplace", False)
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name in _IN_PLACE or name.endswith("_"))


def _is_norm(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op != "call_module" or len(node.users) != 1 or len(node.all_input_nodes) != 1:
        return False
    module = modules[str(node.target)]
    if not isinstance(module, TTNormBase) or isinstance(module, TTNormAct2d):
        return False
    return not has_hooks(module)
