"""One evaluation over many processes: each rank takes its share, and the records become one file.

A rank writes to a part of its own beside the file. Parts are merged at the end, and those that a
killed run left behind at the beginning of the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ..distributed import rank, world_size
from .records import RecordFile, read_records
from .scenarios import SCENARIOS

T = TypeVar("T")


def share_of_rank(
    scenario: str, domains: Sequence[str], jobs: Sequence[T]
) -> tuple[list[str], list[T]]:
    """The domains and jobs of this rank.

    Where every domain is met on its own, ranks divide the domains; where one follows on another,
    and for the clean test set, they divide the jobs.
    """
    mine = slice(rank(), None, world_size())
    if scenario in SCENARIOS and SCENARIOS[scenario].apart and scenario != "source":
        return list(domains[mine]), list(jobs)
    return list(domains), list(jobs[mine])


@contextlib.contextmanager
def shared_records(path: Path) -> Iterator[RecordFile]:
    """A file for this rank's records that knows what is on file; all are in `path` afterwards."""
    if rank() == 0:
        merge(path)
    _wait()
    if world_size() == 1:
        yield RecordFile(path)
        return
    yield RecordFile(path.with_name(f"{path.name}.rank{rank()}"), also=path)
    _wait()
    if rank() == 0:
        merge(path)
    _wait()


def merge(path: Path) -> None:
    """Add the cells of all parts to the file, and take the parts away."""
    parts = sorted(path.parent.glob(f"{path.name}.rank*"))
    if not parts:
        return
    file = RecordFile(path)
    for part in parts:
        RecordFile(part)  # cuts off a torn line
        for record in read_records([part]):
            if record not in file:
                file.append(record)
        part.unlink()


def _wait() -> None:
    if world_size() > 1:
        dist.barrier()
