"""What touches a model's tree: BatchNorm layers become test-time normalization layers and back.

A layer is converted where it stands: the module keeps its identity, parameters, buffers, hooks and
mode, and changes its class. So a layer used in two places stays one layer, optimisers and
references stay valid, and `revert_` has nothing to copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .layers import (
    TTFrozenNorm2d,
    TTNorm1d,
    TTNorm2d,
    TTNorm3d,
    TTNormAct2d,
    TTNormBase,
    TTSyncNorm,
)
from .tree import (
    CLASSES,
    CONFIG,
    CONTENT,
    STREAM,
    M,
    batchnorm_layers,
    check_statistics,
    device_of,
    norms_in,
    remember_,
    ttn_layers,
    unwrap,
)

OPTIONS = ("cross_term", "source_count", "group_size", "sync")  # of a layer, beside alpha
# By name, so that neither torchvision nor timm has to be installed.
_CONVERTED: dict[str, type[TTNormBase]] = {
    "torch.nn.modules.batchnorm.BatchNorm1d": TTNorm1d,
    "torch.nn.modules.batchnorm.BatchNorm2d": TTNorm2d,
    "torch.nn.modules.batchnorm.BatchNorm3d": TTNorm3d,
    "torch.nn.modules.batchnorm.SyncBatchNorm": TTSyncNorm,
    "torchvision.ops.misc.FrozenBatchNorm2d": TTFrozenNorm2d,
    "timm.layers.norm_act.BatchNormAct2d": TTNormAct2d,
}


@torch.inference_mode(False)  # so that alpha is a tensor that may be changed outside of it
def convert_(
    model: M,
    alpha: float | Mapping[str, Tensor],
    *,
    cross_term: bool = True,
    source_count: float = 0.0,
) -> M:
    """Turn every BatchNorm layer into a test-time normalization layer, in place.

    Works on BatchNorm1d/2d/3d, SyncBatchNorm, torchvision's FrozenBatchNorm2d and timm's
    BatchNormAct2d; any other BatchNorm is refused and the model left as it was. Layers that are
    converted already take the new alpha. Call `SyncBatchNorm.convert_sync_batchnorm` before this,
    not after: it would make plain layers of them.

    Args:
        model: the network.
        alpha: one number for all channels (0 is plain BatchNorm in eval mode, 1 uses the batch's
            statistics alone), or a tensor per layer, keyed by module name as in `alphas`.
        cross_term: False for the variance of alpha-BN and AdaptiveBN as they were published.
        source_count: the source counts as so many samples beside a batch's, which is then trusted
            alpha * n / (n + source_count) if it has n. 0 is the paper's: alpha at every size.

    Returns:
        The same model.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> convert_(model, alpha=0.1)[1]
        TTNorm2d(8, eps=1e-05, alpha=0.100 [0.100, 0.100])
    """
    if not source_count >= 0:
        raise ValueError(f"source_count is {source_count}, expected 0 or more samples.")
    refuse_stream(model, "convert_")
    layers = batchnorm_layers(model)
    classes = {name: _converted_class(name, layer) for name, layer in layers.items()}
    values = _alpha_per_layer(layers, alpha)
    remember_(model, CONFIG, None)  # it told how the alpha of before was made
    for name, layer in layers.items():
        if not isinstance(layer, TTNormBase):
            layer.__dict__["_class_before"] = type(layer)
            layer.__class__ = classes[name]
        layer.register_buffer("alpha", values[name])
        layer.cross_term = cross_term  # type: ignore[assignment]
        layer.source_count = float(source_count)  # type: ignore[assignment]
    return model


def revert_(model: M) -> M:
    """Turn every test-time normalization layer back into the BatchNorm it was, bit for bit.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(8))
        >>> type(revert_(convert_(model, alpha=0.1))[0])
        <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
    """
    layers = ttn_layers(model)
    end_stream_(model)
    refuse_stream(model, "revert_")
    for known in (CONFIG, CONTENT, CLASSES):
        remember_(model, known, None)
    for layer in layers.values():
        _revert(layer)
    return model


def end_stream_(model: M) -> M:
    """Have a network forget the streams it remembers: batches are normalised on their own again."""
    for network in unwrap(model).modules():
        stream = network.__dict__.pop(STREAM, None)
        if stream is not None:
            for hook in stream.hooks:
                hook.remove()
            for layer in stream.layers:
                layer.__dict__.pop("standardise", None)
    return model


def refuse_stream(model: nn.Module, what: str) -> None:
    """Raise if layers of the network remember a stream, which `what` would ignore."""
    if any("standardise" in layer.__dict__ for layer in norms_in(model)):
        raise ValueError(
            f"{what} does not work on a network that remembers a stream. Call ttnorm.end_stream_ "
            "first, with the network that stream_ was given. MixNorm has no end: use a copy of the "
            "network from before."
        )


@contextlib.contextmanager
def replaced(
    layers: Sequence[TTNormBase], standardise: Callable[[int, TTNormBase, Tensor], Tensor]
) -> Iterator[None]:
    """Inside, layers do `standardise(index, layer, x)`; outside, what they did before."""
    before = [layer.__dict__.get("standardise") for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.__dict__["standardise"] = partial(standardise, index, layer)
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.__dict__.pop("standardise", None)
            if old is not None:
                layer.__dict__["standardise"] = old


def alphas(model: nn.Module) -> dict[str, Tensor]:
    """The live alpha of every layer, keyed by module name, in the order of `named_modules`.

    Example:
        >>> alphas(convert_(nn.Sequential(nn.BatchNorm1d(2)), alpha=0.5))
        {'0': tensor([0.5000, 0.5000])}
    """
    return {name: layer.alpha for name, layer in ttn_layers(model).items()}


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; outside, every module is in the one it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        # by their own methods, from the outside in: some networks do more than set a flag there
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def borrowed(
    model: nn.Module, alpha: float | Mapping[str, Tensor], **options: Any
) -> Iterator[dict[str, TTNormBase]]:
    """Inside, the model is converted, in eval mode and frozen, and there is no autocast but one's
    own; outside, it is as it was.

    Args:
        alpha, options: see `convert_`.
    """
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    ours = [m for m in model.modules() if isinstance(m, TTNormBase)]
    before = [(m, {name: getattr(m, name) for name in ("alpha", *OPTIONS)}) for m in ours]
    configs = [(m, m.__dict__[CONFIG]) for m in model.modules() if CONFIG in m.__dict__]
    if any(parameter.is_inference() for parameter, _ in frozen):
        raise ValueError(
            "The network was made or copied in torch.inference_mode: nothing can be learned there. "
            "Make one outside of that, and load the weights into it."
        )
    refuse_stream(model, "Post-training")
    convert_(model, alpha, **options)
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        for layer in ours:
            layer.group_size = None
        with eval_mode(model), torch.autocast(device_of(model).type, enabled=False):
            yield ttn_layers(model)
    finally:
        for layer in ttn_layers(model).values():
            if layer not in ours:
                _revert(layer)
        for layer, values in before:
            for name, value in values.items():
                setattr(layer, name, value)
        remember_(model, CONFIG, None)
        for module, config in configs:
            remember_(module, CONFIG, config)
        for parameter, required in frozen:
            parameter.requires_grad_(required)


def _revert(layer: TTNormBase) -> None:
    # A layer that was built as TTNorm2d, not converted, becomes the BatchNorm2d it extends.
    plain = next(kind for kind in type(layer).__mro__ if not issubclass(kind, TTNormBase))
    before = layer.__dict__.pop("_class_before", plain)
    del layer.alpha
    for name in (*OPTIONS, "standardise", "_group_sizes"):
        layer.__dict__.pop(name, None)
    layer.__class__ = before


def _converted_class(name: str, layer: nn.Module) -> type[TTNormBase]:
    kind = type(layer)
    if isinstance(layer, TTNormBase):
        return kind  # type: ignore[return-value]
    where = f"{name or 'the model itself'} ({kind.__name__})"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(f"{where} is lazy and has no statistics yet. Run one forward first.")
    converted = _CONVERTED.get(f"{kind.__module__}.{kind.__qualname__}")
    if converted is None:
        known = ", ".join(sorted(path.rsplit(".", 1)[1] for path in _CONVERTED))
        raise TypeError(
            f"{where} is a BatchNorm that ttnorm does not know; its forward may do more than "
            f"normalise. Known are {known}. Replace the layer by one of these first."
        )
    check_statistics(name, layer)
    return converted


def _alpha_per_layer(
    layers: Mapping[str, nn.Module], alpha: float | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A checked alpha of the right shape, dtype and device for every layer."""
    if isinstance(alpha, Mapping):
        missing, extra = layers.keys() - alpha.keys(), alpha.keys() - layers.keys()
        if missing or extra:
            raise ValueError(
                f"alpha must have one entry per BatchNorm layer. Missing: {sorted(missing)[:5]}; "
                f"unknown: {sorted(extra)[:5]}. Was it fitted on another network?"
            )
        given = {name: torch.as_tensor(value) for name, value in alpha.items()}
    elif isinstance(alpha, Real):  # NumPy's, too
        given = {name: torch.tensor(float(alpha), dtype=torch.float64) for name in layers}
    else:
        raise TypeError(
            f"alpha is a {type(alpha).__name__}, expected a number, or a dict of tensors by layer."
        )
    return {name: _checked_alpha(name, given[name], layer) for name, layer in layers.items()}


def _checked_alpha(name: str, alpha: Tensor, layer: nn.Module) -> Tensor:
    like = layer.running_mean
    assert isinstance(like, Tensor)
    if alpha.dim() and alpha.shape != like.shape:
        raise ValueError(
            f"alpha for {name!r} has shape {tuple(alpha.shape)}, expected {tuple(like.shape)}. "
            "Was it fitted on another network?"
        )
    if like.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no statistics yet. Load the network's weights "
            "before: model.to_empty(device=...), then load_state_dict."
        )
    if not bool(((alpha >= 0) & (alpha <= 1)).all()):  # NaN is neither
        low, high = alpha.min().item(), alpha.max().item()
        raise ValueError(f"alpha for {name!r} spans [{low}, {high}], expected values in [0, 1].")
    return alpha.detach().to(like.device, like.dtype).expand_as(like).clone()
