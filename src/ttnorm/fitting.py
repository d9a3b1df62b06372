"""Fitting alpha: the loop behind `post_train_`.

All alphas are one flat vector here, so that a step of Adam, the clamp to [0, 1] and the regulariser
are one operation each, and every granularity is a shorter vector that is expanded.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import kernels
from .augment import Drawn, moves_pixels, numbers_drawn
from .batches import Loader, Loss, batches, cross_entropy, scalar
from .capture import Repeated
from .checkpoint import FORMAT, Checkpoint
from .distributed import rank, world_size
from .files import write_atomically
from .isolation import isolated
from .layers import TTNormBase
from .posttrain_config import PostTrainConfig
from .progress import Progress
from .reproducible import reproducible
from .tree import device_of

logger = logging.getLogger("ttnorm")


class AlphaNetwork(nn.Module):
    """The network as a function of one flat trainable vector, `theta`.

    Args:
        model: a converted network.
        layers: its test-time normalization layers.
        per: what shares one entry of theta: "channel" (nothing), "layer" or "constant".
    """

    layer_sizes: Tensor

    def __init__(self, model: nn.Module, layers: dict[str, TTNormBase], per: str) -> None:
        super().__init__()
        self.model, self.layers, self.per = model, list(layers.values()), per
        self.sizes = [layer.running_mean.numel() for layer in self.layers]
        sizes = torch.tensor(self.sizes, device=device_of(model))
        self.register_buffer("layer_sizes", sizes, persistent=False)
        entries = {"channel": sum(self.sizes), "layer": len(self.sizes), "constant": 1}[per]
        self.theta = nn.Parameter(
            torch.zeros(entries, dtype=torch.float32, device=device_of(model))
        )

    def alpha(self) -> Tensor:
        """One value per channel, layer after layer."""
        if self.per == "layer":
            return self.theta.repeat_interleave(self.layer_sizes, output_size=sum(self.sizes))
        return self.theta.expand(sum(self.sizes))

    def let_go(self) -> None:
        """Of the last step's autograd graph, which every layer's alpha is part of."""
        for layer in self.layers:
            layer.alpha = layer.alpha.detach()

    def forward(self, x: Tensor | None) -> tuple[Any, Tensor]:
        alpha = self.alpha()
        if x is None:  # only the regulariser is wanted
            return None, alpha
        for layer, value in zip(self.layers, alpha.split(self.sizes), strict=True):
            layer.alpha = value.to(layer.running_mean.dtype)
        return self.model(x), alpha


class Fit:
    """A fitting run: theta, its optimiser and the history, which a checkpoint restores, and the
    recorded steps, which it does not."""

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
        self.names = list(layers)
        self.drawn: dict[Any, int | None] = {}  # random numbers for a shift, by a batch's shape
        self.history: list[dict[str, float]] = []
        self.prior = _flat(prior, layers, self.device) if config.needs_prior else None
        self.network = AlphaNetwork(model, layers, config.granularity)
        self._initialise(self.network.theta.data)
        self.call: nn.Module = self.network
        if world_size() > 1:
            self.call = DistributedDataParallel(self.network, broadcast_buffers=False)
            for layer in layers.values():
                layer.sync = layer.sync or config.sync_statistics
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "float16")
        # a loss of the user's may run Python code that a recorded step would leave out
        alone = world_size() == 1 and not self.scaler.is_enabled() and loss is cross_entropy
        self.recorded = kernels.ENABLED and alone and self.device.type == "cuda"
        # a recorded step needs the rate, and the count of steps, on the GPU
        self.lr = torch.tensor(config.lr, dtype=torch.float32, device=self.device)
        lr = self.lr if self.recorded else config.lr
        self.optimiser = torch.optim.Adam([self.network.theta], lr=lr, capturable=self.recorded)
        # a graph for every size of groups, and below for every batch size that is drawn
        sizes = config.group_sizes or (None,)
        self.graphs: Repeated | None = None
        self.descend = {size: self._repeated(self._descend) for size in sizes}
        self.shift_and_descend = {size: self._repeated(self._shift_and_descend) for size in sizes}

    def _repeated(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not self.recorded:
            return step
        most = 200 if self.config.dynamic_batch else 8
        self.graphs = Repeated(step, most=most, beside=self.graphs)
        return self.graphs

    def _initialise(self, theta: Tensor) -> None:
        init = self.config.init
        if init == "prior":
            assert self.prior is not None
            theta.copy_(_average(self.prior, self.network.sizes, self.config.granularity))
        elif init == "random":
            generator = Generator().manual_seed(self.config.seed)
            theta.copy_(torch.rand(theta.shape, generator=generator, dtype=torch.float32))
        else:
            theta.fill_(float(init))

    def run(
        self,
        loader: Loader,
        checkpoint: str | os.PathLike[str] | None,
        identity: dict[str, Any],
    ) -> None:
        """All epochs that are left, with a checkpoint after each."""
        config, steps = self.config, _length(loader, self.config)
        if not (config.ce or config.mse):
            return
        _check_same_on_all_ranks(steps)
        done = len(self.history) * (steps or 0)
        progress = Progress("post-training", config.epochs * steps if steps else None, done)
        try:
            while len(self.history) < config.epochs and not self.saturated():
                with reproducible(loader, config.seed, 1 + len(self.history)) as generator:
                    self.epoch(loader, generator, progress)
                if checkpoint is not None and rank() == 0:
                    write_atomically(checkpoint, *self.checkpoint(identity))
            progress.close()
        finally:
            self.descend.clear()  # graphs hold memory of their own
            self.shift_and_descend.clear()
            self.graphs = None

    def epoch(self, loader: Loader, generator: Generator, progress: Progress) -> None:
        done, started = len(self.history), time.monotonic()
        steps = _length(loader, self.config)
        sums, count = torch.zeros(2, dtype=torch.float32, device=self.device), 0
        pairs = itertools.islice(batches(loader, self.device), self.config.steps_per_epoch)
        for x, y in pairs:
            if done == count == 0:
                self._warn_of_moves(y)
                _warn_of_order(y)
            self._set_lr((done + (count / steps if steps else 0)) / self.config.epochs)
            sums += self._step(x, y, generator, check=count == 0 or x.is_cpu)
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
        row = {"epoch": done + 1, "ce": ce, "mse": mse}
        row["lr"] = float(self.optimiser.param_groups[0]["lr"])
        row |= {"alpha_mean": theta.mean().item(), "seconds": time.monotonic() - started}
        self.history.append(row)
        logger.info("post-training: %s", row)

    def _warn_of_moves(self, y: Tensor) -> None:
        if y.dim() > 2 and moves_pixels(self.shift.keywords["augment"]):
            logger.warning(
                "post-training: every pixel has a label, and the shift moves pixels without their "
                "labels. Pass one that does not, such as "
                "augment=functools.partial(ttnorm.domain_shift, parts=('jitter', 'blur'))."
            )

    def _step(self, x: Tensor, y: Tensor, generator: Generator, check: bool) -> Tensor:
        config = self.config
        if config.dynamic_batch:
            low, high = (min(size, len(x)) for size in config.dynamic_batch)
            size = int(torch.randint(low, high + 1, (), generator=generator))
            x, y = x[:size], y[:size]
        group: int | None = None
        if config.group_sizes:
            index = torch.randint(len(config.group_sizes), (), generator=generator)
            group = config.group_sizes[int(index)]
        with isolated(self.network.model, group) if group else contextlib.nullcontext():
            if not config.ce:
                return self.descend[group](None, y)
            numbers = self._numbers(x, generator) if self.recorded and not check else None
            if numbers is not None:
                return self.shift_and_descend[group](x, y, numbers)
            return self.descend[group](self.shift(x, generator=generator, check=check), y)

    def _numbers(self, x: Tensor, generator: Generator) -> Tensor | None:
        """What the shift will draw, for a step that is recorded as a whole; None if unknown."""
        key = tuple(x.shape[:2])
        if key not in self.drawn:
            self.drawn[key] = numbers_drawn(self.shift.keywords["augment"], *key)
        count = self.drawn[key]
        if count is None:
            return None
        numbers = torch.rand(count, generator=generator, dtype=torch.float32)
        return numbers.to(self.device, non_blocking=True)

    def _shift_and_descend(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
        return self._descend(self.shift(x, generator=Drawn(numbers), check=False), y)

    def _descend(self, shifted: Tensor | None, y: Tensor) -> Tensor:
        """One step of Adam; the cross-entropy and the MSE before it.

        The shift stays out of autocast: half a pixel of rounding would be a shift of its own.
        """
        config = self.config
        dtype = getattr(torch, config.amp) if config.amp else None
        # without a cache: a recorded step must not hold casts that were made outside of it
        with torch.autocast(
            self.device.type, dtype, enabled=dtype is not None, cache_enabled=False
        ):
            output, alpha = self.call(shifted)
            ce = scalar(self.loss(output, y)) if config.ce else alpha.new_zeros(())
        # the mean: with a sum, thousands of channels would hold alpha at the prior
        mse = alpha.new_zeros(())
        if self.prior is not None:
            mse = (alpha - self.prior).square().mean()
        total = ce + (config.lambda_ * mse if config.mse else 0)
        self.optimiser.zero_grad()
        # not into parameters that a loss of the user's may have; DDP's own hooks want all
        into = [self.network.theta] if self.call is self.network else None
        self.scaler.scale(total).backward(inputs=into)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.network.let_go()
        with torch.no_grad():
            self.network.theta.clamp_(0, 1)
        return torch.stack((ce, mse)).detach().float()

    def _set_lr(self, progress: float) -> None:
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        lr = self.config.lr * (cosine if self.config.schedule == "cosine" else 1.0)
        if self.recorded:
            self.lr.fill_(lr)
        else:
            self.optimiser.param_groups[0]["lr"] = lr

    def saturated(self) -> bool:
        """Whether the MSE has changed little for `patience` epochs."""
        tolerance, patience = self.config.early_stop, self.config.patience
        if tolerance is None or len(self.history) <= patience:
            return False
        recent = [row["mse"] for row in self.history[-patience - 1 :]]
        return all(abs(b - a) <= tolerance * abs(a) for a, b in itertools.pairwise(recent))

    def alpha(self) -> dict[str, Tensor]:
        """The fitted alpha by layer, averaged if that was asked for."""
        parts = (part.clone() for part in self.network.alpha().detach().split(self.network.sizes))
        alpha = dict(zip(self.names, parts, strict=True))
        return averaged(alpha, self.config.average) if self.config.average else alpha

    def checkpoint(self, identity: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {"theta": self.network.theta.detach()}
        # empty while a scaler has skipped every step for overflow
        tensors |= self.optimiser.state.get(self.network.theta, {})
        if self.prior is not None:
            tensors["prior"] = self.prior
        metadata = identity | {
            "format": FORMAT,
            "history": self.history,
            "scaler": self.scaler.state_dict(),
        }
        return {name: t.cpu().contiguous() for name, t in tensors.items()}, metadata

    def resume(self, state: Checkpoint) -> None:
        if self.prior is not None and not torch.equal(state.tensors["prior"], self.prior.cpu()):
            raise ValueError(
                "The prior is not the one that the checkpoint's run was given. Delete the "
                "checkpoint to start anew."
            )
        self.network.theta.data.copy_(state.tensors["theta"])
        if "step" in state.tensors:
            moments = {n: state.tensors[n].to(self.device) for n in ("exp_avg", "exp_avg_sq")}
            step = state.tensors["step"]
            adam = {"step": step.to(self.device) if self.recorded else step, **moments}
            self.optimiser.state[self.network.theta] = adam
        self.history[:] = state.metadata["history"]
        self.scaler.load_state_dict(state.metadata["scaler"])
        if len(self.history) < self.config.epochs:
            logger.info("post-training: continuing after epoch %d", len(self.history))
        else:
            logger.warning(
                "post-training: the checkpoint is of a finished run, whose alpha is taken. Delete "
                "the file to fit anew."
            )


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


def averaged(alpha: Mapping[str, Tensor], per: str) -> dict[str, Tensor]:
    """alpha by layer, with the mean over each "layer", or over everything ("constant")."""
    everything = torch.cat(list(alpha.values())).mean()
    return {
        name: (a.mean() if per == "layer" else everything).expand_as(a).clone()
        for name, a in alpha.items()
    }


def _average(alpha: Tensor, sizes: list[int], per: str) -> Tensor:
    """The mean of a flat alpha over whatever shares one entry of theta."""
    if per == "channel":
        return alpha
    parts = alpha.split(sizes) if per == "layer" else [alpha]
    return torch.stack([part.mean() for part in parts])


def _warn_of_order(y: Tensor) -> None:
    if y.dim() == 1 and len(y) >= 16 and bool((y == y[0]).all()):
        logger.warning(
            "post-training: all %d samples of the first batch have the same label. Alpha is fitted "
            "to batches as the loader gives them; if they come sorted, shuffle them.",
            len(y),
        )


def _check_same_on_all_ranks(steps: int | None) -> None:
    every: list[int | None] = [steps] * world_size()
    if world_size() > 1:
        dist.all_gather_object(every, steps)
    if len(set(every)) > 1:
        raise ValueError(
            f"The loaders of the ranks have {', '.join(map(str, every))} batches, expected as many "
            "on each: all ranks take every step together. A DistributedSampler sees to that."
        )


def _length(loader: Loader, config: PostTrainConfig) -> int | None:
    """Batches in an epoch, where the loader knows."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return config.steps_per_epoch
    return min(length, config.steps_per_epoch or length)
