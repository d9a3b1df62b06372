"""ImageNet and ImageNet-C from their folders, as uint8 tensors of one size.

load_imagenet(folder)         CLASS/*.JPEG; as train and val are, once val is sorted into classes
load_imagenet_c(folder, ...)  corruption/severity/CLASS/*.JPEG

CLASS is one of the 1,000 WordNet ids, n01440764 and so on, in whose order classes are numbered, or
the number of a class itself, 0000 to 0999.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .corruptions import CORRUPTIONS
from .images import SKIP_BAD, Array, Images, read_each, read_picture

logger = logging.getLogger("ttnorm")
CLASSES = 1000
MOST = 64_000  # images of a training set, the paper's number for an epoch
ENDINGS = (".jpeg", ".jpg", ".png", ".webp")
SPLITS = {"test": ("test", "val"), "source": ("source", "train")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a network's weights want their images.

    Args:
        resize: of the shorter side.
        crop: side of the square that is then cut from the middle.
        interpolation: "bilinear" or "bicubic".
        mean, std: what the network subtracts and divides by, of images in [0, 1].
    """

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


def load_imagenet(
    folder: str | Path,
    preprocessing: Preprocessing | None = None,
    *,
    most: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> Images:
    """The images of a folder, by class and name.

    Args:
        folder: see above.
        preprocessing: of the network; an image that has the size of its crop is taken as it is.
        most: as many images, drawn at random, where there are more.
        seed: of that draw.
        skip_bad: leave out what cannot be read, and say how many.
    """
    files = _files(Path(folder))
    if most is not None and len(files) > most:
        drawn = np.random.default_rng(seed).choice(len(files), most, replace=False)
        names = list(files)
        files = {names[i]: files[names[i]] for i in sorted(drawn)}
    return _load(Path(folder), files, preprocessing, skip_bad, f"read {Path(folder).name}")


def load_imagenet_c(
    folder: str | Path,
    corruptions: Sequence[str] = CORRUPTIONS,
    severity: int = 5,
    preprocessing: Preprocessing | None = None,
    *,
    files: Mapping[str, int] | None = None,
    skip_bad: bool = False,
) -> dict[str, Images]:
    """The same images under every corruption: those that all of them have.

    Args:
        folder: see above.
        corruptions, severity: which.
        preprocessing, skip_bad: see `load_imagenet`.
        files: what `usable_files` found, where corruptions are not loaded all at once.
    """
    if files is None:
        files = usable_files(folder, corruptions, severity, skip_bad=skip_bad)
    return {
        c: _load(Path(folder) / c / str(severity), files, preprocessing, False, f"read {c}")
        for c in corruptions
    }


def usable_files(
    folder: str | Path,
    corruptions: Sequence[str] = CORRUPTIONS,
    severity: int = 5,
    *,
    skip_bad: bool = False,
    ours: Sequence[str] | None = None,
    exchange: Callable[[list[str]], list[str]] = list,
) -> dict[str, int]:
    """The images of ImageNet-C that are there under every corruption: CLASS/NAME, and the class.

    Args:
        folder: see above.
        corruptions, severity: which.
        skip_bad: leave out what one of them lacks, instead of raising; and what cannot be read,
            which is found by reading everything.
        ours: the corruptions to read for that, where other processes read the others.
        exchange: from the files that are left out here to those that are by any such process.
    """
    files = _common(Path(folder), corruptions, severity, skip_bad)
    if not files:
        raise ValueError(f"{folder} has no image that is there under every corruption.")
    if not skip_bad:
        return files
    bad = set()
    for corruption in corruptions if ours is None else ours:
        bad |= _unreadable(Path(folder) / corruption / str(severity), files)
    left_out = set(exchange(sorted(bad)))
    kept = {name: label for name, label in files.items() if name not in left_out}
    if not kept:
        raise ValueError(f"{folder} has no image that can be read under every corruption.")
    return kept


def _common(
    folder: Path, corruptions: Sequence[str], severity: int, skip_bad: bool
) -> dict[str, int]:
    """The files that are there under every corruption."""
    folders = {c: folder / c / str(severity) for c in corruptions}
    for corruption, where in folders.items():
        if not where.is_dir():
            raise FileNotFoundError(
                f"There is no folder {where}; expected {corruption}/{severity}/CLASS/*.JPEG in "
                f"{folder}, as ImageNet-C is unpacked."
            )
    files = {c: _files(where) for c, where in folders.items()}
    there = set.intersection(*(set(f) for f in files.values()))
    for corruption, found in files.items():
        if len(found) == len(there):
            continue
        odd = folders[corruption] / min(set(found) - there)
        if not skip_bad:
            raise ValueError(
                f"{odd} is not there under every corruption. Unpack ImageNet-C anew, or leave such "
                f"images out with {SKIP_BAD}."
            )
        left_out = len(found) - len(there)
        logger.warning(
            "%s: %d of %d left out, for they are not there under every corruption, such as %s",
            corruption, left_out, len(found), odd,
        )  # fmt: skip
    return {name: label for name, label in files[corruptions[0]].items() if name in there}


def split_folder(folder: str | Path, split: str) -> Path:
    """The part of a folder that is to test on ("test" or "val") or to learn from ("source")."""
    found = [Path(folder) / name for name in SPLITS[split] if (Path(folder) / name).is_dir()]
    if not found:
        raise FileNotFoundError(f"{folder} has no folder {' or '.join(SPLITS[split])}.")
    return found[0]


def _files(folder: Path) -> dict[str, int]:
    """From CLASS/NAME to the number of the class."""
    classes = _classes(folder)
    files = {
        f"{name}/{path.name}": label
        for name, label in classes.items()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in ENDINGS
    }
    if not files:
        raise FileNotFoundError(f"{folder} has folders of classes and no image in any of them.")
    return files


def _classes(folder: Path) -> dict[str, int]:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    folders = (path.name for path in folder.iterdir() if path.is_dir())
    names = sorted(name for name in folders if not name.startswith("."))
    if names and all(re.fullmatch(r"n\d{8}", name) for name in names):
        if len(names) != CLASSES:
            raise ValueError(
                f"{folder} has {len(names)} folders of WordNet ids, expected all {CLASSES:,}: a "
                "class is numbered by its place among them. Some may be empty."
            )
        return {name: label for label, name in enumerate(names)}
    others = [name for name in names if not (name.isdigit() and int(name) < CLASSES)]
    if names and not others:
        return {name: int(name) for name in names}
    found = "no folders"
    if others:
        found = f"folder{'s' * (len(others) > 1)} {', '.join(others[:3])}"
    raise ValueError(
        f"{folder} has {found}; expected the {CLASSES:,} classes of ImageNet, n01440764 and so on, "
        "or numbers of classes, 0000 to 0999."
    )


def _unreadable(folder: Path, files: Iterable[str]) -> set[str]:
    def check(name: str) -> None:
        read_picture(folder / name)

    each = read_each(files, check, skip_bad=True, title=f"check {folder.parent.name}")
    return set(files) - {name for name, _ in each}


def _load(
    folder: Path,
    files: Mapping[str, int],
    preprocessing: Preprocessing | None,
    skip_bad: bool,
    title: str,
) -> Images:
    preprocessing = preprocessing or Preprocessing()
    # in their place at once: 50,000 images are 7.5 GB, and there is not always room for two copies
    images = np.empty((len(files), 3, preprocessing.crop, preprocessing.crop), np.uint8)
    read = partial(_prepared, folder, preprocessing)
    labels: list[int] = []
    for name, picture in read_each(files, read, skip_bad=skip_bad, title=title):
        images[len(labels)] = picture.transpose(2, 0, 1)
        labels.append(files[name])
    return Images(torch.from_numpy(images[: len(labels)]), torch.tensor(labels))


def _prepared(folder: Path, preprocessing: Preprocessing, name: str) -> Array:
    """uint8 (crop, crop, 3): the shorter side resized, the middle cut out."""
    from PIL import Image

    picture, crop = read_picture(folder / name), preprocessing.crop
    if picture.size == (crop, crop):
        return np.asarray(picture)
    size = tuple(preprocessing.resize * side // min(picture.size) for side in picture.size)
    picture = picture.resize(size, Image.Resampling[preprocessing.interpolation.upper()])
    left, top = (round((side - crop) / 2) for side in picture.size)
    return np.asarray(picture.crop((left, top, left + crop, top + crop)))
