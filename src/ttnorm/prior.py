"""The prior A: how far a channel's gradients disagree between clean and shifted images (Eq. 3-5).

A channel's gradient of gamma (or beta) is one number, so the cosine of Eq. 3 is a product of signs
and the score s is a mean sign agreement over samples. It has to be taken per sample: the gradient
of a whole batch hides the disagreement. With source statistics the samples of a batch do not see
each other, so one batched backward per view gives them all: for a BatchNorm output z with gradient
g, sample i contributes sum_hw(g_i * z_hat_i) to gamma and sum_hw(g_i) to beta.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from .arguments import check_whole
from .augment import Augment, prior_shift, shift_images
from .batches import Loader, Loss, batches, cross_entropy, scalar
from .distributed import world_size
from .functional import affine_gradients, normalise
from .layers import TTNormBase
from .native import moment_dtype
from .progress import Progress
from .surgery import borrowed, replaced
from .tree import device_of, unwrap

logger = logging.getLogger("ttnorm")
RARE = 1 / 32  # of the samples: a channel to which fewer give a gradient cannot be judged


@torch.inference_mode(False)
def estimate_prior(
    model: nn.Module,
    loader: Loader,
    *,
    samples: int = 1024,
    augment: Augment = prior_shift,
    loss: Loss | None = None,
    generator: Generator | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> dict[str, Tensor]:
    """Sensitivity of every channel to a domain shift, in [0, 1] (Eq. 3-5, Algorithm 1).

    s = mean over samples of sign(g) * sign(g'), where neither is 0, for gamma and for beta
    A = (1 - (s_gamma + s_beta) / 2)^2 after min-max normalisation of all s together

    A sample that gives a channel no gradient, because a ReLU behind it is off, does not count.
    Channels for which that leaves fewer than 1 sample in 32 are left out of the normalisation, get
    0 (the source's statistics) and are logged. The model comes back as it was. Where
    torch.distributed is initialised, every rank takes its share of the samples and all ranks return
    the same prior.

    Args:
        model: the trained network, converted or not.
        loader: yields (x, y), shuffled, with x as the network takes it.
        samples: how many samples to look at.
        augment: the simulated shift, `augment(images, generator)`.
        loss: `loss(output, y)`, a mean or sum over samples; cross-entropy by default, which takes
            class labels (N,) as well as per-pixel labels (N, H, W). For labels to leave out use
            `functools.partial(torch.nn.functional.cross_entropy, ignore_index=255)`.
        generator: randomness of the augmentation; None is torch's global one.
        mean, std: what the loader normalised the images with, if it did.

    Returns:
        A tensor (C,) per BatchNorm layer, keyed by module name.

    Example:
        >>> norm = nn.BatchNorm2d(4)
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 2))
        >>> loader = [(torch.rand(8, 3, 8, 8), torch.randint(2, (8,)))]
        >>> {name: tuple(a.shape) for name, a in estimate_prior(model, loader).items()}
        {'1': (4,)}
    """
    check_whole("samples", samples, at_least=1)
    loss = cross_entropy if loss is None else loss
    model = unwrap(model)  # layers that hand out gradients are not for a compiler
    device = device_of(model)
    ranks = world_size()
    wanted = -(-samples // ranks)
    agreement: dict[str, Tensor] = {}
    informed: dict[str, Tensor] = {}
    seen = 0
    with (
        borrowed(model, alpha=0.0) as layers,
        _per_sample_gradients(model, layers) as gradients,
        torch.enable_grad(),
    ):
        progress = Progress("prior", None)
        for x, y in progress.track(_at_most(batches(loader, device), wanted)):
            moved = shift_images(x, augment, generator, mean, std)  # first: it checks the images
            clean = gradients(x.clone(), y, loss)  # a network may change what it is given
            shifted = gradients(moved, y, loss)
            for name, grads in clean.items():
                product = torch.sign(grads) * torch.sign(shifted[name])  # (2, N, C)
                agreement[name] = agreement.get(name, 0) + product.sum(1)
                informed[name] = informed.get(name, 0) + (product != 0).sum(1)
            seen += len(x)
        progress.close()
    if seen == 0:
        raise ValueError("The loader yielded no samples; expected batches (x, y).")
    if seen < wanted:
        logger.info("prior: the loader ended after %d of %d samples", seen, wanted)
    if ranks > 1:
        count = torch.tensor(float(seen), device=device)
        for tensor in (count, *agreement.values(), *informed.values()):
            dist.all_reduce(tensor)
        seen = int(count.item())
    return _prior_from_agreement(agreement, informed, seen)


def _prior_from_agreement(
    agreement: dict[str, Tensor], informed: dict[str, Tensor], samples: int
) -> dict[str, Tensor]:
    """Eq. 4 and 5, over all layers together."""
    names, sizes = list(agreement), [a.shape[1] for a in agreement.values()]
    counts = torch.cat([informed[name] for name in names], 1)
    # a sample without a gradient says nothing: counted as 0, one channel that hardly ever fires
    # would be the lowest score of all, and make every other channel look alike
    score = torch.cat([agreement[name] for name in names], 1) / counts.clamp_min(1)
    alive = (counts >= max(1, samples * RARE)).all(0)
    if not alive.any():
        raise ValueError(
            "Every gradient of every BatchNorm channel is exactly zero. Are the labels right?"
        )
    low, high = score[:, alive].min(), score[:, alive].max()
    # all scores alike says nothing about which channel to trust: then no channel is sensitive
    similarity = (score - low) / (high - low) if high > low else torch.ones_like(score)
    prior = (1 - similarity.mean(0)).square()
    prior = torch.where(alive, prior, 0.0)
    per_layer = dict(zip(names, prior.split(sizes), strict=True))
    silent = {n: int((~a).sum()) for n, a in zip(names, alive.split(sizes), strict=True)}
    if any(silent.values()):
        logger.warning(
            "prior: %d of %d channels hardly ever got a gradient and keep the source's statistics: "
            "%s",
            sum(silent.values()),
            len(alive),
            ", ".join(f"{count} in {name}" for name, count in silent.items() if count),
        )
    return per_layer


@contextlib.contextmanager
def _per_sample_gradients(
    model: nn.Module, layers: dict[str, TTNormBase]
) -> Iterator[Callable[[Tensor, Tensor, Loss], dict[str, Tensor]]]:
    """Inside, a function (x, y, loss) -> gradients of gamma and beta, (2, N, C) per layer."""
    # Every layer's output hangs on this scalar, so that asking for its gradient reaches all layers
    # of a network in which no parameter requires one.
    anchor = torch.zeros((), requires_grad=True)
    recorded: dict[str, Tensor] = {}

    names = list(layers)

    def record(index: int, layer: TTNormBase, x: Tensor) -> Tensor:
        return _RecordingNorm.apply(x, anchor, layer, functools.partial(keep, names[index]))

    def keep(name: str, grads: Tensor) -> None:  # a layer used twice has the sum of both uses
        recorded[name] = recorded[name] + grads if name in recorded else grads

    def gradients(x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
        recorded.clear()
        value = scalar(loss(model(x), y))
        if not value.requires_grad:
            raise ValueError("The loss depends on no BatchNorm layer, so there is no prior.")
        if not bool(torch.isfinite(value)):
            raise ValueError(
                "The loss is not finite. Is there a batch without a single valid label? Are the "
                "inputs finite?"
            )
        torch.autograd.grad(value, anchor)
        for name, grads in recorded.items():
            if grads.shape[1] != len(x):
                raise ValueError(
                    f"{name!r} saw {grads.shape[1]} samples in a batch of {len(x)}: its gradients "
                    "cannot be told apart by sample. Only layers that keep the batch dimension "
                    "have a prior; use PostTrainConfig(init=0.1, mse=False) for this network."
                )
        unused = {n: x.new_zeros(2, len(x), m.alpha.numel()) for n, m in layers.items()}
        return {**unused, **recorded}

    with replaced(list(layers.values()), record):
        yield gradients


class _RecordingNorm(torch.autograd.Function):
    """BatchNorm with source statistics that hands out its per-sample gradients on the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, layer: TTNormBase, keep: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.keep = layer, keep
        return normalise(x, *_float_moments(layer, x), layer.weight, layer.bias, layer.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        mean, var = _float_moments(layer, x)
        rows = (mean.expand(len(x), -1), var.expand(len(x), -1))
        grad = grad.contiguous() if x.is_contiguous() else grad
        ctx.keep(torch.stack(affine_gradients(grad, x, *rows, layer.eps, group_size=1)))
        zero = torch.zeros_like(mean)
        grad_x = normalise(grad, zero, var, layer.weight, None, layer.eps)
        return grad_x, torch.zeros((), device="cpu"), None, None


def _float_moments(layer: TTNormBase, x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = moment_dtype(x)
    return layer.running_mean.to(dtype), layer.running_var.to(dtype)


def _at_most(
    pairs: Iterable[tuple[Tensor, Tensor]], samples: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in pairs:
        yield x[:samples], y[:samples]
        samples -= len(x)
        if samples <= 0:
            return
