"""Corrupted test sets in the layout of CIFAR-10-C: reading official files, and making such files.

A folder holds `<corruption>.npy`, uint8 (5 N, 32, 32, 3), and `labels.npy`, (5 N,), with severity s
in rows (s - 1) N to s N; officially N = 10,000. Files made here have the same layout, with the size
of the images they are made of. Severities that were not asked for are zeros (and take no room on
most disks); reading them is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from torch import Tensor

from ..files import unfinished
from ..progress import Progress
from .cifar import checked_labels
from .corruptions import CORRUPTIONS, Array, check_textures, corrupt
from .images import Images, as_tensor

SEVERITIES = (1, 2, 3, 4, 5)
PIXELS_AT_ONCE = 250 * 32 * 32  # small enough for a progress bar that moves
LEAST_AT_ONCE = 32  # images: glass blur takes as long for one as for that many


def load_corrupted(
    folder: str | Path,
    corruption: str,
    severity: int,
    *,
    size: tuple[int, int] = (32, 32),
    classes: int = 100,
    which: slice | Sequence[int] = slice(None),
) -> Images:
    """One corruption at one severity.

    Args:
        folder: see the head of this file.
        corruption: "gaussian_noise", ...
        severity: 1 to 5.
        size: height and width.
        classes: that labels may be of, at most.
        which: of the images; others are not read.
    """
    labels = load_labels(folder, severity, classes=classes)[which]
    images = open_corrupted(folder, corruption, severity, size=size)[which]
    return Images(as_tensor(images), labels)


def load_labels(folder: str | Path, severity: int, *, classes: int = 100) -> Tensor:
    """The labels of a severity's images; see `load_corrupted`."""
    _check_severity(severity)
    labels = _labels(Path(folder))
    return checked_labels(labels[_rows(len(labels) // 5, severity)].tolist(), Path(folder), classes)


def open_corrupted(
    folder: str | Path, corruption: str, severity: int, *, size: tuple[int, int] = (32, 32)
) -> Array:
    """The images of one corruption at one severity, uint8 (N, H, W, 3), still on disk."""
    folder = Path(folder)
    _check_severity(severity)
    path, labels = folder / f"{corruption}.npy", _labels(folder)
    images = _npy(path)
    expected = (len(labels), *size, 3)
    if images.shape != expected:
        raise ValueError(f"{path} has shape {images.shape}, expected {expected}.")
    if images.dtype != np.uint8:
        raise ValueError(f"{path} has {images.dtype}, expected uint8.")
    found = images[_rows(len(labels) // 5, severity)]
    if not _are_there(found):
        raise ValueError(f"{path} holds no images of severity {severity}. Run ttnorm corrupt.")
    return found


def _labels(folder: Path) -> Array:
    """Of all severities."""
    labels = _npy(folder / "labels.npy")
    if labels.ndim != 1 or len(labels) == 0 or len(labels) % 5:
        raise ValueError(f"{folder / 'labels.npy'} has shape {labels.shape}, expected (5 N,).")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{folder / 'labels.npy'} has {labels.dtype}, expected whole numbers.")
    return labels


def make_corrupted(
    clean: Images,
    folder: str | Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    textures: str | Path | None = None,
    workers: int | None = None,
) -> None:
    """Write such files of the images, on all cores; what is there already is not made again.

    A file appears under its name when it is complete, so a run that was killed goes on with the
    corruption it was at. Of several processes with one folder, one works and the others wait.

    Args:
        clean: the test set.
        folder: created if it is not there. One with other people's files is refused.
        corruptions, severities: which ones.
        seed: see `corruptions.corrupt`.
        textures: the folder of the frost pictures.
        workers: processes; as many as cores by default.
    """
    _refuse_to_be_imported()
    check_options(corruptions, severities, seed, textures, workers)
    if not len(clean.labels):
        raise ValueError("There are no images to corrupt.")
    folder = Path(folder)
    images = np.ascontiguousarray(clean.images.numpy().transpose(0, 2, 3, 1))
    _claim(folder, images, clean.labels.numpy(), seed)
    with FileLock(folder / ".lock"):
        if not (folder / "labels.npy").is_file():
            partial = folder / "labels.npy.partial"
            with partial.open("wb") as file:
                np.save(file, np.tile(clean.labels.numpy(), 5))
            os.replace(partial, folder / "labels.npy")
        _remove_partial(folder)
        todo = {c: _missing(folder / f"{c}.npy", images, severities) for c in corruptions}
        chunks = -(-len(images) // _at_once(images))
        progress = Progress("corrupt", chunks * sum(map(len, todo.values())))
        with _workers(workers or os.cpu_count() or 1) as pool:
            for name, missing in todo.items():
                if missing:
                    _make(pool, folder / f"{name}.npy", images, missing, seed, textures, progress)
        progress.close()


def check_options(
    corruptions: Sequence[str],
    severities: Sequence[int],
    seed: int,
    textures: str | Path | None,
    workers: int | None,
) -> None:
    """Raise on what `make_corrupted` would refuse, whatever the images are."""
    for severity in severities:
        _check_severity(severity)
    for corruption in corruptions:
        if corruption not in CORRUPTIONS:
            raise ValueError(f"There is no corruption {corruption!r}; there are {CORRUPTIONS}.")
    if "frost" in corruptions:
        check_textures(textures)
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected 0 or more.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, expected at least 1, or None for all cores.")


def _make(
    pool: ProcessPoolExecutor,
    path: Path,
    images: Array,
    severities: Sequence[int],
    seed: int,
    textures: str | Path | None,
    progress: Progress,
) -> None:
    """Fill in the severities a corruption lacks, in a copy that then takes the file's place."""
    count = len(images)
    unfinished = path.with_suffix(".npy.partial")
    out = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (5 * count, *images.shape[1:]))
    if path.is_file():
        there = _npy(path)
        for severity in set(SEVERITIES) - set(_missing(path, images, SEVERITIES)):
            out[_rows(count, severity)] = there[_rows(count, severity)]
    jobs, at_once = {}, _at_once(images)
    for severity in severities:
        for first in range(0, count, at_once):
            chunk = images[first : first + at_once]
            work = partial(corrupt, seed=seed, first=first, textures=textures)
            jobs[pool.submit(work, chunk, path.stem, severity)] = (severity, first)
    for job in as_completed(jobs):
        severity, first = jobs.pop(job)  # or its images stay in memory until the file is whole
        start = (severity - 1) * count + first
        done = job.result()
        out[start : start + len(done)] = done
        progress.step(f"{path.stem} {severity}")
    out.flush()
    os.replace(unfinished, path)


def _at_once(images: Array) -> int:
    """How many images a process is given at a time."""
    return max(LEAST_AT_ONCE, PIXELS_AT_ONCE // (images.shape[1] * images.shape[2]))


def _refuse_to_be_imported() -> None:
    """Raise in a worker that runs its parent's script: it would wait for the parent's lock."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Python itself asks
        raise RuntimeError(
            "make_corrupted starts processes that import this script: call it under "
            'if __name__ == "__main__":'
        )


def _start_worker() -> None:
    import cv2

    cv2.setNumThreads(1)  # the processes are the parallelism


@contextlib.contextmanager
def _workers(workers: int) -> Iterator[ProcessPoolExecutor]:
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, "1"))  # what workers inherit
    try:
        with ProcessPoolExecutor(workers, mp_context=_context(), initializer=_start_worker) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _context() -> BaseContext:
    """Forking a process with threads, as torch has, may hang: fork from one that never had any."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, and not by every worker
    return context


def _claim(folder: Path, images: Array, labels: Array, seed: int) -> None:
    """Make the folder ours, or find that it is, with the same images and seed."""
    digest = hashlib.sha256(images.data.cast("B"))
    digest.update(np.ascontiguousarray(labels).data.cast("B"))
    about = {"images": digest.hexdigest(), "seed": seed}
    note = folder / "corruptions.json"
    used = any(folder.glob("*.npy"))  # first: another process writes its note before its files
    if note.is_file():
        try:
            there = json.loads(note.read_text())
        except ValueError as error:
            raise ValueError(f"{note} is damaged: {error}. Choose another folder.") from error
        if there != about:
            raise ValueError(
                f"{folder} holds corruptions of other images or another seed than {seed}. Choose "
                "another folder."
            )
    elif used:
        raise ValueError(
            f"{folder} holds npy files that ttnorm did not make, and would not be written over. "
            "Choose another folder."
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(unfinished(note))
        partial.write_text(json.dumps(about) + "\n")
        os.replace(partial, note)


def _remove_partial(folder: Path) -> None:
    for path in folder.glob("*.npy.partial"):
        path.unlink()


def _missing(path: Path, images: Array, severities: Sequence[int]) -> list[int]:
    """Which severities of a corruption of these images are still to be made."""
    if not path.is_file():
        return list(severities)
    there, expected = _npy(path), (5 * len(images), *images.shape[1:])
    if there.shape != expected or there.dtype != np.uint8:
        raise ValueError(
            f"{path} has shape {there.shape}, {there.dtype}, expected {expected}, uint8. Delete it "
            "to have it made anew."
        )
    return [s for s in severities if not _are_there(there[_rows(len(images), s)])]


def _are_there(images: Array) -> bool:
    """Whether any of them is not black: those of a severity that was not asked for all are."""
    return any(image.any() for image in images)  # reads the file up to that one, and no further


def _rows(count: int, severity: int) -> slice:
    return slice((severity - 1) * count, severity * count)


def _check_severity(severity: Any) -> None:
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}, expected 1 to 5.")


def _npy(path: Path) -> Array:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        found = np.load(path, mmap_mode="r")
        if not isinstance(found, np.ndarray):
            raise ValueError("it holds several arrays")
        return found
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is truncated or no npy file: {error}") from error
