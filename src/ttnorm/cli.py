"""The command line: parses, calls one function, prints."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
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
    """Run the command line; what a user can mend is said in one line, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False)
        sys.exit(1)


@app.command("post-train")
def post_train(
    network: Network,
    loader: Annotated[
        str, typer.Argument(help="MODULE:FUNCTION that returns a loader of (x, y) source batches.")
    ],
    output: Output,
    epochs: Annotated[int, typer.Option(help="Passes over the loader.")] = 30,
    lr: Annotated[
        float, typer.Option(help="Adam's step size; the paper's for ImageNet is 2.5e-4.")
    ] = 1e-3,
    lambda_: Annotated[
        float, typer.Option("--lambda", help="Weight of the distance to the prior.")
    ] = 1.0,
    init: Annotated[str, typer.Option(help="prior, random, or a number in [0, 1].")] = "prior",
    granularity: Annotated[str, typer.Option(help="channel, layer or constant.")] = "channel",
    shift: Annotated[
        str, typer.Option(help="One simulated shift per 'batch' or per 'image'.")
    ] = "batch",
    dynamic_batch: Annotated[
        tuple[int, int], typer.Option(help="Draw batch sizes from this range, e.g. 4 200.")
    ] = (0, 0),
    early_stop: Annotated[
        float | None, typer.Option(help="Stop when the MSE changes by less than this share.")
    ] = None,
    steps_per_epoch: Annotated[
        int | None, typer.Option(help="End an epoch after so many batches.")
    ] = None,
    prior_samples: Annotated[int, typer.Option(help="Samples the prior looks at.")] = 1024,
    mean: Annotated[
        str, typer.Option(help="What the loader subtracts, e.g. 0.485,0.456,0.406.")
    ] = "",
    std: Annotated[str, typer.Option(help="What the loader divides by.")] = "",
    amp: Annotated[str | None, typer.Option(help="bfloat16 or float16.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Written every epoch; resumed from if there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes everything that is random.")] = 0,
    device: Device = None,
) -> None:
    """Learn, once and with labelled source data, how far each channel should trust the batch.

    Under torchrun (torchrun --nproc-per-node 8 -m ttnorm post-train ...) the work is shared; the
    loader function then has to give every rank its part, with a DistributedSampler for instance.
    """
    config = posttrain.PostTrainConfig(
        epochs=epochs,
        lr=lr,
        lambda_=lambda_,
        init=init if init in ("prior", "random") else _number("--init", init),  # type: ignore[arg-type]
        granularity=granularity,  # type: ignore[arg-type]
        shift=shift,  # type: ignore[arg-type]
        dynamic_batch=dynamic_batch if any(dynamic_batch) else None,
        early_stop=early_stop,
        steps_per_epoch=steps_per_epoch,
        prior_samples=prior_samples,
        amp=amp,  # type: ignore[arg-type]
        seed=seed,
    )
    with _Ranks() as ranks:
        model = _network(network).to(ranks.device(device))
        result = posttrain.post_train_(
            model,
            _resolve(loader)(),
            config,
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
    model = artefact.load_(_network(network), alpha)
    example = torch.rand(2, *(int(size) for size in shape.split(",")))
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
        f"[bold]{path.name}[/]  {path.stat().st_size / 1024:.1f} KiB, format "
        f"{metadata['format_version']}, ttnorm {metadata['ttnorm']}\n"
        f"network {statistics[:12]}: {len(alpha)} layers, {len(every)} channels, "
        f"mean alpha {every.mean():.3f}"
    )
    if metadata["config"]:
        console.print(
            "  ".join(f"{key}={value}" for key, value in metadata["config"].items()), style="dim"
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


class _Ranks:
    """The process group that torchrun announces in the environment; nothing without it."""

    def __enter__(self) -> _Ranks:
        self.local = int(os.environ.get("LOCAL_RANK", -1))
        if self.local >= 0:
            cuda = torch.cuda.is_available()
            if cuda:
                torch.cuda.set_device(self.local)
            dist.init_process_group("nccl" if cuda else "gloo")
        return self

    def __exit__(self, *_: Any) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def device(self, wanted: str | None) -> str:
        if wanted is not None:
            return wanted
        if not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{max(self.local, 0)}"


def _network(spec: str) -> nn.Module:
    model = _resolve(spec)()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{spec} returned a {type(model).__name__}, expected a torch.nn.Module.")
    return model


def _resolve(spec: str) -> Callable[[], Any]:
    """The function that MODULE:FUNCTION names; modules of the working directory count."""
    module, _, function = spec.partition(":")
    if not function:
        raise ValueError(f"{spec!r} names no function, expected MODULE:FUNCTION.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), function, None)
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
