"""`ttnorm reproduce`: the paper's tables and figures from folders with CIFAR."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import cli_inputs as inputs


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(help="table1 to table12 but 6, table14, figure1, figure4, figure5, or all."),
    ],
    records: Annotated[
        Path, typer.Option(help="The folder of records to add to, and of alpha files.")
    ] = Path("results"),
    work: Annotated[Path, typer.Option(help="A folder for corrupted images.")] = Path("work"),
    cifar10: Annotated[Path | None, typer.Option(help="A folder with CIFAR-10.")] = None,
    cifar100: Annotated[Path | None, typer.Option(help="A folder with CIFAR-100.")] = None,
    textures: Annotated[
        Path | None, typer.Option(help="The folder with frost1.png to frost5.jpg.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            help="200 images of 3 corruptions at B = 200, 16 and 1; one seed and one epoch of "
            "post-training on 2,000 images; records go below WORK. Minutes on a CPU."
        ),
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of post-training; 3 if none.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; a GPU if there is one.")
    ] = None,
) -> None:
    """Run what a table or figure of the paper shows, and print it beside the paper's numbers.

    Killed, it goes on where it was. Cells that are in the records are not run again.
    """
    import dataclasses

    from .bench import reproduce as bench
    from .bench import tables
    from .bench.experiments import experiments_named
    from .bench.records import read_records

    chosen = experiments_named(names)
    scale = bench.QUICK if quick else bench.FULL
    if seeds is not None:
        scale = dataclasses.replace(scale, seeds=seeds)
    folders = {"cifar10": cifar10, "cifar100": cifar100}
    given = {name: folder for name, folder in folders.items() if folder is not None}
    if not given:
        raise ValueError("Without --cifar10 or --cifar100, a folder with it, nothing can be run.")
    if quick:
        work = work / "quick"
        records = work / "records"
    for folder in (work, records):
        inputs.check_folder(folder)
    where = inputs.device(device)
    benches = {
        name: bench.Bench(name, folder, work, records / "alphas", textures, where, scale)
        for name, folder in given.items()
    }
    bench.reproduce(list(chosen), benches, records)
    console = Console()
    everything = read_records([records])
    for experiment in chosen.values():
        for table in tables.of_experiment(experiment, everything):
            console.print(tables.to_rich(table))
    console.print(f"Records are in {records}; ttnorm report {records} makes a page of them.")
