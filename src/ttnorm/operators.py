"""The kernels as PyTorch operators, with shapes and gradients that a compiler understands.

Eager code calls `kernels` itself, which is quicker; `torch.compile` sees one operator per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kernels


@torch.library.custom_op("ttnorm::forward", mutates_args=())
def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    eps: float,
    group_size: int,
    cross_term: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.forward` as one operator; differentiable in x, weight, bias and alpha.

    A group size of 0 is no groups: schemas have no optional integers that may be symbolic.
    """
    return kernels.forward(
        x, weight, bias, alpha, source_mean, source_var, eps, group_size or None, cross_term
    )


@forward.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    group_size = rest[-2]
    shape = [x.shape[1]]
    if group_size:
        shape.insert(0, (x.shape[0] + group_size - 1) // group_size)
    mean, var = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return _like_kernels(x), mean, var


@torch.library.custom_op("ttnorm::backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    source_mean: Tensor,
    source_var: Tensor,
    batch_mean: Tensor,
    batch_var: Tensor,
    eps: float,
    group_size: int,
    cross_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_x, *others = kernels.backward(
        grad, x, weight, alpha, source_mean, source_var, batch_mean, batch_var, eps,
        group_size or None, cross_term,
    )  # fmt: skip
    assert grad_x is not None
    return grad_x, *(t.clone() for t in others)  # type: ignore[return-value]  # outputs may not share


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, alpha: Tensor, *_: Any) -> tuple[Tensor, ...]:
    per_channel = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(3))
    return _like_kernels(x), *per_channel


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, alpha, source_mean, source_var, *ctx.options = inputs
    ctx.save_for_backward(x, weight, alpha, source_mean, source_var, *output[1:])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, alpha, *moments = ctx.saved_tensors
    grads = _backward(grad, x, weight, alpha, *moments, *ctx.options)
    return *in_dtypes_of(grads, weight, ctx.bias_dtype, alpha), *[None] * 5


def in_dtypes_of(
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor | None],
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    alpha: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and alpha, as their owners want them."""
    grad_x, grad_weight, grad_bias, grad_alpha = grads
    return (
        grad_x,
        None if weight is None else grad_weight.to(weight.dtype),
        None if bias_dtype is None else grad_bias.to(bias_dtype),
        None if grad_alpha is None else grad_alpha.to(alpha.dtype),
    )


forward.register_autograd(_differentiate, setup_context=_setup_context)


def _like_kernels(x: Tensor) -> Tensor:
    """An output as the kernels lay it out: x's layout, or contiguous where x is in neither."""
    return torch.empty_like(x, memory_format=kernels.memory_format(x))
