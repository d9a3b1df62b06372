"""Train DeepLabV3+ on frames that lie on the device: a source network for street scenes."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..data.images import Images
from ..data.loader import as_targets
from ..progress import Progress
from .segmentation import DeepLabV3Plus

logger = logging.getLogger("ttnorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """The recipe of a segmentation network.

    Args:
        epochs, batch_size: passes over the frames, and frames a step.
        lr, weight_decay: of AdamW; the rate falls as a cosine.
        amp: compute in bfloat16 where precision allows it; by default on a GPU.
        scale: frames are enlarged or reduced by a factor in this range, one for every batch.
        seed: fixes initialisation, order and augmentation (on one kind of device).
    """

    epochs: int = 80
    batch_size: int = 8
    lr: float = 5e-4
    weight_decay: float = 1e-2
    amp: bool | None = None
    scale: tuple[float, float] = (0.75, 1.5)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number.")
        if self.batch_size < 2:
            raise ValueError("batch_size is 1, expected at least 2: one frame has no statistics.")


def train_segmentation(
    model: DeepLabV3Plus, train: Images, config: SegmentationConfig, device: str = "cpu"
) -> list[dict[str, float]]:
    """Train a network in place, and leave it in eval mode.

    Returns:
        A row per epoch: loss, lr and seconds.
    """
    if len(train.labels) < config.batch_size:
        raise ValueError(
            f"There are {len(train.labels)} frames, expected a batch of {config.batch_size}."
        )
    generator = Generator(device).manual_seed(config.seed)
    model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    frames, masks = train.images.to(device), train.labels.to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), config.lr, weight_decay=config.weight_decay, foreach=True
    )
    batches = len(frames) // config.batch_size
    progress, history = Progress("training", config.epochs * batches), []
    for epoch in range(config.epochs):
        started, total = time.monotonic(), torch.zeros((), device=device)
        order = torch.randperm(len(frames), generator=generator, device=device)
        for index, batch in enumerate(order[: batches * config.batch_size].view(batches, -1)):
            done = (epoch * batches + index) / (config.epochs * batches)
            rate = config.lr * 0.5 * (1 + math.cos(math.pi * done))
            optimiser.param_groups[0]["lr"] = rate
            total += _step(model, optimiser, frames[batch], masks[batch], config, generator)
            progress.step(f"epoch {epoch + 1}")
        row = {"epoch": epoch + 1, "loss": (total / batches).item(), "lr": rate}
        history.append(row | {"seconds": time.monotonic() - started})
        logger.info("training: %s", history[-1])
    progress.close()
    model.eval()
    return history


def _step(
    model: DeepLabV3Plus,
    optimiser: torch.optim.Optimizer,
    frames: Tensor,
    masks: Tensor,
    config: SegmentationConfig,
    generator: Generator,
) -> Tensor:
    x, y = scale_crop_and_flip(frames, masks, config.scale, generator)
    amp = x.is_cuda if config.amp is None else config.amp
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        output = model(x)
    loss = F.cross_entropy(output.float(), y)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.detach()


def scale_crop_and_flip(
    frames: Tensor, masks: Tensor, scale: tuple[float, float], generator: Generator
) -> tuple[Tensor, Tensor]:
    """Frames in [0, 1] and masks, moved alike: one scale and place for a batch, flips for each.

    What lies outside a frame repeats its edge, and counts for nothing in its mask.
    """
    count, _, height, width = frames.shape
    u = torch.rand(3, generator=generator, device=frames.device)
    factor = scale[0] + (scale[1] - scale[0]) * u[0]
    flip = torch.rand(count, generator=generator, device=frames.device) < 0.5
    matrix = torch.zeros(count, 2, 3, device=frames.device)
    matrix[:, 0, 0] = torch.where(flip, -1.0, 1.0) / factor
    matrix[:, 1, 1] = 1 / factor
    # anywhere inside a frame that was enlarged, or around one that was reduced
    matrix[:, :, 2] = (2 * u[1:] - 1) * (1 - 1 / factor).abs()
    grid = F.affine_grid(matrix, [count, 3, height, width], align_corners=False)
    sample = partial(F.grid_sample, grid=grid, padding_mode="border", align_corners=False)
    x = sample(frames.float() / 255, mode="bilinear")
    y = sample(masks[:, None].float(), mode="nearest")[:, 0]
    outside = (grid.abs() > 1).any(-1)
    return x, as_targets(y.round().byte()).masked_fill(outside, -100)
