"""Post-training: once, with labelled source data, learn how far to trust the batch (Algorithm 2).

L = CE(network(shifted images), labels) + lambda * mean over channels of (alpha - A)^2

Here are the two stages, the prior and the fit; the choices are in `posttrain_config`, the loop in
`fitting`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .augment import (
    Augment,
    domain_shift,
    per_channel_list,
    prior_shift,
    shift_images,
)
from .batches import Loader, Loss, check_repeatable, cross_entropy
from .checkpoint import Checkpoint
from .classes import classes_of
from .distributed import of_rank_0, world_size
from .files import checksum, fingerprint
from .fitting import Fit
from .identity import identity_of, name_of
from .posttrain_config import PostTrainConfig, as_json
from .prior import estimate_prior
from .reproducible import reproducible, warn_of_lasting_workers
from .shallow import content_of
from .surgery import borrowed, convert_
from .tree import CLASSES, CONFIG, CONTENT, remember_, unwrap


@dataclasses.dataclass(frozen=True)
class PostTrainResult:
    """What a run gives: alpha and the prior by layer, and one row of history per epoch."""

    alpha: dict[str, Tensor]
    prior: dict[str, Tensor] | None
    history: list[dict[str, float]]
    config: PostTrainConfig


@torch.inference_mode(False)
def post_train_(
    model: nn.Module,
    loader: Loader,
    config: PostTrainConfig | None = None,
    *,
    loss: Loss | None = None,
    prior_augment: Augment = prior_shift,
    augment: Augment | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PostTrainResult:
    """Estimate the prior, optimise alpha, and leave the model with test-time normalization layers.

    No weight and no running statistic of the network changes. Under torchrun, with a loader per
    rank, the work is shared and every rank ends with the same alpha. On a GPU, with the loss left
    as it is, steps are recorded as a CUDA graph: Python code in the network's forward then runs a
    few times only. TTNORM_KERNELS=eager in the environment has it run at every step.

    Args:
        model: the trained network.
        loader: yields (x, y) of labelled source data, shuffled, with x as the network takes it.
        config: see `PostTrainConfig`.
        loss: `loss(output, y)`; cross-entropy by default. See `estimate_prior`.
        prior_augment: the shift of the prior, `prior_augment(images, generator)`.
        augment: the shift while optimising; `domain_shift` by default.
        mean, std: what the loader normalised the images with, if it did; shifts happen in [0, 1].
        checkpoint: a file to write after every epoch. If it is there, the run goes on from it and
            ends with the alpha that an uninterrupted run gives.

    Example:
        >>> norm = nn.BatchNorm2d(4)
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 2))
        >>> loader = [(torch.rand(8, 3, 8, 8), torch.randint(2, (8,)))]
        >>> result = post_train_(model, loader, PostTrainConfig(epochs=2))
        >>> [row["epoch"] for row in result.history], type(model[1]).__name__
        ([1, 2], 'TTNorm2d')
    """
    config = _checked(config)
    check_repeatable(loader)
    mean, std = per_channel_list(mean), per_channel_list(std)
    identity = {}
    if checkpoint is not None:
        identity = _identity(model, config, loss, augment, prior_augment, mean, std)
    state = Checkpoint.read(checkpoint, identity)
    prior = None
    if state is not None:
        prior = state.prior()
    elif config.needs_prior:
        with reproducible(loader, config.seed, epoch=0) as generator:
            prior = estimate_prior(
                model,
                loader,
                samples=config.prior_samples,
                augment=prior_augment,
                loss=loss,
                generator=generator,
                mean=mean,
                std=std,
            )
    with reproducible(loader, config.seed, epoch=0):
        classes = classes_of(model, loader, predictions=loss is None or loss is cross_entropy)
        known = {CONTENT: content_of(model, loader), CLASSES: classes}
    known = of_rank_0(known)  # every rank looked at images of its own
    shift = _shift(config, augment, mean, std)
    result = _fit(model, loader, prior, config, loss, shift, checkpoint, identity, state)
    convert_(model, result.alpha, source_count=config.source_count)
    for attribute, value in known.items():
        remember_(model, attribute, value)
    also: dict[str, Any] = {
        "prior augmentation": name_of(prior_augment),
        "augmentation": name_of(domain_shift if augment is None else augment),
    }
    if mean is not None or std is not None:
        also |= {"mean": mean, "std": std}
    remember_(model, CONFIG, as_json(config) | also)
    return result


@torch.inference_mode(False)
def optimise_alpha(
    model: nn.Module,
    loader: Loader,
    prior: dict[str, Tensor] | None,
    config: PostTrainConfig | None = None,
    *,
    loss: Loss | None = None,
    augment: Augment | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PostTrainResult:
    """The second half of `post_train_`: fit alpha under simulated shifts. The model is untouched.

    Args:
        prior: from `estimate_prior`; None is enough where neither init nor mse uses it.
        loader, config, loss, augment, mean, std, checkpoint: see `post_train_`.
    """
    config = _checked(config)
    check_repeatable(loader)
    mean, std = per_channel_list(mean), per_channel_list(std)
    identity = {}
    if checkpoint is not None:
        identity = _identity(model, config, loss, augment, None, mean, std)
    state = Checkpoint.read(checkpoint, identity)
    shift = _shift(config, augment, mean, std)
    return _fit(model, loader, prior, config, loss, shift, checkpoint, identity, state)


def _fit(
    model: nn.Module,
    loader: Loader,
    prior: dict[str, Tensor] | None,
    config: PostTrainConfig,
    loss: Loss | None,
    shift: partial[Tensor],
    checkpoint: str | os.PathLike[str] | None,
    identity: dict[str, Any],
    state: Checkpoint | None,
) -> PostTrainResult:
    if checkpoint is not None:
        warn_of_lasting_workers(loader)
    with (
        borrowed(model, alpha=0.0, source_count=config.source_count) as layers,
        torch.enable_grad(),
    ):
        fit = Fit(model, layers, prior, config, cross_entropy if loss is None else loss, shift)
        if state is not None:
            fit.resume(state)
        fit.run(loader, checkpoint, identity)
        return PostTrainResult(fit.alpha(), prior, fit.history, config)


def _shift(
    config: PostTrainConfig,
    augment: Augment | None,
    mean: list[float] | None,
    std: list[float] | None,
) -> partial[Tensor]:
    # not `or`: an empty container of modules is false, and may be a shift all the same
    augment = partial(domain_shift, per=config.shift) if augment is None else augment
    return partial(shift_images, augment=augment, mean=mean, std=std)


def _checked(config: PostTrainConfig | None) -> PostTrainConfig:
    if config is not None and not isinstance(config, PostTrainConfig):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a PostTrainConfig, such as "
            "PostTrainConfig(epochs=10)."
        )
    return config or PostTrainConfig()


def _identity(
    model: nn.Module,
    config: PostTrainConfig,
    loss: Loss | None,
    augment: Augment | None,
    prior_augment: Augment | None,
    mean: list[float] | None,
    std: list[float] | None,
) -> dict[str, Any]:
    """What has to be the same for a run to go on from a checkpoint."""
    return {
        "config": as_json(config),
        "network": fingerprint(model),
        "weights": checksum(dict(unwrap(model).named_parameters()), {}),
        "loss": identity_of(cross_entropy if loss is None else loss),
        "augmentation": identity_of(domain_shift if augment is None else augment),
        "prior augmentation": None if prior_augment is None else identity_of(prior_augment),
        "mean and std": [mean, std],
        "number of ranks": world_size(),
    }
