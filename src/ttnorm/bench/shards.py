"""One evaluation over many processes: each takes its share, and the records become one file.

A process writes to a part of its own beside the file. Parts are merged at the end, and those that a
killed run left behind at the beginning of the next. There is no process group: to the network every
process is the only one, and its statistics and random numbers are those of a single process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.rendezvous import rendezvous

from .records import RecordFile, read_records
from .scenarios import SCENARIOS

T = TypeVar("T")
LONGEST = timedelta(days=30)  # that one process waits for another; torchrun ends it if one fails


class Shards:
    """The processes that torchrun announces in the environment, or one without it."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        if self.count > 1:
            self.store, _, _ = next(rendezvous("env://"))
        self.waits = 0

    def share(
        self, scenario: str, domains: Sequence[str], jobs: Sequence[T]
    ) -> tuple[list[str], list[T]]:
        """The domains and jobs of this process.

        Where every domain is met on its own, the domains are divided; where one follows on another,
        and for the clean test set, the jobs.
        """
        if SCENARIOS[scenario].apart and scenario != "source":
            return self.ours(domains), list(jobs)
        return list(domains), self.ours(jobs)

    def ours(self, things: Sequence[T]) -> list[T]:
        """Those of this process, of things that are divided among all."""
        return list(things[self.rank :: self.count])

    def common(self, name: str, make: Callable[[], Any]) -> Any:
        """What the first process makes, for all: another GPU may give other last digits."""
        if self.count == 1:
            return make()
        if self.rank == 0:
            self.store.set(self._key(name), json.dumps(make()))
        self.store.wait([self._key(name)], LONGEST)
        return json.loads(self.store.get(self._key(name)))

    def of_all(self, name: str, ours: list[str]) -> list[str]:
        """What all processes have, for each of them; every one has to ask, or the others wait."""
        if self.count == 1:
            return ours
        keys = [self._key(f"{name} {rank}") for rank in range(self.count)]
        self.store.set(keys[self.rank], json.dumps(ours))
        self.store.wait(keys, LONGEST)
        return [value for key in keys for value in json.loads(self.store.get(key))]

    @contextlib.contextmanager
    def records(self, path: Path) -> Iterator[RecordFile]:
        """A file for this process that knows what is on file; all is in `path` afterwards."""
        self._merge(path)
        if self.count == 1:
            yield RecordFile(path)
            return
        yield RecordFile(path.with_name(f"{path.name}.rank{self.rank}"), also=path)
        self._wait()
        self._merge(path)

    def _merge(self, path: Path) -> None:
        if self.rank == 0:
            merge(path)
        self._wait()

    def _wait(self) -> None:
        """Until all processes are here."""
        if self.count == 1:
            return
        self.waits += 1
        here, all_here = (self._key(f"{what} {self.waits}") for what in ("here", "all here"))
        if self.store.add(here, 1) == self.count:
            self.store.set(all_here, "yes")
        self.store.wait([all_here], LONGEST)

    def _key(self, name: str) -> str:
        """Of this attempt: torchrun may start all processes anew."""
        return f"ttnorm {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {name}"


def merge(path: Path) -> None:
    """Add the cells of all parts to the file, and take the parts away."""
    name = re.compile(re.escape(path.name) + r"\.rank\d+")
    parts = sorted(part for part in path.parent.iterdir() if name.fullmatch(part.name))
    if not parts:
        return
    file = RecordFile(path)
    for part in parts:
        RecordFile(part)  # cuts off a torn line
        for record in read_records([part]):
            if record not in file:
                file.append(record)
        part.unlink()
