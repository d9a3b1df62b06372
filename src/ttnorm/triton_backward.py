"""The GPU kernels of the backward, in Triton; layouts, slabs and names as in `triton_forward`."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import mix, unit_in_rows, units_of_group


@triton.jit
def slab_gradients_rows(
    grad_ptr, x_ptr, total_ptr, centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, C, L_over_vec, K, units, units_in_all, R, P,
    CROSS_TERM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Sums over one slab of grad and of grad * (x - mean), for one channel."""
    L = L_over_vec * VEC
    pid = tl.program_id(0).to(tl.int64)
    channel, slab = pid % C, pid // C
    group = slab // P
    mean, _ = mix(
        channel, group * C + channel, channel < C, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    begin = group * units + (slab % P) * R
    end = tl.minimum(begin + R, group * units + units_of_group(group, units, units_in_all))
    row, pixel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_S)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    centred = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    for n in range(begin, end, BLOCK_N):
        for s in range(0, L, BLOCK_S):
            inside = (n + row < end) & (s + pixel < L)
            place = unit_in_rows(n + row, channel, C, K) * L + s + pixel
            grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
            total += grad
            centred += tl.where(inside, grad * (x - mean), 0.0)
    tl.store(total_ptr + slab * C + channel, tl.sum(tl.sum(total, 1), 0))
    tl.store(centred_ptr + slab * C + channel, tl.sum(tl.sum(centred, 1), 0))


@triton.jit
def slab_gradients_interleaved(
    grad_ptr, x_ptr, total_ptr, centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr,
    source_mean_ptr, source_var_ptr, C_over_vec, units, units_in_all, R, P,
    CROSS_TERM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Sums over one slab of grad and of grad * (x - mean), for BLOCK_C channels."""
    C = C_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    slab = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group = slab // P
    there = channel < C
    mean, _ = mix(
        channel, group * C + channel, there, batch_mean_ptr, batch_var_ptr, alpha_ptr,
        source_mean_ptr, source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    begin = group * units + (slab % P) * R
    end = tl.minimum(begin + R, group * units + units_of_group(group, units, units_in_all))
    row, column = tl.arange(0, BLOCK_M)[:, None], channel[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    centred = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for m in range(begin, end, BLOCK_M):
        inside = (m + row < end) & (column < C)
        place = (m + row) * C + column
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += grad
        centred += tl.where(inside, grad * (x - mean[None, :]), 0.0)
    tl.store(total_ptr + slab * C + channel, tl.sum(total, 0), mask=there)
    tl.store(centred_ptr + slab * C + channel, tl.sum(centred, 0), mask=there)


@triton.jit
def merge_gradients(
    slab_total_ptr, slab_centred_ptr, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
    source_var_ptr, weight_ptr, coefficients_ptr, sums_ptr, eps, C, groups, units, units_in_all, P,
    per_unit,
    AFFINE: tl.constexpr, CROSS_TERM: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """From slabs to a group's gradients of weight, bias and alpha, and to those of x as a map.

    dx = scale * grad + slope * (x - centre) + offset, with these four in `coefficients`, (4, G, C);
    the gradients of weight, bias and alpha go into `sums`, (3, G, C).
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    group = pid // blocks
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channel < C
    place = group * C + channel
    _, var = mix(
        channel, place, there, batch_mean_ptr, batch_var_ptr, alpha_ptr, source_mean_ptr,
        source_var_ptr, CROSS_TERM,
    )  # fmt: skip
    alpha = tl.load(alpha_ptr + channel, mask=there, other=0.0).to(tl.float32)
    batch_mean = tl.load(batch_mean_ptr + place, mask=there, other=0.0)
    source_mean = tl.load(source_mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    batch_var = tl.load(batch_var_ptr + place, mask=there, other=1.0)
    source_var = tl.load(source_var_ptr + channel, mask=there, other=1.0).to(tl.float32)

    slab = tl.arange(0, BLOCK_P)
    inside = (slab < P)[:, None] & there[None, :]
    slabs = (group * P + slab)[:, None] * C + channel[None, :]
    grad_bias = tl.sum(tl.load(slab_total_ptr + slabs, mask=inside, other=0.0), 0)
    inv_std = 1 / tl.sqrt(var + eps)
    centred = tl.sum(tl.load(slab_centred_ptr + slabs, mask=inside, other=0.0), 0)
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

    # d mu / dx = 1 / n and d var / dx = 2 (x - mu) / n, unless the moments came from elsewhere
    count = (units_of_group(group, units, units_in_all) * per_unit).to(tl.float32)
    seen = (alpha != 0) & (not GIVEN)
    slope = tl.where(seen, 2 * alpha * grad_var / count, 0.0)
    offset = tl.where(seen, grad_batch_mean / count, 0.0)
    centre = tl.where(seen, batch_mean, 0.0)
    size = groups * C
    tl.store(coefficients_ptr + place, scale, mask=there)
    tl.store(coefficients_ptr + size + place, slope, mask=there)
    tl.store(coefficients_ptr + 2 * size + place, centre, mask=there)
    tl.store(coefficients_ptr + 3 * size + place, offset, mask=there)
    tl.store(sums_ptr + place, grad_weight, mask=there)
    tl.store(sums_ptr + size + place, grad_bias, mask=there)
    tl.store(sums_ptr + 2 * size + place, grad_alpha, mask=there)


@triton.jit
def input_gradient_rows(
    grad_ptr, x_ptr, out_ptr, coefficients_ptr, rows, C, S_over_vec, B, size,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """scale * grad + slope * (x - centre) + offset, for BLOCK_R rows; `size` is groups * C."""
    S = S_over_vec * VEC  # so that the compiler knows what divides it
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(S, BLOCK_S)
    row = (pid // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    pixel = (pid % blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    there = row < rows
    place = row // C // B * C + row % C
    scale = tl.load(coefficients_ptr + place, mask=there, other=0.0)[:, None]
    slope = tl.load(coefficients_ptr + size + place, mask=there, other=0.0)[:, None]
    centre = tl.load(coefficients_ptr + 2 * size + place, mask=there, other=0.0)[:, None]
    offset = tl.load(coefficients_ptr + 3 * size + place, mask=there, other=0.0)[:, None]
    inside = there[:, None] & (pixel < S)[None, :]
    at = row[:, None] * S + pixel[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
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
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, tile = pid // blocks // tiles, pid // blocks % tiles
    there = channel < C
    place = group * C + channel
    scale = tl.load(coefficients_ptr + place, mask=there, other=0.0)[None, :]
    slope = tl.load(coefficients_ptr + size + place, mask=there, other=0.0)[None, :]
    centre = tl.load(coefficients_ptr + 2 * size + place, mask=there, other=0.0)[None, :]
    offset = tl.load(coefficients_ptr + 3 * size + place, mask=there, other=0.0)[None, :]
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (local < units_of_group(group, units, units_in_all))[:, None] & there[None, :]
    at = (group * units + local)[:, None] * C + channel[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    moved = tl.where(slope == 0, 0.0, slope * (x - centre))
    tl.store(
        out_ptr + at, (scale * grad + moved + offset).to(out_ptr.dtype.element_ty), mask=inside
    )
