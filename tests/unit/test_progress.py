"""Progress: a line that is rewritten on a terminal, and a line a minute in a log."""

import sys

import pytest

from ttnorm import progress
from ttnorm.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def run(clock, seconds, steps=10):
    line = Progress("fit", steps)
    for _ in range(steps):
        clock[0] += seconds / steps
        line.step("epoch 1")
    line.close()


def test_a_log_has_a_line_a_minute_without_a_bar(clock, capsys):
    run(clock, seconds=300)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"fit  {n}/10  {30 * (10 - n)}s left  epoch 1" for n in (3, 6, 9)]


def test_what_takes_less_leaves_nothing_in_a_log(clock, capsys):
    run(clock, seconds=59)
    assert not capsys.readouterr().err


def test_a_terminal_has_one_line_that_is_rewritten(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(clock, seconds=10)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith(f"{'━' * 24}  10/10  0s left  epoch 1\n")
