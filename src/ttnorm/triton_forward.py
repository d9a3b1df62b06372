"""The GPU kernels of the forward, in Triton; `kernels` decides when and how they are launched.

A batch lies in memory in one of two ways. In rows (contiguous): the S pixels of one channel of one
sample side by side. Interleaved (channels last, and (N, C)): the C channels of one pixel side by
side. Each pass has a kernel for either.

Statistics are reduced in slabs: a slab is a stretch of one group, R units long, and a unit is a
pixel (interleaved) or one of the K equal parts of a sample, mostly the whole (rows). Each slab's
moments are exact for the slab, and slabs are merged by the law of total variance, so no precision
is lost however many values there are.

Everything is computed in float32. Names: C channels, S pixels a sample, B samples a group (all of
them without groups), P slabs a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(
    channels,
    place,
    inside,
    batch_mean_ptr,
    batch_var_ptr,
    alpha_ptr,
    source_mean_ptr,
    source_var_ptr,
    CROSS_TERM: tl.constexpr,
):
    """Eq. 2 for some channels; `place` is where their group's moments are."""
    alpha = tl.load(alpha_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    source_mean = tl.load(source_mean_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    source_var = tl.load(source_var_ptr + channels, mask=inside, other=1.0).to(tl.float32)
    batch_mean = tl.load(batch_mean_ptr + place, mask=inside, other=0.0)
    batch_var = tl.load(batch_var_ptr + place, mask=inside, other=1.0)
    mean = alpha * batch_mean + (1 - alpha) * source_mean
    var = alpha * batch_var + (1 - alpha) * source_var
    if CROSS_TERM:
        shift = batch_mean - source_mean
        var += alpha * (1 - alpha) * shift * shift
    # 0 * NaN is NaN: a channel that never looks at the batch must not see a broken sample
    mean = tl.where(alpha == 0, source_mean, mean)
    var = tl.where(alpha == 0, source_var, var)
    return mean, var


@triton.jit
def units_of_group(group, units, units_in_all):
    """How many units a group has; the last one may have fewer."""
    return tl.minimum(units, units_in_all - group * units)


@triton.jit
def unit_in_rows(unit, channel, C, K):
    """Where a unit's pixels of one channel begin, in units: a sample's K parts lie side by side."""
    return (unit // K * C + channel) * K + unit % K


@triton.jit
def slab_moments_rows(
    x_ptr, mean_ptr, m2_ptr, C, L_over_vec, K, units, units_in_all, R, P,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, FINAL: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of one channel in one slab (the variance, if FINAL)."""
    L = L_over_vec * VEC  # a unit's pixels; so that the compiler knows what divides them
    pid = tl.program_id(0).to(tl.int64)
    channel, slab = pid % C, pid // C
    group = slab // P
    begin = group * units + (slab % P) * R
    end = tl.minimum(begin + R, group * units + units_of_group(group, units, units_in_all))
    row, pixel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_S)[None, :]

    # Deviations are summed from the mean of the first tile, which lies near the slab's.
    inside = (begin + row < end) & (pixel < L)
    first = tl.load(
        x_ptr + unit_in_rows(begin + row, channel, C, K) * L + pixel, mask=inside, other=0.0
    ).to(tl.float32)
    in_tile = tl.minimum(end - begin, BLOCK_N) * tl.minimum(L, BLOCK_S)
    pivot = tl.sum(tl.sum(first, 1), 0) / tl.maximum(in_tile, 1).to(tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    squares = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for n in range(begin, end, BLOCK_N):
        for s in range(0, L, BLOCK_S):
            inside = (n + row < end) & (s + pixel < L)
            place = unit_in_rows(n + row, channel, C, K) * L + s + pixel
            x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
            deviation = tl.where(inside, x - pivot, 0.0)
            total += deviation
            squares += deviation * deviation
    count = tl.maximum((end - begin) * L, 1).to(tl.float32)  # 0 past the end of a ragged group
    offset = tl.sum(tl.sum(total, 1), 0) / count
    m2 = tl.sum(tl.sum(squares, 1), 0) - count * offset * offset
    m2 = tl.where(m2 < 0, 0.0, m2)  # by rounding; NaN stays NaN
    tl.store(mean_ptr + slab * C + channel, pivot + offset)
    tl.store(m2_ptr + slab * C + channel, m2 / count if FINAL else m2)


@triton.jit
def slab_moments_interleaved(
    x_ptr, mean_ptr, m2_ptr, C_over_vec, units, units_in_all, R, P,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, FINAL: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of BLOCK_C channels in one slab."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    slab = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group = slab // P
    begin = group * units + (slab % P) * R
    end = tl.minimum(begin + R, group * units + units_of_group(group, units, units_in_all))
    row = tl.arange(0, BLOCK_M)[:, None]
    column = channel[None, :]

    inside = (begin + row < end) & (column < C)
    first = tl.load(x_ptr + (begin + row) * C + column, mask=inside, other=0.0).to(tl.float32)
    in_tile = tl.minimum(end - begin, BLOCK_M)
    pivot = tl.sum(first, 0) / tl.maximum(in_tile, 1).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for m in range(begin, end, BLOCK_M):
        inside = (m + row < end) & (column < C)
        x = tl.load(x_ptr + (m + row) * C + column, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, x - pivot[None, :], 0.0)
        total += deviation
        squares += deviation * deviation
    count = tl.maximum(end - begin, 1).to(tl.float32)
    offset = tl.sum(total, 0) / count
    m2 = tl.sum(squares, 0) - count * offset * offset
    m2 = tl.where(m2 < 0, 0.0, m2)
    tl.store(mean_ptr + slab * C + channel, pivot + offset, mask=channel < C)
    tl.store(m2_ptr + slab * C + channel, m2 / count if FINAL else m2, mask=channel < C)


@triton.jit
def merge_slabs(
    slab_mean_ptr, slab_m2_ptr, mean_ptr, var_ptr, C, units, units_in_all, R, P, per_unit,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moments of a group from those of its slabs."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    group = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    slab = tl.arange(0, BLOCK_P)
    here = units_of_group(group, units, units_in_all)
    in_slab = tl.minimum(tl.maximum(here - slab * R, 0), R)
    count = (in_slab * per_unit).to(tl.float32)[:, None]
    # a ragged group may have empty slabs at its end; their moments are not even read
    inside = (in_slab > 0)[:, None] & (slab < P)[:, None] & (channel < C)[None, :]
    count = tl.where((slab < P)[:, None], count, 0.0)
    place = (group * P + slab)[:, None] * C + channel[None, :]
    means = tl.load(slab_mean_ptr + place, mask=inside, other=0.0)
    m2 = tl.load(slab_m2_ptr + place, mask=inside, other=0.0)
    total = (here * per_unit).to(tl.float32)
    # from the first slab's mean on, so that large means do not swallow small differences
    pivot = tl.load(slab_mean_ptr + group * P * C + channel, mask=channel < C, other=0.0)
    mean = pivot + tl.sum(count * tl.where(inside, means - pivot[None, :], 0.0), 0) / total
    distance = tl.where(inside, means - mean[None, :], 0.0)
    var = tl.sum(m2 + count * distance * distance, 0) / total
    tl.store(mean_ptr + group * C + channel, mean, mask=channel < C)
    tl.store(var_ptr + group * C + channel, var, mask=channel < C)


@triton.jit
def normalise_rows(
    x_ptr, y_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr,
    weight_ptr, bias_ptr, residual_ptr, eps, rows, C, S_over_vec, B,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Mix, then normalise BLOCK_R rows of BLOCK_S pixels."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(S, BLOCK_S)
    row = (pid // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    pixel = (pid % blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    channel, group = row % C, row // C // B
    there = row < rows
    mean, var = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    scale = 1 / tl.sqrt(var + eps)
    inside = there[:, None] & (pixel < S)[None, :]
    place = row[:, None] * S + pixel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * scale[:, None] + bias[:, None]
    else:
        y = (x - mean[:, None]) * scale[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and NaN stays NaN, as in torch
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalise_interleaved(
    x_ptr, y_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr,
    weight_ptr, bias_ptr, residual_ptr, eps, C_over_vec, units, units_in_all, tiles,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Mix, then normalise BLOCK_M pixels of one group and BLOCK_C channels; `tiles` a group."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, tile = pid // blocks // tiles, pid // blocks % tiles
    there = channel < C
    mean, var = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    scale = 1 / tl.sqrt(var + eps)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (local < units_of_group(group, units, units_in_all))[:, None] & there[None, :]
    place = (group * units + local)[:, None] * C + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    else:
        y = (x - mean[None, :]) * scale[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and NaN stays NaN, as in torch
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
