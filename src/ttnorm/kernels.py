"""Fused Triton kernels behind `functional.test_time_norm`, and the rule that picks them.

Forward: the moments of slabs, merged to those of groups, then mixing and normalising in one pass;
two reads and one write of x in all. Backward: likewise. TTNORM_KERNELS=triton in the environment
switches them on, for batches on CUDA, and with them the recording of steps as CUDA graphs.

Moments may also be given instead of computed, for statistics that come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

ENABLED = os.environ.get("TTNORM_KERNELS", "eager") == "triton"
Result = TypeVar("Result")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None

TILE = 4096  # values a program has in registers at once
SLAB = 16384  # values a program reduces, roughly
MOST_SLABS = 512  # of a group: what the merging program can hold
WARPS = 8


def usable(x: Tensor) -> bool:
    """Whether the kernels take this batch."""
    if not (x.is_cuda and ENABLED and _HAS_TRITON and x.dtype in _DTYPES and 2 <= x.dim() <= 5):
        return False
    return not torch._C._is_tracing()


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
    mean, var = moments(x, group_size) if given is None else given
    shape = (g.groups, g.channels) if group_size is not None else (g.channels,)
    mean, var = (t.float().expand(shape).contiguous() for t in (mean, var))
    y = torch.empty_like(x)
    weight, bias = _affine(weight, bias, alpha)
    per_channel = [t.contiguous() for t in (alpha, source_mean, source_var)]
    options: dict[str, Any] = {
        "AFFINE": weight is not None,
        "CROSS_TERM": cross_term,
        "RESIDUAL": residual is not None,
        "RELU": relu,
        "num_warps": WARPS,
    }
    if residual is not None:
        residual = residual.contiguous(memory_format=memory_format(x))
    tensors = (x, y, mean, var, *per_channel, weight, bias, residual)
    if g.interleaved:
        blocks = g.tile()
        tiles = _cdiv(g.units, blocks["BLOCK_M"])
        grid = (g.groups * tiles * _cdiv(g.channels, blocks["BLOCK_C"]),)
        _forward_code().normalise_interleaved[grid](
            *tensors, eps, g.across, g.units, g.units_in_all, tiles, **blocks, **options
        )
    else:
        blocks = g.row_tile()
        rows = g.samples * g.channels
        grid = (_cdiv(rows, blocks["BLOCK_R"]) * _cdiv(g.pixels, blocks["BLOCK_S"]),)
        _forward_code().normalise_rows[grid](
            *tensors, eps, rows, g.channels, g.across, g.group_size, **blocks, **options
        )
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
    sizes = (g.units, g.units_in_all, g.slab_units, g.slabs)
    options: dict[str, Any] = {"CROSS_TERM": cross_term, "num_warps": WARPS}
    if g.interleaved:
        blocks = g.tile()
        grid = (g.groups * g.slabs * _cdiv(g.channels, blocks["BLOCK_C"]),)
        _backward_code().slab_gradients_interleaved[grid](
            grad, x, total, centred, *mixed, g.across, *sizes, **blocks, **options
        )
    else:
        grid = (g.groups * g.slabs * g.channels,)
        _backward_code().slab_gradients_rows[grid](
            grad, x, total, centred, *mixed, g.channels, g.part_across, g.parts, *sizes,
            **g.slab_tile(), **options,
        )  # fmt: skip
    coefficients = x.new_empty((4, g.groups, g.channels), dtype=torch.float32)
    sums = x.new_empty((3, g.groups, g.channels), dtype=torch.float32)
    blocks = g.merge_tile()
    _backward_code().merge_gradients[(g.groups * _cdiv(g.channels, blocks["BLOCK_C"]),)](
        total, centred, *mixed, None if weight is None else weight.contiguous(), coefficients, sums,
        eps, g.channels, g.groups, g.units, g.units_in_all, g.slabs, g.per_unit,
        AFFINE=weight is not None, GIVEN=given, **blocks, **options,
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
    sizes = (g.units, g.units_in_all, g.slab_units, g.slabs)
    if g.interleaved:
        blocks = g.tile()
        grid = (g.groups * g.slabs * _cdiv(g.channels, blocks["BLOCK_C"]),)
        _forward_code().slab_moments_interleaved[grid](
            x, slab_mean, slab_m2, g.across, *sizes, FINAL=final, num_warps=WARPS, **blocks
        )
    else:
        _forward_code().slab_moments_rows[(g.groups * g.slabs * g.channels,)](
            x, slab_mean, slab_m2, g.channels, g.part_across, g.parts, *sizes,
            FINAL=final, num_warps=WARPS, **g.slab_tile(),
        )  # fmt: skip
    if not final:
        blocks = g.merge_tile()
        _forward_code().merge_slabs[(g.groups * _cdiv(g.channels, blocks["BLOCK_C"]),)](
            slab_mean, slab_m2, mean, var, g.channels, *sizes, g.per_unit,
            num_warps=WARPS, **blocks,
        )  # fmt: skip


def _input_gradient(grad: Tensor, x: Tensor, coefficients: Tensor, g: _Geometry) -> Tensor:
    out = torch.empty_like(x)
    size = g.groups * g.channels
    if g.interleaved:
        blocks = g.tile()
        tiles = _cdiv(g.units, blocks["BLOCK_M"])
        grid = (g.groups * tiles * _cdiv(g.channels, blocks["BLOCK_C"]),)
        _backward_code().input_gradient_interleaved[grid](
            grad, x, out, coefficients, g.across, g.units, g.units_in_all, tiles, size,
            num_warps=WARPS, **blocks,
        )  # fmt: skip
    else:
        blocks = g.row_tile()
        rows = g.samples * g.channels
        grid = (_cdiv(rows, blocks["BLOCK_R"]) * _cdiv(g.pixels, blocks["BLOCK_S"]),)
        _backward_code().input_gradient_rows[grid](
            grad, x, out, coefficients, rows, g.channels, g.across, g.group_size, size,
            num_warps=WARPS, **blocks,
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

    @property
    def groups(self) -> int:
        return _cdiv(self.samples, self.group_size)

    @property
    def vector(self) -> int:
        """The largest power of 2 up to 16 that divides what lies side by side in memory."""
        side_by_side = self.channels if self.interleaved else self.pixels
        return min(16, side_by_side & -side_by_side)

    @property
    def across(self) -> int:
        """What lies side by side in memory, in vectors."""
        return (self.channels if self.interleaved else self.pixels) // self.vector

    @property
    def parts(self) -> int:
        """Equal parts of a sample in rows: more than 1 where it is too long for one program."""
        parts = 1
        while not self.interleaved and self.pixels % (32 * parts) == 0:
            if self.pixels // parts <= SLAB:
                break
            parts *= 2
        return parts

    @property
    def part_across(self) -> int:
        """A part of a sample in rows, in vectors; parts are multiples of 16 unless there is one."""
        return self.pixels // self.parts // self.vector

    @property
    def per_unit(self) -> int:
        """Values of one channel in a unit: one pixel's, or those of a part of a sample."""
        return 1 if self.interleaved else self.pixels // self.parts

    @property
    def units(self) -> int:
        """Units a group."""
        return self.group_size * self.pixels // self.per_unit

    @property
    def units_in_all(self) -> int:
        return self.samples * self.pixels // self.per_unit

    @property
    def slab_units(self) -> int:
        across = self.tile()["BLOCK_C"] if self.interleaved else self.per_unit
        wanted = max(1, SLAB // across)
        return min(self.units, max(wanted, _cdiv(self.units, MOST_SLABS)))

    @property
    def slabs(self) -> int:
        """Slabs a group."""
        return _cdiv(self.units, self.slab_units)

    def tile(self) -> dict[str, int]:
        """Pixels x channels, interleaved."""
        down = min(_power_of_2(self.units), TILE // 32)
        across = min(_power_of_2(self.channels), max(64, TILE // down), TILE)
        rows = min(down, max(1, TILE // across))
        return {"BLOCK_M": rows, "BLOCK_C": across, "VEC": self.vector}

    def row_tile(self) -> dict[str, int]:
        """Rows x pixels."""
        across = min(_power_of_2(self.pixels), 1024, TILE)
        rows = _power_of_2(self.samples * self.channels)
        tile = {"BLOCK_R": min(rows, TILE // across), "BLOCK_S": across}
        return tile | {"VEC": self.vector}

    def slab_tile(self) -> dict[str, int]:
        """Parts of samples x pixels of one channel."""
        across = min(_power_of_2(self.per_unit), 1024, TILE)
        rows = min(_power_of_2(self.slab_units), TILE // across)
        return {"BLOCK_N": rows, "BLOCK_S": across, "VEC": self.vector}

    def merge_tile(self) -> dict[str, int]:
        """Slabs x channels."""
        down = _power_of_2(self.slabs)
        across = min(_power_of_2(self.channels), max(1, TILE // down), 256)
        return {"BLOCK_P": down, "BLOCK_C": across}


def _geometry(x: Tensor, group_size: int | None) -> tuple[Tensor, _Geometry]:
    """x in one of the two layouts, copied only if it is in neither, and how to cut it."""
    x = x.contiguous(memory_format=memory_format(x))
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    interleaved = x.dim() == 2 or not x.is_contiguous()
    size = min(group_size or samples, samples)
    return x, _Geometry(samples, channels, pixels, size, interleaved)


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
