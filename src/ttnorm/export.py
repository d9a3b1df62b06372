"""A converted network as a graph for production: torch.export and ONNX, for any batch size."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .surgery import refuse_stream, ttn_layers, unwrap


def to_exported_program(model: nn.Module, example: Tensor) -> ExportedProgram:
    """torch.export with a dynamic batch dimension.

    Args:
        model: a converted network.
        example: an input of any batch size.

    Example:
        >>> from ttnorm import convert_
        >>> model = convert_(nn.Sequential(nn.BatchNorm2d(3)), 0.1)
        >>> program = to_exported_program(model, torch.rand(1, 3, 8, 8))
        >>> program.module()(torch.rand(7, 3, 8, 8)).shape
        torch.Size([7, 3, 8, 8])
    """
    model = unwrap(model)
    layers = ttn_layers(model)  # an unconverted network would export, and never adapt
    refuse_stream(model, "The exported graph")
    if any(layer.group_size is not None for layer in layers.values()):
        raise ValueError("The model is isolated; export it outside of ttnorm.isolated().")
    with _eval_mode(model), torch.no_grad():
        return torch.export.export(
            model, (_at_least_two(example),), dynamic_shapes=({0: Dim("batch", min=1)},)
        )


def to_onnx(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str], *, opset: int = 18
) -> None:
    """Write an ONNX file with a dynamic batch dimension, input `x` and, if it is one, `output`.

    Args:
        model: a converted network.
        example: an input of any batch size.
        path: where to write.
        opset: 17 or newer. torch's exporter writes 18; what it cannot convert that to is refused.
    """
    if opset < 17:
        raise ValueError(f"opset is {opset}, expected 17 or newer.")
    program = to_exported_program(model, example)
    single = len(program.graph_signature.user_outputs) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own notes on its deprecations
        exported = torch.onnx.export(
            program,
            (),
            input_names=["x"],
            output_names=["output"] if single else None,
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    written = exported.model.opset_imports[""]
    if written != opset:  # the exporter says so in its log only
        raise ValueError(f"opset is {opset}, and torch's exporter offers {written} instead.")
    exported.save(path, external_data=False)


def _at_least_two(example: Tensor) -> Tensor:
    # torch.export takes a dimension of 1 for a constant, however dynamic it is declared
    return example if len(example) > 1 else torch.cat((example, example))


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
