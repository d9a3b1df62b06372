"""The GPU kernels of the backward, in Triton; layouts, slabs and names as in `triton_forward`."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import mix, unit_in_rows, units_of_group


@triton.jit
def row_gradients(
    grad_ptr, x_ptr, total_ptr, centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, rows, C, B, L_over_vec,
    CROSS_TERM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over BLOCK_N rows of grad and of grad * (x - mean): slabs of one unit."""
    L = L_over_vec * VEC
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = row % C
    mean, _ = mix(
        channel, row // C // B * C + channel, row < rows, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    pixel = tl.arange(0, BLOCK_S)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    centred = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for s in tl.range(0, L, BLOCK_S, num_stages=STAGES):
        inside = (row < rows)[:, None] & (s + pixel < L)
        place = row[:, None] * L + s + pixel
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += grad
        centred += tl.where(inside, grad * (x - mean[:, None]), 0.0)
    tl.store(total_ptr + row, tl.sum(total, 1), mask=row < rows)
    tl.store(centred_ptr + row, tl.sum(centred, 1), mask=row < rows)


@triton.jit
def sums_in_rows(
    grad_ptr, x_ptr, mean, channel, group, slab, C, L, K, units, here, P,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one slab of grad and of grad * (x - mean), for one channel."""
    row = slab * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    pixel = tl.arange(0, BLOCK_S)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    centred = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    across = tl.cdiv(L, BLOCK_S)
    tiles = tl.cdiv(tl.maximum(here - slab * BLOCK_N, 0), P * BLOCK_N)
    for tile in tl.range(0, tiles * across, num_stages=STAGES):
        n, s = row + tile // across * (P * BLOCK_N), tile % across * BLOCK_S + pixel
        inside = (n < here) & (s < L)
        place = unit_in_rows(group * units + n, channel, C, K) * L + s
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += grad
        centred += tl.where(inside, grad * (x - mean), 0.0)
    return tl.sum(total), tl.sum(centred)


@triton.jit
def slab_gradients_rows(
    grad_ptr, x_ptr, total_ptr, centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, C, L_over_vec, K, units, units_in_all, P,
    CROSS_TERM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one slab of grad and of grad * (x - mean), for one channel."""
    L = L_over_vec * VEC
    pid = tl.program_id(0)
    channel, slab = pid % C, pid // C
    group, slab = slab // P, slab % P
    mean, _ = mix(
        channel, group * C + channel, channel < C, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    here = units_of_group(group, units, units_in_all)
    total, centred = sums_in_rows(
        grad_ptr, x_ptr, mean, channel, group, slab, C, L, K, units, here, P,
        BLOCK_N, BLOCK_S, STAGES,
    )  # fmt: skip
    at = (group * P + slab) * C + channel
    tl.store(total_ptr + at, total)
    tl.store(centred_ptr + at, centred)


@triton.jit
def slab_gradients_interleaved(
    grad_ptr, x_ptr, total_ptr, centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, C_over_vec, units, units_in_all, P,
    CROSS_TERM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one slab of grad and of grad * (x - mean), for BLOCK_C channels."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, slab = pid // blocks // P, pid // blocks % P
    there = channel < C
    mean, _ = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    here = units_of_group(group, units, units_in_all)
    row = slab * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    centred = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for tile in tl.range(0, here - slab * BLOCK_M, P * BLOCK_M, num_stages=STAGES):
        inside = (tile + row < here) & there[None, :]
        place = (group * units + tile + row) * C + channel[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += grad
        centred += tl.where(inside, grad * (x - mean[None, :]), 0.0)
    at = (group * P + slab) * C + channel
    tl.store(total_ptr + at, tl.sum(total, 0), mask=there)
    tl.store(centred_ptr + at, tl.sum(centred, 0), mask=there)


@triton.jit
def group_gradients(
    channel, place, there, grad_bias, centred, count, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, weight_ptr, sums_ptr, eps, size,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr,
):  # fmt: skip
    """From sums over a group, of `count` values a channel, to its gradients.

    dx = scale * grad + slope * (x - centre) + offset, and these four are returned; the gradients of
    weight, bias and alpha go into `sums`, (3, G, C), of which `size` is G * C.
    """
    _, var = mix(
        channel, place, there, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
        source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    alpha = tl.load(alpha_ptr + channel, mask=there, other=0.0).to(tl.float32)
    batch_mean = tl.load(batch_mean_ptr + place, mask=there, other=0.0)
    source_mean = tl.load(source_mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    batch_var = tl.load(batch_var_ptr + place, mask=there, other=1.0)
    source_var = tl.load(source_var_ptr + channel, mask=there, other=1.0).to(tl.float32)
    inv_std = 1 / tl.sqrt(var + eps)
    grad_weight = centred * inv_std

    scale = inv_std
    if AFFINE:
        scale *= tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
    grad_mean = -scale * grad_bias
    grad_var = -0.5 * scale * inv_std * grad_weight
    shift = batch_mean - source_mean
    var_slope = batch_var - source_var  # d var / d alpha
    grad_batch_mean = alpha * grad_mean
    if CROSS_TERM:
        var_slope += (1 - 2 * alpha) * shift * shift
        grad_batch_mean += 2 * alpha * (1 - alpha) * shift * grad_var
    grad_alpha = grad_mean * shift + grad_var * var_slope
    tl.store(sums_ptr + place, grad_weight, mask=there)
    tl.store(sums_ptr + size + place, grad_bias, mask=there)
    tl.store(sums_ptr + 2 * size + place, grad_alpha, mask=there)

    # d mu / dx = 1 / n and d var / dx = 2 (x - mu) / n
    seen = alpha != 0
    slope = tl.where(seen, 2 * alpha * grad_var / count, 0.0)
    offset = tl.where(seen, grad_batch_mean / count, 0.0)
    centre = tl.where(seen, batch_mean, 0.0)
    return scale, slope, centre, offset


@triton.jit
def merge_gradients(
    slab_total_ptr, slab_centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
    source_var_ptr, weight_ptr, coefficients_ptr, sums_ptr, eps, C, groups, units, units_in_all, T,
    P, per_unit,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """From slabs to a group's gradients; those of x as `coefficients`, (4, G, C)."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK_C)
    group = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channel < C
    place = group * C + channel
    slab = tl.arange(0, BLOCK_P)
    here = units_of_group(group, units, units_in_all)
    inside = ((slab < P) & (slab * T < here))[:, None] & there[None, :]
    slabs = (group * P + slab)[:, None] * C + channel[None, :]
    total = tl.sum(tl.load(slab_total_ptr + slabs, mask=inside, other=0.0), 0)
    centred = tl.sum(tl.load(slab_centred_ptr + slabs, mask=inside, other=0.0), 0)
    size = groups * C
    scale, slope, centre, offset = group_gradients(
        channel, place, there, total, centred, here.to(tl.float32) * per_unit, batch_mean_ptr,
        batch_var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr, weight_ptr, sums_ptr, eps, size,
        AFFINE, CROSS_TERM,
    )  # fmt: skip
    tl.store(coefficients_ptr + place, scale, mask=there)
    tl.store(coefficients_ptr + size + place, slope, mask=there)
    tl.store(coefficients_ptr + 2 * size + place, centre, mask=there)
    tl.store(coefficients_ptr + 3 * size + place, offset, mask=there)


@triton.jit
def backward_again(
    grad_ptr, x_ptr, out_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
    source_var_ptr, weight_ptr, sums_ptr, eps, samples, C, S_over_vec, B, groups,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both passes over one channel of a group: what is read again is still in the cache."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    place = tl.program_id(0)
    channel, group = place % C, place // C
    here = units_of_group(group, B, samples)
    mean, _ = mix(
        channel, place, channel < C, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
        source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    total, centred = sums_in_rows(
        grad_ptr, x_ptr, mean, channel, group, 0, C, S, 1, B, here, 1, BLOCK_N, BLOCK_S, STAGES
    )
    scale, slope, centre, offset = group_gradients(
        channel, place, channel < C, total, centred, (here * S).to(tl.float32), batch_mean_ptr,
        batch_var_ptr, alpha_ptr, source_mean_ptr, source_var_ptr, weight_ptr, sums_ptr, eps,
        groups * C, AFFINE, CROSS_TERM,
    )  # fmt: skip
    if INPUT:
        row, pixel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_S)[None, :]
        across = tl.cdiv(S, BLOCK_S)
        for tile in tl.range(0, tl.cdiv(here, BLOCK_N) * across, num_stages=STAGES):
            n, s = row + tile // across * BLOCK_N, tile % across * BLOCK_S + pixel
            inside = (n < here) & (s < S)
            at = ((group * B + n) * C + channel) * S + s
            grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            moved = tl.where(slope == 0, 0.0, slope * (x - centre))
            out = scale * grad + moved + offset
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def input_gradient_rows(
    grad_ptr, x_ptr, out_ptr, coefficients_ptr, rows, C, S_over_vec, B, size,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """scale * grad + slope * (x - centre) + offset, for BLOCK_R rows; `size` is groups * C."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still in the cache
    blocks = tl.cdiv(S, BLOCK_S)
    row = (pid // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    pixel = (pid % blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    there = row < rows
    inside = there[:, None] & (pixel < S)[None, :]
    at = row[:, None] * S + pixel[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    place = row // C // B * C + row % C
    scale = tl.load(coefficients_ptr + place, mask=there, other=0.0)[:, None]
    slope = tl.load(coefficients_ptr + size + place, mask=there, other=0.0)[:, None]
    centre = tl.load(coefficients_ptr + 2 * size + place, mask=there, other=0.0)[:, None]
    offset = tl.load(coefficients_ptr + 3 * size + place, mask=there, other=0.0)[:, None]
    # a broken sample does not reach channels that ignore the batch
    moved = tl.where(slope == 0, 0.0, slope * (x - centre))
    tl.store(
        out_ptr + at, (scale * grad + moved + offset).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def input_gradient_interleaved(
    grad_ptr, x_ptr, out_ptr, coefficients_ptr, C_over_vec, units, units_in_all, tiles, size,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """scale * grad + slope * (x - centre) + offset, for BLOCK_M pixels of one group."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still in the cache
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, tile = pid // blocks // tiles, pid // blocks % tiles
    there = channel < C
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (row < units_of_group(group, units, units_in_all))[:, None] & there[None, :]
    at = (group * units + row)[:, None] * C + channel[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    place = group * C + channel
    scale = tl.load(coefficients_ptr + place, mask=there, other=0.0)[None, :]
    slope = tl.load(coefficients_ptr + size + place, mask=there, other=0.0)[None, :]
    centre = tl.load(coefficients_ptr + 2 * size + place, mask=there, other=0.0)[None, :]
    offset = tl.load(coefficients_ptr + 3 * size + place, mask=there, other=0.0)[None, :]
    moved = tl.where(slope == 0, 0.0, slope * (x - centre))
    tl.store(
        out_ptr + at, (scale * grad + moved + offset).to(out_ptr.dtype.element_ty), mask=inside
    )
