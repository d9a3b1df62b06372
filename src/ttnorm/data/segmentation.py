"""Street scenes with a class for every pixel, from the folders that their makers hand out.

LAYOUTS, at the end of the file, says where each of them has its frames and masks. Masks come in the
19 classes of Cityscapes, CamVid's in its own 11, with VOID where nothing counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from . import label_maps
from .images import WHAT_TO_DO, Array, Images, UnusableFile, as_tensor, read_each, read_picture

FRAMES = (".png", ".jpg", ".jpeg", ".webp")
Pair = tuple[Path, Path]  # a frame and its mask


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a data set has its frames and masks, and what its labels mean.

    Args:
        files: what is where.
        pairs: from folder and split to frames and masks; masks need not be there.
        labels: from every label that is known to a class, or VOID.
        classes: their names.
        read_labels: from a mask's file to its labels.
    """

    files: str
    pairs: Callable[[Path, str], list[Pair]]
    labels: Mapping[int, int]
    classes: tuple[str, ...] = label_maps.CITYSCAPES_CLASSES
    read_labels: Callable[[Path], Array] = lambda path: np.asarray(read_picture(path, mode=""))


def load_scenes(
    dataset: str,
    folder: str | Path,
    split: str,
    *,
    size: tuple[int, int] | None = None,
    keep: Callable[[str], bool] | None = None,
    skip_bad: bool = False,
) -> Images:
    """Frames and masks, in the order of their names.

    Args:
        dataset: one of LAYOUTS.
        folder, split: see LAYOUTS.
        size: height and width to resize to: frames bilinearly, masks to the nearest pixel. Without
            it, all frames have to be of one size.
        keep: from a frame's name to whether it is wanted.
        skip_bad: leave out frames that cannot be used, and say how many.
    """
    layout = layout_of(dataset)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    pairs = layout.pairs(Path(folder), split)
    if keep is not None:
        pairs = [pair for pair in pairs if keep(pair[0].stem)]
    if not pairs:
        files = layout.files.replace("SPLIT", split)
        raise FileNotFoundError(
            f"{folder} holds no frames of {dataset}, {split}: expected {files}."
        )
    read = partial(_read, layout, dataset, size or _size(pairs, skip_bad), size is not None)
    each = read_each(pairs, read, skip_bad=skip_bad, title=f"read {dataset}")
    found = [frame_and_mask for _, frame_and_mask in each]
    masks = torch.from_numpy(np.stack([mask for _, mask in found]))
    return Images(as_tensor(np.stack([frame for frame, _ in found])), masks)


def layout_of(dataset: str) -> Layout:
    if dataset not in LAYOUTS:
        raise ValueError(f"There is no data set {dataset!r}; there are {', '.join(LAYOUTS)}.")
    return LAYOUTS[dataset]


def _read(
    layout: Layout, dataset: str, size: tuple[int, int], resize: bool, pair: Pair
) -> tuple[Array, Array]:
    """A frame, uint8 (H, W, 3), and its mask in classes, uint8 (H, W)."""
    from PIL import Image

    frame, (frame_file, mask_file) = read_picture(pair[0]), pair
    if not mask_file.is_file():
        raise UnusableFile(f"{frame_file} has no mask: there is no file {mask_file}.")
    labels = layout.read_labels(mask_file)
    if labels.shape != frame.size[::-1]:
        raise UnusableFile(
            f"{mask_file} has shape {labels.shape}, expected {frame.size[::-1]} as its frame."
        )
    mask = _in_classes(labels, layout, dataset, mask_file)
    if frame.size[::-1] != size:
        if not resize:
            raise UnusableFile(
                f"{frame_file} is {frame.size[::-1]}, and others are {size}. Resize it, or "
                "give load_scenes a size for all."
            )
        frame = frame.resize(size[::-1], Image.Resampling.BILINEAR)
        mask = np.asarray(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))
    return np.asarray(frame), mask


def _in_classes(labels: Array, layout: Layout, dataset: str, file: Path) -> Array:
    if labels.dtype.kind not in "iu":
        raise UnusableFile(f"{file} has {labels.dtype}, expected numbers of classes.")
    known = np.full(256, -1, dtype=np.int16)
    known[list(layout.labels)] = list(layout.labels.values())
    if labels.max(initial=0) > 255 or (known[labels] < 0).any():
        unknown = sorted(set(np.unique(labels).tolist()) - set(layout.labels))
        raise UnusableFile(f"{file} has label {unknown[0]}, which {dataset} does not have.")
    return known[labels].astype(np.uint8)


def _size(pairs: list[Pair], skip_bad: bool) -> tuple[int, int]:
    """Of the first frame that can be read."""
    for frame, _ in pairs:
        try:
            width, height = read_picture(frame).size
            return height, width
        except UnusableFile as error:
            if not skip_bad:
                raise UnusableFile(f"{error} {WHAT_TO_DO}") from error
    raise ValueError(f"None of {len(pairs)} frames can be read, beginning with {pairs[0][0]}.")


def _cityscapes(folder: Path, split: str) -> list[Pair]:
    ending = "_leftImg8bit.png"
    frames = sorted((folder / "leftImg8bit" / split).glob(f"*/*{ending}"))
    masks = folder / "gtFine" / split
    return [
        (f, masks / f.parent.name / f"{f.name.removesuffix(ending)}_gtFine_labelIds.png")
        for f in frames
    ]


def _bdd100k(folder: Path, split: str) -> list[Pair]:
    now = _beside(folder / "images/10k" / split, folder / "labels/sem_seg/masks" / split)
    before = _beside(folder / "images" / split, folder / "labels" / split, "_train_id.png")
    return now or before


def _mapillary(folder: Path, split: str) -> list[Pair]:
    where = folder / {"train": "training", "val": "validation", "test": "testing"}.get(split, split)
    version_2 = where / "v1.2/labels"
    return _beside(where / "images", version_2 if version_2.is_dir() else where / "labels")


def _gtav(folder: Path, split: str) -> list[Pair]:
    pairs = _beside(folder / "images", folder / "labels")
    listing = folder / "split.mat"
    if not listing.is_file():
        return pairs
    from scipy.io import loadmat

    key = {"train": "trainIds", "val": "valIds", "test": "testIds"}.get(split, split)
    found = loadmat(listing)
    if key not in found:
        raise ValueError(f"{listing} has no {key}; expected the split train, val or test.")
    numbers = set(found[key].flatten().tolist())
    return [(frame, mask) for frame, mask in pairs if int(frame.stem) in numbers]


def _synthia(folder: Path, split: str) -> list[Pair]:
    return _beside(folder / "RGB", folder / "GT/LABELS")


def _camvid(folder: Path, split: str) -> list[Pair]:
    return _beside(folder / split, folder / f"{split}annot")


def _beside(frames: Path, masks: Path, ending: str = ".png") -> list[Pair]:
    """Frames of a folder, and masks of the same name in another."""
    if not frames.is_dir():
        return []
    found = sorted(path for path in frames.iterdir() if path.suffix.lower() in FRAMES)
    return [(frame, masks / f"{frame.stem}{ending}") for frame in found]


def _first_channel(path: Path) -> Array:
    """SYNTHIA's masks have 16 bits: classes in the first channel, instances in the second."""
    import cv2

    labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if labels is None:
        raise UnusableFile(f"{path} is truncated or no picture.")
    return labels[..., -1] if labels.ndim == 3 else labels  # OpenCV reads blue first


LAYOUTS: dict[str, Layout] = {
    "cityscapes": Layout(
        "leftImg8bit/SPLIT/CITY/NAME_leftImg8bit.png and "
        "gtFine/SPLIT/CITY/NAME_gtFine_labelIds.png",
        _cityscapes,
        label_maps.CITYSCAPES,
    ),
    "bdd100k": Layout(
        "images/10k/SPLIT/NAME.jpg and labels/sem_seg/masks/SPLIT/NAME.png, or, as it was before, "
        "images/SPLIT/NAME.jpg and labels/SPLIT/NAME_train_id.png",
        _bdd100k,
        label_maps.TRAIN_IDS,
    ),
    "mapillary": Layout(
        "training, validation or testing/images/NAME.jpg and labels/NAME.png beside it "
        "(v1.2/labels in version 2)",
        _mapillary,
        label_maps.MAPILLARY,
    ),
    "gtav": Layout(
        "images/NAME.png and labels/NAME.png, and split.mat if there is one",
        _gtav,
        label_maps.CITYSCAPES,
    ),
    "synthia": Layout(
        "RGB/NAME.png and GT/LABELS/NAME.png; it has no splits",
        _synthia,
        label_maps.SYNTHIA,
        read_labels=_first_channel,
    ),
    "camvid": Layout(
        "SPLIT/SEQUENCE_NUMBER.png and SPLITannot/SEQUENCE_NUMBER.png",
        _camvid,
        label_maps.CAMVID,
        label_maps.CAMVID_CLASSES,
    ),
}
