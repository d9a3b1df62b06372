"""The GPU kernels of the forward, in Triton; `kernels` decides when and how they are launched.

A batch lies in memory in one of two ways. In rows (contiguous): the S pixels of one channel of one
sample side by side. Interleaved (channels last, and (N, C)): the C channels of one pixel side by
side. Each pass has a kernel for either.

Statistics are reduced in slabs. A unit is a pixel (interleaved) or one of the K equal parts of a
sample, mostly the whole (rows); every T units of a group are a tile, and every P-th tile belongs to
the same slab, so that all programs together go through memory from its beginning to its end. Each
slab's moments are exact for the slab, and slabs are merged by the law of total variance, so no
precision is lost however many values there are.

Everything is computed in float32. Names: C channels, S pixels a sample, B samples a group (all of
them without groups), P slabs a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_values(
    channels,
    inside,
    batch_mean,
    batch_var,
    alpha_ptr,
    source_mean_ptr,
    source_var_ptr,
    CROSS_TERM: tl.constexpr,
):
    """Eq. 2 for some channels."""
    alpha = tl.load(alpha_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    source_mean = tl.load(source_mean_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    source_var = tl.load(source_var_ptr + channels, mask=inside, other=1.0).to(tl.float32)
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
    batch_mean = tl.load(batch_mean_ptr + place, mask=inside, other=0.0)
    batch_var = tl.load(batch_var_ptr + place, mask=inside, other=1.0)
    return mix_values(
        channels, inside, batch_mean, batch_var, alpha_ptr, source_mean_ptr, source_var_ptr,
        CROSS_TERM,
    )  # fmt: skip


@triton.jit
def units_of_group(group, units, units_in_all):
    """How many units a group has; the last one may have fewer."""
    return tl.minimum(units, units_in_all - group * units)


@triton.jit
def units_of_slab(slab, here, T, P):
    """How many of a group's `here` units belong to one of its slabs."""
    whole = here // T
    return tl.cdiv(tl.maximum(whole - slab, 0), P) * T + tl.where(whole % P == slab, here % T, 0)


@triton.jit
def unit_in_rows(unit, channel, C, K):
    """Where a unit's pixels of one channel begin, in units: a sample's K parts lie side by side."""
    return ((unit // K) * C + channel) * K + unit % K


@triton.jit
def merge_lanes(count, pivot, total, squares, values, AXIS: tl.constexpr):
    """Mean and sum of squared deviations along an axis, of `values` values that lanes have summed:
    from their counts, first values, and sums of deviations from these and of the squares."""
    offset = total / tl.maximum(count, 1.0)
    mean = pivot + offset
    m2 = squares - total * offset
    m2 = tl.where(m2 < 0, 0.0, m2)  # by rounding; NaN stays NaN
    # about a rough mean, so that large means do not swallow small differences
    rough = tl.sum(count * mean, AXIS, keep_dims=True) / values
    distance = mean - rough
    first = tl.sum(count * distance, AXIS, keep_dims=True)
    second = tl.sum(m2 + count * distance * distance, AXIS, keep_dims=True)
    m2 = second - first * first / values
    return rough + first / values, tl.where(m2 < 0, 0.0, m2)


@triton.jit
def row_moments(
    x_ptr, mean_ptr, m2_ptr, rows, L_over_vec,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, FINAL: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of BLOCK_N rows (the variance, if FINAL): slabs of one
    unit, where groups are too small to fill a program."""
    L = L_over_vec * VEC  # a unit's pixels; so that the compiler knows what divides them
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    pixel = tl.arange(0, BLOCK_S)[None, :]

    # A lane sums deviations from its first value: near the mean, and no other lane is asked.
    inside = (row < rows) & (pixel < L)
    pivot = tl.load(x_ptr + row * L + pixel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    squares = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for s in tl.range(BLOCK_S, L, BLOCK_S, num_stages=STAGES):
        inside = (row < rows) & (s + pixel < L)
        x = tl.load(x_ptr + row * L + s + pixel, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, x - pivot, 0.0)
        total += deviation
        squares += deviation * deviation
    count = tl.cdiv(tl.maximum(L - pixel, 0), BLOCK_S).to(tl.float32)
    values = L.to(tl.float32)
    mean, m2 = merge_lanes(count, pivot, total, squares, values, 1)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(m2_ptr + row, m2 / values if FINAL else m2, mask=row < rows)


@triton.jit
def moments_in_rows(
    x_ptr, channel, group, slab, C, L, K, units, here, P,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of one channel in one slab, and of how many values."""
    row = slab * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    pixel = tl.arange(0, BLOCK_S)[None, :]

    place = unit_in_rows(group * units + row, channel, C, K) * L + pixel
    inside = (row < here) & (pixel < L)
    pivot = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    squares = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    across = tl.cdiv(L, BLOCK_S)
    tiles = tl.cdiv(tl.maximum(here - slab * BLOCK_N, 0), P * BLOCK_N)
    for tile in tl.range(1, tiles * across, num_stages=STAGES):
        n, s = row + tile // across * (P * BLOCK_N), tile % across * BLOCK_S + pixel
        inside = (n < here) & (s < L)
        place = unit_in_rows(group * units + n, channel, C, K) * L + s
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, x - pivot, 0.0)
        total += deviation
        squares += deviation * deviation
    down = tl.cdiv(tl.maximum(here - row, 0), P * BLOCK_N)
    count = (down * tl.cdiv(tl.maximum(L - pixel, 0), BLOCK_S)).to(tl.float32)
    in_row = (down * L).to(tl.float32)
    mean, m2 = merge_lanes(count, pivot, total, squares, tl.maximum(in_row, 1.0), 1)
    values = tl.maximum(units_of_slab(slab, here, BLOCK_N, P) * L, 1).to(tl.float32)
    mean, m2 = merge_lanes(in_row, mean, tl.zeros((BLOCK_N, 1), tl.float32), m2, values, 0)
    return mean, m2, values


@triton.jit
def slab_moments_rows(
    x_ptr, mean_ptr, m2_ptr, C, L_over_vec, K, units, units_in_all, P,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, FINAL: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of one channel in one slab (the variance, if FINAL)."""
    L = L_over_vec * VEC
    pid = tl.program_id(0)
    channel, slab = pid % C, pid // C
    group, slab = slab // P, slab % P
    here = units_of_group(group, units, units_in_all)
    mean, m2, values = moments_in_rows(
        x_ptr, channel, group, slab, C, L, K, units, here, P, BLOCK_N, BLOCK_S, STAGES
    )
    at = (group * P + slab) * C + channel + tl.zeros((1, 1), tl.int32)
    tl.store(mean_ptr + at, mean)
    tl.store(m2_ptr + at, m2 / values if FINAL else m2)


@triton.jit
def slab_moments_interleaved(
    x_ptr, mean_ptr, m2_ptr, C_over_vec, units, units_in_all, P,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, FINAL: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of BLOCK_C channels in one slab."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    group, slab = pid // blocks // P, pid // blocks % P
    here = units_of_group(group, units, units_in_all)
    row = slab * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]

    place = (group * units + row) * C + channel
    inside = (row < here) & (channel < C)
    pivot = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for tile in tl.range(P * BLOCK_M, here - slab * BLOCK_M, P * BLOCK_M, num_stages=STAGES):
        inside = (tile + row < here) & (channel < C)
        x = tl.load(x_ptr + place + tile * C, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, x - pivot, 0.0)
        total += deviation
        squares += deviation * deviation
    count = tl.cdiv(tl.maximum(here - row, 0), P * BLOCK_M).to(tl.float32)
    values = tl.maximum(units_of_slab(slab, here, BLOCK_M, P), 1).to(tl.float32)
    mean, m2 = merge_lanes(count, pivot, total, squares, values, 0)
    at = (group * P + slab) * C + channel
    tl.store(mean_ptr + at, mean, mask=channel < C)
    tl.store(m2_ptr + at, m2 / values if FINAL else m2, mask=channel < C)


@triton.jit
def merge_slabs(
    slab_mean_ptr, slab_m2_ptr, mean_ptr, var_ptr, C, units, units_in_all, T, P, per_unit,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moments of a group from those of its slabs."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    group = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    slab = tl.arange(0, BLOCK_P)[:, None]
    here = units_of_group(group, units, units_in_all)
    in_slab = tl.where(slab < P, units_of_slab(slab, here, T, P), 0)
    # a ragged group may have empty slabs at its end; their moments are not even read
    inside = (in_slab > 0) & (channel < C)
    place = (group * P + slab) * C + channel
    means = tl.load(slab_mean_ptr + place, mask=inside, other=0.0)
    m2 = tl.load(slab_m2_ptr + place, mask=inside, other=0.0)
    count = in_slab.to(tl.float32) * per_unit
    total = here.to(tl.float32) * per_unit
    zero = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    mean, m2 = merge_lanes(count, means, zero, m2, total, 0)
    at = group * C + channel
    tl.store(mean_ptr + at, mean, mask=channel < C)
    tl.store(var_ptr + at, m2 / total, mask=channel < C)


@triton.jit
def forward_whole(
    x_ptr, y_ptr, mean_ptr, var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr, weight_ptr,
    bias_ptr, residual_ptr, eps, samples, C, S_over_vec, B,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Everything at once, for BLOCK_K channels of groups that fit into a program: x is read once.

    Programs hold (channels of all groups) x (samples of a group) x pixels.
    """
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    one = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    channel, group = one % C, one // C
    here = tl.minimum(B, samples - group * B)
    there = here > 0
    sample, pixel = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_S)[None, None, :]
    inside = (sample < here[:, None, None]) & (pixel < S)
    row = ((group * B)[:, None, None] + sample) * C + channel[:, None, None]
    place = row * S + pixel
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    values = tl.maximum(here * S, 1).to(tl.float32)
    rough = tl.sum(tl.sum(x, 2), 1) / values
    distance = tl.where(inside, x - rough[:, None, None], 0.0)
    offset = tl.sum(tl.sum(distance, 2), 1) / values
    var = tl.sum(tl.sum(distance * distance, 2), 1) / values - offset * offset
    var = tl.where(var < 0, 0.0, var)  # by rounding; NaN stays NaN
    tl.store(mean_ptr + one, rough + offset, mask=there)
    tl.store(var_ptr + one, var, mask=there)
    mean, var = mix_values(
        channel, there, rough + offset, var, alpha_ptr, source_mean_ptr, source_var_ptr, CROSS_TERM
    )
    scale, bias = 1 / tl.sqrt(var + eps), tl.zeros((BLOCK_K,), tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    y = (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and NaN stays NaN, as in torch
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def forward_again(
    x_ptr, y_ptr, mean_ptr, var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr, weight_ptr,
    bias_ptr, residual_ptr, eps, samples, C, S_over_vec, B,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both passes over one channel of a group: what is read again is still in the cache."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    channel, group = tl.program_id(0) % C, tl.program_id(0) // C
    here = units_of_group(group, B, samples)
    mean, m2, values = moments_in_rows(
        x_ptr, channel, group, 0, C, S, 1, B, here, 1, BLOCK_N, BLOCK_S, STAGES
    )
    at = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    tl.store(mean_ptr + at, mean)
    tl.store(var_ptr + at, m2 / values)
    channels = channel + tl.zeros((1, 1), tl.int32)
    mean, var = mix_values(
        channels, channels < C, mean, m2 / values, alpha_ptr, source_mean_ptr, source_var_ptr,
        CROSS_TERM,
    )  # fmt: skip
    scale, bias = 1 / tl.sqrt(var + eps), tl.zeros((1, 1), tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channels).to(tl.float32)
        bias = tl.load(bias_ptr + channels).to(tl.float32)
    row, pixel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_S)[None, :]
    across = tl.cdiv(S, BLOCK_S)
    for tile in tl.range(0, tl.cdiv(here, BLOCK_N) * across, num_stages=STAGES):
        n, s = row + tile // across * BLOCK_N, tile % across * BLOCK_S + pixel
        inside = (n < here) & (s < S)
        place = ((group * B + n) * C + channel) * S + s
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * scale + bias
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # and NaN stays NaN, as in torch
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalise_rows(
    x_ptr, y_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr,
    weight_ptr, bias_ptr, residual_ptr, eps, rows, C, S_over_vec, B,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Mix, then normalise BLOCK_R rows of BLOCK_S pixels."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still in the cache
    blocks = tl.cdiv(S, BLOCK_S)
    row = (pid // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    pixel = (pid % blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    there = row < rows
    inside = there[:, None] & (pixel < S)[None, :]
    place = row[:, None] * S + pixel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    channel, group = row % C, row // C // B
    mean, var = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    scale = 1 / tl.sqrt(var + eps)
    bias = tl.zeros((BLOCK_R,), tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    y = (x - mean[:, None]) * scale[:, None] + bias[:, None]
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
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Mix, then normalise BLOCK_M pixels of one group and BLOCK_C channels; `tiles` a group."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still in the cache
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, tile = pid // blocks // tiles, pid // blocks % tiles
    there = channel < C
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (row < units_of_group(group, units, units_in_all))[:, None] & there[None, :]
    place = (group * units + row)[:, None] * C + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean, var = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    scale, bias = 1 / tl.sqrt(var + eps), tl.zeros((BLOCK_C,), tl.float32)
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and NaN stays NaN, as in torch
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
