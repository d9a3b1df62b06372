"""Images as the library holds them, and pictures read from disk: whole, or named and left out."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..progress import Progress

logger = logging.getLogger("ttnorm")
Array = NDArray[Any]
T = TypeVar("T")
SKIP_BAD = "skip_bad=True or --skip-bad"  # in Python, and on the command line
WHAT_TO_DO = f"Mend it or take it away, or leave it out with {SKIP_BAD}."
READ_AHEAD = 256  # pictures
VOID = 255  # what a mask has where nothing is to be learned or scored


class Images(NamedTuple):
    """uint8 images (N, 3, H, W), and labels: classes (N,) or masks of classes, uint8 (N, H, W)."""

    images: Tensor
    labels: Tensor


class UnusableFile(ValueError):
    """A file that is there and cannot be used; the message names it."""


def read_picture(path: Path, mode: str = "RGB") -> Any:
    """A picture as PIL has it, decoded; an error names the file.

    Args:
        path: the file.
        mode: "RGB", or "" for whatever the file has, such as the numbers of a mask.
    """
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture.convert(mode) if mode else picture.copy()
    except (
        UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError
    ) as error:  # fmt: skip
        raise UnusableFile(f"{path} is truncated or no picture: {error}") from error


def read_each(
    items: Iterable[T], read: Callable[[T], Any], *, skip_bad: bool, title: str
) -> Iterator[tuple[T, Any]]:
    """Every item with what `read` makes of it, in their order, on all cores.

    A few are read ahead and no more, for all of them may take most of the memory that there is.

    Args:
        items: such as paths.
        read: raises UnusableFile or FileNotFoundError where something is wrong with a file.
        skip_bad: leave such items out, and say how many, instead of raising.
        title: of the progress line.
    """
    items = list(items)
    progress, bad = Progress(title, len(items)), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for item, job in _submitted(items, read, pool):
            try:
                found = job.result()
            except (UnusableFile, FileNotFoundError) as error:
                if not skip_bad:
                    pool.shutdown(cancel_futures=True)
                    raise type(error)(f"{error} {WHAT_TO_DO}") from error
                bad.append(str(error))
            else:
                yield item, found
            progress.step()
    progress.close()
    if bad:
        logger.warning("%d of %d left out: %s", len(bad), len(items), " ".join(bad[:3]))
    if len(bad) == len(items):
        raise ValueError(f"Of {len(items)} files none can be used. " + " ".join(bad[:1]))


def _submitted(
    items: Iterable[T], read: Callable[[T], Any], pool: ThreadPoolExecutor
) -> Iterator[tuple[T, Future[Any]]]:
    """Every item with its job, a few of them ahead of the one that is waited for."""
    waiting: deque[tuple[T, Future[Any]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(read, item)))
        if len(waiting) > READ_AHEAD:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def as_tensor(pictures: Array) -> Tensor:
    """uint8 pictures (N, H, W, 3) as images (N, 3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)))
