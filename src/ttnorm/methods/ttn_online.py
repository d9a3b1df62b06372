"""TTN, adapting alpha itself at test time (appendix of the paper)."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..tree import ttn_layers
from .setting import Setting
from .step import AdaptationStep, FlatParameters, adam, batch_means, entropy, in_batches

# the paper's, by size of the test batch
RATES = MappingProxyType({200: 1e-2, 64: 2.5e-3, 16: 5e-4, 4: 1e-4, 2: 5e-5, 1: 2.5e-5})


def ttn_online(
    model: nn.Module, batch_size: int, *, lr: float = 1e-2, window: int | None = None
) -> AdaptationStep:
    """Adapts the alpha of every channel; an output is the one before the update.

    loss = sum over batches of  mean entropy + mean over channels of (alpha - alpha_0)^2

    where alpha_0 is what post-training learned. alpha is clamped to [0, 1] after every update.

    Args:
        model: with its normalisation in place; it is changed.
        batch_size: samples that are normalised together.
        lr: of Adam.
        window: samples between two updates; None updates after every batch.
    """
    alphas = {f"{name}.alpha": layer.alpha for name, layer in ttn_layers(model).items()}
    flat = FlatParameters(alphas)
    learned = flat.vector.detach().clone()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        output = in_batches(model, x, batch_size)
        return output, batch_means(entropy(output), batch_size).sum()

    def pull(gradient: Tensor, number: int) -> None:
        gradient.add_(flat.vector - learned, alpha=2 * number / len(learned))

    def clamp() -> None:
        flat.vector.clamp_(0, 1)

    return AdaptationStep(
        model,
        predict,
        flat,
        adam(lr),
        batch_size,
        window or batch_size,
        pull=pull,
        after=clamp,
    )


def settings(setting: Setting) -> dict[str, Any]:
    """The paper's learning rate for the nearest batch size that it lists."""
    nearest = min(RATES, key=lambda size: abs(math.log(size / setting.batch_size)))
    return {"lr": RATES[nearest]}
