"""Simulated domain shifts for images in [0, 1]: what the prior and the post-training look at.

An augmentation is any function `augment(images, generator) -> images` on (N, C, H, W) in [0, 1], on
any device. All randomness comes from the generator. Transforms of colour (saturation, hue,
grayscale) apply to images of three channels; with any other number they are left out.

Nothing here waits for a GPU or copies to it, given numbers that were drawn beforehand (`Drawn`), so
that a step of post-training can be recorded with its shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .batches import describe
from .distributed import rank, world_size

Augment = Callable[[Tensor, Generator | None], Tensor]
Per = Literal["batch", "image"]

PRIOR_PARTS = ("jitter", "grayscale", "invert")
DOMAIN_PARTS = ("jitter", "affine", "blur", "flip")
INVERT = 0.1  # the probability of that: benchmarks/choose_prior_shift.py
BLUR = 0.5  # the largest sigma, in pixels, of images of 32


class Drawn:
    """Random numbers that were drawn beforehand, in place of a generator of the shifts below.

    Args:
        numbers: uniform in [0, 1), on the images' device; see `numbers_drawn`.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.taken = numbers, 0

    def take(self, count: int) -> Tensor:
        self.taken += count
        there = len(self.numbers)
        # or the slice would be short without a word
        assert self.taken <= there, f"{self.taken} numbers were taken of {there} that were drawn"
        return self.numbers[self.taken - count : self.taken]


def prior_shift(
    images: Tensor,
    generator: Generator | Drawn | None = None,
    *,
    invert: float = INVERT,
    parts: Sequence[str] = PRIOR_PARTS,
    per: Per = "image",
    strength: float = 1.0,
    check: bool = True,
) -> Tensor:
    """Colour jitter, random grayscale and random invert: the shift the prior is measured with.

    Jitter is brightness, contrast and saturation by a factor in [0.6, 1.4] and hue by up to 0.1
    turns; grayscale has probability 0.2. Blur, with a sigma of up to half a pixel, and flip are not
    in the paper's.

    Args:
        images: (N, C, H, W) in [0, 1].
        generator: source of randomness; None is torch's global one.
        invert: probability of that; the more often, the higher the prior in early layers.
        parts: of "jitter", "grayscale", "invert", "blur" and "flip", those to do.
        per: whether every image draws its own shift, or the batch draws one for all.
        strength: of the jitter, whose ranges are that many times as wide; SimCLR has 1 for CIFAR-10
            and 2 for ImageNet. Factors stay at 0.1 or above.
        check: whether to look if images are in [0, 1], for which a GPU has to be waited for.

    Example:
        >>> images = torch.rand(4, 3, 32, 32)
        >>> prior_shift(images, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])
    """
    _check_parts(parts, (*PRIOR_PARTS, "blur", "flip"))
    _check_strength(strength)
    draw = _Draw(_checked(images, "prior_shift", check), generator, per)
    if "jitter" in parts:
        factor = _factors(0.4, strength)
        images = _jitter(images, draw, factor, factor, factor, strength * 0.1)
    images = _grayscale_and_invert(images, draw, parts, invert)
    if "blur" in parts:
        images = _blur(images, draw.uniform(0.001, BLUR))
    return _flip(images, generator) if "flip" in parts else images


def domain_shift(
    images: Tensor,
    generator: Generator | Drawn | None = None,
    *,
    parts: Sequence[str] = DOMAIN_PARTS,
    per: Per = "batch",
    strength: float = 1.0,
    check: bool = True,
) -> Tensor:
    """CoTTA's augmentation without its noise: the shift alpha is optimised under.

    Jitter: brightness 0.6-1.4, contrast 0.7-1.3, saturation 0.5-1.5, hue +-0.06 turns, gamma
    0.7-1.3. Affine, in an image padded by half its size with its own edge: rotation +-15 degrees, a
    move of up to 1/16 of the padded size, scale 0.9-1.1. Blur: Gaussian, sigma up to 1/64 of the
    shorter side, which is half a pixel of CIFAR's 32, and weights three times as far.
    Flip: horizontal, with probability 0.5, drawn for every image whatever `per` says.

    Args:
        images: (N, C, H, W) in [0, 1].
        generator: source of randomness; None is torch's global one.
        parts: of "jitter", "affine", "blur" and "flip", those to do; "grayscale" and "invert", as
            in `prior_shift`, come after the jitter where they are asked for.
        per: a test batch is one domain, so by default the batch draws one shift.
        strength: of jitter and blur, whose ranges are that many times as wide; factors stay at
            0.1 or above.
        check: see `prior_shift`.

    Example:
        >>> images = torch.rand(4, 3, 32, 32)
        >>> domain_shift(images, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])
    """
    _check_parts(parts, (*DOMAIN_PARTS, *PRIOR_PARTS[1:]))
    _check_strength(strength)
    draw = _Draw(_checked(images, "domain_shift", check), generator, per)
    if "jitter" in parts:
        brightness, contrast, saturation, gamma = (
            _factors(most, strength) for most in (0.4, 0.3, 0.5, 0.3)
        )
        images = _jitter(images, draw, brightness, contrast, saturation, strength * 0.06)
        images = images.pow(draw.uniform(*gamma)[:, None, None, None])
    images = _grayscale_and_invert(images, draw, parts, INVERT)
    if "affine" in parts:
        images = _affine(images, draw)
    if "blur" in parts:
        most = strength * BLUR * min(images.shape[-2:]) / 32
        images = _blur(images, draw.uniform(0.001, most), most)
    if "flip" in parts:
        images = _flip(images, generator)
    return images.clamp(0, 1)


def _factors(most: float, strength: float) -> tuple[float, float]:
    """The range of a factor that is 1 +- `most` at a strength of 1."""
    return max(0.1, 1 - strength * most), 1 + strength * most


def _grayscale_and_invert(
    images: Tensor, draw: _Draw, parts: Sequence[str], invert: float
) -> Tensor:
    # Here and below, imported on use: kornia takes seconds to import, and production has no need.
    from kornia.color import rgb_to_grayscale

    if "grayscale" in parts and images.shape[1] == 3:
        images = torch.where(draw.chance(0.2), rgb_to_grayscale(images), images)
    if "invert" in parts:
        images = torch.where(draw.chance(invert), 1 - images, images)
    return images


def _affine(images: Tensor, draw: _Draw) -> Tensor:
    from kornia.geometry.transform import get_affine_matrix2d, warp_affine

    height, width = images.shape[-2:]
    angle, scale = draw.uniform(-15, 15), draw.uniform(0.9, 1.1)
    # 1/16 of an image padded by half its size on both sides is 1/8 of the image. The padding
    # itself is grid_sample's "border", which repeats the edge without ever storing it.
    right, down = draw.uniform(-width / 8, width / 8), draw.uniform(-height / 8, height / 8)
    move = torch.stack((right, down), 1)
    centre = torch.stack(
        (torch.full_like(right, (width - 1) / 2), torch.full_like(down, (height - 1) / 2)), 1
    )
    matrix = get_affine_matrix2d(move, centre, scale[:, None].expand(-1, 2), angle)[:, :2]
    return warp_affine(images, matrix, (height, width), padding_mode="border")


def _flip(images: Tensor, generator: Generator | Drawn | None) -> Tensor:
    return torch.where(_Draw(images, generator, "image").chance(0.5), images.flip(-1), images)


def moves_pixels(augment: Augment) -> bool:
    """Whether it is a shift of ours that moves pixels, and would have to move their labels too."""
    defaults = {domain_shift: DOMAIN_PARTS, prior_shift: PRIOR_PARTS}.get(_function(augment), ())
    parts = augment.keywords.get("parts") if isinstance(augment, partial) else None
    return bool(defaults) and bool({"affine", "flip"} & set(defaults if parts is None else parts))


def numbers_drawn(augment: Augment, samples: int, channels: int) -> int | None:
    """How many random numbers an augmentation draws for a batch; None for one that is not ours."""
    if _function(augment) not in (prior_shift, domain_shift):
        return None
    # more than any shift draws; per image they are drawn for all ranks
    counter = Drawn(torch.zeros(1).expand(100 * samples * world_size()))
    augment(torch.zeros(samples, channels, 2, 2), counter)  # type: ignore[arg-type]
    return counter.taken


def shift_images(
    images: Tensor,
    augment: Augment,
    generator: Generator | Drawn | None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    *,
    check: bool = True,
) -> Tensor:
    """Augment images that a loader has normalised: back to [0, 1], shift, normalise again.

    Args:
        mean, std: what the loader subtracted and divided by, per channel; None where it did not.
        check: see `prior_shift`.

    Raises:
        ValueError: when the images are not in [0, 1] after undoing mean and std.
    """
    if _function(augment) in (prior_shift, domain_shift):
        augment = partial(augment, check=check)  # type: ignore[call-arg]
    else:
        images = images.clone()  # which it may give back, and a network may change
    if mean is None and std is None:
        return _augmented(images, augment, generator)
    if std is not None and min(per_channel_list(std) or [1.0]) <= 0:
        raise ValueError(f"std is {std}, expected positive numbers.")
    offset = _per_channel(images, per_channel_list(mean) or [0.0])
    scale = _per_channel(images, per_channel_list(std) or [1.0])
    unit = images * scale + offset
    if check:
        check_unit_range(unit)
    # Rounding alone leaves [0, 1] by less than the tolerance just checked.
    return (_augmented(unit.clamp(0, 1), augment, generator) - offset) / scale


def _augmented(images: Tensor, augment: Augment, generator: Generator | Drawn | None) -> Tensor:
    """What an augmentation makes of images, if it can be taken for them."""
    found = augment(images, generator)  # type: ignore[arg-type]
    if not isinstance(found, Tensor) or (found.dtype, len(found)) != (images.dtype, len(images)):
        kind = f"{found.dtype} " if isinstance(found, Tensor) else ""
        raise TypeError(
            f"The augmentation returned {kind}{describe(found)}, expected {images.dtype} images, "
            f"{len(images)} as it was given."
        )
    return found


def per_channel_list(values: Any) -> list[float] | None:
    """A mean or std given as a number, a sequence, an array or a tensor, as a list."""
    if values is None:
        return None
    return torch.as_tensor(values, dtype=torch.float64).flatten().tolist()


def _function(augment: Augment) -> Any:
    return augment.func if isinstance(augment, partial) else augment


def _jitter(
    images: Tensor,
    draw: _Draw,
    brightness: tuple[float, float],
    contrast: tuple[float, float],
    saturation: tuple[float, float],
    hue: float,
) -> Tensor:
    from kornia import enhance

    images = enhance.adjust_brightness_accumulative(images, draw.uniform(*brightness))
    images = enhance.adjust_contrast_with_mean_subtraction(images, draw.uniform(*contrast))
    if images.shape[1] != 3:
        return images
    images = enhance.adjust_saturation_with_gray_subtraction(images, draw.uniform(*saturation))
    return enhance.adjust_hue(images, draw.uniform(-hue, hue) * 2 * math.pi)


def _blur(images: Tensor, sigma: Tensor, most: float = BLUR) -> Tensor:
    """Gaussian blur, the edge repeated; kornia's would have a GPU waited for.

    Args:
        sigma: of every image.
        most: the largest it can be; weights go three times as far, 5 x 5 for half a pixel.
    """
    reach, planes = math.ceil(3 * most), images.shape[0] * images.shape[1]
    taps = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    line = torch.softmax(-taps.square() / (2 * sigma[:, None].square()), 1)
    line = line.repeat_interleave(images.shape[1], 0)[:, None]
    x = F.pad(images, (reach,) * 4, mode="replicate").flatten(0, 1)[None]
    x = F.conv2d(x, line[..., None], groups=planes)
    return F.conv2d(x, line[:, :, None], groups=planes).reshape(images.shape)


class _Draw:
    """Random numbers for a batch: one per image, or one for all of them."""

    def __init__(self, images: Tensor, generator: Generator | Drawn | None, per: Per) -> None:
        if per not in ("batch", "image"):
            raise ValueError(f"per is {per!r}, expected 'batch' or 'image'.")
        self.images, self.generator, self.per = images, generator, per

    def uniform(self, low: float, high: float) -> Tensor:
        count = len(self.images)
        # Ranks share their seed, so that a batch over all ranks is one domain. Draws per image are
        # made for all of that batch, and each rank takes its part: what one process would draw.
        draws = count * world_size() if self.per == "image" else 1
        # float32 whatever the images are, so that a seed means the same shift in every dtype
        u = self._draw(draws)
        if self.per == "image":
            u = u[rank() * count : (rank() + 1) * count]
        # Not blocking, so that a GPU that is behind need not be waited for.
        drawn = (low + (high - low) * u).to(self.images, non_blocking=True)
        return drawn.expand(count)

    def _draw(self, count: int) -> Tensor:
        if isinstance(self.generator, Drawn):
            return self.generator.take(count)
        device = self.generator.device if self.generator is not None else self.images.device
        return torch.rand(count, generator=self.generator, device=device, dtype=torch.float32)

    def chance(self, probability: float) -> Tensor:
        return (self.uniform(0, 1) < probability)[:, None, None, None]


def _check_parts(parts: Sequence[str], known: tuple[str, ...]) -> None:
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ValueError(f"There is no part {unknown[0]!r} of it; there are {', '.join(known)}.")


def _check_strength(strength: float) -> None:
    if strength <= 0:
        raise ValueError(f"strength is {strength}, expected a positive number.")


def _checked(images: Tensor, name: str, check: bool) -> Tensor:
    if images.dim() != 4:
        raise ValueError(
            f"{name} works on images (N, C, H, W), got shape {tuple(images.shape)}. "
            "For other data pass shifts of your own, prior_augment= and augment=."
        )
    if check:
        check_unit_range(images)
    return images


def check_unit_range(images: Tensor) -> None:
    """Raise where images are not in [0, 1], for which a GPU has to be waited for."""
    if not images.is_floating_point():
        raise TypeError(
            f"Images are {images.dtype}, expected floating point. Convert them to [0, 1] with "
            "images.float() / 255."
        )
    if images.numel() == 0:
        return
    low, high = (v.item() for v in torch.aminmax(images))
    # what undoing a normalisation can cost in rounding, and no more
    tolerance = 1e-3 if images.dtype in (torch.float32, torch.float64) else 2e-2
    if not (low >= -tolerance and high <= 1 + tolerance):
        raise ValueError(
            f"Images span [{low:.3g}, {high:.3g}], expected [0, 1]. If the loader normalises them, "
            "pass the mean and std it uses (mean=, std=); if they are in [0, 255], divide by 255; "
            "for other data pass shifts of your own (augment=, prior_augment=)."
        )


def _per_channel(images: Tensor, values: list[float]) -> Tensor:
    channels = images.shape[1]
    if len(values) not in (1, channels):
        raise ValueError(
            f"mean and std have {len(values)} values, expected one per channel: {channels}."
        )
    shape = (1, -1, *[1] * (images.dim() - 2))
    return torch.stack([images.new_full((), value) for value in values]).view(shape)
