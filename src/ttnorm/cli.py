"""The command line: parses, calls one function, prints."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import artefact, export, posttrain
from .distributed import rank

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:  # the library itself needs neither
    sys.exit(f"The command line needs more than the library: pip install 'ttnorm[bench]' ({error})")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Test-time normalization: networks with BatchNorm that adapt in a plain forward.",
)
console = Console()

Network = Annotated[str, typer.Argument(help="MODULE:FUNCTION that returns the trained network.")]
Output = Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU if there is one.")]


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
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 256,
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
    device = _device(device)
    _check_writable(output)
    train, test = (load_cifar(data, split) for split in ("train", "test"))
    model, history = source.train_source(train, test, config, device)
    facts = {"device": _device_name(device), "torch": torch.__version__}
    zoo.save_checkpoint(model, output, config, history, **facts)
    stored, _ = zoo.load_checkpoint(output)
    stored_error = source.error(stored.to(device), test)
    console.print(
        f"{output}: test error {history[-1]['test_error']:.2f} %, as stored {stored_error:.2f} %"
    )


@app.command("post-train")
def post_train(
    network: Network,
    loader: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION that returns a loader of (x, y) source batches.")
    ],
    output: Output,
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

    Under torchrun (torchrun --nproc-per-node 8 -m ttnorm post-train ...) the work is shared; the
    loader function then has to give every rank its part, with a DistributedSampler for instance.
    """
    given = locals()
    options = {f.name: given[f.name] for f in dataclasses.fields(posttrain.PostTrainConfig)}
    if init not in ("prior", "random"):
        options["init"] = _number("--init", init)
    config = posttrain.PostTrainConfig(**options)
    for path in (output, checkpoint):
        _check_writable(path)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    where = _device(device, local_rank)
    with _ranks(where):
        model = _network(network).to(where)
        result = posttrain.post_train_(
            model,
            _resolve(loader)(),
            config,
            loss=_resolve(loss) if loss else None,
            mean=_floats(mean),
            std=_floats(std),
            checkpoint=checkpoint,
        )
        if rank() == 0:
            artefact.save(model, output)
            console.print(f"{len(result.history)} epochs, last: {_row(result.history)}")
            _print_info(output)


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
    _check_writable(output)
    sizes = shape.split(",")
    if not all(size.strip().isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape is {shape!r}, expected whole numbers such as 3,224,224.")
    model = artefact.load_(_network(network), alpha).eval()
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
def demo() -> None:
    """Train, post-train, save, load and score a small network on handwritten digits."""
    from .demo.digits import run

    run(console)


def _print_info(path: Path) -> None:
    alpha, metadata = artefact.read(path)
    every = torch.cat(list(alpha.values()))
    statistics = next(iter(metadata["fingerprint"]["statistics"].values()))
    console.print(
        f"{path.name}  {path.stat().st_size / 1024:.1f} KiB, format "
        f"{metadata['format_version']}, ttnorm {metadata['ttnorm']}\n"
        f"network {statistics[:12]}: {len(alpha)} layers, {len(every)} channels, "
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


def _device(wanted: str | None, local_rank: int = 0) -> str:
    """The device asked for, if it can be had; without a wish a GPU, if there is one."""
    if wanted is None:
        return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError:
        raise ValueError(f"--device is {wanted!r}, expected cpu, cuda, cuda:1, mps, ...") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {wanted!r}, and torch sees no GPU here.")
    return wanted


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _check_writable(path: Path | None) -> None:
    """Before hours of work, not after."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: {folder} has to be a folder you may write to.")


def _network(spec: str) -> nn.Module:
    model = _resolve(spec)()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{spec} returned a {type(model).__name__}, expected a torch.nn.Module.")
    return model


def _resolve(spec: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names; modules of the working directory count."""
    module, _, function = spec.partition(":")
    if not function:
        raise ValueError(f"{spec!r} names no function, expected MODULE:FUNCTION.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks something itself
        raise ValueError(f"There is no module {error.name!r} to import {spec!r} from.") from None
    if not callable(found):
        raise ValueError(f"{module} has no function {function!r}.")
    return found


def _floats(text: str) -> list[float] | None:
    return [_number("--mean or --std", part) for part in text.split(",")] if text else None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}, which is no number.") from None


def _row(history: list[dict[str, float]]) -> str:
    if not history:
        return "nothing to optimise"
    return ", ".join(f"{key} {value:.4g}" for key, value in history[-1].items() if key != "epoch")
