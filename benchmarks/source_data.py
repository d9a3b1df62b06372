"""Source images for the scripts that choose something: held out, and in domains that no test
corruption is."""

from __future__ import annotations

import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from kornia.color import hsv_to_rgb, rgb_to_hsv
from kornia.filters import gaussian_blur2d
from torch import Tensor, nn

import ttnorm
from ttnorm.data.cifar import load_cifar
from ttnorm.data.loader import DeviceLoader


def held_out(args: Namespace) -> tuple[DeviceLoader, Tensor, Tensor]:
    """The last training images, in [0, 1], and their labels, after a loader of the others.

    Args:
        args: of `measure.source_data_parser`.
    """
    count = args.images
    images, labels = (t.to(args.device) for t in load_cifar(args.data, "train"))
    loader = DeviceLoader(images[:-count], labels[:-count], 200)
    return loader, images[-count:].float() / 255, labels[-count:]


@torch.no_grad()
def error(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> float:
    """Percent wrong in batches of that size, of a converted network."""
    with ttnorm.isolated(model, batch_size):
        predicted = torch.cat([model(x).argmax(1) for x in images.split(1600)])
    return 100 * (predicted != labels).double().mean().item()


def simulated(x: Tensor) -> dict[str, Tensor]:
    """Clean, inverted, solarized, posterized, shrunk and dark."""
    small = F.interpolate(x, scale_factor=0.5, mode="area")
    edge = (x.shape[-1] - small.shape[-1]) // 2, (x.shape[-2] - small.shape[-2]) // 2
    small = F.pad(small, (edge[0], edge[0], edge[1], edge[1]), mode="replicate")
    return {
        "clean": x,
        "inverted": 1 - x,
        "solarized": torch.where(x > 0.5, 1 - x, x),
        "posterized": (3 * x).round() / 3,
        "shrunk": small,
        "dark": x.mean(1, keepdim=True).expand_as(x) ** 2.5,
    }


def for_validation(x: Tensor) -> dict[str, Tensor]:
    """Speckled, blurred, saturated and spattered: what ImageNet-C's authors set aside for choosing,
    at the severity that is scored, 5, and not among the 15 corruptions that are.

    As with those, parameters are ImageNet-C's, in pixels, whatever the size of the images.
    """
    generator = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    hsv = rgb_to_hsv(x)
    hsv[:, 1] = (20 * hsv[:, 1] + 0.2).clamp(0, 1)
    wet = _blurred(0.67 + 0.4 * noise[:, :1], 1) > 0.65
    mud = _blurred(wet.to(x), 1.5)
    mud = torch.where(mud < 0.8, 0, mud)
    brown = x.new_tensor([63, 42, 20]).view(-1, 1, 1) / 255
    return {
        "speckled": (x + 0.6 * x * noise).clamp(0, 1),
        "blurred": _blurred(x, 6),
        "saturated": hsv_to_rgb(hsv).clamp(0, 1),
        "spattered": x * (1 - mud) + brown * mud,
    }


def _blurred(x: Tensor, sigma: float) -> Tensor:
    return gaussian_blur2d(x, 2 * math.ceil(3 * sigma) + 1, (sigma, sigma))
