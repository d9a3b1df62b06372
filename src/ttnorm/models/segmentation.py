"""DeepLabV3+ (Chen et al., 2018), through segmentation-models-pytorch, and the files it is kept in.

A checkpoint is a safetensors file: weights of convolutions in float16, all else in float32, with
the encoder, the number of classes, the recipe and the training log in its metadata.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.imagenet import Preprocessing
from ..files import read_safetensors, write_atomically
from .checkpoints import placed, stored
from .imagenet import read_weights

ENCODERS = ("mobilenet_v2", "resnet50")
STRIDE = 16  # that sides of images have to be multiples of
CLASSIFIER = ("classifier.", "fc.")  # what an encoder has no use for


class DeepLabV3Plus(nn.Module):
    """A class for every pixel of images in [0, 1], of any size.

    Images are normalised as for ImageNet, and padded with their edge to a multiple of 16.

    Args:
        encoder: one of ENCODERS.
        classes: outputs.

    Example:
        >>> model = DeepLabV3Plus("mobilenet_v2", classes=11).eval()
        >>> model(torch.rand(2, 3, 36, 50)).shape
        torch.Size([2, 11, 36, 50])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: str, classes: int) -> None:
        super().__init__()
        import segmentation_models_pytorch as smp

        if encoder not in ENCODERS:
            raise ValueError(f"There is no encoder {encoder!r}; there are {', '.join(ENCODERS)}.")
        self.encoder, self.classes = encoder, classes
        self.network = smp.DeepLabV3Plus(encoder, encoder_weights=None, classes=classes)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(Preprocessing(), name)).view(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        x = (x - self.mean) / self.std
        right, below = -width % STRIDE, -height % STRIDE
        if right or below:
            x = F.pad(x, (0, right, 0, below), mode="replicate")
        return self.network(x)[..., :height, :width]


def with_encoder_weights(encoder: str, classes: int, weights: str | Path | None) -> DeepLabV3Plus:
    """A network to train, whose encoder knows ImageNet.

    Args:
        encoder, classes: see `DeepLabV3Plus`.
        weights: a file of torchvision's weights of that network; None starts from nothing.
    """
    model = DeepLabV3Plus(encoder, classes)
    if weights is not None:
        state = read_weights(weights)
        state = {name: t for name, t in state.items() if not name.startswith(CLASSIFIER)}
        try:
            model.network.encoder.load_state_dict(state)
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise ValueError(f"{weights} holds the weights of no {encoder}: {reason}") from None
    return model


def save_checkpoint(
    model: DeepLabV3Plus,
    path: str | os.PathLike[str],
    config: Any,
    history: list[dict[str, float]],
    **facts: Any,
) -> None:
    """Write a trained network with everything that is to be known about it."""
    about = {"encoder": model.encoder, "segmentation_classes": model.classes}
    recipe = {"config": dataclasses.asdict(config), "history": history}
    write_atomically(path, stored(model), about | recipe | facts)


def load_checkpoint(path: str | os.PathLike[str], device: str = "cpu") -> DeepLabV3Plus:
    """The network of a checkpoint, in float32 and eval mode."""
    tensors, metadata = read_safetensors(path)
    if "segmentation_classes" not in metadata:
        raise ValueError(f"{path} is no checkpoint of a segmentation network.")
    with torch.random.fork_rng(devices=[]):  # the initialisation is overwritten
        model = DeepLabV3Plus(metadata["encoder"], metadata["segmentation_classes"])
    model.load_state_dict(tensors)
    return placed(model.eval(), device)
