"""The step that gradient methods share: predict, and update after every window of samples.

Parameters stay as they are inside a window, so all its batches are one forward with groups and one
backward, exactly as if their gradients had been accumulated one by one. On a GPU such a window is
recorded as a CUDA graph. A step after which anything is not finite is undone.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import groups, kernels
from ..capture import Repeated
from ..isolation import isolated
from ..memory import Stream
from ..mixnorm import MixNorm
from ..stream_rows import outside_inference_mode
from ..tree import STREAM, unwrap

logger = logging.getLogger("ttnorm")

LOOK = 100  # updates after which a GPU is asked whether all were finite
Predict = Callable[[Tensor], tuple[Tensor, Tensor]]


class AdaptationStep:
    """Predicts samples, and updates parameters after every window of them.

    Args:
        model: with its normalisation in place.
        predict: from samples to their outputs and a loss, the sum over their batches.
        flat: the parameters that adapt.
        optimiser: makes one of a list with that vector, such as `adam`.
        batch_size: samples that are normalised together.
        window: samples, at least, between two updates.
        pull: adds to the vector's gradient what a number of batches adds by a regulariser.
        after: called after an update, before it is checked for values that are not finite.
        also: other tensors that an update changes; they are restored, saved and loaded as well.
        copies: networks beside the model whose norm starts anew with it.
        record: whether a whole window may be recorded as a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        predict: Predict,
        flat: FlatParameters,
        optimiser: Callable[[list[Tensor]], torch.optim.Optimizer],
        batch_size: int,
        window: int,
        *,
        pull: Callable[[Tensor, int], None] | None = None,
        after: Callable[[], None] | None = None,
        also: Mapping[str, Tensor] | None = None,
        copies: Sequence[nn.Module] = (),
        record: bool = True,
    ) -> None:
        for name, value in {"batch_size": batch_size, "window": window}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1.")
        self.models = (model, *copies)
        self.predict, self.batch_size, self.window = predict, batch_size, window
        self.pull, self.after = pull, after
        model.requires_grad_(False)
        for parameter in flat.tensors:
            parameter.requires_grad_()
        self.flat = flat
        self.optimiser = optimiser([self.flat.vector])
        _create_state(self.optimiser, self.flat.vector)
        self.state = {"parameters": self.flat.vector.data, **(also or {})}
        self.state |= {k: v for k, v in self.optimiser.state[self.flat.vector].items()
                       if isinstance(v, Tensor)}  # fmt: skip
        self.start = {name: t.clone() for name, t in self.state.items()}
        self.good = {name: t.clone() for name, t in self.state.items()}
        self.began: list[Any] = [memory.memory_state() for memory in self._memories()]
        self.lost = torch.zeros((), device=self.flat.vector.device)  # undone updates
        self.seen = self.updates = self.warned = self.reported = 0
        record = record and kernels.ENABLED and self.flat.vector.is_cuda
        record = record and memory_of(model) is None  # that changes with every batch
        self._whole = Repeated(self._window) if record else self._window

    @property
    def room(self) -> int:
        """Samples until the next update, in whole batches."""
        return math.ceil((self.window - self.seen) / self.batch_size) * self.batch_size

    @outside_inference_mode
    def __call__(self, x: Tensor) -> Tensor:
        """The outputs, as they are before the update that they lead to; valid until the next call.

        Args:
            x: whole batches one after another; only the last may be smaller.
        """
        self.flat.check(self.models[0])
        if x.is_inference():
            x = x.clone()  # which autograd may keep
        if not len(x):  # nothing to adapt to
            with torch.no_grad():
                return in_batches(self.models[0], x, self.batch_size)
        if len(x) <= self.room:
            return self._part(x)
        outputs = []
        while len(x):
            count = min(self.room, len(x))
            outputs.append(self._part(x[:count]).clone())
            x = x[count:]
        return torch.cat(outputs)

    def reset(self) -> None:
        """As it was at the beginning, bit for bit."""
        self._warn()
        _copy(self.state, self.start)
        self.flat.gradient.zero_()
        self.seen = self.updates = 0
        for memory, state in zip(self._memories(), self.began, strict=True):
            memory.load_memory_state(state)

    def report(self) -> int:
        """How many updates have been undone since the last report."""
        lost = self._warn()
        new, self.reported = lost - self.reported, lost
        return new

    def state_dict(self) -> dict[str, Any]:
        """All that the next call depends on."""
        self._warn()
        tensors = {name: t.clone() for name, t in self.state.items()}
        counts = {"seen": self.seen, "updates": self.updates}
        norms = {"norms": [memory.memory_state() for memory in self._memories()]}
        return tensors | {"gradient": self.flat.gradient.clone()} | counts | norms

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expected = {*self.state, "gradient", "seen", "updates", "norms"}
        if set(state) != expected:
            raise ValueError(
                f"The state has {', '.join(sorted(state))}; expected "
                f"{', '.join(sorted(expected))}. Was it saved by another method?"
            )
        memories = self._memories()
        if len(state["norms"]) != len(memories):
            raise ValueError("The state was saved with another norm than this one.")
        for name, tensor in {**self.state, "gradient": self.flat.gradient}.items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} of the state has shape {tuple(state[name].shape)}, expected "
                    f"{tuple(tensor.shape)}. Was it saved with another network?"
                )
        for memory, seen in zip(memories, state["norms"], strict=True):
            memory.load_memory_state(seen)
        _copy(self.state, state)
        self.flat.gradient.copy_(state["gradient"])
        self.seen, self.updates = int(state["seen"]), int(state["updates"])

    def _memories(self) -> list[MixNorm | Stream]:
        """Of the networks whose norm has a state of its own."""
        memories = (memory_of(model) for model in self.models)
        return [memory for memory in memories if memory is not None]

    def _part(self, x: Tensor) -> Tensor:
        """Samples that fit into what is left of the window."""
        if self.seen == 0 and len(x) >= self.window:
            output = self._whole(x)
        else:
            output, loss = self._accumulate(x)
            self.seen += len(x)
            if self.seen < self.window:
                return output
            self._update(loss)
            self.seen = 0
        self.updates += 1
        if x.is_cpu or self.updates % LOOK == 0:
            self._warn()
        return output

    def _window(self, x: Tensor) -> Tensor:
        output, loss = self._accumulate(x)
        self._update(loss)
        return output

    @torch.enable_grad()
    def _accumulate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, loss = self.predict(x)
        self.flat.add_gradients(loss)
        if self.pull is not None:
            with torch.no_grad():
                self.pull(self.flat.gradient, math.ceil(len(x) / self.batch_size))
        return output.detach(), loss.detach()

    @torch.no_grad()
    def _update(self, loss: Tensor) -> None:
        _copy(self.good, self.state)
        finite = torch.isfinite(loss) & torch.isfinite(self.flat.gradient).all()
        self.flat.vector.grad = self.flat.gradient
        self.optimiser.step()
        self.flat.vector.grad = None
        if self.after is not None:
            self.after()
        for tensor in self.state.values():
            if tensor.device == finite.device:
                finite = finite & torch.isfinite(tensor).all()
        for name, tensor in self.state.items():
            tensor.copy_(torch.where(finite.to(tensor.device), tensor, self.good[name]))
        self.flat.gradient.zero_()
        self.lost += ~finite

    def _warn(self) -> int:
        """How many updates have been undone, with a warning of new ones; waits for a GPU."""
        lost = int(self.lost)
        if lost > self.warned:
            logger.warning(
                "%d update(s) would have made a parameter infinite or NaN and were undone. Is "
                "there a broken sample, or is the learning rate too high?",
                lost - self.warned,
            )
        self.warned = lost
        return lost


class FlatParameters:
    """Some parameters of a network as one vector, so that an update is one operation.

    Args:
        parameters: leaf tensors of one dtype on one device, by name; they become views.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        tensors = list(parameters.values())
        if len({(t.dtype, t.device) for t in tensors}) != 1:
            kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
            raise ValueError(
                f"The parameters that adapt are {', '.join(kinds) or 'none'}; expected one dtype "
                "on one device. Convert the network, and use autocast for lower precision."
            )
        if tensors[0].dtype == torch.float16:
            raise ValueError(
                "The parameters that adapt are torch.float16, in which an update is lost or "
                "infinite; expected torch.float32 or torch.bfloat16. Use autocast."
            )
        sizes = [t.numel() for t in tensors]
        self.tensors, self.names = tensors, list(parameters)
        self.vector = nn.Parameter(torch.empty(sum(sizes), dtype=tensors[0].dtype,
                                               device=tensors[0].device))  # fmt: skip
        self.gradient = torch.zeros_like(self.vector.data)
        starts = [0, *itertools.accumulate(sizes)][:-1]
        self.slices = {
            name: slice(start, start + size)
            for name, start, size in zip(self.names, starts, sizes, strict=True)
        }
        self.gradients = []
        for tensor, start in zip(tensors, starts, strict=True):
            # with the strides it has: a channels-last weight stays one
            like = torch.empty_like(tensor)
            view = self.vector.data.as_strided(like.shape, like.stride(), start)
            view.copy_(tensor.data)
            tensor.data = view
            self.gradients.append(self.gradient.as_strided(like.shape, like.stride(), start))

    def check(self, model: nn.Module) -> None:
        """Raise if the network's parameters are no longer these, for nothing would adapt."""
        here = self.vector.untyped_storage().data_ptr()
        held = {id(t) for t in itertools.chain(model.parameters(), model.buffers())}
        if any(id(t) not in held or t.untyped_storage().data_ptr() != here for t in self.tensors):
            raise RuntimeError(
                "The network was moved, cast or given other parameters after the method was made. "
                "Make the method anew."
            )

    def add_gradients(self, loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, self.tensors, allow_unused=True)
        pairs = [(view, g) for view, g in zip(self.gradients, grads, strict=True) if g is not None]
        with torch.no_grad():
            torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs])


def memory_of(model: nn.Module) -> MixNorm | Stream | None:
    """What the network's norm remembers, if it does."""
    return model if isinstance(model, MixNorm) else unwrap(model).__dict__.get(STREAM)


def in_batches(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    """The network's outputs, each batch of `batch_size` normalised on its own."""
    if isinstance(model, MixNorm):  # it knows no batches
        return _checked(model(x))
    if memory_of(model) is not None:  # one batch after another: each changes the memory
        return torch.cat([_checked(model(part)) for part in x.split(batch_size)])
    with isolated(model, batch_size):
        return _checked(model(x))


def _checked(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"The network gave a {type(output).__name__}, expected a tensor of predictions. Wrap "
            "it in a module that picks them out."
        )
    return output


def entropy(output: Tensor) -> Tensor:
    """Of the predicted classes, for every sample: (N, classes) to (N, 1).

    Where every pixel has a prediction, (N, classes, H, W), the mean over pixels.

    Example:
        >>> round(entropy(torch.zeros(1, 10)).item(), 4)  # nothing is known: log 10
        2.3026
    """
    log_p = output.log_softmax(1)
    return mean_over_pixels(-(log_p.exp() * log_p).sum(1, keepdim=True))


def mean_over_pixels(values: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C); what has no pixels stays as it is."""
    return values if values.dim() == 2 else values.flatten(2).mean(2)


def batch_means(values: Tensor, batch_size: int) -> Tensor:
    """Means over batches of consecutive samples, the last one of which may be smaller.

    Args:
        values: (N, ...), to (batches, ...).

    Example:
        >>> batch_means(torch.tensor([[1.0], [3.0], [5.0]]), 2)
        tensor([[2.],
                [5.]])
    """
    sums = groups.group_sum(values.flatten(1), batch_size)
    sizes = groups.group_sum(torch.ones_like(values.flatten(1)[:, :1]), batch_size)
    return (sums / sizes).unflatten(1, values.shape[1:])


def adam(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Makes Adam with its usual betas."""
    return lambda tensors: torch.optim.Adam(tensors, lr=lr, capturable=tensors[0].is_cuda)


def optimiser(lr: float, momentum: float | None) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Makes SGD with that momentum, or Adam where it is None."""
    if momentum is None:
        return adam(lr)
    return lambda tensors: torch.optim.SGD(tensors, lr=lr, momentum=momentum)


def _create_state(optimiser: torch.optim.Optimizer, vector: nn.Parameter) -> None:
    """An optimiser makes its state in its first step; have it there before, all zero."""
    before = vector.data.clone()
    vector.grad = torch.zeros_like(vector)
    optimiser.step()
    vector.grad = None
    vector.data.copy_(before)
    for value in optimiser.state[vector].values():
        if isinstance(value, Tensor):
            value.zero_()


def _copy(to: Mapping[str, Tensor], source: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, tensor in to.items():
            tensor.copy_(source[name])
