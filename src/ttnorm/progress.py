"""A progress line on a terminal, and a line a minute in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from .distributed import rank

T = TypeVar("T")


class Progress:
    """One line on stderr that is rewritten in place; a new one every minute where that is no
    terminal, so that what takes less leaves nothing in a log.

    Args:
        title: what is being done.
        total: number of steps, or None when it is not known.
        done: steps that an earlier run has done already.
    """

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        self.title, self.total, self.done, self.note = title, total, done, ""
        self.before = done
        self.started = self.shown = time.monotonic()
        self.visible, self.terminal = rank() == 0, sys.stderr.isatty()

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, counting each as a step."""
        for item in items:
            yield item
            self.step()

    def step(self, note: str | None = None, by: int = 1) -> None:
        self.done += by
        self.note = self.note if note is None else note
        now = time.monotonic()
        last = self.terminal and self.done == self.total
        if self.visible and (last or now - self.shown > (0.1 if self.terminal else 60)):
            self.shown = now
            line = self._line(now - self.started)
            sys.stderr.write(f"\r\x1b[K{line}" if self.terminal else f"{line}\n")
            sys.stderr.flush()

    def close(self) -> None:
        if self.visible and self.terminal:
            sys.stderr.write("\n")

    def _line(self, seconds: float) -> str:
        if not self.total:
            return f"{self.title}  {self.done}  {seconds:.0f}s  {self.note}"
        filled = 24 * min(self.done, self.total) // self.total
        bar = "━" * filled + "╌" * (24 - filled) + "  " if self.terminal else ""
        left = seconds / max(1, self.done - self.before) * max(0, self.total - self.done)
        return f"{self.title}  {bar}{self.done}/{self.total}  {left:.0f}s left  {self.note}"
