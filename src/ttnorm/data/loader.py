"""Batches of images that lie on the device already: no workers, no copies, no waiting."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from .images import VOID


def as_targets(labels: Tensor) -> Tensor:
    """Labels as losses take them: VOID in a mask becomes -100, which cross-entropy leaves out.

    Example:
        >>> as_targets(torch.tensor([[[3, 255]]], dtype=torch.uint8))
        tensor([[[   3, -100]]])
    """
    if labels.dim() == 1:
        return labels
    labels = labels.long()
    return labels.masked_fill(labels == VOID, -100)


class DeviceLoader:
    """Yields (x, y) with x float in [0, 1], in a new random order every time it is iterated.

    Args:
        images: uint8 (N, C, H, W), on the device to train on.
        labels: (N,), or masks (N, H, W), on the same device; see `as_targets`.
        batch_size: images a batch; a last, smaller one is left out.
        seed: fixes the orders.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, seed: int = 0) -> None:
        if not 1 <= batch_size <= len(images):
            raise ValueError(f"batch_size is {batch_size}, expected 1 to {len(images)}.")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.generator = Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), generator=self.generator).to(self.images.device)
        for index in order[: len(self) * self.batch_size].split(self.batch_size):
            yield self.images[index].float() / 255, as_targets(self.labels[index])
