"""Fused Triton kernels behind `functional.test_time_norm`, and the rule that picks them.

Forward: the moments of slabs, merged to those of groups, then mixing and normalising in one pass:
two reads and one write of x in all, or a single read where a program can hold what shares its
moments, or a single launch where the second read finds it in the cache. Backward: in slabs as
well. Batches on CUDA take them; TTNORM_KERNELS=eager in the environment switches them off, and with
them the recording of steps as CUDA graphs.

Moments may also be given instead of computed, for statistics that come from elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import cutting
from .cutting import Cut

ENABLED = os.environ.get("TTNORM_KERNELS", "triton") != "eager"
logger = logging.getLogger("ttnorm")
Result = TypeVar("Result")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None

STAGES = 4  # tiles that are on their way at once


def usable(x: Tensor) -> bool:
    """Whether the kernels take this batch."""
    if not (x.is_cuda and ENABLED and _HAS_TRITON and x.dtype in _DTYPES and 2 <= x.dim() <= 5):
        return False
    if x.numel() >= 2**31 or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False  # places are 32-bit numbers
    if torch.compiler.is_compiling():
        return True
    return not torch._C._are_functorch_transforms_active() and _work_on(x.device)


@functools.cache
def _work_on(device: torch.device) -> bool:
    """Whether Triton works here: it needs a C compiler, and a GPU that is not too old."""
    try:
        moments(torch.zeros(1, 1, 2, 2, device=device))
    except Exception as error:
        logger.warning(
            "The fused kernels cannot be used, and PyTorch's operations are used instead: %s. "
            "TTNORM_KERNELS=eager in the environment chooses that without a warning.",
            error,
        )
        return False
    return True


def _on_its_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """Launch where the first tensor is, whatever GPU is the current one."""

    @functools.wraps(function)
    def launch(first: Tensor, *args: Any, **kwargs: Any) -> Result:
        with torch.cuda.device_of(first):
            return function(first, *args, **kwargs)

    return launch


@_on_its_device
def moments(x: Tensor, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance in float32: (C,), or (groups, C) with a group size."""
    x, g = _geometry(x, group_size)
    mean, var = (x.new_empty((g.groups, g.channels), dtype=torch.float32) for _ in range(2))
    _moments(x, g, mean, var)
    return (mean, var) if group_size is not None else (mean[0], var[0])


@_on_its_device
def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    eps: float,
    group_size: int | None,
    cross_term: bool,
    given: tuple[Tensor, Tensor] | None = None,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 2: the output, and the moments that were mixed in.

    Args:
        given: the batch's mean and variance, (C,) or (groups, C), instead of x's own.
        residual: of x's shape, added to the output in the same pass. There is no backward for it,
            nor for relu.
        relu: whether to cut the output off at 0, after that.
    """
    x, g = _geometry(x, group_size)
    y = torch.empty_like(x)
    shape = (g.groups, g.channels) if group_size is not None else (g.channels,)
    if given is None:
        mean, var = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    else:
        mean, var = (t.float().expand(shape).contiguous() for t in given)
    weight, bias = _affine(weight, bias, alpha)
    per_channel = [t.contiguous() for t in (alpha, source_mean, source_var)]
    options: dict[str, Any] = {
        "AFFINE": weight is not None,
        "CROSS_TERM": cross_term,
        "RESIDUAL": residual is not None,
        "RELU": relu,
    }
    if residual is not None:
        residual = residual.contiguous(memory_format=memory_format(x))
    tensors = (x, y, mean, var, *per_channel, weight, bias, residual)
    if given is None and g.whole:
        _forward_code().forward_whole[g.whole_grid](
            *tensors, eps, g.samples, g.channels, g.across, g.group_size, **g.whole_tile, **options
        )
        return y, mean, var
    if given is None and g.again:
        _forward_code().forward_again[g.groups * g.channels,](
            *tensors, eps, g.samples, g.channels, g.across, g.group_size,
            STAGES=STAGES, **g.again_tile(x.element_size()), **options, num_warps=cutting.WARPS,
        )  # fmt: skip
        return y, mean, var
    if given is None:
        _moments(x, g, mean, var)
    if g.interleaved:
        _forward_code().normalise_interleaved[g.map_grid](
            *tensors, eps, g.across, g.units, g.units_in_all, g.tiles,
            **g.map_tile, **options, num_warps=cutting.WARPS,
        )  # fmt: skip
    else:
        _forward_code().normalise_rows[g.map_grid](
            *tensors, eps, g.rows, g.channels, g.across, g.group_size,
            **g.map_tile, **options, num_warps=cutting.WARPS,
        )  # fmt: skip
    return y, mean, var


@_on_its_device
def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    batch_mean: Tensor,
    batch_var: Tensor,
    eps: float,
    group_size: int | None,
    cross_term: bool,
    *,
    needs_input: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of x (None where not needed), weight, bias and alpha, the last three in float32."""
    x, g = _geometry(x, group_size)
    grad = grad.to(x.dtype).contiguous(memory_format=memory_format(x))
    per_channel = [t.contiguous() for t in (alpha, source_mean, source_var)]
    mixed = (batch_mean, batch_var, *per_channel)
    weight = None if weight is None else weight.contiguous()
    sums = x.new_empty((3, g.groups, g.channels), dtype=torch.float32)
    options: dict[str, Any] = {"AFFINE": weight is not None, "CROSS_TERM": cross_term,
                               "num_warps": cutting.WARPS}  # fmt: skip
    if g.again:
        grad_x = torch.empty_like(x) if needs_input else None
        _backward_code().backward_again[g.groups * g.channels,](
            grad, x, grad_x, *mixed, weight, sums, eps, g.samples, g.channels, g.across,
            g.group_size, g.groups, INPUT=needs_input, STAGES=STAGES,
            **g.again_tile(x.element_size()), **options,
        )  # fmt: skip
    else:
        coefficients = _gradients_of_slabs(grad, x, g, mixed, weight, sums, eps, options)
        grad_x = _input_gradient(grad, x, coefficients, g) if needs_input else None
    grad_weight, grad_bias, grad_alpha = sums.sum(1) if g.groups > 1 else sums[:, 0]
    return grad_x, grad_weight, grad_bias, grad_alpha


@_on_its_device
def mix_frames(
    frame_mean: Tensor,
    frame_var: Tensor,
    group: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    trust: Tensor,
    source_mean: Tensor,
    unit: Tensor,
    *,
    farthest: float,
    cross_term: bool,
) -> tuple[Tensor, Tensor]:
    """What every frame of a batch is normalised with, (N, C), where groups of frames share moments.

    As `pooling.in_units` and `cell_moments` of the frames, mixed in with `trust`.

    Args:
        frame_mean, frame_var: moments of every frame, (N, C).
        group: of every frame, (N,).
        counts: 1, or 0 for a frame that does not count, (N,).
        mean, var, trust: of every group, (groups, C); rows may be apart.
        source_mean, unit: of the source: its mean and standard deviation, (C,).
        farthest: units away from the source that a frame's moments count as, at most.
    """
    samples, channels = frame_mean.shape
    out = torch.empty_like(frame_mean), torch.empty_like(frame_var)
    mean, var, trust = _with_common_stride(mean, var, trust)
    group = group.contiguous()  # of frames that share one it may be one number that stands for many
    block = min(128, 1 << (channels - 1).bit_length())
    _stream_code().mix_frames[samples * -(-channels // block),](
        frame_mean, frame_var, group, counts, mean, var, trust,
        source_mean, unit, *out, samples, channels, mean.stride(0),
        FARTHEST=farthest, CROSS_TERM=cross_term, BLOCK_C=block, num_warps=1,
    )  # fmt: skip
    return out


def _with_common_stride(*rows: Tensor) -> Sequence[Tensor]:
    """Rows that lie apart in the same way, with their values side by side."""
    if len({t.stride(0) for t in rows}) == 1 and all(t.stride(1) == 1 for t in rows):
        return rows
    return [t.contiguous() for t in rows]


def _gradients_of_slabs(
    grad: Tensor,
    x: Tensor,
    g: Cut,
    mixed: tuple[Tensor, ...],
    weight: Tensor | None,
    sums: Tensor,
    eps: float,
    options: dict[str, Any],
) -> Tensor:
    """Fills `sums` with the gradients of weight, bias and alpha; the rest is x's, as a map."""
    total, centred = (x.new_empty((g.groups * g.slabs, g.channels), dtype=torch.float32)
                      for _ in range(2))  # fmt: skip
    sizes = (g.units, g.units_in_all, g.slabs)
    here: dict[str, Any] = {"STAGES": STAGES, "CROSS_TERM": options["CROSS_TERM"],
                            "num_warps": cutting.WARPS}  # fmt: skip
    if g.interleaved:
        _backward_code().slab_gradients_interleaved[g.reduce_grid](
            grad, x, total, centred, *mixed, g.across, *sizes, **g.reduce_tile, **here
        )
    elif g.by_rows:
        _backward_code().row_gradients[g.reduce_grid](
            grad, x, total, centred, *mixed, g.rows, g.channels, g.group_size, g.part_across,
            **g.reduce_tile, **here,
        )  # fmt: skip
    else:
        _backward_code().slab_gradients_rows[g.reduce_grid](
            grad, x, total, centred, *mixed, g.channels, g.part_across, g.parts, *sizes,
            **g.reduce_tile, **here,
        )  # fmt: skip
    coefficients = x.new_empty((4, g.groups, g.channels), dtype=torch.float32)
    _backward_code().merge_gradients[g.merge_grid](
        total, centred, *mixed, weight, coefficients, sums, eps, g.channels, g.groups, g.units,
        g.units_in_all, g.tile_units, g.slabs, g.per_unit, **g.merge_tile, **options,
    )  # fmt: skip
    return coefficients


def _moments(x: Tensor, g: Cut, mean: Tensor, var: Tensor) -> None:
    final = g.slabs == 1  # then there is nothing to merge
    if final:
        slab_mean, slab_m2 = mean, var
    else:
        shape = (g.groups * g.slabs, g.channels)
        slab_mean, slab_m2 = (mean.new_empty(shape) for _ in range(2))
    sizes = (g.units, g.units_in_all, g.slabs)
    options: dict[str, Any] = {"FINAL": final, "STAGES": STAGES, "num_warps": cutting.WARPS}
    if g.interleaved:
        _forward_code().slab_moments_interleaved[g.reduce_grid](
            x, slab_mean, slab_m2, g.across, *sizes, **g.reduce_tile, **options
        )
    elif g.by_rows:
        _forward_code().row_moments[g.reduce_grid](
            x, slab_mean, slab_m2, g.rows, g.part_across, **g.reduce_tile, **options
        )
    else:
        _forward_code().slab_moments_rows[g.reduce_grid](
            x, slab_mean, slab_m2, g.channels, g.part_across, g.parts, *sizes,
            **g.reduce_tile, **options,
        )  # fmt: skip
    if not final:
        _forward_code().merge_slabs[g.merge_grid](
            slab_mean, slab_m2, mean, var, g.channels, g.units, g.units_in_all, g.tile_units,
            g.slabs, g.per_unit, num_warps=cutting.WARPS, **g.merge_tile,
        )  # fmt: skip


def _input_gradient(grad: Tensor, x: Tensor, coefficients: Tensor, g: Cut) -> Tensor:
    out = torch.empty_like(x)
    size = g.groups * g.channels
    if g.interleaved:
        _backward_code().input_gradient_interleaved[g.map_grid](
            grad, x, out, coefficients, g.across, g.units, g.units_in_all, g.tiles, size,
            num_warps=cutting.WARPS, **g.map_tile,
        )  # fmt: skip
    else:
        _backward_code().input_gradient_rows[g.map_grid](
            grad, x, out, coefficients, g.rows, g.channels, g.across, g.group_size, size,
            num_warps=cutting.WARPS, **g.map_tile,
        )  # fmt: skip
    return out


def _geometry(x: Tensor, group_size: int | None) -> tuple[Tensor, Cut]:
    """x in one of the two layouts, copied only if it is in neither, and how to cut it."""
    x = x.contiguous(memory_format=memory_format(x))
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    interleaved = pixels == 1 or not x.is_contiguous()
    size = min(group_size or samples, samples)
    return x, cutting.cut(samples, channels, pixels, size, interleaved)


def memory_format(x: Tensor) -> torch.memory_format:
    """Channels last if x is, contiguous otherwise."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last and not x.is_contiguous() and x.is_contiguous(memory_format=channels_last):
        return channels_last
    return torch.contiguous_format


def _affine(
    weight: Tensor | None, bias: Tensor | None, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Both or neither."""
    if weight is None and bias is None:
        return None, None
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return weight.contiguous(), bias.contiguous()


# Imported on use: Triton takes a while, and needs to be there.
def _forward_code() -> Any:
    from . import triton_forward

    return triton_forward


def _backward_code() -> Any:
    from . import triton_backward

    return triton_backward


def _stream_code() -> Any:
    from . import triton_stream

    return triton_stream
