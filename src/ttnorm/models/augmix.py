"""AugMix (Hendrycks et al., 2020) for a whole batch at once, on any device.

An image is mixed with three chains of one to three operations each, at severity 3. The operations
are PIL's, rewritten for batches: every image draws its own operation and strength, all geometric
ones are one bilinear sampling, and nothing leaves the device, so that a step can be captured.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

CHAINS, LONGEST, SEVERITY = 3, 3, 3
OPERATIONS = (
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)


def augmix(images: Tensor, generator: Generator | None = None) -> Tensor:
    """A convex combination of every image and three augmented versions of it.

    (1 - m) x + m sum_k w_k chain_k(x),  m uniform in [0, 1], w from Dirichlet(1, 1, 1)

    Args:
        images: (N, 3, H, W) in [0, 1].
        generator: source of randomness, on the images' device; None is torch's global one.

    Example:
        >>> augmix(torch.rand(4, 3, 32, 32)).shape
        torch.Size([4, 3, 32, 32])
    """
    draw = _Draw(images.device, generator)
    count = len(images)
    chains = (255 * images).round().repeat(CHAINS, 1, 1, 1)
    length = draw.integers(CHAINS * count, LONGEST) + 1
    for position in range(LONGEST):
        changed = random_operation(chains, draw)
        chains = torch.where((position < length).view(-1, 1, 1, 1), changed, chains)
    # Dirichlet(1, ..., 1) is a normalised exponential, Beta(1, 1) is uniform
    weights = -torch.log(draw.uniform(CHAINS * count).clamp_min(1e-7)).view(CHAINS, count)
    weights = (weights / weights.sum(0)).view(CHAINS, count, 1, 1, 1)
    mixed = (weights * (chains / 255).view(CHAINS, *images.shape)).sum(0)
    return torch.lerp(images, mixed, draw.uniform(count).view(-1, 1, 1, 1))


def random_operation(x: Tensor, draw: _Draw) -> Tensor:
    """One of the nine operations, drawn for every image. x holds whole numbers in 0..255."""
    count = len(x)
    chosen = draw.integers(count, len(OPERATIONS))
    level = 0.1 + (SEVERITY - 0.1) * draw.uniform(count)
    sign = 1 - 2 * draw.integers(count, 2)
    geometric = affine(x, *_matrix(chosen, level, sign, x.shape[-1]))
    is_pointwise = chosen < OPERATIONS.index("rotate")
    result = torch.where(is_pointwise.view(-1, 1, 1, 1), x, geometric)
    pointwise = (
        autocontrast(x),
        equalize(x),
        posterize(x, 4 - torch.floor(level * 4 / 10)),
        solarize(x, 256 - torch.floor(level * 256 / 10)),
    )
    for index, changed in enumerate(pointwise):
        result = torch.where((chosen == index).view(-1, 1, 1, 1), changed, result)
    return result


def autocontrast(x: Tensor) -> Tensor:
    """Stretch every channel to 0..255."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.floor((x - low) * (255 / (high - low).clamp_min(1)) + 1e-3)
    return torch.where(high > low, stretched, x)


def equalize(x: Tensor) -> Tensor:
    """Flatten every channel's histogram."""
    values = x.long().flatten(2).flatten(0, 1)  # (N * C, pixels)
    histogram = x.new_zeros(len(values), 256).scatter_add_(1, values, x.new_ones(values.shape))
    before = histogram.cumsum(1) - histogram
    last = histogram.gather(1, values.amax(1, keepdim=True))
    step = torch.floor((values.shape[1] - last) / 255)
    table = torch.floor((torch.floor(step / 2) + before) / step.clamp_min(1)).clamp(0, 255)
    equalized = table.gather(1, values).view_as(x)
    return torch.where((step > 0).view(*x.shape[:2], 1, 1), equalized, x)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits, one number per image."""
    unit = torch.exp2(8 - bits).view(-1, 1, 1, 1)
    return torch.floor(x / unit) * unit


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert all values at or above the threshold, one number per image."""
    return torch.where(x < threshold.view(-1, 1, 1, 1), x, 255 - x)


def affine(x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Sample each image bilinearly at `matrix @ p + offset`, p in [-1, 1]^2; outside is black."""
    theta = torch.cat((matrix, offset.unsqueeze(2)), 2)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False).round()


def _matrix(chosen: Tensor, level: Tensor, sign: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The affine map of every image's operation; the identity for those that are not geometric."""

    def amount(name: str, value: Tensor) -> Tensor:
        return torch.where(chosen == OPERATIONS.index(name), sign * value, 0.0)

    angle = amount("rotate", torch.floor(level * 3)) * (math.pi / 180)
    shear_x, shear_y = (amount(name, level * 0.03) for name in ("shear_x", "shear_y"))
    pixels = torch.floor(level * (size / 3) / 10)
    move_x, move_y = (amount(name, pixels * 2 / size) for name in ("translate_x", "translate_y"))
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = (torch.stack((cos, shear_x - sin), 1), torch.stack((sin + shear_y, cos), 1))
    # PIL shears around the corner, the grid around the centre
    return torch.stack(rows, 1), torch.stack((move_x + shear_x, move_y + shear_y), 1)


class _Draw:
    """Random numbers on the images' device."""

    def __init__(self, device: torch.device, generator: Generator | None) -> None:
        self.device, self.generator = device, generator

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device)

    def integers(self, count: int, below: int) -> Tensor:
        # as floats, which is what they are compared and multiplied with
        return torch.floor(self.uniform(count) * below).clamp_max(below - 1)
