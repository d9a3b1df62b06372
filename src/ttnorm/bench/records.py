"""Records: one JSON line per cell, appended as soon as it is known.

A process may be killed at any moment. What it had written is whole lines and, at most, one torn
line at the end; that one is cut off when the file is opened again, and its cell is run again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

from .variants import OF_KIND, VARIANTS

logger = logging.getLogger("ttnorm")

Record = dict[str, Any]

# What every record has, so that another kind of file is not taken for one of records.
FIELDS = {
    **dict.fromkeys(("dataset", "scenario", "domain", "norm", "method"), str),
    **dict.fromkeys(("batch_size", "seed", "n", "severity"), int),
    **dict.fromkeys(("model", "config"), dict),
}
BEGINNING = b'{"dataset": "'  # of every line
SCORES = frozenset({"wrong", "miou"})  # images that are wrong, or the classes' mean overlap
# Two records that agree in all but these are the same cell.
OUTCOME = SCORES | {"iou", "undone", "seconds", "versions", "device", "experiment"}


class RecordFile:
    """A JSONL file that knows which cells it holds.

    Args:
        path: created if it is not there.
        also: a file whose cells count as held, too.

    Example:
        >>> import tempfile
        >>> file = RecordFile(tempfile.mkdtemp() + "/records.jsonl")
        >>> record = {name: kind() for name, kind in FIELDS.items()} | {"n": 9, "wrong": 3}
        >>> file.append(record)
        >>> record | {"wrong": 7} in file, record | {"norm": "tbn"} in file
        (True, False)
    """

    def __init__(
        self, path: str | os.PathLike[str], also: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = Path(path)
        _cut_torn_line(self.path)
        files = [self.path] if also is None else [self.path, also]
        self._read = self.path.stat().st_size if self.path.is_file() else 0
        there = read_records(files, missing_ok=True)
        self._cells = {_cell(record) for record in there}
        self._alphas = {alpha["name"] for record in there if (alpha := record.get("alpha"))}
        self._of_others: set[str] = set()  # that other processes have written since

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, record: Record) -> bool:
        return _cell(record) in self._cells

    def had_alpha(self, name: str) -> bool:
        """Whether cells that were there when it was opened have alpha from a file of that name."""
        return name in self._alphas

    def append(self, record: Record) -> None:
        """Write one record, whole and for good; refuses a cell that is there already.

        One that another process has written since is left as that has it.
        """
        if record in self:
            raise ValueError(f"{self.path} already holds this cell: {record}.")
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.path.open("a+b") as file, _alone(file):
            _cut_torn_line(self.path)
            self._of_others |= _cells_after(file, self._read)
            if _cell(record) not in self._of_others:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
            self._read = file.tell()
        self._cells.add(_cell(record))


def read_records(
    paths: Iterable[str | os.PathLike[str]], *, missing_ok: bool = False
) -> list[Record]:
    """All records of some files, in their order; a folder stands for the JSONL files in it.

    A cell that is there twice, as where files of several machines are put together, counts once.
    """
    records: dict[str, Record] = {}
    for path in map(Path, paths):
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            if not file.is_file():
                if missing_ok:
                    continue
                raise FileNotFoundError(f"There is no file {file}.")
            for number, line in _lines(file):
                record = _parse(line, file, number)
                records.setdefault(_cell(record), record)
    return list(records.values())


@contextlib.contextmanager
def _alone(file: BinaryIO) -> Iterator[None]:
    """Inside, no other process is here with the same file, where the system can see to that."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_UN)


def _cells_after(file: BinaryIO, position: int) -> set[str]:
    """Of the records beyond that position of a file, to the end of which it is moved."""
    file.seek(position)
    return {_cell(json.loads(line)) for line in file.read().splitlines()}


def _lines(file: Path) -> Iterable[tuple[int, str]]:
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no file of records: {error}") from None
    lines = text.splitlines()
    if lines and not text.endswith("\n") and _is_torn(lines[-1].encode()):
        logger.warning("%s ends in the middle of a record, which is left out.", file)
        lines.pop()
    return enumerate(lines, start=1)


def _parse(line: str, file: Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number} is no record: {error}") from None
    if not _is_record(record):
        raise ValueError(f"{file}, line {number} is no record of an evaluation.")
    return record


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() & SCORES:
        return False
    scores = [value[name] for name in SCORES & value.keys()]
    if not all(isinstance(value.get(name), kind) for name, kind in FIELDS.items()):
        return False
    named = "name" in value["model"] and "subset" in value["config"]
    return named and value["n"] > 0 and all(isinstance(score, int | float) for score in scores)


def _cell(record: Record) -> str:
    identity = {key: value for key, value in record.items() if key not in OUTCOME}
    if "alpha" in identity:
        identity["alpha"] = alpha_file(record)
    return json.dumps(identity, sort_keys=True)


def alpha_file(record: Record) -> dict[str, str] | None:
    """Which file a record's alpha is from, or None where it has none.

    How it was fitted is left out: the fingerprint covers it, and older records do not say.
    """
    alpha = record.get("alpha")
    return alpha and {key: value for key, value in alpha.items() if key != "config"}


def variant_of(record: Record) -> tuple[str, int] | None:
    """The variant and the seed of a record's alpha, or None where it has none.

    Files that `reproduce` made are called NETWORK.VARIANT.seedN, with one of VARIANTS; what users
    call theirs says nothing.
    """
    if record.get("alpha") is None:
        return None
    network = re.escape(record["model"]["name"])
    name = record["alpha"]["name"].removesuffix(".ttn.safetensors")
    match = re.fullmatch(rf"{network}\.(.+)\.seed(\d+)", name)
    if match is not None and match[1] in VARIANTS:
        return match[1], int(match[2])
    match = re.fullmatch(rf"{network}\.(.+)", name)  # as those that are shipped are called
    return OF_KIND.get(match[1] if match else "ttn", "default"), 0


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return
    for number, line in enumerate(content[:whole].decode(errors="replace").splitlines(), start=1):
        _parse(line, path, number)  # or it is somebody's file, and not ours to cut
    if not _may_be_torn(content[whole:]):
        raise ValueError(f"{path} is no file of records.")
    with path.open("r+b") as file:
        file.truncate(whole)


def _may_be_torn(tail: bytes) -> bool:
    """Whether this is a record or the beginning of one, and not somebody's line."""
    return _is_torn(tail) or _is_record(_decoded(tail))


def _is_torn(tail: bytes) -> bool:
    """Whether a record begins like this and is not whole."""
    begins = tail.startswith(BEGINNING) or BEGINNING.startswith(tail)
    return begins and _decoded(tail) is None


def _decoded(text: bytes) -> Any:
    """What JSON it is, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None
