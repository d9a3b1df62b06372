"""`ttnorm reproduce`: the paper's tables and figures from folders with images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..bench.experiments import EXPERIMENTS, Only, experiments_named
from . import inputs
from .options import Device
from .printing import console

TABLES = [name for name in EXPERIMENTS if name.startswith("table")]
OTHERS = [name for name in EXPERIMENTS if name not in TABLES]


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(help=f"{TABLES[0]} to {TABLES[-1]}, {', '.join(OTHERS)}, or all."),
    ],
    records: Annotated[
        Path, typer.Option(help="The folder for records and alpha files; of --quick, one in WORK.")
    ] = Path("records"),
    work: Annotated[Path, typer.Option(help="A folder for corrupted images.")] = Path("work"),
    cifar10: Annotated[Path | None, typer.Option(help="A folder with CIFAR-10.")] = None,
    cifar100: Annotated[Path | None, typer.Option(help="A folder with CIFAR-100.")] = None,
    imagenet: Annotated[
        Path | None,
        typer.Option(help="A folder with ImageNet: test (or val) and source (or train)."),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help="For ImageNet: NAME, or NAME=FILE with its weights; resnet50 if none."),
    ] = None,
    camvid: Annotated[Path | None, typer.Option(help="A folder with CamVid.")] = None,
    camvid_network: Annotated[
        Path | None, typer.Option(help="What ttnorm train-segmentation wrote, for --camvid.")
    ] = None,
    camvid_severity: Annotated[int, typer.Option(help="Of CamVid's corruptions, 1 to 5.")] = 5,
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for pictures of CamVid's dusk and fog.")
    ] = None,
    textures: Annotated[
        Path | None, typer.Option(help="The folder with frost1.png to frost5.jpg.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A row: ttn, tent, tent+ttn, a variant such as lambda-10; all if none."),
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Of a table that has several; all if none.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="All if none.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            help="400 images of 3 corruptions at B = 200, 16 and 1 (of ImageNet 32 at 16 and 1, of "
            "CamVid 32 of 2 corruptions at 2), or at what --batch-size says; one seed, one epoch "
            "of post-training on 2,000 images, or 64 large ones; records go below WORK. Minutes on "
            "a CPU."
        ),
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of post-training; 3 if none.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unreadable images, and count them.")
    ] = False,
    device: Device = None,
) -> None:
    """Run what a table or figure of the paper shows, and print it beside the paper's numbers.

    Killed, it goes on where it was. Cells that are in the records are not run again. Rows,
    scenarios and batch sizes can be run apart, on several machines, and their records put together.
    """
    import dataclasses

    from ..bench import figures, formats, subject, tables
    from ..bench.camvid import CamvidBench
    from ..bench.cifar import CifarBench
    from ..bench.imagenet import ImageNetBench
    from ..bench.records import read_records
    from ..bench.reproduce import Bench
    from ..bench.reproduce import reproduce as run

    chosen = experiments_named(names)
    part = Only(
        rows=tuple(only or ()),
        scenarios=tuple(scenario or ()),
        batch_sizes=tuple(batch_size or ()),
    )
    scales = [subject.FULL] * 3
    if quick:
        scales = [subject.QUICK, subject.QUICK_LARGE, subject.QUICK_SCENES]
    if batch_size:
        scales = [dataclasses.replace(scale, batch_sizes=()) for scale in scales]
    if seeds is not None:
        scales = [dataclasses.replace(scale, seeds=seeds) for scale in scales]
    if not any((cifar10, cifar100, imagenet, camvid)):
        raise ValueError(
            "Without --cifar10, --cifar100, --imagenet or --camvid, a folder with it, nothing can "
            "be run."
        )
    wanted = {d for experiment in part.of_all(chosen).values() for d in experiment.datasets}
    wanted |= {"camvid"} if pictures is not None else set()
    given = {"cifar10": cifar10, "cifar100": cifar100, "imagenet": imagenet, "camvid": camvid}
    folders = {name: f for name, f in given.items() if f is not None and name in wanted}
    networks = _networks(network or ["resnet50"])
    # what is read, before a folder is made to write to
    _check(folders, networks, camvid_network, textures)
    if quick:
        work = work / "quick"
        records = work / "records"
    for folder in (work, records):
        inputs.check_folder(folder)
    setup, large_setup, scenes_setup = (
        subject.Setup(
            work=work,
            alphas=records / "alphas",
            textures=textures,
            device=inputs.device(device),
            scale=scale,
        )
        for scale in scales
    )
    benches: dict[str, Bench] = {
        name: CifarBench(name, folder, setup)
        for name, folder in folders.items()
        if name.startswith("cifar")
    }
    if "imagenet" in folders:
        for name, weights in networks.items():
            benches[name] = ImageNetBench(
                name, weights, folders["imagenet"], large_setup, skip_bad=skip_bad
            )
    if "camvid" in folders and camvid_network is not None:
        benches["camvid"] = CamvidBench(
            camvid_network,
            folders["camvid"],
            scenes_setup,
            severity=camvid_severity,
            skip_bad=skip_bad,
        )
    run(list(chosen), benches, records, part)
    scenes = benches.get("camvid")
    if pictures is not None and isinstance(scenes, CamvidBench):
        pictures.mkdir(parents=True, exist_ok=True)
        for domain in ("dusk", "fog"):
            figures.save(scenes.picture(domain), pictures / f"camvid-{domain}.png", dpi=100)
    everything = read_records([records])
    for experiment in chosen.values():
        try:
            for table in tables.of_experiment(experiment, everything):
                console.print(formats.to_rich(table))
        except ValueError as error:  # of what was in the records before
            console.print(f"No table of {experiment.title}: {error}", markup=False)
    console.print(
        f"Records are in {records}; ttnorm report {records} --output report makes a page."
    )


def _networks(named: list[str]) -> dict[str, Path | None]:
    """The files of weights by network, None where torchvision's or timm's are to be taken."""
    found: dict[str, Path | None] = {}
    for name, _, file in (one.partition("=") for one in named):
        if name in found:
            raise ValueError(
                f"--network has {name} twice: records know it by its name, so give the second a "
                "run with --records and --work of its own."
            )
        found[name] = Path(file) if file else None
    return found


def _check(
    folders: Mapping[str, Path],
    networks: Mapping[str, Path | None],
    camvid_network: Path | None,
    textures: Path | None,
) -> None:
    """Raise where something that is to be read is not there."""
    from ..data.corruptions import check_textures
    from ..models import imagenet

    for name, folder in folders.items():
        inputs.check_test_set(name, folder)
    if "imagenet" in folders:
        for name, weights in networks.items():
            imagenet.check(name)
            inputs.check_file(weights)
    if "camvid" in folders:
        if camvid_network is None:
            raise ValueError("--camvid needs --camvid-network: run ttnorm train-segmentation.")
        inputs.check_file(camvid_network)
    if textures is not None:
        check_textures(textures)
