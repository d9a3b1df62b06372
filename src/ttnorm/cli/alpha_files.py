"""`ttnorm info` and `export`: what is in an alpha file, and a graph of the network with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import artefact
from ..export import to_exported_program, to_onnx
from . import inputs
from .options import Network, Weights
from .printing import console, print_alpha_file


def info(file: Annotated[Path, typer.Argument(help="An alpha file.")]) -> None:
    """Show what is in an alpha file: for which network, how it was made, alpha layer by layer."""
    print_alpha_file(file)


def export(
    network: Network,
    alpha: Annotated[Path, typer.Argument(help="The network's alpha file.")],
    output: Annotated[Path, typer.Argument(help="NAME.onnx, or NAME.pt2 for torch.export.")],
    shape: Annotated[str, typer.Option(help="One sample's shape, e.g. 3,224,224.")],
    weights: Weights = None,
    opset: Annotated[int, typer.Option(help="ONNX operator set, 17 or newer.")] = 18,
) -> None:
    """Write an adapting network as ONNX or as an exported program, for any batch size."""
    if output.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"{output} ends in {output.suffix!r}, expected .onnx or .pt2.")
    inputs.check_writable(output)
    sizes = shape.split(",")
    if not all(size.strip().isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape is {shape!r}, expected whole numbers such as 3,224,224.")
    model = artefact.load_(inputs.network(network, weights=weights), alpha).eval()
    example = torch.rand(2, *map(int, sizes))
    try:
        model(example)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"The network does not take --shape {shape}: {error}") from error
    if output.suffix == ".onnx":
        to_onnx(model, example, output, opset=opset)
    else:
        torch.export.save(to_exported_program(model, example), output)
    console.print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB, dynamic batch dimension")
