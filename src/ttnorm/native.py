"""BatchNorm's own kernels, put to our use: one pass each, no copies, on a CPU and on CUDA.

They trace badly and hide some gradients, so compilers, exporters and autograd never meet them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def usable(*tensors: Tensor) -> bool:
    """Whether these kernels may be called; the first tensor is the batch."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False  # inside vmap, no tensor says that a gradient will be asked of it
    return tensors[0].is_cpu or tensors[0].is_cuda


def moment_dtype(x: Tensor) -> torch.dtype:
    """What moments are computed in: float32, or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel: several times as fast as var_mean on a CPU."""
    # The kernel insists on updating running statistics, and takes the moments' dtype from them:
    # give it some to throw away.
    unused = torch.empty(x.shape[1], dtype=moment_dtype(x), device=x.device)
    mean, var = torch.ops.aten.batch_norm_update_stats(x, unused, unused, 0.0)
    return mean, var


def in_rows(x: Tensor) -> bool:
    """Whether `sample_moments` takes this batch."""
    exact = x.dtype in (torch.float32, torch.float64)  # it would round half precision's moments
    return x.is_cpu and exact and x.dim() > 2 and x.is_contiguous()


def sample_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of every sample, (N, C): GroupNorm's, a channel a group.

    On a CPU and in contiguous memory it is several times as fast as BatchNorm's own pass.
    """
    samples, channels = x.shape[:2]
    pixels = x.numel() // (samples * channels)
    _, mean, inv_std = torch.native_group_norm(
        x, None, None, samples, channels, pixels, channels, 0.0
    )
    return mean, inv_std.pow(-2)


def normalise(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    # not F.batch_norm, which in some versions refuses eps = 0
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, cudnn)


def affine_gradients(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sum of grad * (x - mean) / sqrt(var + eps) and sum of grad, for every channel."""
    inv_std = torch.rsqrt(var + eps)
    if x.is_cuda:
        total, centred, _, _ = torch.batch_norm_backward_reduce(
            grad, x, mean, inv_std, None, True, False, False
        )
        return centred * inv_std, total
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, inv_std, True, eps, [False, True, True]
    )
    return grad_weight, grad_bias
