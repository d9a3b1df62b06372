"""MixNorm (Hu et al., 2021): a sample's own moments, blended with those of the stream so far.

At every layer, for every sample t of the stream:

local_t  = moments of the sample and its mirror image together
global_t = (1 - rate) * global_{t-1} + rate * local_t,  with the source's moments as global_0
y_t      = normalise(x_t, scale * local_t + (1 - scale) * global_t)

where the global average is over first and second moments, so that its variance holds what differs
between samples as well. A sample is treated the same whatever batch it comes in; one that is not
finite is not remembered. The paper draws a random crop and flip for the second view; here it is the
mirror image, so that nothing is random.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .functional import batch_moments, mix_moments, normalise
from .layers import TTNormBase
from .surgery import convert_
from .tree import ttn_layers


class MixNorm(nn.Module):
    """A network under MixNorm; it remembers the stream until `reset`.

    Args:
        model: a network with BatchNorm layers that takes (N, C, H, W); changed for good.
        scale: weight of the sample's own moments.
        rate: of the exponential average.
    """

    def __init__(self, model: nn.Module, *, scale: float = 0.05, rate: float = 0.001) -> None:
        super().__init__()
        self.model = convert_(model, alpha=scale, cross_term=False)
        self.streams = [_Stream(layer, rate) for layer in ttn_layers(model).values()]
        for stream in self.streams:
            stream.layer.standardise = stream.standardise  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.cat([x, x.flip(-1)]))[: len(x)]

    def reset(self) -> None:
        """Forget the stream."""
        for stream in self.streams:
            stream.reset()

    def memory_state(self) -> list[tuple[Tensor, Tensor]]:
        """What every layer has seen."""
        return [(stream.first.clone(), stream.second.clone()) for stream in self.streams]

    def load_memory_state(self, state: list[tuple[Tensor, Tensor]]) -> None:
        shapes = [stream.first.shape for stream in self.streams]
        if [first.shape for first, _ in state] != shapes:
            raise ValueError("The state of MixNorm's stream was saved with another network.")
        for stream, (first, second) in zip(self.streams, state, strict=True):
            like = stream.layer.running_mean
            stream.first, stream.second = (t.to(like, copy=True) for t in (first, second))


class _Stream:
    """What one layer has seen."""

    def __init__(self, layer: TTNormBase, rate: float) -> None:
        self.layer, self.rate = layer, rate
        self.reset()

    def reset(self) -> None:
        # moments about the source's mean, where little cancels
        self.first, self.second = torch.zeros_like(self.layer.running_mean), self.layer.running_var

    def standardise(self, x: Tensor) -> Tensor:
        """x holds the samples, then their mirror images in the same order."""
        if not len(x):
            return x
        (mean, mirror_mean), (var, mirror_var) = (m.chunk(2) for m in batch_moments(x, 1))
        local_mean = (mean + mirror_mean) / 2
        local_var = (var + mirror_var) / 2 + ((mean - mirror_mean) / 2).square()
        layer = self.layer
        self.first, self.second = (t.to(layer.running_mean) for t in (self.first, self.second))
        offset = local_mean - layer.running_mean
        # no gradient runs through the stream, or it would depend on where the stream is cut
        second = (local_var + offset.square()).detach()
        # what is not finite would stay in the average for good
        kept = second.isfinite().all(1)
        first = running_average(offset.detach(), self.first, self.rate, kept)
        second = running_average(second, self.second, self.rate, kept)
        self.first, self.second = first[-1], second[-1]
        mixed = mix_moments(
            layer.alpha,
            layer.running_mean + first,
            (second - first.square()).clamp_min(0),  # rounding, where nothing varies
            local_mean,
            local_var,
            cross_term=False,
        )
        both_mean, both_var = (torch.cat([m, m]) for m in mixed)
        return normalise(x, both_mean, both_var, layer.weight, layer.bias, layer.eps, 1)


def running_average(
    values: Tensor, start: Tensor, rate: float, kept: Tensor | None = None
) -> Tensor:
    """Row t is (1 - rate) * row t-1 + rate * values[t], all rows at once; row -1 is `start`.

    Where values are not `kept`, (rows,) of bool, row t is row t-1.

    Example:
        >>> running_average(torch.ones(3, 1), torch.zeros(1), 0.5).flatten()
        tensor([0.5000, 0.7500, 0.8750])
    """
    if kept is None:
        kept = torch.ones(len(values), device=values.device, dtype=torch.bool)
    steps = kept.cumsum(0).to(values.dtype)
    weights = rate * (1 - rate) ** (steps[:, None] - steps).clamp(min=0)
    values = torch.where(kept[:, None], values, 0.0)  # a weight of 0 does not take a NaN away
    return weights.tril() @ values + (1 - rate) ** steps[:, None] * start
