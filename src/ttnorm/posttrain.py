"""Post-training: once, with labelled source data, learn how far to trust the batch (Algorithm 2).

L = CE(network(shifted images), labels) + lambda * mean over channels of (alpha - A)^2

Only alpha moves. All alphas are one flat vector here, so that a step of Adam, the clamp to [0, 1]
and the regulariser are one operation each, and every granularity is a shorter vector, expanded.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .artefact import fingerprint, read_safetensors, write_atomically
from .augment import Augment, Per, domain_shift, prior_shift, shift_images
from .distributed import rank, world_size
from .layers import TTNormBase
from .prior import Loss, estimate_prior
from .progress import Progress
from .reproducible import reproducible
from .surgery import borrowed, convert_, device_of

logger = logging.getLogger("ttnorm")
Loader = Iterable[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostTrainConfig:
    """Every choice of a post-training run; the defaults are the paper's for CIFAR.

    Args:
        epochs: passes over the loader.
        lr: Adam's step size.
        schedule: cosine to zero over all epochs, or constant.
        init: where alpha starts: the prior, uniformly random, or a number.
        ce: whether the cross-entropy counts.
        mse: whether the distance to the prior counts.
        lambda_: weight of that distance.
        granularity: what shares one alpha: nothing, the channels of a layer, or everything.
        average: average the optimised alpha afterwards over each layer, or over everything.
        dynamic_batch: draw every step's batch size from this range, both ends included, and use
            that many samples of the loader's batch; the paper's variant is (4, 200).
        shift: one per batch, as a test batch is one domain, or one per image.
        early_stop: stop when the MSE's relative change stays below this for `patience` epochs.
        patience: see early_stop.
        steps_per_epoch: end an epoch after that many batches.
        amp: autocast to this dtype.
        sync_statistics: in data-parallel runs, the batches of all ranks have common statistics.
        prior_samples: how many samples the prior looks at.
        seed: fixes the random initialisation, the augmentation and the loader's order.
    """

    epochs: int = 30
    lr: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    init: Literal["prior", "random"] | float = "prior"
    ce: bool = True
    mse: bool = True
    lambda_: float = 1.0
    granularity: Literal["channel", "layer", "constant"] = "channel"
    average: Literal["layer", "constant"] | None = None
    dynamic_batch: tuple[int, int] | None = None
    shift: Per = "batch"
    early_stop: float | None = None
    patience: int = 3
    steps_per_epoch: int | None = None
    amp: Literal["bfloat16", "float16"] | None = None
    sync_statistics: bool = True
    prior_samples: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("schedule", self.schedule, ("cosine", "constant"))
        _check_choice("granularity", self.granularity, ("channel", "layer", "constant"))
        _check_choice("average", self.average, ("layer", "constant", None))
        _check_choice("shift", self.shift, ("batch", "image"))
        _check_choice("amp", self.amp, ("bfloat16", "float16", None))
        if isinstance(self.init, str):
            _check_choice("init", self.init, ("prior", "random"))
        elif not 0 <= self.init <= 1:
            raise ValueError(
                f"init is {self.init}, expected 'prior', 'random' or a number in [0, 1]."
            )
        if self.dynamic_batch and not 1 <= self.dynamic_batch[0] <= self.dynamic_batch[1]:
            raise ValueError(f"dynamic_batch is {self.dynamic_batch}, expected (low, high).")
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}, expected a positive number.")
        if self.epochs < 0 or self.lambda_ < 0:
            raise ValueError(
                f"epochs is {self.epochs} and lambda_ is {self.lambda_}, expected at least 0."
            )

    @property
    def needs_prior(self) -> bool:
        return self.init == "prior" or self.mse


@dataclasses.dataclass(frozen=True)
class PostTrainResult:
    """What a run gives: alpha and the prior by layer, and one row of history per epoch."""

    alpha: dict[str, Tensor]
    prior: dict[str, Tensor] | None
    history: list[dict[str, float]]
    config: PostTrainConfig


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
    rank, the work is shared and every rank ends with the same alpha.

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
    config = config or PostTrainConfig()
    state = _load_checkpoint(checkpoint, model, config)
    prior = None
    if state is not None:
        prior = state.prior
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
    result = optimise_alpha(
        model,
        loader,
        prior,
        config,
        loss=loss,
        augment=augment,
        mean=mean,
        std=std,
        checkpoint=checkpoint,
    )
    convert_(model, result.alpha)
    model.__dict__["_ttnorm_config"] = {
        **dataclasses.asdict(config),
        "prior_augment": _name_of(prior_augment),
        "augment": _name_of(augment or domain_shift),
    }
    return result


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
    config = config or PostTrainConfig()
    shift = partial(
        shift_images, augment=augment or partial(domain_shift, per=config.shift), mean=mean, std=std
    )
    state = _load_checkpoint(checkpoint, model, config)
    with borrowed(model, alpha=0.0) as layers, torch.enable_grad():
        run = _Run(model, layers, prior, config, loss or F.cross_entropy, shift)
        if state is not None:
            run.resume(state)
        steps = config.epochs * (_length(loader, config) or 0)
        progress = Progress("post-training", steps or None)
        progress.done = len(run.history) * (steps // max(config.epochs, 1))
        while (
            len(run.history) < config.epochs and not run.saturated() and (config.ce or config.mse)
        ):
            with reproducible(loader, config.seed, 1 + len(run.history)) as generator:
                run.epoch(loader, generator, progress)
            if checkpoint is not None and rank() == 0:
                write_atomically(checkpoint, *run.checkpoint(fingerprint(model)))
        progress.close()
        return PostTrainResult(run.result(), prior, run.history, config)


class _AlphaNetwork(nn.Module):
    """The network as a function of one flat trainable vector of alphas."""

    def __init__(
        self, model: nn.Module, layers: dict[str, TTNormBase], start: Tensor, per: str
    ) -> None:
        super().__init__()
        self.model, self.layers, self.per = model, list(layers.values()), per
        self.sizes = [layer.running_mean.numel() for layer in self.layers]
        self.theta = nn.Parameter(_average(start, self.sizes, per, expand=False))

    def alpha(self) -> Tensor:
        """One value per channel, layer after layer."""
        if self.per == "layer":
            sizes = torch.tensor(self.sizes, device=self.theta.device)
            return self.theta.repeat_interleave(sizes, output_size=sum(self.sizes))
        return self.theta.expand(sum(self.sizes))

    def forward(self, x: Tensor | None) -> tuple[Any, Tensor]:
        alpha = self.alpha()
        if x is None:  # only the regulariser is wanted
            return None, alpha
        for layer, value in zip(self.layers, alpha.split(self.sizes), strict=True):
            layer.alpha = value.to(layer.running_mean.dtype)
        return self.model(x), alpha


class _Run:
    """A post-training run between two epochs: all that has to survive a kill is here."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, TTNormBase],
        prior: dict[str, Tensor] | None,
        config: PostTrainConfig,
        loss: Loss,
        shift: partial[Tensor],
    ) -> None:
        self.config, self.loss, self.shift, self.device = config, loss, shift, device_of(model)
        self.names, self.history = list(layers), []  # type: tuple[list[str], list[dict[str, float]]]
        self.prior = _flat(prior, layers, self.device) if config.needs_prior else None
        self.network = _AlphaNetwork(model, layers, self._start(layers), config.granularity)
        self.call: nn.Module = self.network
        if world_size() > 1:
            self.call = DistributedDataParallel(self.network, broadcast_buffers=False)
            for layer in layers.values():
                layer.sync = layer.sync or config.sync_statistics
        self.optimiser = torch.optim.Adam([self.network.theta], lr=config.lr)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "float16")

    def _start(self, layers: dict[str, TTNormBase]) -> Tensor:
        channels = sum(layer.running_mean.numel() for layer in layers.values())
        if self.config.init == "prior":
            assert self.prior is not None
            return self.prior.clone()
        if self.config.init == "random":
            generator = Generator().manual_seed(self.config.seed)
            return torch.rand(channels, generator=generator).to(self.device)
        return torch.full((channels,), float(self.config.init), device=self.device)

    def epoch(self, loader: Loader, generator: Generator, progress: Progress) -> None:
        done, started = len(self.history), time.monotonic()
        steps = _length(loader, self.config)
        sums, count = torch.zeros(2, device=self.device), 0
        for x, y in itertools.islice(loader, self.config.steps_per_epoch):
            self._set_lr((done + (count / steps if steps else 0)) / self.config.epochs)
            sums += self._step(x.to(self.device), y.to(self.device), generator)
            count += 1
            progress.step(f"epoch {done + 1}")
        if count == 0:
            raise ValueError("The loader yielded no batches; expected (x, y).")
        theta = self.network.theta.detach()
        if not bool(torch.isfinite(sums).all() & torch.isfinite(theta).all()):
            raise ValueError(
                f"The loss was not finite in epoch {done + 1}. Is there a batch without a single "
                "valid label? Are the inputs finite?"
            )
        ce, mse = (sums / count).tolist()
        row = {"epoch": done + 1, "ce": ce, "mse": mse, "lr": self.optimiser.param_groups[0]["lr"]}
        row |= {"alpha_mean": theta.mean().item(), "seconds": time.monotonic() - started}
        self.history.append(row)
        logger.info("post-training: %s", row)

    def _step(self, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        config = self.config
        if config.dynamic_batch:
            low, high = (min(size, len(x)) for size in config.dynamic_batch)
            size = int(torch.randint(low, high + 1, (), generator=generator))
            x, y = x[:size], y[:size]
        dtype = getattr(torch, config.amp) if config.amp else None
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            output, alpha = self.call(self.shift(x, generator=generator) if config.ce else None)
            ce = self.loss(output, y) if config.ce else alpha.new_zeros(())
        # the mean: with a sum, thousands of channels would hold alpha at the prior
        mse = (
            (alpha - self.prior).square().mean() if self.prior is not None else alpha.new_zeros(())
        )
        total = ce + (config.lambda_ * mse if config.mse else 0)
        self.optimiser.zero_grad()
        self.scaler.scale(total).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        with torch.no_grad():
            self.network.theta.clamp_(0, 1)
        return torch.stack((ce, mse)).detach().float()

    def _set_lr(self, progress: float) -> None:
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        lr = self.config.lr * (cosine if self.config.schedule == "cosine" else 1.0)
        self.optimiser.param_groups[0]["lr"] = lr

    def saturated(self) -> bool:
        """Whether the MSE has changed little for `patience` epochs."""
        if self.config.early_stop is None or len(self.history) <= self.config.patience:
            return False
        recent = [row["mse"] for row in self.history[-self.config.patience - 1 :]]
        return all(
            abs(new - old) <= self.config.early_stop * abs(old)
            for old, new in itertools.pairwise(recent)
        )

    def result(self) -> dict[str, Tensor]:
        sizes = self.network.sizes
        alpha = self.network.alpha().detach().clone()
        if self.config.average is not None:
            alpha = _average(alpha, sizes, self.config.average, expand=True)
        return dict(zip(self.names, (a.clone() for a in alpha.split(sizes)), strict=True))

    def checkpoint(self, network: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        adam = self.optimiser.state[self.network.theta]
        tensors = {"theta": self.network.theta.detach(), **adam}
        if self.prior is not None:
            tensors["prior"] = self.prior
        metadata = {
            "config": _as_json(self.config),
            "history": self.history,
            "network": network,
            "scaler": self.scaler.state_dict(),
        }
        return {name: t.cpu().contiguous() for name, t in tensors.items()}, metadata

    def resume(self, state: _Checkpoint) -> None:
        with torch.no_grad():
            self.network.theta.copy_(state.tensors["theta"])
        names = ("step", "exp_avg", "exp_avg_sq")
        adam = {
            name: state.tensors[name].to(self.device if name != "step" else "cpu") for name in names
        }
        self.optimiser.state[self.network.theta] = adam
        self.history[:] = state.metadata["history"]
        self.scaler.load_state_dict(state.metadata["scaler"])
        logger.info("post-training: continuing after epoch %d", len(self.history))


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def prior(self) -> dict[str, Tensor] | None:
        if "prior" not in self.tensors:
            return None
        names, sizes = zip(*self.metadata["network"]["layers"], strict=True)
        return dict(zip(names, self.tensors["prior"].split(sizes), strict=True))


def _load_checkpoint(
    path: str | os.PathLike[str] | None, model: nn.Module, config: PostTrainConfig
) -> _Checkpoint | None:
    if path is None or not Path(path).exists():
        return None
    tensors, metadata = read_safetensors(path)
    for name, ours in (("config", _as_json(config)), ("network", fingerprint(model))):
        if metadata.get(name) != ours:
            raise ValueError(
                f"{path} is a checkpoint of another run: its {name} differs. Delete the file to "
                "start anew, or give this run a file of its own."
            )
    return _Checkpoint(tensors, metadata)


def _flat(
    prior: dict[str, Tensor] | None, layers: dict[str, TTNormBase], device: torch.device
) -> Tensor:
    if prior is None:
        raise ValueError(
            "This configuration needs a prior (init='prior' or mse=True). Pass "
            "estimate_prior(model, loader), or PostTrainConfig(init=0.1, mse=False)."
        )
    expected = {name: layer.running_mean.numel() for name, layer in layers.items()}
    given = {name: a.numel() for name, a in prior.items()}
    if given != expected:
        raise ValueError(
            "The prior's layers are not this network's. Was it estimated on another one?"
        )
    return torch.cat([prior[name].detach().float() for name in layers]).to(device)


def _average(alpha: Tensor, sizes: list[int], per: str, *, expand: bool) -> Tensor:
    """Average a flat alpha over what shares a value; `expand` repeats it for every channel."""
    if per == "channel":
        return alpha
    parts = alpha.split(sizes) if per == "layer" else [alpha]
    means = [part.mean().reshape(1) for part in parts]
    if expand:
        means = [m.expand_as(part) for m, part in zip(means, parts, strict=True)]
    return torch.cat(means)


def _length(loader: Loader, config: PostTrainConfig) -> int | None:
    """Batches in an epoch, where the loader knows."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return config.steps_per_epoch
    return min(length, config.steps_per_epoch or length)


def _as_json(config: PostTrainConfig) -> dict[str, Any]:
    """The config as it looks after a round trip through a file: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _name_of(augment: Augment) -> str:
    return getattr(augment, "__qualname__", None) or repr(augment)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")
