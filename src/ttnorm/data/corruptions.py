"""The fifteen common corruptions (Hendrycks and Dietterich, 2019), five severities each.

Every image has a random generator of its own, from the seed, the corruption, the severity and the
image's index. So any subset, in any order and on any number of processes, has the same bytes.
Parameters are those of CIFAR-10-C (32 pixels) and ImageNet-C (224 pixels), in `severities`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .severities import CIFAR, IMAGENET

Array = NDArray[Any]
Generators = list[np.random.Generator]

CORRUPTIONS = tuple(CIFAR)


def corrupt(
    images: Array,
    corruption: str,
    severity: int,
    *,
    seed: int = 0,
    first: int = 0,
    textures: str | Path | None = None,
) -> Array:
    """Corrupt uint8 images (N, H, W, 3); 32 pixels take CIFAR's parameters, others ImageNet's.

    Args:
        corruption: one of CORRUPTIONS.
        severity: 1 to 5.
        seed: another seed is another draw of everything that is random.
        first: the index of the first image in its data set, which its randomness depends on.
        textures: the folder with frost1.png ... frost5.jpg; only frost needs it.

    Example:
        >>> corrupt(np.zeros((2, 32, 32, 3), np.uint8), "brightness", 5).max()
        np.uint8(76)
    """
    if corruption not in CORRUPTIONS:
        raise ValueError(f"There is no corruption {corruption!r}; there are {CORRUPTIONS}.")
    if severity not in range(1, 6):
        raise ValueError(f"severity is {severity}, expected 1 to 5.")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images are {images.dtype} {images.shape}, expected uint8 (N, H, W, 3).")
    small = images.shape[1] == 32
    parameters = (CIFAR if small else IMAGENET)[corruption][severity - 1]
    kind = CORRUPTIONS.index(corruption)
    generators = [
        np.random.default_rng((seed, kind, severity, first + i)) for i in range(len(images))
    ]
    if corruption == "frost":
        return frost(images, parameters, generators, textures)
    return FUNCTIONS[corruption](images, parameters, generators)


def gaussian_noise(images: Array, scale: float, generators: Generators) -> Array:
    noise = np.stack([g.normal(size=images.shape[1:], scale=scale) for g in generators])
    return _to_bytes(images / 255 + noise)


def shot_noise(images: Array, photons: float, generators: Generators) -> Array:
    pairs = zip(generators, images, strict=True)
    return _to_bytes(np.stack([g.poisson(x / 255 * photons) for g, x in pairs]) / photons)


def impulse_noise(images: Array, amount: float, generators: Generators) -> Array:
    out = images.copy()
    for x, g in zip(out, generators, strict=True):
        hit, salt = g.random(x.shape) < amount, g.random(x.shape) < 0.5
        x[hit] = np.where(salt[hit], 255, 0)
    return out


def defocus_blur(images: Array, parameters: tuple[float, float], generators: Generators) -> Array:
    import cv2

    kernel = _disk(*parameters)
    return _to_bytes(np.stack([cv2.filter2D(x / 255, -1, kernel) for x in images]))


def glass_blur(images: Array, parameters: tuple[float, int, int], generators: Generators) -> Array:
    """Each pixel, from the bottom right, takes the value of a neighbour; all images at once."""
    sigma, reach, rounds = parameters
    x = (_blur(images / 255, sigma) * 255).astype(np.uint8)
    count, height, width, _ = x.shape
    steps_y, steps_x = (range(size - reach, reach, -1) for size in (height, width))
    shape = (rounds, len(steps_y), len(steps_x), 2)
    moves = np.stack([g.integers(-reach, reach, shape) for g in generators], axis=-1)
    every = np.arange(count)
    for one_round in moves:
        for i, y in enumerate(steps_y):
            for j, column in enumerate(steps_x):
                dx, dy = one_round[i, j]
                x[:, y, column] = x[every, y + dy, column + dx]
    return _to_bytes(_blur(x / 255, sigma))


def motion_blur(images: Array, parameters: tuple[int, float], generators: Generators) -> Array:
    angles = [g.uniform(-45, 45) for g in generators]
    pairs = zip(images, angles, strict=True)
    return np.stack([_motion(x.astype(float), *parameters, angle) for x, angle in pairs]).astype(
        np.uint8
    )


def zoom_blur(images: Array, parameters: tuple[float, float], generators: Generators) -> Array:
    factors = np.arange(1, *parameters)
    x = images / 255
    total = x.copy()
    for factor in factors:
        total += _zoom(x, factor)
    return _to_bytes(total / (len(factors) + 1))


def snow(images: Array, parameters: tuple[float, ...], generators: Generators) -> Array:
    mean, deviation, magnify, threshold, radius, sigma, keep = parameters
    flakes = np.stack([g.normal(mean, deviation, images.shape[1:3]) for g in generators])
    flakes = _zoom(flakes[..., None], magnify)[..., 0]
    flakes[flakes < threshold] = 0
    flakes = np.floor(np.clip(flakes, 0, 1) * 255)
    angles = [g.uniform(-135, -45) for g in generators]
    layer = np.stack(
        [_motion(f, int(radius), sigma, a) for f, a in zip(flakes, angles, strict=True)]
    )
    layer = np.floor(layer)[..., None] / 255
    x = images / 255
    grey = x @ np.array((0.299, 0.587, 0.114))
    whitened = np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return _to_bytes(keep * x + (1 - keep) * whitened + layer + layer[:, ::-1, ::-1])


def frost(
    images: Array,
    parameters: tuple[float, float],
    generators: Generators,
    textures: str | Path | None,
) -> Array:
    check_textures(textures)
    height, width = images.shape[1:3]
    pictures = _textures(str(textures), 0.2 if height == 32 else 1.0)
    out = np.empty_like(images)
    for i, g in enumerate(generators):
        picture = _at_least(pictures[int(g.integers(len(pictures)))], height + 1, width + 1)
        top, left = (
            g.integers(0, size - wanted)
            for size, wanted in zip(picture.shape[:2], (height, width), strict=True)
        )
        crop = picture[top : top + height, left : left + width]
        mixed = parameters[0] * images[i] + parameters[1] * crop
        out[i] = np.clip(mixed, 0, 255).astype(np.uint8)
    return out


def fog(images: Array, parameters: tuple[float, float], generators: Generators) -> Array:
    amount, decay = parameters
    height, width = images.shape[1:3]
    size = 32 if height == 32 else 2 ** math.ceil(math.log2(max(height, width)))
    x = images / 255
    plasma = np.stack([_plasma(size, decay, g)[:height, :width] for g in generators])
    brightest = x.max((1, 2, 3), keepdims=True)
    return _to_bytes((x + amount * plasma[..., None]) * brightest / (brightest + amount))


def brightness(images: Array, amount: float, generators: Generators) -> Array:
    from skimage.color import hsv2rgb, rgb2hsv

    hsv = rgb2hsv(images / 255)
    hsv[..., 2] = np.clip(hsv[..., 2] + amount, 0, 1)
    return _to_bytes(hsv2rgb(hsv))


def contrast(images: Array, factor: float, generators: Generators) -> Array:
    x = images / 255
    mean = x.mean((1, 2), keepdims=True)
    return _to_bytes((x - mean) * factor + mean)


def elastic_transform(
    images: Array, parameters: tuple[float, float, float], generators: Generators
) -> Array:
    unit = 32 if images.shape[1] == 32 else 244
    amplitude, smoothing, affine = (unit * p for p in parameters)
    pairs = zip(images, generators, strict=True)
    return _to_bytes(
        np.stack([_elastic(x / 255, amplitude, smoothing, affine, g) for x, g in pairs])
    )


def pixelate(images: Array, factor: float, generators: Generators) -> Array:
    from PIL import Image

    height, width = images.shape[1:3]
    small = (int(width * factor), int(height * factor))
    box = Image.Resampling.BOX
    pictures = (Image.fromarray(x).resize(small, box) for x in images)
    return np.stack([np.asarray(p.resize((width, height), box)) for p in pictures])


def jpeg_compression(images: Array, quality: int, generators: Generators) -> Array:
    from PIL import Image

    out = np.empty_like(images)
    for i, x in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(x).save(buffer, "JPEG", quality=quality)
        out[i] = np.asarray(Image.open(buffer))
    return out


FUNCTIONS: dict[str, Callable[[Array, Any, Generators], Array]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}


def _to_bytes(x: Array) -> Array:
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def _blur(x: Array, sigma: float) -> Array:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)


def _disk(radius: float, alias_blur: float) -> Array:
    """A disk with soft edges, to blur with."""
    import cv2

    reach = 8 if radius <= 8 else math.ceil(radius)
    size = 3 if radius <= 8 else 5
    axis = np.arange(-reach, reach + 1)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    return cv2.GaussianBlur(disk / disk.sum(), (size, size), sigmaX=alias_blur)


def _motion(x: Array, radius: int, sigma: float, angle: float) -> Array:
    """ImageMagick's motion blur: half a Gaussian along a direction, edges repeated."""
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    direction = math.radians(angle)
    across = np.ceil(taps * math.cos(direction) - 0.5).astype(int)
    down = np.ceil(taps * math.sin(direction) - 0.5).astype(int)
    height, width = x.shape[:2]
    pad = [(2 * radius, 2 * radius)] * 2 + [(0, 0)] * (x.ndim - 2)
    padded = np.pad(x, pad, mode="edge")
    out = np.zeros_like(x)
    for weight, dx, dy in zip(weights, across, down, strict=True):
        top, left = 2 * radius + dy, 2 * radius + dx
        out += weight * padded[top : top + height, left : left + width]
    return out


def _zoom(x: Array, factor: float) -> Array:
    """The centre of every image (N, H, W, C), magnified bilinearly to the full size."""
    down, across = (_zoom_matrix(size, factor) for size in x.shape[1:3])
    return np.einsum("ih,nhwc,jw->nijc", down, x, across, optimize=True)


def _zoom_matrix(size: int, factor: float) -> Array:
    """What magnifying does along one axis, (size, size): crop, interpolate, trim."""
    kept = math.ceil(size / factor)
    start = (size - kept) // 2
    length = round(kept * factor)
    trim = (length - size) // 2
    position = np.arange(trim, trim + size) * (kept - 1) / (length - 1)
    lower = np.minimum(np.floor(position).astype(int), kept - 2)
    matrix = np.zeros((size, size))
    rows = np.arange(size)
    matrix[rows, start + lower] = 1 - (position - lower)
    matrix[rows, start + lower + 1] += position - lower
    return matrix


def _plasma(size: int, decay: float, generator: np.random.Generator) -> Array:
    """A cloud in [0, 1] by midpoint displacement on a torus."""
    field = np.zeros((size, size))
    step, amplitude = size, 100.0

    def displaced(total: Array) -> Array:
        # the original multiplies by the amplitude twice, so that it falls with decay squared
        return total / 4 + amplitude * generator.uniform(-amplitude, amplitude, total.shape)

    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        right = corners + np.roll(corners, -1, axis=1)
        field[half::step, half::step] = displaced(right + np.roll(right, -1, axis=0))
        centres = field[half::step, half::step]
        below = centres + np.roll(centres, 1, axis=0)
        field[::step, half::step] = displaced(below + right)
        beside = centres + np.roll(centres, 1, axis=1)
        field[half::step, ::step] = displaced(beside + corners + np.roll(corners, -1, axis=0))
        step, amplitude = half, amplitude / decay
    field -= field.min()
    return field / field.max()


def _elastic(
    x: Array, amplitude: float, smoothing: float, affine: float, generator: np.random.Generator
) -> Array:
    import cv2
    from scipy.ndimage import gaussian_filter, map_coordinates

    height, width = x.shape[:2]
    arm = min(height, width) // 3
    corners = np.array(((arm, arm), (arm, -arm), (-arm, -arm)), dtype=np.float32)
    before = corners + np.array((height // 2, width // 2), dtype=np.float32)
    after = before + generator.uniform(-affine, affine, before.shape).astype(np.float32)
    matrix = cv2.getAffineTransform(before, after)
    x = cv2.warpAffine(x, matrix, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    moves = generator.uniform(-1, 1, (2, height, width))
    if smoothing > 0:
        moves = np.stack([gaussian_filter(m, smoothing, mode="reflect", truncate=3) for m in moves])
    rows, columns = np.mgrid[:height, :width] + amplitude * moves
    channels = [
        map_coordinates(c, (rows, columns), order=1, mode="reflect") for c in np.moveaxis(x, 2, 0)
    ]
    return np.stack(channels, -1)


def _at_least(picture: Array, height: int, width: int) -> Array:
    """The picture, enlarged where an image is larger."""
    import cv2

    scale = max(height / picture.shape[0], width / picture.shape[1])
    if scale <= 1:
        return picture
    size = tuple(math.ceil(side * scale) for side in picture.shape[1::-1])
    return cv2.resize(picture, size)


def check_textures(textures: str | Path | None) -> None:
    """Raise where the pictures that frost is made of cannot be found."""
    if textures is None:
        raise ValueError(
            "frost needs its textures: pass the folder (--textures) that has frost1.png to "
            "frost5.jpg, as in the frost folder of the PyPI package imagecorruptions, or name the "
            "other corruptions."
        )
    _textures(str(textures), 1.0)


@lru_cache(maxsize=4)
def _textures(folder: str, scale: float) -> Sequence[Array]:
    """The first five frost pictures, scaled."""
    import cv2

    names = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
    pictures = []
    for name in names:
        path = Path(folder) / name
        picture = cv2.imread(str(path)) if path.is_file() else None
        if picture is None:
            raise FileNotFoundError(f"There is no picture {path}; frost needs {', '.join(names)}.")
        picture = cv2.resize(picture, (0, 0), fx=scale, fy=scale)
        pictures.append(picture[..., ::-1])  # OpenCV reads blue first
    return pictures
