"""SWR (Choi et al., 2022): adapt every parameter, but hold those that a shift does not concern.

A parameter whose gradients on clean and on shifted source images agree says nothing about the
shift: the more they agree, the more its movement costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from ..augment import Augment, prior_shift
from ..batches import Loader, batches
from ..layers import TTNormBase
from ..mixnorm import MixNorm
from ..reproducible import reproducible
from ..surgery import eval_mode
from ..tree import device_of, ttn_layers
from .setting import Setting
from .step import (
    AdaptationStep,
    FlatParameters,
    batch_means,
    entropy,
    in_batches,
    mean_over_pixels,
    optimiser,
)


def swr(
    model: nn.Module,
    batch_size: int,
    *,
    weights: Mapping[str, float],
    lr: float = 1e-3,
    momentum: float | None = None,
    stable: bool = False,
    entropy_weight: float = 0.2,
    diversity_weight: float = 0.25,
    strength: float = 10.0,
    window: int = 200,
) -> AdaptationStep:
    """Adapts all parameters; an output is the one before the update.

    loss = sum over batches of  entropy_weight * mean entropy
                              - diversity_weight * entropy of the mean prediction
                              + strength * sum_l w_l ||theta_l - theta*_l||^2

    where theta* is theta before its last update, or the source's if `stable`.

    Args:
        model: with its normalisation in place; it is changed.
        batch_size: samples that are normalised together.
        weights: w, by parameter: `gradient_agreement`.
        lr: of Adam, or of SGD.
        momentum: of SGD; None is Adam.
        stable: for streams without end, in which theta must not walk away.
        entropy_weight, diversity_weight, strength: of the parts of the loss.
        window: samples between two updates.
    """
    ttn_layers(model)  # or it says that there are none
    inner = model.model if isinstance(model, MixNorm) else model
    names: dict[str, Tensor] = dict(inner.named_parameters())
    missing = sorted(set(names) - set(weights))
    if missing:
        raise ValueError(
            f"weights have none for {missing[0]!r} and {len(missing) - 1} more. Were they made "
            "with another network? gradient_agreement makes them."
        )

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        output = in_batches(model, x, batch_size)
        certain = batch_means(entropy(output), batch_size).sum()
        mean = batch_means(mean_over_pixels(output.softmax(1)), batch_size)
        diverse = -(mean * mean.clamp(min=1e-12).log()).sum()
        return output, entropy_weight * certain - diversity_weight * diverse

    flat = FlatParameters(names)
    anchor, weight = flat.vector.detach().clone(), torch.empty_like(flat.gradient)
    for name, place in flat.slices.items():
        weight[place] = weights[name]

    def pull(gradient: Tensor, number: int) -> None:
        """Adds the gradient of the regulariser, which every batch has."""
        gradient.addcmul_(weight, flat.vector - anchor, value=2 * strength * number)

    def remember() -> None:
        anchor.copy_(step.good["parameters"])

    step = AdaptationStep(
        model,
        predict,
        flat,
        optimiser(lr, momentum),
        batch_size,
        window,
        pull=pull,
        after=None if stable else remember,
        also={} if stable else {"anchor": anchor},
    )
    return step


def gradient_agreement(
    model: nn.Module,
    loader: Loader,
    *,
    samples: int = 1024,
    augment: Augment = prior_shift,
    seed: int = 0,
) -> dict[str, float]:
    """w of every parameter: how far its gradients on clean and shifted source images agree.

    s_l = mean over samples of cos(gradient of theta_l, its gradient on the shifted sample)
    w_l = ((s_l - min s) / (max s - min s))^2

    Args:
        model: the source network, with BatchNorm layers; it is not changed.
        loader: yields (x, y) of source images in [0, 1].
        samples: to look at.
        augment: the shift.
        seed: of the loader's order and of the shift.
    """
    if any(isinstance(module, TTNormBase) for module in model.modules()):
        raise ValueError(
            "The network has test-time normalization layers; expected the source network. Measure "
            "before convert_ and load_, or after revert_."
        )
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    total, count, generator = dict.fromkeys(parameters, 0.0), 0, Generator().manual_seed(seed)
    # the same images whenever it is asked
    with eval_mode(model), reproducible(loader, seed, 0):
        for x, y in batches(loader, device_of(model)):
            x, y = x[: samples - count], y[: samples - count]
            shifted = augment(x, generator)
            for part in zip(x.split(32), shifted.split(32), y.split(32), strict=True):
                clean, moved = (gradients(parameters, view, part[2]) for view in part[:2])
                for name in parameters:
                    pair = (g[name].flatten(1) for g in (clean, moved))
                    total[name] += F.cosine_similarity(*pair).sum().item()
            count += len(x)
            if count >= samples:
                break
    if count == 0:
        raise ValueError("The loader yielded no batches; expected (x, y).")
    scores = {name: value / count for name, value in total.items()}
    low, high = min(scores.values()), max(scores.values())
    return {name: ((s - low) / max(high - low, 1e-12)) ** 2 for name, s in scores.items()}


def settings(setting: Setting) -> dict[str, Any]:
    """The TTN paper's, but for those over a learned alpha on CIFAR, and rates below B = 200."""
    if setting.task == "segmentation":
        return {"lr": 1e-6, "strength": 500.0, "window": setting.batch_size}
    if setting.task == "imagenet":
        lr = 2.5e-4 if setting.batch_size >= 64 else 2.5e-6
        return {"lr": lr, "momentum": 0.9, "window": 64}
    if setting.endless:
        lr = 1e-4 if setting.scenario == "continual" else 5e-5
        lr *= 0.1 if setting.learned else 1
    else:
        lr = 1e-3 if setting.large and not setting.learned else 1e-4
    options = {"lr": lr, "stable": setting.endless}
    # benchmarks/choose_swr_over_ttn.py
    return options | {"strength": 40.0} if setting.learned else options
