"""Running the paper's experiments from folders with images: corrupt, post-train, score.

All of it goes on where it was stopped: corrupted images, alpha files and records are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .evaluate import evaluate
from .experiments import Only, experiments_named, parts
from .job import Domains
from .records import RecordFile
from .subject import Setup, Subject

logger = logging.getLogger("ttnorm")


class Bench(Protocol):
    """A network and its data set, as experiments are run with it.

    Args:
        dataset: "cifar10", ...; experiments say which they are for.
        records: the name of the file that its records go to.
        setup: where it runs, and how much.
    """

    dataset: str
    records: str
    setup: Setup

    def tests(self, clean: bool) -> Sequence[Domains]:
        """What is scored: domains of the same images together."""

    @property
    def subject(self) -> Subject:
        """The network, with the files that were made of it."""


def reproduce(
    names: Sequence[str], benches: Mapping[str, Bench], records: Path, only: Only | None = None
) -> None:
    """Run experiments; cells that are in the records are not run again.

    Args:
        names: of experiments, or "all".
        benches: by any name; experiments leave out data sets that are not there.
        records: a folder, with a file for every data set.
        only: a part of each.
    """
    only = only or Only()
    chosen = only.of_all(experiments_named(names))
    given = {bench.dataset for bench in benches.values()}
    if not any(given & set(experiment.datasets) for experiment in chosen.values()):
        wanted = sorted({dataset for e in chosen.values() for dataset in e.datasets})
        raise ValueError(f"{', '.join(chosen)}: wants a folder with {' or '.join(wanted)}.")
    records.mkdir(parents=True, exist_ok=True)
    for name, experiment in chosen.items():
        there = [bench for bench in benches.values() if bench.dataset in experiment.datasets]
        for dataset in experiment.datasets:
            if dataset not in {bench.dataset for bench in there}:
                logger.warning("%s: without %s, for no folder with it was given", name, dataset)
        for bench in there:
            lost: list[Path] = []
            file, scale = RecordFile(records / bench.records), bench.setup.scale
            for part in parts(experiment, scale.seeds, scale.batch_sizes):
                if part.dataset != bench.dataset:
                    continue
                if part.variant is not None:
                    alpha = bench.subject.own_file(part.variant, part.seed)
                    if not alpha.is_file() and file.had_alpha(alpha.name):
                        lost.append(alpha)
                        continue
                logger.info("%s: %s", name, part)
                clean = experiment.scenarios == ("source",)
                network = bench.subject.network(part)
                for data in bench.tests(clean):
                    if part.images is not None and part.images < len(data.labels):
                        data = data.subset(part.images)
                    evaluate(network, data, part.jobs, file, experiment=name)
            _warn_of_lost(lost, file)


def _warn_of_lost(alphas: Sequence[Path], file: RecordFile) -> None:
    """Say which alpha files were not fitted anew: another fit has other last digits, and its cells
    would stand beside those that are on file."""
    if alphas:
        logger.warning(
            "Not fitted anew, for %s has cells of them: %s. To add to these cells put the files "
            "into %s; to check them run everything with --records of your own.",
            file.path,
            ", ".join(alpha.name for alpha in alphas),
            alphas[0].parent,
        )
