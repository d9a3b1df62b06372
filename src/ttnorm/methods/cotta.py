"""CoTTA (Wang et al., 2022): follow a slow teacher, and forget a little all the time."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..augment import Drawn, check_unit_range, domain_shift, numbers_drawn
from ..groups import per_sample
from ..tree import ttn_layers
from .setting import Setting
from .step import AdaptationStep, FlatParameters, adam, batch_means, in_batches

_SHIFT = partial(domain_shift, per="image")


def cotta(
    model: nn.Module,
    batch_size: int,
    *,
    lr: float = 1e-3,
    teacher_rate: float = 0.999,
    threshold: float = 0.92,
    views: int = 32,
    restore: float = 0.01,
    noise: float = 0.005,
    seed: int = 0,
    window: int = 200,
) -> AdaptationStep:
    """Adapts all parameters; an output is the teacher's, before the update. Takes images in [0, 1].

    loss = sum over batches of the mean cross-entropy between the network and its teacher

    The teacher is an exponential average of the network. Where the source network's mean
    confidence in a batch is below the threshold, the teacher's prediction is its mean over
    augmented views. After an update every parameter goes back to the source with a small
    probability.

    Args:
        model: with its normalisation in place; it is changed.
        batch_size: samples that are normalised together.
        lr: of Adam.
        teacher_rate: how much of the teacher stays after an update.
        threshold: the paper's are 0.92 for CIFAR-10 and 0.72 for CIFAR-100.
        views: that are averaged.
        restore: probability of a parameter.
        noise: standard deviation of what is added to a view.
        seed: of views and restoring.
        window: samples between two updates.
    """
    ttn_layers(model)  # or it says that there are none
    source, teacher = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))
    teacher_vector = FlatParameters(dict(teacher.named_parameters())).vector.data
    flat = FlatParameters(dict(model.named_parameters()))
    capacity = window + batch_size  # samples of a window, at most

    def draw(stream: int) -> Generator:
        """Depends on the window alone, so that a window in parts is the window at once."""
        number = (seed * 1_000_003 + step.updates) * (views + 1) + stream
        return Generator(teacher_vector.device).manual_seed(number % 2**63)

    def view(x: Tensor, index: int, drawn: int) -> Tensor:
        """An augmented view of samples that follow those already seen in this window.

        Args:
            index: of the view.
            drawn: numbers that a sample's shift draws.
        """
        generator, here = draw(index), slice(step.seen, step.seen + len(x))
        numbers = torch.rand((drawn, capacity), generator=generator, device=x.device)
        shifted = _SHIFT(x.clamp(0, 1), Drawn(numbers[:, here].flatten()), check=False)
        size = (capacity, *x.shape[1:])
        grain = torch.randn(size, generator=generator, device=x.device)[here]
        return (shifted + noise * grain.to(x.dtype)).clamp(0, 1)

    @torch.no_grad()
    def teach(x: Tensor) -> Tensor:
        plain = in_batches(teacher, x, batch_size)
        confidence = in_batches(source, x, batch_size).softmax(1).amax(1, keepdim=True)
        unsure = batch_means(confidence, batch_size) < threshold
        if views == 0 or not bool(unsure.any()):
            return plain
        mean = torch.zeros_like(plain)
        drawn = numbers_drawn(_SHIFT, 1, x.shape[1]) or 0
        for index in range(views):
            mean += in_batches(teacher, view(x, index, drawn), batch_size) / views
        return torch.where(per_sample(unsure, len(x), batch_size), mean, plain)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        if step.updates == step.seen == 0:
            check_unit_range(x.nan_to_num(0.5))
        taught = teach(x)
        output = in_batches(model, x, batch_size)
        cross_entropy = -(taught.softmax(1) * output.log_softmax(1)).sum(1, keepdim=True)
        return taught, batch_means(cross_entropy, batch_size).sum()

    def follow_and_forget() -> None:
        vector = flat.vector.data
        teacher_vector.lerp_(vector, 1 - teacher_rate)
        chance = torch.rand(vector.shape, generator=draw(views), device=vector.device)
        vector.copy_(torch.where(chance < restore, step.start["parameters"], vector))

    step = AdaptationStep(
        model,
        predict,
        flat,
        adam(lr),
        batch_size,
        window,
        after=follow_and_forget,
        also={"teacher": teacher_vector},
        copies=(source, teacher),
        record=False,  # it decides by what it sees
    )
    return step


def settings(setting: Setting) -> dict[str, Any]:
    """Its authors' for CIFAR-10, and for CIFAR-100."""
    return {"threshold": 0.92 if setting.classes <= 10 else 0.72}
