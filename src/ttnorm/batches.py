"""What comes out of a user's loader, network and loss, checked where it comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Loader = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]


def batches(loader: Loader, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's (x, y), on the device."""
    for batch in loader:
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not pair or not all(isinstance(t, Tensor) for t in batch):
            raise TypeError(
                f"The loader yielded {describe(batch)}, expected a pair of tensors (x, y). Wrap "
                "the loader in one that yields those."
            )
        x, y = batch
        if not x.dim() or not y.dim():
            raise ValueError(
                f"The loader yielded {describe(x)} and {describe(y)}: one sample, as a data set "
                "does. Pass batches, such as DataLoader(dataset, batch_size=200, shuffle=True)."
            )
        if len(x) == 0 or len(x) != len(y):
            raise ValueError(
                f"The loader yielded {len(x)} inputs and {len(y)} labels, expected as many of both "
                "and at least one."
            )
        x, y = (t.clone() if t.is_inference() else t for t in (x, y))
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def check_repeatable(loader: Loader) -> None:
    """Refuse a generator: post-training reads the data more than once."""
    if isinstance(loader, Iterator):
        raise TypeError(
            f"The loader is a {type(loader).__name__}, which can be read only once. Pass a "
            "DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )


def cross_entropy(output: Any, y: Tensor) -> Tensor:
    """The default loss: class labels (N,) or per-pixel labels (N, H, W)."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The network returned {describe(output)}, and the default loss wants a tensor. Pass "
            "a loss of your own, such as loss=lambda output, y: cross_entropy(output['out'], y)."
        )
    if y.shape == output.shape:
        if y.is_cpu and not are_chances(y):  # a GPU would have to be waited for
            raise ValueError(
                f"Labels have the output's shape, {tuple(y.shape)}, and are not how likely each "
                "class is: those are at least 0 and add up to 1. Pass the loss that the network "
                "was trained with, such as loss=torch.nn.BCEWithLogitsLoss()."
            )
        return F.cross_entropy(output, y.to(output.dtype))
    if y.shape != (len(output), *output.shape[2:]):
        raise ValueError(
            f"Labels have shape {tuple(y.shape)} and the output {tuple(output.shape)}, expected "
            f"labels of shape {(len(output), *output.shape[2:])}, or a loss of your own: loss=..."
        )
    if y.is_floating_point():
        raise TypeError(
            f"Labels are {y.dtype}, expected classes: y.long(). For numbers to predict pass the "
            "loss that the network was trained with: loss=..."
        )
    if y.is_cpu and bool(_unknown(y, output.shape[1]).any()):  # likewise
        label = int(y[_unknown(y, output.shape[1])][0])
        raise ValueError(
            f"There is a label {label}, and the network tells {output.shape[1]} classes "
            "apart. For labels to leave out use -100, or a loss with another ignore_index."
        )
    return F.cross_entropy(output, y.long())


def _unknown(y: Tensor, classes: int) -> Tensor:
    """Which labels are neither a class nor what cross-entropy leaves out."""
    return (y >= classes) | ((y < 0) & (y != -100))


def are_chances(y: Tensor) -> bool:
    """Whether labels of the output's shape say how likely each class is, of several."""
    total = y.float().sum(1)
    whole = torch.allclose(total, torch.ones_like(total), atol=1e-3)
    return whole and y.shape[1] > 1 and bool((y >= 0).all())


def scalar(loss: Tensor) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"The loss is {describe(loss)}, expected one number: a mean or a sum over samples."
        )
    return loss.reshape(())


def describe(value: Any) -> str:
    """What it is, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in value[:3])
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return f"a {type(value).__name__}"
