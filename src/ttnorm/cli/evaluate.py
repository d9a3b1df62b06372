"""`ttnorm corrupt`, `evaluate` and `report`: from test images to records, and to a page of them."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import artefact
from ..bench.scenarios import SCENARIOS, segments
from ..methods import METHODS
from ..norms import NORMS, norm_named
from . import inputs
from .options import Dataset, Device, Seed, SkipBad, Weights
from .printing import console


def corrupt(
    data: Annotated[
        Path,
        typer.Argument(help="A folder with CIFAR-10, CIFAR-100, or ImageNet's classes."),
    ],
    output: Annotated[Path, typer.Argument(help="The folder to write npy files into.")],
    dataset: Dataset = "cifar",
    severity: Annotated[list[int] | None, typer.Option(help="1 to 5; all five if none.")] = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Which; all 15 if none.")] = None,
    textures: Annotated[
        Path | None, typer.Option(help="The folder with frost1.png to frost5.jpg; for frost.")
    ] = None,
    seed: Seed = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; one per core if none.")] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Write the common corruptions of a test set in the layout of CIFAR-10-C and CIFAR-100-C.

    ImageNet's images are resized to 256 and cropped to 224 pixels, if they are not so already, and
    take ImageNet-C's parameters. Killed, it goes on where it was. The frost pictures are those of
    the PyPI package imagecorruptions: pip download --no-deps imagecorruptions, and unzip it.
    """
    from ..data import corrupted, corruptions

    inputs.check_folder(output)
    names, severities = corruption or corruptions.CORRUPTIONS, severity or corrupted.SEVERITIES
    if not data.is_dir():
        raise FileNotFoundError(f"There is no folder {data}.")
    # before minutes of reading, not after
    corrupted.check_options(names, severities, seed, textures, workers)
    corrupted.make_corrupted(
        inputs.images(data, dataset, "test", skip_bad=skip_bad),
        output,
        corruptions=names,
        severities=severities,
        seed=seed,
        textures=textures,
        workers=workers,
    )
    console.print(f"{output}: {len(list(output.glob('*.npy'))) - 1} corruptions and labels")


def evaluate(
    records: Annotated[Path, typer.Argument(help="The JSONL file to add records to.")],
    network: Annotated[
        str,
        typer.Option(
            help="A network by name, a checkpoint, or MODULE:FUNCTION; it is given images in "
            "[0, 1]."
        ),
    ] = "wrn40_2-cifar10",
    weights: Weights = None,
    dataset: Annotated[str, typer.Option(help="cifar-c or imagenet-c.")] = "cifar-c",
    data: Annotated[
        Path | None, typer.Option(help="A folder with CIFAR-C npy files, or with ImageNet-C.")
    ] = None,
    clean: Annotated[
        Path | None, typer.Option(help="A folder with the test set; for the scenario source.")
    ] = None,
    norm: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(NORMS)}, constant-0.3; if none, all that alpha files allow."
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; none.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="A folder of source images; for the method swr.")
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SCENARIOS)}; single.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="200 (not ImageNet), 64, 16, 4, 2, 1.")
    ] = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Which; all 15 if none.")] = None,
    severity: Annotated[int, typer.Option(help="1 to 5.")] = 5,
    subset: Annotated[
        int | None,
        typer.Option(help="Only so many images of a domain, the first; ImageNet's of all classes."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="The order of images; 0.")] = None,
    streams: Annotated[
        int, typer.Option(help="Streams to divide the images among, for norms that remember.")
    ] = 1,
    alpha: Annotated[Path | None, typer.Option(help="The network's alpha file.")] = None,
    dynamic_alpha: Annotated[
        Path | None, typer.Option(help="Its alpha file fitted with dynamic batch sizes.")
    ] = None,
    sequential: Annotated[bool, typer.Option(help="Batch after batch, without groups.")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Score normalisations: every norm x method x scenario x batch size, one record per cell.

    Killed, it goes on where it was; cells on file are not run again (of a network that was trained
    on with the same running statistics neither: give it another file). What swr measures on source
    images is kept beside the file, and measured once. Options that take a list are
    given several times: --norm tbn --norm ttn. Under torchrun (torchrun --nproc-per-node 8 -m
    ttnorm evaluate ...) every process takes its share of the corruptions, or of the batch sizes
    where corruptions follow on each other, and the records become one file.
    """
    import torch

    from ..bench.evaluate import evaluate as score
    from ..bench.job import Job, check, check_pair
    from ..bench.records import RecordFile, read_records
    from ..bench.runs import StoredDomains, check_folder, network_under_test, stored_domains
    from ..bench.shards import Shards
    from ..bench.subject import kept_agreement
    from ..data.corruptions import CORRUPTIONS
    from ..methods.swr import gradient_agreement

    kind = inputs.dataset_named(dataset)
    # names and sizes before any file: a wrong one is not to be found after minutes of reading
    for one, other in itertools.product(norm or ["source"], method or ["none"]):
        check_pair(one, other)
    for chosen, size in itertools.product(scenario or ["single"], batch_size or [1]):
        segments(chosen, ["any"], torch.zeros(2, dtype=torch.long), size, 0)
        check_folder(clean if chosen == "source" else data, chosen == "source")
    where = inputs.device(device, int(os.environ.get("LOCAL_RANK", 0)))
    inputs.check_writable(records)
    RecordFile(records)  # which refuses a file of something else
    shards = Shards()
    model = inputs.network(network, where, weights)
    agreement = None
    if source and any(METHODS[m].needs_agreement for m in method or ()):
        examples = inputs.loader(str(source), where, kind, network=network, skip_bad=skip_bad)
        inputs.check_loader(examples, str(source), model, network, kind)
        kept = partial(kept_agreement, records.parent, f"{records.name}.{_file_name(network)}")
        measure = partial(gradient_agreement, model, examples)
        agreement = shards.common("agreement", lambda: kept(model, measure))
    tested = network_under_test(network, model, alpha, dynamic_alpha, agreement)
    for path in tested.alpha_files.values():
        _warn_of_normalised_images(path)
    stored = functools.cache(
        lambda is_clean: stored_domains(
            tested,
            kind,
            clean if is_clean else data,
            is_clean,
            corruption or CORRUPTIONS,
            severity,
            preprocessing=inputs.preprocessing(network),
            skip_bad=skip_bad,
            subset=subset,
            ours=shards.ours(corruption or CORRUPTIONS),
            exchange=partial(shards.of_all, "bad files"),
        )
    )

    @functools.cache
    def norms_there() -> list[str]:
        names = [n for n in NORMS if streams == 1 or norm_named(n).remembers]
        if not all(METHODS[m].over_memory for m in method or ()):
            names = [n for n in names if not norm_named(n).has_memory]
        return [n for n in names if tested.can_have(n)]

    runs: list[tuple[StoredDomains, Sequence[str], list[Job]]] = []
    for chosen in scenario or ["single"]:
        jobs = [
            Job(norm=n, method=m, scenario=chosen, batch_size=b, seed=s, streams=streams)
            for n in norm or norms_there()
            for m in method or ["none"]
            for s in seed or [0]
            for b in batch_size or inputs.BATCH_SIZES[kind]
        ]
        tests = stored(chosen == "source")
        domains, jobs = shards.share(chosen, list(tests.readers), jobs)
        if not domains or not jobs:
            continue  # more processes than there is to do
        check(tested, tests.outline(domains), jobs)
        parts = tests.parts(domains) if SCENARIOS[chosen].apart else [domains]
        runs += [(tests, part, jobs) for part in parts]
    with shards.records(records) as file:
        before = len(file)
        for tests, part, jobs in runs:
            score(tested, tests.read(part).to(where), jobs, file, grouped=not sequential)
    if shards.rank == 0:
        _print_tables(records)
        new = len(read_records([records])) - before
        console.print(f"{records}: {new} new records, {before} from before", soft_wrap=True)


def report(
    records: Annotated[list[Path], typer.Argument(help="JSONL files, or folders with them.")],
    output: Annotated[Path, typer.Option(help="The folder to write results.md into.")],
    alpha: Annotated[
        list[Path] | None, typer.Option(help="Alpha files to draw over depth.")
    ] = None,
) -> None:
    """Turn records into a page with tables and figures, and into LaTeX and CSV."""
    from ..bench.records import read_records
    from ..bench.report import write_report

    inputs.check_folder(output)
    written = write_report(read_records(records), output, alpha or [])
    for path in written:
        console.print(path)


def _file_name(network: str) -> str:
    """Of a network that may be a path or MODULE:FUNCTION."""
    return re.sub(r"[^\w.+-]+", "-", Path(network).name)


def _warn_of_normalised_images(alpha_file: Path) -> None:
    if artefact.read(alpha_file).metadata["config"].get("mean") is not None:
        console.print(
            f"{alpha_file} was fitted with images that the loader normalised, and the network is "
            "given images in [0, 1] here: it has to normalise them itself.",
            style="yellow",
            markup=False,
        )


def _print_tables(records: Path) -> None:
    from ..bench import formats, tables
    from ..bench.records import read_records

    found = read_records([records])
    for (_, scenario), together in tables.split(found).items():
        dataset = together[0]["dataset"]
        try:
            table = tables.by_batch_size(together, dataset=dataset, scenario=scenario)
        except ValueError as error:  # of what was in the file before
            console.print(f"No table of {dataset}, {scenario}: {error}", markup=False)
        else:
            console.print(formats.to_rich(table))
