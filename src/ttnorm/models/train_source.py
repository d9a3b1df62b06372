"""Train a source network: a wide residual network with AugMix and its Jensen-Shannon loss.

The images lie on the device and every augmentation happens there in batches. On a GPU the network
is compiled, and the whole step, augmentation, forward, backward and update, is captured once as a
graph and replayed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..capture import record
from ..data.images import Images
from ..progress import Progress
from .augmix import augmix
from .wide_resnet import WideResNet

logger = logging.getLogger("ttnorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe of a source network.

    Args:
        depth, width: of the wide residual network.
        epochs, batch_size: passes over the training set, and images a step.
        lr, momentum, weight_decay: of SGD with Nesterov momentum; the rate falls as a cosine.
        consistency: weight of the Jensen-Shannon divergence between an image and its AugMix views.
        seed: fixes initialisation, order and augmentation (on one kind of device).
    """

    depth: int = 40
    width: int = 2
    epochs: int = 100
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    consistency: float = 12.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "batch_size", "lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number.")


def train_source(
    train: Images, test: Images, config: TrainConfig, device: str = "cpu"
) -> tuple[WideResNet, list[dict[str, float]]]:
    """Train on `train`; `test` is only looked at, every ten epochs and at the end.

    Returns:
        The network in eval mode, and a row per epoch: loss, lr, seconds and, where it was
        measured, the test error in percent.
    """
    if len(train.labels) < config.batch_size:
        raise ValueError(
            f"There are {len(train.labels)} images, expected a batch of {config.batch_size}."
        )
    generator = Generator(device).manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = WideResNet(config.depth, config.width, int(train.labels.max()) + 1)
    model = model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    images, labels = train.images.to(device), train.labels.to(device)
    step = _Step(model, images, labels, config, generator)
    batches = len(images) // config.batch_size
    progress = Progress("training", config.epochs * batches)
    history = []
    for epoch in range(config.epochs):
        started, total = time.monotonic(), torch.zeros((), device=device)
        order = torch.randperm(len(images), generator=generator, device=device)
        for index, batch in enumerate(order[: batches * config.batch_size].view(batches, -1)):
            done = (epoch * batches + index) / (config.epochs * batches)
            total += step(batch, config.lr * 0.5 * (1 + math.cos(math.pi * done)))
            progress.step(f"epoch {epoch + 1}")
        row = {"epoch": epoch + 1, "loss": (total / batches).item(), "lr": float(step.lr)}
        row["seconds"] = time.monotonic() - started
        if (epoch + 1) % 10 == 0 or epoch + 1 == config.epochs:
            row["test_error"] = error(model, test)
        history.append(row)
        logger.info("training: %s", row)
    progress.close()
    return model.eval(), history


@torch.no_grad()
def error(model: nn.Module, data: Images, batch_size: int = 1000) -> float:
    """Percent of images that a network in eval mode gets wrong."""
    device = next(model.parameters()).device
    training, wrong = model.training, 0
    model.eval()
    for x, y in zip(data.images.split(batch_size), data.labels.split(batch_size), strict=True):
        output = model(x.to(device).float() / 255)
        wrong += int((output.argmax(1) != y.to(device)).sum())
    model.train(training)
    return 100 * wrong / len(data.labels)


def consistency_loss(logits: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Cross-entropy of the clean view plus the Jensen-Shannon divergence of all three.

    Args:
        logits: of the clean views, then of two AugMix views: (3 N, classes).
    """
    clean, first, second = logits.float().chunk(3)
    views = [F.softmax(view, dim=1) for view in (clean, first, second)]
    log_mean = (sum(views) / 3).clamp(1e-7, 1).log()  # type: ignore[union-attr]
    divergence = sum(F.kl_div(log_mean, view, reduction="batchmean") for view in views) / 3
    return F.cross_entropy(clean, labels) + weight * divergence


def crop_and_flip(images: Tensor, generator: Generator | None) -> Tensor:
    """Random crops after padding by 4, and random flips: uint8 (N, 3, H, W) to float in [0, 1]."""
    count, _, height, width = images.shape
    u = torch.rand(3, count, 1, generator=generator, device=images.device)
    rows = torch.arange(height, device=images.device) + torch.floor(9 * u[0]).long()
    columns = torch.arange(width, device=images.device)
    columns = torch.where(u[2] < 0.5, columns, columns.flip(0)) + torch.floor(9 * u[1]).long()
    padded = F.pad(images, (4, 4, 4, 4))
    index = torch.arange(count, device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).float() / 255


class _Step:
    """One step of training, captured as a CUDA graph where there is a GPU."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        config: TrainConfig,
        generator: Generator,
    ) -> None:
        self.model, self.images, self.labels = model, images, labels
        self.config, self.generator = config, generator
        self.cuda = images.is_cuda
        self.forward = torch.compile(model) if self.cuda else model
        self.lr = torch.zeros((), device=images.device)
        self.batch = torch.zeros(config.batch_size, dtype=torch.long, device=images.device)
        self.optimiser = torch.optim.SGD(
            model.parameters(),
            self.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=True,
            fused=self.cuda,
            foreach=False,
        )
        self.run: Callable[[], Tensor] = self._capture() if self.cuda else self._step

    def __call__(self, batch: Tensor, lr: float) -> Tensor:
        self.batch.copy_(batch)
        self.lr.fill_(lr)
        return self.run()

    def _step(self) -> Tensor:
        x = crop_and_flip(self.images[self.batch], self.generator)
        y = self.labels[self.batch]
        views = torch.cat((x, augmix(x.repeat(2, 1, 1, 1), self.generator)))
        views = views.contiguous(memory_format=torch.channels_last)
        # without its cache: a graph must not hold casts that were made outside of it
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.cuda, cache_enabled=False):
            logits = self.forward(views)
        loss = consistency_loss(logits, y, self.config.consistency)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _capture(self) -> Callable[[], Tensor]:
        """Warm up at a rate of zero, undo what that left behind, and record one step."""
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimiser.zero_grad()
        replay = record(self._step, [self.generator])
        self.model.load_state_dict(before)
        for state in self.optimiser.state.values():
            state["momentum_buffer"].zero_()
        return replay
