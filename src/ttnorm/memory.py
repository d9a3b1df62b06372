"""The memory behind `stream_`: what a network has seen of its streams, and its part of a forward.

Moments are in units of the source, (mean - mu_s) / sigma_s and var / var_s, with all layers of the
network side by side in one row of T channels. A memory that has seen nothing is 0 and 1, and what
comes out is BatchNorm in eval mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from . import kernels
from .batches import describe
from .classes import ALIKE, USUAL, Classes, effect_of, predicted, spread_of, without_class
from .functional import Moments, batch_moments, mix_moments, normalise
from .native import moment_dtype
from .pooling import (
    FARTHEST,
    average,
    cell_moments,
    in_slots,
    in_units,
    of_all_uses,
    plausible,
    remember,
    share_of_new,
    shares,
)
from .routes import Routes
from .routing import Content
from .shallow import describe_frames
from .stream_config import StreamConfig
from .stream_frames import Frames, Places, usable, without_autocast
from .stream_rows import State, StreamRows, outside_inference_mode
from .tree import CLASSES, CONTENT, known_of, ttn_layers
from .trust import Unlike, compare, trust, unknown

NEGLIGIBLE = 0.02  # a batch that is less of its stream's window has no say in its own statistics
BEGINNING = 0.25  # of the window: how long a batch has a say whatever it is like


class Stream(StreamRows):
    """What a network remembers of its streams; hooks of the network call it at every forward.

    Args:
        model: a converted network.
        config: see `StreamConfig`.
    """

    @outside_inference_mode
    def __init__(self, model: nn.Module, config: StreamConfig) -> None:
        self.layers = list(ttn_layers(model).values())
        self.sizes = [layer.running_mean.numel() for layer in self.layers]
        self.dtype = moment_dtype(self.layers[0].running_mean)
        self.source_mean = self._flat([layer.running_mean for layer in self.layers])
        self.unit_var = self._flat([layer.running_var for layer in self.layers]).clamp_min(1e-12)
        self.unit = self.unit_var.sqrt()
        self.ones = torch.ones_like(self.unit)
        self.ends = torch.tensor(self.sizes, device=self.unit.device).cumsum(0)
        # parts of a memory, each with its part of the window: no more than there are classes
        self.cells = config.buckets if config.memory == "balanced" else 1
        self.classes_known = False  # how many there are, as the first output tells
        self.classes = _classes_on(model, self.source_mean, config.memory)
        # the variance between classes, which frames lack that are remembered without theirs
        self.spread = torch.zeros_like(self.source_mean)
        if self.classes is not None:
            self.spread = spread_of(self.classes)
        self.routes = None  # a memory for every domain of a stream
        if config.memory == "routed":
            self.routes = Routes(_content_on(model, self.source_mean), config.slots)
        self.slots = 1 if self.routes is None else self.routes.slots
        self.explicit = False  # whether an exporter has made the state inputs and outputs
        self.frames: Frames | None = None  # of the forward in progress
        self.hooks: list[RemovableHandle] = []
        super().__init__(config)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward: what its layers will mix in."""
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if tracing or (torch.compiler.is_exporting() and not self.explicit):
            raise RuntimeError(
                "A graph has no memory: it would never adapt. Export a network that remembers its "
                "stream with ttnorm.to_onnx or ttnorm.to_exported_program, which make what it "
                "remembers inputs and outputs."
            )
        given = (*args, *kwargs.values())
        tensors = [v for v in given if isinstance(v, Tensor) and v.dim()]
        if not tensors:
            raise ValueError(
                f"The network was called with {', '.join(map(describe, given)) or 'nothing'}, "
                "expected a tensor: a stream needs batches. Of a detector that takes a list of "
                "images, stream its backbone: stream_(model.backbone)."
            )
        x = max(tensors, key=Tensor.dim)  # the frames, rather than what is known of them
        if x.device != self.source_mean.device:
            self.to(x.device)
        if self.waiting:
            self.select(self.ids)
        elif not torch.compiler.is_compiling():
            self.used()
        samples = x.shape[0]  # exporters and compilers take a len() for a constant
        if self.group.shape[0] not in (1, samples):  # likewise
            raise ValueError(f"{len(self.ids)} ids for a batch of {samples}: expected one each.")
        self.frames = None
        if not samples:
            return
        self.cross_term = all(layer.cross_term for layer in self.layers)
        described = None
        if self.routes is not None:
            # of its own: a network may change what it is given
            copies, named = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            shallow = partial(model.forward, *copies, **named)
            pass_through = describe_frames
            if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
                # a decorator would import the compiler, for a second
                pass_through = torch.compiler.disable(describe_frames)
            described = pass_through(self.layers, shallow, size=len(self.routes.content.mean))
        with without_autocast(x):
            self.frames = self._plan(x, described)

    def _plan(self, x: Tensor, described: Tensor | None) -> Frames:
        """What layers will normalise with, by the input and by what enters the first of them."""
        group, places = self.group.expand(x.shape[0]), None
        with torch.no_grad():
            counts = usable(x).to(self.dtype)
            if self.routes is not None and described is not None:
                described = self.routes.whiten(described)
                slot = self.routes.slot(self.state, self.active[group], described)
                group, places = self._places(group, slot)
            share, new = shares(group, counts, len(self.active if places is None else places[0]))
            memory = self._recall(places)
            batch_share = self._trust_in_batch(new, places)[:, None]
        alpha = self._flat([layer.alpha for layer in self.layers])
        # three are mixed, source, memory and batch: the first two here, for all layers at once
        remembered = alpha * (1 - batch_share) / (1 - alpha * batch_share).clamp_min(1e-12)
        zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
        mean, var = mix_moments(remembered, zero, one, *memory, cross_term=self.cross_term)
        mean, var = torch.addcmul(self.source_mean, mean, self.unit), var * self.unit_var
        per_layer = (mean, var, alpha * batch_share, self.source_mean, self.unit)
        return Frames(
            group,
            counts,
            share,
            places,
            described,
            # asking a GPU would mean waiting for it, and a compiler cannot branch on the answer
            mixing=x.is_cuda or torch.compiler.is_compiling() or bool((batch_share > 0).any()),
            per_layer=[*zip(*(t.split(self.sizes, -1) for t in per_layer), strict=True)],
        )

    def _places(self, streams: Tensor, slot: Tensor) -> tuple[Tensor, Places]:
        """Where the memories are that samples need, and which of them each of the samples needs."""
        wanted = streams * self.slots + slot
        if wanted.is_cuda or torch.compiler.is_compiling():  # all: some would have to be waited for
            used = torch.arange(len(self.active) * self.slots, device=wanted.device)
        else:
            used, wanted = wanted.unique(return_inverse=True)
        return wanted, (self.active[used // self.slots], used % self.slots)

    def _read(self, name: str, places: Places | None) -> Tensor:
        """Of the memories at these places, or of all active streams where each has but one."""
        if places is None:
            return self.state[name][self.active]
        return in_slots(self.state[name], self.slots)[places]

    def _write(self, name: str, places: Places | None, value: Tensor) -> None:
        if places is None:
            self.state[name][self.active] = value
        else:
            in_slots(self.state[name], self.slots)[places] = value  # a view

    def _recall(self, places: Places | None) -> Moments:
        """Moments of each memory, (memories, T)."""
        mean, var = average(self._read("mean", places), self._read("var", places))
        return mean, var + self.spread

    def _trust_in_batch(self, new: Tensor, places: Places | None) -> Tensor:
        """The batch's share in what is mixed with the source, for each memory."""
        if self.config.memory == "pool":
            share, _ = share_of_new(self._read("count", places)[:, 0], new, self.config.window)
        else:
            # its labels may be all alike, so it helps out where domains come and go, and as long
            # as little has been seen
            seen = self.state["seen"][self.active]
            seen = seen if places is None else self.state["slot_seen"][places]
            seen = seen / (BEGINNING * self.config.window)
            unlike = unknown(new)
            if self.classes is not None:
                unlike = Unlike(*(self._read(name, places)[:, 0] for name in Unlike._fields))
            share = trust(unlike, new, (1 - seen).clamp_min(0) / self.config.source)
        return torch.where(share < NEGLIGIBLE, 0.0, share)

    def standardise(self, index: int, x: Tensor) -> Tensor:
        """A layer's part of the forward."""
        now, layer = self.frames, self.layers[index]
        if not x.shape[0]:
            return x
        if now is None:
            raise RuntimeError(
                "A layer was called outside of a forward of the network that stream_ was given. "
                "Copies of a graph, such as fuse gives, are to be made before stream_."
            )
        if x.shape[0] != now.group.shape[0]:
            raise ValueError(
                f"A layer sees {len(x)} samples in a batch of {len(now.group)}, so it is unknown "
                "which of them belongs to which stream. Networks that fold other dimensions into "
                "the batch cannot have streams."
            )
        with torch.no_grad():
            mean, var = batch_moments(x.detach(), 1)
            frames = (mean.to(self.dtype), var.to(self.dtype))  # the network may have been cast
        now.moments.setdefault(index, []).append(frames)
        mean, var, batch_alpha, source_mean, unit = now.per_layer[index]
        if kernels.usable(x) and not (batch_alpha.requires_grad or torch.compiler.is_compiling()):
            return self._on_gpu(now, index, x)
        if now.mixing:
            with torch.no_grad(), without_autocast(x):
                frames = in_units(*frames, source_mean, unit)
                batch = cell_moments(now.share, now.group, *frames)
                batch = (torch.addcmul(source_mean, batch[0], unit), batch[1] * unit.square())
            mean, var = mix_moments(batch_alpha, mean, var, *batch, cross_term=self.cross_term)
        dtype = moment_dtype(x)  # the network may have been cast since
        mean, var = mean.to(dtype), var.to(dtype)
        if len(mean) == 1:
            return normalise(x, mean[0], var[0], layer.weight, layer.bias, layer.eps)
        rows = (mean[now.group], var[now.group])
        return normalise(x, *rows, layer.weight, layer.bias, layer.eps, 1)

    def _on_gpu(self, now: Frames, index: int, x: Tensor) -> Tensor:
        """The same in three kernels: a layer has many small operations, and few frames a step."""
        layer = self.layers[index]
        rows = kernels.mix_frames(
            *now.moments[index][-1],
            now.group,
            now.counts,
            *now.per_layer[index],
            farthest=FARTHEST,
            cross_term=self.cross_term,
        )
        adapted = [t for t in (x, layer.weight, layer.bias) if t is not None and t.requires_grad]
        if torch.is_grad_enabled() and adapted:
            return normalise(x, *rows, layer.weight, layer.bias, layer.eps, 1)
        _, _, _, source_mean, unit = now.per_layer[index]
        # with an alpha of 1 the source is not mixed in again, whatever is given as its statistics
        statistics = (self.ones[: len(unit)], source_mean, unit)
        return kernels.forward(
            x, layer.weight, layer.bias, *statistics, layer.eps, 1, False, given=rows
        )[0]

    @torch.no_grad()
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a forward: remember its frames."""
        now, self.frames = self.frames, None
        if now is None:  # no frames came
            return
        with without_autocast(now.counts):
            moments, source = self._moments(now), (self.source_mean, self.unit)
            now.counts = now.counts * plausible(*moments, *source, self.ends)
            self._take(now, in_units(*moments, *source), output)
        streams = self.group.expand(now.group.shape[0])
        taken = shares(streams, now.counts, len(self.active))[1].long()
        every = shares(streams, torch.ones_like(now.counts), len(self.active))[1].long()
        self.state["seen"][self.active] += taken
        self.state["rejected"][self.active] += every - taken
        if not (now.group.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.find_domains()

    def _take(self, now: Frames, moments: Moments, output: Any) -> None:
        """Into the memories: frames, by their moments in units of the source, (N, T) each."""
        cells, counts, places = now.group, now.counts, now.places
        if self.config.memory == "balanced":
            cells = cells * self._cells_for(output) + output.argmax(1) % self.cells
        if self.classes is not None:
            chance = predicted(output, self.classes)
            effect = effect_of(chance - self._usual_classes(counts, chance), self.classes)
            moments = without_class(moments, effect)
        if self.routes is not None and places is not None:  # a frame of no domain is in no memory
            counts = counts * (places[1][now.group] < self.routes.domains)
        names = ("count", "mean", "var")
        before = {name: self._read(name, places).flatten(0, 1) for name in names}
        share, new = shares(cells, counts, len(before["count"]))
        new_mean, new_var = cell_moments(share, cells, *moments)
        if self.classes is not None:
            batch = (moments[0], effect[0], cells, share)
            self._compare(places, new, batch, (before["mean"], before["count"]))
        after = remember(
            **before,
            new=new,
            new_mean=new_mean,
            new_var=new_var,
            window=max(1.0, self.config.window / self.cells),
            cross_term=self.config.between_frames,
        )
        for name, value in zip(names, after, strict=True):
            self._write(name, places, value.view(-1, self.cells, *value.shape[1:]))
        if self.routes is not None and places is not None and now.described is not None:
            self.state["slot_seen"][places] += new.view(-1, self.cells).sum(1).long()
            rows = self.active[self.group.expand(now.group.shape[0])]
            frames = (rows, now.described, places[1][now.group], now.counts)
            self.routes.remember(self.state, *frames)

    def _compare(
        self,
        places: Places | None,
        new: Tensor,
        batch: tuple[Tensor, Tensor, Tensor, Tensor],
        memory: Moments,
    ) -> None:
        """How unlike their memory batches are: see `trust.compare`."""
        alpha = self._flat([layer.alpha.detach() for layer in self.layers])
        new = torch.where(new < 2, 0.0, new)  # one frame has no variance
        found = compare(*batch, new, *memory, alpha / alpha.sum().clamp_min(1e-12))
        weight, count = share_of_new(self._read("compared", places)[:, 0], new, self.config.window)
        self._write("compared", places, count[:, None])
        for name, value in zip(Unlike._fields, found, strict=True):
            before = self._read(name, places)[:, 0]
            self._write(name, places, (before + weight * (value - before))[:, None])

    def _usual_classes(self, counts: Tensor, chance: Tensor) -> Tensor:
        """The mean prediction of every frame's stream, these frames included, (N, K)."""
        streams = self.group.expand(chance.shape[0])
        share, new = shares(streams, counts, len(self.active))
        usual, count = (self.state[name][self.active] for name in ("usual", "usual_count"))
        weight, count = share_of_new(count, new, USUAL)
        usual = usual + weight[:, None] * (share @ chance - usual)
        self.state["usual"][self.active], self.state["usual_count"][self.active] = usual, count
        return usual[streams]

    @torch.no_grad()
    def find_domains(self) -> None:
        """Of the streams that were last seen, if it is time for that; routed memories have some."""
        if self.routes is not None:
            with without_autocast(self.source_mean):
                self.routes.look(self.state, self.active, self._blank)

    def _moments(self, now: Frames) -> Moments:
        """Of every sample in every channel, (N, T)."""
        samples = now.group.shape[0]
        means = list(self.source_mean.expand(samples, -1).split(self.sizes, 1))
        variances = list(self.unit_var.expand(samples, -1).split(self.sizes, 1))
        for index, uses in now.moments.items():  # a layer that was not used is the source's
            means[index], variances[index] = of_all_uses(uses)
        return self._flat(means), self._flat(variances)

    def _cells_for(self, output: Any) -> int:
        """As many as the network tells classes apart, which its first output says."""
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise ValueError(
                "A balanced memory needs predictions of shape (N, classes). For a network that "
                "gives something else: stream_(model, memory='pool')."
            )
        if not self.classes_known:
            self.use_cells(min(self.cells, output.shape[1]))
        return self.cells

    @outside_inference_mode
    def use_cells(self, number: int) -> None:
        """Before anything has been seen."""
        self.classes_known = True
        if number != self.cells:
            self.cells = number
            self.state = self._blank(len(self.state["seen"]))

    def _flat(self, per_layer: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.to(self.dtype) for t in per_layer], -1)

    @outside_inference_mode
    def to(self, device: torch.device) -> None:
        for name in (
            "source_mean",
            "unit",
            "unit_var",
            "ones",
            "ends",
            "spread",
            "active",
            "group",
        ):
            setattr(self, name, getattr(self, name).to(device))
        if self.classes is not None:
            self.classes = Classes(*(t.to(device) for t in self.classes))
        if self.routes is not None:
            self.routes.to(device)
        self.state = {name: t.to(device) for name, t in self.state.items()}

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        cells = self.cells
        if self.config.memory == "balanced" and "count" in state:
            # fewer than buckets, where an output has told that there are fewer classes
            self.cells = min(max(state["count"].shape[-1], 1), self.config.buckets)
        try:
            super().load_memory_state(state)
        except ValueError:
            self.cells = cells
            raise
        self.classes_known = bool(self.state["seen"].any())

    def _blank(self, streams: int) -> State:
        like, cells = self.source_mean, self.slots * self.cells
        state = {
            "mean": like.new_zeros(streams, cells, len(like)),
            "var": (1 - self.spread).expand(streams, cells, -1).clone(),
            "count": like.new_full((streams, cells), self.config.source / self.cells),
            "seen": like.new_zeros(streams, dtype=torch.long),
            "rejected": like.new_zeros(streams, dtype=torch.long),
        }
        if self.classes is not None:
            number = len(self.classes.codes)
            state |= {
                "excess": like.new_zeros(streams, self.slots),
                "runs": like.new_zeros(streams, self.slots),
                "within": like.new_ones(streams, self.slots),
                "compared": like.new_full((streams, self.slots), 1e-6),
                "usual": like.new_full((streams, number), 1 / number),
                "usual_count": like.new_full((streams,), ALIKE),
            }
        if self.routes is not None:
            state |= self.routes.blank(streams)
        return state


def _content_on(model: nn.Module, like: Tensor) -> Content:
    content: Content | None = known_of(model, CONTENT)
    if content is None:
        raise ValueError(
            "It is not known how source images vary, which a routed memory needs. Post-train the "
            "network again and save its alpha file anew, or use memory='balanced'."
        )
    return Content(*(t.to(like) for t in content))


def _classes_on(model: nn.Module, like: Tensor, memory: str | None) -> Classes | None:
    """What is known of classes, for memories that want it; a routed one can do without."""
    classes: Classes | None = known_of(model, CLASSES)
    if memory == "corrected" and classes is None:
        raise ValueError(
            "It is not known what classes do to statistics, which a corrected memory needs. "
            "Post-train the network with a class for every image, and save its alpha file anew, or "
            "use memory='balanced'."
        )
    if memory not in ("corrected", "routed") or classes is None:
        return None
    if classes.directions.shape[1] != 2 * len(like):
        raise ValueError(
            f"What classes do is known of {classes.directions.shape[1] // 2} channels, and the "
            f"network has {len(like)}: was a part of it folded? Fold the network as a whole."
        )
    return Classes(*(t.to(like) for t in classes))
