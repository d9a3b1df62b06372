"""The step that gradient methods share: a window of batches, forward to update, at once.

Parameters stay as they are inside a window, so all its batches are one forward with groups and one
backward, exactly as if their gradients had been accumulated one by one. On a GPU the whole step can
be recorded as a CUDA graph: see `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import kernels
from ..capture import Repeated
from ..surgery import isolated


class AdaptationStep:
    """Predicts a window of samples, then updates parameters by a loss of the predictions.

    Args:
        model: with its normalisation in place.
        optimiser: of the parameters that adapt; on a GPU one that is `capturable`.
        loss: from the outputs of all samples to one number.
        batch_size: samples that are normalised together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        loss: Callable[[Tensor], Tensor],
        batch_size: int,
    ) -> None:
        self.model, self.optimiser, self.loss = model, optimiser, loss
        self.batch_size = batch_size
        self._run = Repeated(self._step) if kernels.ENABLED else self._step

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs, as they are before the update; valid until the next call."""
        return self._run(x)

    @torch.enable_grad()
    def _step(self, x: Tensor) -> Tensor:
        with isolated(self.model, self.batch_size):
            output = self.model(x)
        self.optimiser.zero_grad()
        self.loss(output).backward()
        self.optimiser.step()
        return output.detach()


def mean_entropy(output: Tensor) -> Tensor:
    """Of the predicted classes, over all samples.

    Example:
        >>> round(mean_entropy(torch.zeros(3, 10)).item(), 4)  # nothing is known: log 10
        2.3026
    """
    log_p = output.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()
