"""How good predictions are: images that are wrong, or overlap of classes where pixels have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.images import VOID
from ..float64 import in_float64


def score(predicted: Tensor, labels: Tensor, classes: int) -> dict[str, Any]:
    """What a record says: `wrong`, or `miou` and the `iou` of every class, None if it is not there.

    Args:
        predicted: classes, (N,) or (N, H, W).
        labels: likewise; masks have VOID where a pixel does not count.
        classes: that there are.

    Example:
        >>> score(torch.tensor([1, 2, 2]), torch.tensor([1, 2, 0]), classes=3)
        {'wrong': 1}
    """
    if labels.dim() == 1:
        return {"wrong": int((predicted != labels).sum())}
    overlap = class_overlap(predicted, labels, classes)
    there = overlap[~overlap.isnan()]
    return {
        "miou": round(there.mean().item(), 6),
        "iou": [None if value != value else round(value, 6) for value in overlap.tolist()],
    }


def class_overlap(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Intersection over union of every class over all pixels; NaN for one that is nowhere.

    Example:
        >>> class_overlap(torch.tensor([[[0, 0, 1, 2]]]), torch.tensor([[[0, 1, 1, 255]]]), 3)
        tensor([0.5000, 0.5000,    nan], dtype=torch.float64)
    """
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    table = in_float64(torch.zeros(classes, classes, device=labels.device))
    for mine, theirs in zip(predicted.split(16), labels.split(16), strict=True):
        table += multiclass_confusion_matrix(
            mine.long(), theirs.long(), classes, ignore_index=VOID, validate_args=False
        ).to(table)
    both = table.diagonal()
    return both / (table.sum(0) + table.sum(1) - both)
