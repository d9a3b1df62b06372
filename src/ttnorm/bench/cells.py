"""Cells of tables: errors of records, over domains, seeds and rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .records import Record, alpha_file, variant_of

# what records of one cell may differ in
KINDS = {
    "severity": "severities",
    "model": "networks",
    "data": "images",
    "config": "settings",
    "alpha": "alpha files",
}


class Cell(NamedTuple):
    """An error in percent, its deviation over seeds if there are several, and the paper's."""

    ours: float | None
    deviation: float | None = None
    paper: float | None = None


class Measured(NamedTuple):
    """What becomes a cell: our error by seed, and the paper's."""

    ours: dict[Any, float]
    paper: float | None


def measure(records: Sequence[Record], domains: set[str], theirs: float | None) -> Measured:
    """Our mean over the domains by seed, of those seeds that have them all."""
    by_seed: dict[Any, dict[str, float]] = {}
    before: dict[Any, Record] = {}
    alphas: dict[tuple[str, int], Any] = {}  # one file for every seed of one variant
    for r in records:
        errors = by_seed.setdefault((r["seed"], variant_of(r)), {})
        variant, seed = variant_of(r) or ("", 0)
        alpha = alphas.setdefault((variant, seed), alpha_file(r))
        several = alpha != alpha_file(r) or len({variant for variant, _ in alphas}) > 1
        other = before.setdefault((r["seed"], variant_of(r), r["domain"]), r)
        if other is not r or several:
            differ = [name for key, name in KINDS.items() if r.get(key) != other.get(key)]
            raise ValueError(
                f"There are two records of {r['norm']} on {r['domain']} at B = {r['batch_size']}, "
                f"of other {' and '.join(differ) or KINDS['alpha']}. Keep these in files of their "
                "own, and report on one at a time."
            )
        errors[r["domain"]] = 100 * r["miou"] if "miou" in r else 100 * r["wrong"] / r["n"]
    means = {s: statistics.mean(e.values()) for s, e in by_seed.items() if e.keys() == domains}
    return Measured(means, theirs)


def to_cell(measured: Measured) -> Cell:
    return mean_cell(list(measured.ours.values()))._replace(paper=measured.paper)


def mean_cell(values: Sequence[float]) -> Cell:
    """Over seeds."""
    if not values:
        return Cell(None)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.mean(values), deviation)


def average_of(row: Sequence[Measured]) -> Cell:
    """Over a row; the paper's is recomputed from its cells, where it has them all.

    It deviates as the seeds' own averages do, where all cells have the same seeds.
    """
    ours = [to_cell(measured).ours for measured in row]
    theirs = [measured.paper for measured in row]
    seeds = row[0].ours.keys()
    same = all(measured.ours.keys() == seeds for measured in row)
    of_seeds = [statistics.mean(m.ours[seed] for m in row) for seed in seeds] if same else []
    return Cell(
        None if None in ours else statistics.mean(ours),  # type: ignore[type-var]
        statistics.stdev(of_seeds) if len(of_seeds) > 1 else None,
        None if None in theirs else statistics.mean(theirs),  # type: ignore[type-var]
    )


def most_seeds(rows: Iterable[Iterable[Measured]]) -> int:
    """That any one cell has."""
    return max(len(measured.ours) for row in rows for measured in row)
