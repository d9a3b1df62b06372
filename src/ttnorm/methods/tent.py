"""TENT (Wang et al., 2021): minimise the entropy of predictions over gamma and beta."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..tree import ttn_layers
from .setting import Setting
from .step import (
    AdaptationStep,
    FlatParameters,
    batch_means,
    entropy,
    in_batches,
    optimiser,
)


def tent(
    model: nn.Module,
    batch_size: int,
    *,
    lr: float = 1e-3,
    momentum: float | None = None,
    window: int = 200,
) -> AdaptationStep:
    """Adapts the affine parameters of the norms; an output is the one before the update.

    loss = sum over batches of the mean entropy of a batch's predictions

    Args:
        model: with its normalisation in place; it is changed.
        batch_size: samples that are normalised together.
        lr: of Adam, or of SGD.
        momentum: of SGD; None is Adam.
        window: samples between two updates.
    """

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        output = in_batches(model, x, batch_size)
        return output, batch_means(entropy(output), batch_size).sum()

    flat = FlatParameters(affine_parameters(model))
    return AdaptationStep(model, predict, flat, optimiser(lr, momentum), batch_size, window)


def affine_parameters(model: nn.Module) -> dict[str, Tensor]:
    """gamma and beta of every norm, by name."""
    found = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in ttn_layers(model).items()
        for kind in ("weight", "bias")
        if getattr(layer, kind) is not None
    }
    if not found:
        raise ValueError(
            "The norms of this network have neither weight nor bias, which is what TENT adapts."
        )
    return found


def settings(setting: Setting) -> dict[str, Any]:
    """The TTN paper's, but for the rates over a learned alpha on CIFAR, and below B = 200."""
    if setting.task == "segmentation":
        return {"lr": 1e-6, "window": setting.batch_size}
    if setting.task == "imagenet":
        return {"lr": 5e-6 if setting.learned else 2.5e-4, "momentum": 0.9, "window": 64}
    if setting.learned:
        # The source's statistics do not take back what a step does to a scale, as a batch's would,
        # so that less is enough: benchmarks/choose_learning_rate.py, choose_mixed_rate.py
        return {"lr": 5e-6 if setting.endless else 5e-5}
    return {"lr": 1e-3 if setting.large and not setting.endless else 1e-4}
