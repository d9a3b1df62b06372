"""A converted network as a graph for production: torch.export and ONNX, for any batch size.

A graph has no memory. Where a network remembers its stream, what it remembers goes in beside the
batch and comes out beside the output: see `stream_state`. Where it looks for domains every few
frames, that is a branch of the graph.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .stream import copied, stream_of, stream_state
from .surgery import eval_mode, refuse_stream
from .tree import STREAM, ttn_layers, unwrap


def to_exported_program(model: nn.Module, example: Tensor) -> ExportedProgram:
    """torch.export with a dynamic batch dimension.

    Args:
        model: a converted network. After `stream_`, the program takes the batch and the tensors of
            `stream_state`, and gives the output and these tensors as they are after the batch. Any
            memory will do; of a routed one the program is functional, and takes longer to make.
        example: an input of any batch size.

    Example:
        >>> from ttnorm import convert_
        >>> model = convert_(nn.Sequential(nn.BatchNorm2d(3)), 0.1)
        >>> program = to_exported_program(model, torch.rand(1, 3, 8, 8))
        >>> program.module()(torch.rand(7, 3, 8, 8)).shape
        torch.Size([7, 3, 8, 8])
    """
    program = _export(model, example)
    if STREAM not in unwrap(model).__dict__ or stream_of(model).routes is None:
        return program
    # frames are told apart by the first layers: what a second pass does beyond them is not needed,
    # and nothing but functions can be seen to be that
    program = program.run_decompositions({})
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _export(model: nn.Module, example: Tensor) -> ExportedProgram:
    """See `to_exported_program`; ONNX leaves out what is not needed by itself."""
    model = unwrap(model)
    layers = ttn_layers(model)  # an unconverted network would export, and never adapt
    if any(layer.group_size is not None for layer in layers.values()):
        raise ValueError("The model is isolated; export it outside of ttnorm.isolated().")
    if STREAM not in model.__dict__:
        refuse_stream(model, "The export of a network around one that remembers, or of its part,")
    example = _at_least_two(example)
    state: tuple[Tensor, ...] = ()
    with eval_mode(model), torch.no_grad():
        if STREAM in model.__dict__:
            remembering = copied(model)
            stream_of(remembering).start_anew()  # a graph has one stream, in the first row
            stream_of(remembering).explicit = True
            remembering(example)  # how many classes there are, and with that the state's shape
            stream_of(model).use_cells(stream_of(remembering).cells)
            state = tuple(stream_state(remembering).values())
            classless = stream_of(model).routes is not None and stream_of(model).classes is None
            model = (_ExplicitDomains if classless else _Explicit)(remembering).eval()
        shapes = ({0: Dim("batch", min=1)}, *(None for _ in state))
        return torch.export.export(model, (example, *state), dynamic_shapes=shapes)


def to_onnx(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str], *, opset: int = 18
) -> None:
    """Write an ONNX file with a dynamic batch dimension, input `x` and, if it is one, `output`.

    Args:
        model: a converted network. After `stream_`, the tensors of `stream_state` are inputs as
            well, and `next_NAME` outputs: what to give with the next batch. Several outputs of the
            network are then `output_0` and so on.
        example: an input of any batch size; what else it measures, such as height and width, is
            fixed in the file.
        path: where to write.
        opset: 17 or newer. torch's exporter writes 18; what it cannot convert that to is refused.
    """
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"to_onnx needs {error.name}: pip install 'ttnorm[export]', or '.[export]' in a clone."
        ) from error
    newest = onnx.defs.onnx_opset_version()
    if not 17 <= opset <= newest:
        raise ValueError(f"opset is {opset}, expected 17 to {newest}, the newest that onnx knows.")
    program = _export(model, example)
    state = tuple(stream_of(model).state) if STREAM in unwrap(model).__dict__ else ()
    others = len(program.graph_signature.user_outputs) - len(state)
    names = ["output"] if others == 1 else [f"output_{index}" for index in range(others)]
    # the exporter's own notes on its deprecations, and tracebacks of conversions that it gives up
    with warnings.catch_warnings(), _silent("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program,
            (),
            input_names=["x", *state],
            output_names=[*names, *(f"next_{name}" for name in state)]
            if others == 1 or state
            else None,
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    written = exported.model.opset_imports[""]
    if written != opset:  # the exporter says so in its log only
        raise ValueError(f"opset is {opset}, and torch's exporter offers {written} instead.")
    exported.save(path, external_data=False)


@contextlib.contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Without the logs of these packages."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class _Explicit(nn.Module):
    """A network that remembers, with its memory as inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    # every name of a state is spelled out: ONNX would give what comes in as *state one name twice
    def forward(
        self,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        seen: Tensor,
        rejected: Tensor,
        # where it knows what classes do
        excess: Tensor | None = None,
        runs: Tensor | None = None,
        within: Tensor | None = None,
        compared: Tensor | None = None,
        usual: Tensor | None = None,
        usual_count: Tensor | None = None,
        # where it tells domains apart
        slot_seen: Tensor | None = None,
        looked: Tensor | None = None,
        frames: Tensor | None = None,
        frame_slot: Tensor | None = None,
        middles: Tensor | None = None,
        there: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> tuple[Any, ...]:
        given = {"mean": mean, "var": var, "count": count, "seen": seen, "rejected": rejected}
        known = {"excess": excess, "runs": runs, "within": within, "compared": compared}
        known |= {"usual": usual, "usual_count": usual_count}
        known |= {"slot_seen": slot_seen, "looked": looked, "frames": frames}
        known |= {"frame_slot": frame_slot, "middles": middles, "there": there, "reach": reach}
        given |= {name: t for name, t in known.items() if t is not None}
        stream = stream_of(self.model)
        stream.state = {name: given[name].clone() for name in stream.state}
        output = self.model(x)
        # nothing learns through a memory, whatever becomes of no_grad on the way to a graph
        return (output, *(t.detach() for t in stream.state.values()))


class _ExplicitDomains(_Explicit):
    """Where it tells domains apart and does not know what classes do."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        seen: Tensor,
        rejected: Tensor,
        slot_seen: Tensor,
        looked: Tensor,
        frames: Tensor,
        frame_slot: Tensor,
        middles: Tensor,
        there: Tensor,
        reach: Tensor,
    ) -> tuple[Any, ...]:
        domains = {"slot_seen": slot_seen, "looked": looked, "frames": frames}
        domains |= {"frame_slot": frame_slot, "middles": middles, "there": there, "reach": reach}
        return super().forward(x, mean, var, count, seen, rejected, **domains)


def _at_least_two(example: Tensor) -> Tensor:
    # torch.export takes a dimension of 1 for a constant, however dynamic it is declared
    return example if len(example) > 1 else torch.cat((example, example))
