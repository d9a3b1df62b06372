"""Fused Triton kernels behind `functional.test_time_norm`, and the rule that picks them.

Forward: the moments of slabs, merged to those of groups, then mixing and normalising in one pass:
two reads and one write of x in all, or a single read where a program can hold what shares its
moments. Backward: in slabs as well. Batches on CUDA take them; TTNORM_KERNELS=eager in the
environment switches them off, and with them the recording of steps as CUDA graphs.

Moments may also be given instead of computed, for statistics that come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

ENABLED = os.environ.get("TTNORM_KERNELS", "triton") != "eager"
logger = logging.getLogger("ttnorm")
Result = TypeVar("Result")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None

TILE = 2048  # values a program has in registers at once
ACROSS = 32  # of them side by side in a reduction, at most, where channels are
MAP_ACROSS = 256  # and in a pass that writes
PROGRAMS = 528  # that share a reduction, roughly: four for each of an H200's processors
WHOLE = 0  # values of one channel and group that a program may hold; 0 has all go in slabs
PART = 16384  # pixels of one channel and sample that are not divided among programs
MOST_SLABS = 512  # of a group: what the merging program can hold
WARPS = 4
STAGES = 4  # tiles that are on their way at once


def usable(x: Tensor) -> bool:
    """Whether the kernels take this batch."""
    if not (x.is_cuda and ENABLED and _HAS_TRITON and x.dtype in _DTYPES and 2 <= x.dim() <= 5):
        return False
    if x.numel() >= 2**31 or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False  # places are 32-bit numbers
    return torch.compiler.is_compiling() or _work_on(x.device)


@functools.cache
def _work_on(device: torch.device) -> bool:
    """Whether Triton works here: it needs a C compiler, and a GPU that is not too old."""
    try:
        moments(torch.zeros(1, 1, 2, 2, device=device))
    except Exception as error:
        logger.warning(
            "The fused kernels cannot be used, and PyTorch's operations are used instead: %s. "
            "TTNORM_KERNELS=eager says so beforehand.",
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
    if given is None:
        _moments(x, g, mean, var)
    if g.interleaved:
        _forward_code().normalise_interleaved[g.map_grid](
            *tensors, eps, g.across, g.units, g.units_in_all, g.tiles,
            **g.map_tile, **options, num_warps=WARPS,
        )  # fmt: skip
    else:
        _forward_code().normalise_rows[g.map_grid](
            *tensors, eps, g.rows, g.channels, g.across, g.group_size,
            **g.map_tile, **options, num_warps=WARPS,
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
    given: bool = False,
    needs_input: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of x (None where not needed), weight, bias and alpha, the last three in float32."""
    x, g = _geometry(x, group_size)
    grad = grad.to(x.dtype).contiguous(memory_format=memory_format(x))
    per_channel = [t.contiguous() for t in (alpha, source_mean, source_var)]
    mixed = (batch_mean, batch_var, *per_channel)
    total, centred = (x.new_empty((g.groups * g.slabs, g.channels), dtype=torch.float32)
                      for _ in range(2))  # fmt: skip
    sizes = (g.units, g.units_in_all, g.slabs)
    options: dict[str, Any] = {"CROSS_TERM": cross_term, "num_warps": WARPS}
    if g.interleaved:
        _backward_code().slab_gradients_interleaved[g.reduce_grid](
            grad, x, total, centred, *mixed, g.across, *sizes, STAGES=STAGES, **g.reduce_tile,
            **options,
        )  # fmt: skip
    elif g.by_rows:
        _backward_code().row_gradients[g.reduce_grid](
            grad, x, total, centred, *mixed, g.rows, g.channels, g.group_size, g.part_across,
            STAGES=STAGES, **g.reduce_tile, **options,
        )  # fmt: skip
    else:
        _backward_code().slab_gradients_rows[g.reduce_grid](
            grad, x, total, centred, *mixed, g.channels, g.part_across, g.parts, *sizes,
            STAGES=STAGES, **g.reduce_tile, **options,
        )  # fmt: skip
    coefficients = x.new_empty((4, g.groups, g.channels), dtype=torch.float32)
    sums = x.new_empty((3, g.groups, g.channels), dtype=torch.float32)
    _backward_code().merge_gradients[g.merge_grid](
        total, centred, *mixed, None if weight is None else weight.contiguous(), coefficients, sums,
        eps, g.channels, g.groups, g.units, g.units_in_all, g.tile_units, g.slabs, g.per_unit,
        AFFINE=weight is not None, GIVEN=given, **g.merge_tile, **options,
    )  # fmt: skip
    grad_x = _input_gradient(grad, x, coefficients, g) if needs_input else None
    grad_weight, grad_bias, grad_alpha = sums.sum(1) if g.groups > 1 else sums[:, 0]
    return grad_x, grad_weight, grad_bias, grad_alpha


def _moments(x: Tensor, g: _Geometry, mean: Tensor, var: Tensor) -> None:
    final = g.slabs == 1  # then there is nothing to merge
    if final:
        slab_mean, slab_m2 = mean, var
    else:
        shape = (g.groups * g.slabs, g.channels)
        slab_mean, slab_m2 = (mean.new_empty(shape) for _ in range(2))
    sizes = (g.units, g.units_in_all, g.slabs)
    options: dict[str, Any] = {"FINAL": final, "STAGES": STAGES, "num_warps": WARPS}
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
            g.slabs, g.per_unit, num_warps=WARPS, **g.merge_tile,
        )  # fmt: skip


def _input_gradient(grad: Tensor, x: Tensor, coefficients: Tensor, g: _Geometry) -> Tensor:
    out = torch.empty_like(x)
    size = g.groups * g.channels
    if g.interleaved:
        _backward_code().input_gradient_interleaved[g.map_grid](
            grad, x, out, coefficients, g.across, g.units, g.units_in_all, g.tiles, size,
            num_warps=WARPS, **g.map_tile,
        )  # fmt: skip
    else:
        _backward_code().input_gradient_rows[g.map_grid](
            grad, x, out, coefficients, g.rows, g.channels, g.across, g.group_size, size,
            num_warps=WARPS, **g.map_tile,
        )  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """How a batch is cut: see the head of `triton_forward` for groups, slabs and units."""

    samples: int
    channels: int
    pixels: int
    group_size: int
    interleaved: bool

    @cached_property
    def groups(self) -> int:
        return _cdiv(self.samples, self.group_size)

    @cached_property
    def rows(self) -> int:
        return self.samples * self.channels

    @cached_property
    def vector(self) -> int:
        """The largest power of 2 up to 16 that divides what lies side by side in memory."""
        side_by_side = self.channels if self.interleaved else self.pixels
        return min(16, side_by_side & -side_by_side)

    @cached_property
    def across(self) -> int:
        """What lies side by side in memory, in vectors."""
        return (self.channels if self.interleaved else self.pixels) // self.vector

    @cached_property
    def parts(self) -> int:
        """Equal parts of a sample in rows: more than 1 where it is too long for one program."""
        parts = 1
        while not self.interleaved and self.pixels % (32 * parts) == 0:
            if self.pixels // parts <= PART:
                break
            parts *= 2
        return parts

    @cached_property
    def part_across(self) -> int:
        """A part of a sample in rows, in vectors; parts are multiples of 16 unless there is one."""
        return self.pixels // self.parts // self.vector

    @cached_property
    def per_unit(self) -> int:
        """Values of one channel in a unit: one pixel's, or those of a part of a sample."""
        return 1 if self.interleaved else self.pixels // self.parts

    @cached_property
    def units(self) -> int:
        """Units a group."""
        return self.group_size * self.pixels // self.per_unit

    @cached_property
    def units_in_all(self) -> int:
        return self.samples * self.pixels // self.per_unit

    @cached_property
    def whole(self) -> bool:
        """Whether a channel of a group fits into a program, so that x need be read but once."""
        size = _power_of_2(self.group_size) * _power_of_2(self.pixels)
        return not self.interleaved and size <= WHOLE

    @cached_property
    def whole_tile(self) -> dict[str, int]:
        """Channels of groups x samples x pixels."""
        down, across = _power_of_2(self.group_size), _power_of_2(self.pixels)
        channels = max(1, min(TILE // (down * across), _power_of_2(self.groups * self.channels)))
        tile = {"BLOCK_K": channels, "BLOCK_N": down, "BLOCK_S": across, "VEC": self.vector}
        return tile | {"num_warps": WARPS if channels * down * across <= 2 * TILE else 2 * WARPS}

    @cached_property
    def whole_grid(self) -> tuple[int]:
        return (_cdiv(self.groups * self.channels, self.whole_tile["BLOCK_K"]),)

    @cached_property
    def by_rows(self) -> bool:
        """Whether programs reduce rows, each a slab of its own: a group would not fill them."""
        whole = not self.interleaved and self.parts == 1
        return whole and self.units < TILE // _snug(self.pixels)

    @cached_property
    def tile_units(self) -> int:
        return 1 if self.by_rows else self.reduce_tile["BLOCK_M" if self.interleaved else "BLOCK_N"]

    @cached_property
    def slabs(self) -> int:
        """Slabs a group: as many as share the work among `PROGRAMS`, or one for every row."""
        if self.by_rows:
            return self.units
        wanted = min(PROGRAMS // (self.groups * self._programs_across), MOST_SLABS)
        return max(1, min(wanted, _cdiv(self.units, self.tile_units)))

    @cached_property
    def reduce_tile(self) -> dict[str, int]:
        """Pixels x channels, or parts of samples x pixels of one channel."""
        if self.interleaved:
            return self._interleaved_tile(ACROSS)
        across = _snug(self.per_unit)
        units = self.rows if self.by_rows else self.units
        rows = min(_power_of_2(units), max(1, TILE // across))
        return {"BLOCK_N": rows, "BLOCK_S": across, "VEC": self.vector}

    @cached_property
    def reduce_grid(self) -> tuple[int]:
        if self.by_rows:
            return (_cdiv(self.rows, self.reduce_tile["BLOCK_N"]),)
        return (self.groups * self.slabs * self._programs_across,)

    @cached_property
    def map_tile(self) -> dict[str, int]:
        """Pixels x channels, or rows x pixels."""
        if self.interleaved:
            return self._interleaved_tile(MAP_ACROSS)
        across = _snug(self.pixels)
        rows = min(_power_of_2(self.rows), max(1, TILE // across))
        return {"BLOCK_R": rows, "BLOCK_S": across, "VEC": self.vector}

    @cached_property
    def map_grid(self) -> tuple[int]:
        if self.interleaved:
            return (self.groups * self.tiles * _cdiv(self.channels, self.map_tile["BLOCK_C"]),)
        tile = self.map_tile
        return (_cdiv(self.rows, tile["BLOCK_R"]) * _cdiv(self.pixels, tile["BLOCK_S"]),)

    @cached_property
    def tiles(self) -> int:
        """What programs that write an interleaved group divide its pixels into."""
        return _cdiv(self.units, self.map_tile["BLOCK_M"])

    @cached_property
    def merge_tile(self) -> dict[str, int]:
        """Slabs x channels."""
        down = _power_of_2(self.slabs)
        across = min(_power_of_2(self.channels), max(1, 4096 // down), 256)
        return {"BLOCK_P": down, "BLOCK_C": across}

    @cached_property
    def merge_grid(self) -> tuple[int]:
        return (self.groups * _cdiv(self.channels, self.merge_tile["BLOCK_C"]),)

    @cached_property
    def _programs_across(self) -> int:
        """Programs side by side: for blocks of channels, or one for every channel."""
        if self.interleaved:
            return _cdiv(self.channels, self.reduce_tile["BLOCK_C"])
        return self.channels

    def _interleaved_tile(self, most: int) -> dict[str, int]:
        """Pixels x channels; few pixels leave room for more channels."""
        pixels = _power_of_2(self.units)
        across = min(_power_of_2(self.channels), max(most, TILE // pixels), TILE)
        return {"BLOCK_M": min(pixels, TILE // across), "BLOCK_C": across, "VEC": self.vector}


_cut = functools.lru_cache(maxsize=4096)(_Geometry)


def _geometry(x: Tensor, group_size: int | None) -> tuple[Tensor, _Geometry]:
    """x in one of the two layouts, copied only if it is in neither, and how to cut it."""
    x = x.contiguous(memory_format=memory_format(x))
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    interleaved = pixels == 1 or not x.is_contiguous()
    size = min(group_size or samples, samples)
    return x, _cut(samples, channels, pixels, size, interleaved)


def _snug(n: int) -> int:
    """A power of 2 whose multiple covers n with little to spare, as large as goes."""
    sizes = [2**k for k in range(6, 11) if 2**k <= TILE and 2**k <= _power_of_2(n)]
    sizes = sizes or [min(_power_of_2(n), TILE)]
    waste = {size: _cdiv(n, size) * size / n for size in sizes}
    snug = [size for size in sizes if waste[size] <= 1.15]
    return max(snug or [size for size in sizes if waste[size] == min(waste.values())])


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


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
