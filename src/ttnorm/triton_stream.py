"""The GPU kernel of streams, in Triton; `kernels` decides when and how it is launched."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import mix_values


@triton.jit
def bounded(values, centre, unit, nothing, lowest, highest):
    """In units of the source; what is not a number counts as `nothing`."""
    values = (values - centre) / unit
    values = tl.where(values != values, nothing, values)
    return tl.minimum(tl.maximum(values, lowest), highest)


@triton.jit
def mix_frames(
    frame_mean_ptr, frame_var_ptr, group_ptr, count_ptr, mean_ptr, var_ptr, trust_ptr,
    source_mean_ptr, unit_ptr, out_mean_ptr, out_var_ptr, N, C, stride,
    FARTHEST: tl.constexpr, CROSS_TERM: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For BLOCK_C channels of a frame: the moments of all frames of its group, mixed with the
    group's own; see `kernels.mix_frames`."""
    blocks = tl.cdiv(C, BLOCK_C)
    frame = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    group = tl.load(group_ptr + frame)
    source_mean = tl.load(source_mean_ptr + channel, mask=inside, other=0.0)
    unit = tl.load(unit_ptr + channel, mask=inside, other=1.0)

    number = tl.zeros((), tl.float32)
    pooled = tl.zeros((BLOCK_C,), tl.float32)
    for other in range(N):
        if tl.load(group_ptr + other) == group:
            count = tl.load(count_ptr + other)
            mean = tl.load(frame_mean_ptr + other * C + channel, mask=inside, other=0.0)
            pooled += count * bounded(mean, source_mean, unit, 0.0, -FARTHEST, FARTHEST)
            number += count
    number = tl.maximum(number, 1e-12)
    pooled = pooled / number

    spread = tl.zeros((BLOCK_C,), tl.float32)
    for other in range(N):
        if tl.load(group_ptr + other) == group:
            count = tl.load(count_ptr + other)
            place = other * C + channel
            mean = tl.load(frame_mean_ptr + place, mask=inside, other=0.0)
            var = tl.load(frame_var_ptr + place, mask=inside, other=1.0)
            apart = bounded(mean, source_mean, unit, 0.0, -FARTHEST, FARTHEST) - pooled
            own = bounded(var, 0.0, unit * unit, 1.0, 0.0, FARTHEST * FARTHEST)
            spread += count * (own + apart * apart)
    spread = spread / number

    start = group * stride
    mean, var = mix_values(
        channel, inside, source_mean + pooled * unit, spread * unit * unit,
        trust_ptr + start, mean_ptr + start, var_ptr + start, CROSS_TERM,
    )  # fmt: skip
    place = frame * C + channel
    tl.store(out_mean_ptr + place, mean, mask=inside)
    tl.store(out_var_ptr + place, var, mask=inside)
