"""The maths of test-time normalization, pure: Eq. 2 of the paper and its gradient.

`batch_moments`, `mix_moments` and `normalise` are the three lines of the method; they are plain,
differentiable functions that trace, compile and export. `test_time_norm` is the three in one, with
an analytic backward that keeps the input and a few values per channel, never a normalised copy.

With `group_size=B` every consecutive B samples are normalised on their own, so that G batches of
size B cost one forward of G * B samples and give the same numbers. Moments are then of shape
(groups, C) instead of (C,); a last group of fewer samples is a group like any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import groups, kernels, native, operators
from .arguments import check_arguments
from .distributed import merge_moments, rank, sum_over_ranks

Moments = tuple[Tensor, Tensor]


def batch_moments(x: Tensor, group_size: int | None = None) -> Moments:
    """Mean and biased variance of every channel, in at least float32.

    mu_c = mean over n, h, w of x[n, c, h, w]
    var_c = mean over n, h, w of (x[n, c, h, w] - mu_c)^2

    Args:
        x: (N, C) or (N, C, ...), not empty.
        group_size: samples that share their moments; None for all of them.

    Returns:
        Mean and variance, both (C,), or (groups, C) with a group size.

    Example:
        >>> mean, var = batch_moments(torch.tensor([[1.0], [3.0]]))
        >>> mean.item(), var.item()
        (2.0, 1.0)
    """
    if kernels.usable(x) and native.usable(x):
        return kernels.moments(x, group_size)
    if group_size == 1:
        return _sample_moments(x)
    if group_size is not None:
        return groups.pool_moments(*_sample_moments(x), group_size)
    if native.usable(x):
        return _pooled(*native.sample_moments(x)) if native.in_rows(x) else native.moments(x)
    dims = [0, *range(2, x.dim())]
    return _moments_over(x.to(native.moment_dtype(x)), dims)


def mix_moments(
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    batch_mean: Tensor,
    batch_var: Tensor,
    *,
    cross_term: bool = True,
) -> Moments:
    """Moments of the mixture that draws from the batch with probability alpha (Eq. 2).

    mean = alpha * mu + (1 - alpha) * mu_s
    var  = alpha * var + (1 - alpha) * var_s + alpha * (1 - alpha) * (mu - mu_s)^2

    Args:
        alpha: (C,), 0 is the source and 1 the batch.
        source_mean, source_var: (C,), BatchNorm's running statistics.
        batch_mean, batch_var: (C,) or (groups, C).
        cross_term: False leaves out the last term of the variance, as published code of
            alpha-BN and AdaptiveBN does.

    Example:
        >>> zero, one, half = torch.zeros(1), torch.ones(1), torch.full((1,), 0.5)
        >>> mean, var = mix_moments(half, zero, one, 2 * one, one)
        >>> mean.item(), var.item()
        (1.0, 2.0)
    """
    alpha, source_mean, source_var = _cast(batch_mean.dtype, alpha, source_mean, source_var)
    # lerp(a, b, w) = w * b + (1 - w) * a, and exactly a and b at the ends
    mean = torch.lerp(source_mean, batch_mean, alpha)
    if cross_term:
        # The same variance as above, seen from the mixture's mean: it takes fewer, safer steps.
        from_source, from_batch = source_mean - mean, batch_mean - mean
        second_source = torch.addcmul(source_var, from_source, from_source)
        second_batch = torch.addcmul(batch_var, from_batch, from_batch)
        var = torch.lerp(second_source, second_batch, alpha)
    else:
        var = torch.lerp(source_var, batch_var, alpha)
    if not (torch.is_grad_enabled() and alpha.requires_grad):
        # 0 * NaN is NaN: a broken sample must not reach a channel that never looks at the batch.
        # (Where alpha is being fitted, this would hide the gradient that lets it leave 0.)
        unused = torch.logical_not(alpha)  # alpha == 0, for half the price of that
        mean, var = torch.where(unused, source_mean, mean), torch.where(unused, source_var, var)
    return mean, var


def normalise(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, channel by channel, in x's dtype and layout.

    Args:
        x: (N, C) or (N, C, ...).
        mean, var: (C,), or (groups, C) with a group size.
        weight, bias: gamma and beta, (C,) or the shape of mean, or None.
        group_size: the one the moments were computed with.

    Example:
        >>> normalise(torch.tensor([[3.0]]), torch.tensor([1.0]), torch.tensor([4.0]), eps=0.0)
        tensor([[1.]])
    """
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    weight, bias = _cast(mean.dtype, weight, bias)
    if group_size is not None:
        mean, var, weight, bias = (
            groups.per_sample(t.expand_as(mean), x.shape[0], group_size)
            for t in (mean, var, weight, bias)
        )
    if native.usable(x, mean, var, weight, bias):
        if group_size is None:
            return native.normalise(x, mean, var, weight, bias, eps)
        if x.is_contiguous():  # then every (sample, channel) is one contiguous row: no copy
            mean, var, weight, bias = (t.reshape(-1) for t in (mean, var, weight, bias))
            y = native.normalise(_rows(x), mean, var, weight, bias, eps)
            # an autograd.Function may not return a plain view that a relu_ then changes
            return torch.ops.aten._unsafe_view(y, x.shape)
    scale = weight * torch.rsqrt(var + eps)
    mean, scale, bias = (_unsqueeze_like(t, x) for t in (mean, scale, bias))
    return torch.addcmul(bias, x - mean, scale).to(x.dtype)


def test_time_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    eps: float = 1e-5,
    group_size: int | None = None,
    cross_term: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Normalise a batch with a mixture of its own and the source's statistics (Eq. 2).

    y = (x - mean) / sqrt(var + eps) * weight + bias
    with mean, var = mix_moments(alpha, running_mean, running_var, *batch_moments(x))

    alpha = 0 is BatchNorm in eval mode, alpha = 1 in train mode. Differentiable once in x, weight,
    bias and alpha.

    Args:
        x: (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W), floating point.
        running_mean, running_var: the source's moments, (C,).
        weight, bias: gamma and beta, (C,), or None.
        alpha: (C,) or a scalar tensor, in [0, 1].
        group_size: samples that share their statistics; None for the whole batch.
        cross_term: see `mix_moments`.
        process_group: ranks whose batches count as one, as in SyncBatchNorm. Groups are isolated
            by definition, so with a group size nothing is reduced.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> zero, one = torch.zeros(1), torch.ones(1)
        >>> test_time_norm(x, zero, one, None, None, alpha=one, eps=0.0)
        tensor([[-1.],
                [ 1.]])
    """
    alpha = check_arguments(x, running_mean, running_var, weight, bias, alpha, group_size)
    if group_size is not None:
        process_group = None
    if x.numel() == 0:
        if process_group is not None:
            raise ValueError(
                f"x is empty, {tuple(x.shape)}, on rank {rank()}: the other ranks would "
                "wait for its statistics. Give every rank at least one sample."
            )
        # no samples, no moments; BatchNorm in eval mode knows the output's shape
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    tensors = (x, weight, bias, alpha)
    if _as_operator(x, process_group):
        moments = (running_mean, running_var)
        return operators.forward(*tensors, *moments, eps, group_size or 0, cross_term)[0]
    options = (eps, group_size, cross_term, process_group)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needs_grad and not torch.compiler.is_compiling() and not _in_functorch():
        return _TestTimeNorm.apply(*tensors, running_mean, running_var, *options)
    # Without a gradient this is what the function above computes; a compiler derives its own.
    return _forward(*tensors, running_mean, running_var, *options)[0]


def _in_functorch() -> bool:
    """Whether torch.func derives gradients, which it does by itself as well."""
    return torch._C._are_functorch_transforms_active()


test_time_norm.__test__ = False  # type: ignore[attr-defined]  # or pytest takes it for a test


def affine_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    group_size: int | None = None,
) -> Moments:
    """Gradients of `normalise`'s weight and bias, a row per group: per sample with groups of 1.

    sum over a group of grad * (x - mean) / sqrt(var + eps), and sum of grad.

    Args:
        grad: gradient of the loss with respect to the output of `normalise`.
        mean, var: what x was normalised with, (C,), or (groups, C) with a group size.
    """
    if group_size is None:
        return native.affine_gradients(grad, x, mean, var, eps)
    rows = [groups.per_sample(t, x.shape[0], group_size) for t in (mean, var)]
    if not x.is_cpu:
        mean, inv_std = (_unsqueeze_like(t, x) for t in (rows[0], torch.rsqrt(rows[1] + eps)))
        gamma, beta = _spatial_sum((x - mean) * inv_std * grad), _spatial_sum(grad.to(mean.dtype))
    elif x.is_contiguous():
        flat = [t.reshape(-1) for t in rows]
        gamma, beta = native.affine_gradients(_rows(grad), _rows(x), flat[0], flat[1], eps)
        gamma, beta = gamma.view(x.shape[:2]), beta.view(x.shape[:2])
    else:
        parts = zip(grad.split(1), x.split(1), rows[0].unbind(), rows[1].unbind(), strict=True)
        gamma, beta = _stack([native.affine_gradients(*part, eps) for part in parts])
    return groups.group_sum(gamma, group_size), groups.group_sum(beta, group_size)


class _TestTimeNorm(torch.autograd.Function):
    """`test_time_norm` with its gradient written out; saves x and per-channel values only."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, bias, alpha, source_mean, source_var, *ctx.options = args
        y, batch_mean, batch_var = _forward(*args)
        ctx.save_for_backward(x, weight, alpha, source_mean, source_var, batch_mean, batch_var)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, alpha, source_mean, source_var, batch_mean, batch_var = ctx.saved_tensors
        eps, group_size, cross_term, process_group = ctx.options
        if kernels.usable(x) and process_group is None:
            moments = (source_mean, source_var, batch_mean, batch_var)
            fused = kernels.backward(
                grad, x, weight, alpha, *moments, eps, group_size, cross_term,
                needs_input=ctx.needs_input_grad[0],
            )  # fmt: skip
            return *operators.in_dtypes_of(fused, weight, ctx.bias_dtype, alpha), *[None] * 6
        grad = grad.contiguous(memory_format=kernels.memory_format(x))
        a, source_mean, source_var = _cast(batch_mean.dtype, alpha, source_mean, source_var)
        mean, var = mix_moments(
            a, source_mean, source_var, batch_mean, batch_var, cross_term=cross_term
        )
        grad_weight, grad_bias = affine_gradients(grad, x, mean, var, eps, group_size)

        inv_std = torch.rsqrt(var + eps)
        scale = inv_std if weight is None else inv_std * weight.to(mean.dtype)
        shift, excess = batch_mean - source_mean, batch_var - source_var
        cross = 1.0 if cross_term else 0.0
        grad_x = grad_alpha = None
        if ctx.needs_input_grad[3]:
            grad_mean, grad_var = -scale * grad_bias, -0.5 * scale * inv_std * grad_weight
            slope = excess + cross * (1 - 2 * a) * shift.square()  # d var / d alpha
            grad_alpha = _sum_to_channels(grad_mean * shift + grad_var * slope)
        if ctx.needs_input_grad[0]:
            # The batch's moments belong to all ranks, so what every rank does with them counts.
            count = groups.values_per_moment(x, group_size, mean)
            total_weight, total_bias, count = sum_over_ranks(
                process_group, grad_weight, grad_bias, count
            )
            grad_mean, grad_var = -scale * total_bias, -0.5 * scale * inv_std * total_weight
            grad_batch_mean = a * grad_mean + cross * 2 * a * (1 - a) * shift * grad_var
            # d mu / dx = 1 / n and d var / dx = 2 (x - mu) / n: once more an affine map.
            slope, offset = 2 * a * grad_var / count, grad_batch_mean / count
            # as in the forward, a broken sample does not reach channels that ignore the batch
            unused = a == 0
            slope, offset, centre = (
                torch.where(unused, 0.0, t) for t in (slope, offset, batch_mean)
            )
            one = torch.ones_like(slope)
            grad_x = normalise(x, centre, one, slope, offset, 0.0, group_size)
            if grad.dtype == scale.dtype:
                if group_size is not None:
                    scale = groups.per_sample(scale, x.shape[0], group_size)
                grad_x.addcmul_(grad, _unsqueeze_like(scale, x))
            else:  # addcmul_ would first make float32 copies of both, at many times the price
                zero = torch.zeros_like(scale)
                grad_x += normalise(grad, zero, one, scale, None, 0.0, group_size)
        grads = (grad_x, _sum_to_channels(grad_weight), _sum_to_channels(grad_bias), grad_alpha)
        return *operators.in_dtypes_of(grads, weight, ctx.bias_dtype, alpha), *[None] * 6


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    eps: float,
    group_size: int | None,
    cross_term: bool,
    process_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 2: the output, and the batch's moments for the backward."""
    if kernels.usable(x) and process_group is None and not torch.compiler.is_compiling():
        arguments = (weight, bias, alpha, source_mean, source_var, eps, group_size, cross_term)
        return kernels.forward(x, *arguments)
    batch_mean, batch_var = batch_moments(x, group_size)
    if process_group is not None:
        count = groups.values_per_moment(x, None, batch_mean)
        batch_mean, batch_var = merge_moments(process_group, batch_mean, batch_var, count)
    mean, var = mix_moments(
        alpha, source_mean, source_var, batch_mean, batch_var, cross_term=cross_term
    )
    return normalise(x, mean, var, weight, bias, eps, group_size), batch_mean, batch_var


def _as_operator(x: Tensor, process_group: dist.ProcessGroup | None) -> bool:
    """A compiler on a GPU gets one operator; an exporter gets operations that any runtime has."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return kernels.usable(x) and process_group is None


def _cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    # a .to() that does nothing still costs what one of the method's own steps does
    return [t if t.dtype == dtype else t.to(dtype) for t in tensors]


def _sample_moments(x: Tensor) -> Moments:
    """Moments of every sample on its own, (N, C)."""
    dtype = native.moment_dtype(x)
    if x.dim() == 2:
        # a copy, for a network may change x in place before a memory takes its moments
        return x.to(dtype, copy=True), torch.zeros_like(x, dtype=dtype)
    if not (x.is_cpu and native.usable(x)):
        return _moments_over(x.to(dtype), list(range(2, x.dim())))
    if native.in_rows(x):
        return native.sample_moments(x)
    if x.is_contiguous():
        mean, var = native.moments(_rows(x))
        return mean.view(x.shape[:2]), var.view(x.shape[:2])
    return _stack([native.moments(sample) for sample in x.split(1)])


def _moments_over(x: Tensor, dims: list[int]) -> Moments:
    if x.dtype == torch.float64 and torch.compiler.is_exporting():
        # var_mean in ONNX would divide float64 by a count in float32, which no runtime takes
        mean = x.mean(dims, keepdim=True)
        return mean.squeeze(dims), (x - mean).square().mean(dims)
    var, mean = torch.var_mean(x, dims, correction=0)
    return mean, var


def _pooled(mean: Tensor, var: Tensor) -> Moments:
    """Moments of a batch from those of its samples, which all have as many values."""
    pooled = mean.mean(0)
    return pooled, (var + (mean - pooled).square()).mean(0)


def _rows(x: Tensor) -> Tensor:
    """A contiguous (N, C, ...) as one sample of N * C channels: a view."""
    return x.view(1, x.shape[0] * x.shape[1], -1)


def _stack(pairs: list[Moments]) -> Moments:
    first, second = zip(*pairs, strict=True)
    return torch.stack(first), torch.stack(second)


def _unsqueeze_like(t: Tensor, x: Tensor) -> Tensor:
    """(C,) or (N, C) with the trailing dimensions that let it broadcast against x."""
    return t.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


def _spatial_sum(x: Tensor) -> Tensor:
    return x.flatten(2).sum(2) if x.dim() > 2 else x


def _sum_to_channels(t: Tensor) -> Tensor:
    return t.sum(0) if t.dim() == 2 else t
