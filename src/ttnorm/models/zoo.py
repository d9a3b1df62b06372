"""Named source networks, shipped with the library, and the files they are kept in.

A checkpoint is a safetensors file: weights of convolutions in float16, all else in float32, with
the recipe, the training log, the test error and the network's fingerprint in its metadata.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from ..files import fingerprint, read_safetensors, write_atomically
from .checkpoints import placed, stored
from .train_source import TrainConfig
from .wide_resnet import WideResNet

ASSETS = Path(__file__).parent / "assets"
NETWORKS = {
    "wrn40_2-cifar10": "WRN-40-2, AugMix, CIFAR-10",
    "wrn40_2-cifar100": "WRN-40-2, AugMix, CIFAR-100",
}


def load(name: str, device: str = "cpu") -> WideResNet:
    """A shipped network in eval mode; it takes images in [0, 1].

    Args:
        name: one of NETWORKS.
        device: where to; on CUDA it lies channels last, what convolutions there are made for.

    Example:
        >>> load("wrn40_2-cifar10")(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    _check(name)
    return load_checkpoint(ASSETS / f"{name}.safetensors", device)[0]


def alpha_files(name: str) -> dict[str, Path]:
    """A shipped network's alpha files, by kind.

    "ttn" has the default settings; "dynamic" was fitted with batch sizes drawn from 4 to 200;
    "strong" after a prior that was measured under a stronger shift: best in large batches, and,
    with `load_(model, path, source_count=2)`, in small ones.

    Example:
        >>> alpha_files("wrn40_2-cifar10")["ttn"].name
        'wrn40_2-cifar10.ttn.safetensors'
    """
    _check(name)
    return {
        "ttn": ASSETS / f"{name}.ttn.safetensors",
        "dynamic": ASSETS / f"{name}.dynamic.ttn.safetensors",
        "strong": ASSETS / f"{name}.strong.ttn.safetensors",
    }


def save_checkpoint(
    model: WideResNet,
    path: str | os.PathLike[str],
    config: TrainConfig,
    history: list[dict[str, float]],
    **facts: Any,
) -> None:
    """Write a trained network with everything that is to be known about it."""
    metadata = {
        "config": dataclasses.asdict(config),
        "classes": model.fc.out_features,
        "fingerprint": fingerprint(model),
        "history": history,
        **facts,
    }
    write_atomically(path, stored(model), metadata)


def load_checkpoint(
    path: str | os.PathLike[str], device: str = "cpu"
) -> tuple[WideResNet, dict[str, Any]]:
    """The network of a checkpoint, in float32 and eval mode, and the checkpoint's metadata."""
    tensors, metadata = read_safetensors(path)
    if "classes" not in metadata:
        raise ValueError(f"{path} is no checkpoint of a source network.")
    config = metadata["config"]
    with torch.random.fork_rng(devices=[]):  # the initialisation is overwritten, and costs no draws
        model = WideResNet(config["depth"], config["width"], metadata["classes"])
    model.load_state_dict(tensors)
    return placed(model.eval(), device), metadata


def _check(name: str) -> None:
    if name not in NETWORKS:
        raise ValueError(f"There is no network {name!r}; there are {', '.join(NETWORKS)}.")
