"""Statistics pooled over a stream: batch size stops mattering.

A frame alone says little about its domain; a stream of frames says a lot. Every layer's moments are
remembered, and a batch of any size is normalised with a mixture of the source's, the memory's and
its own. No gradient, no second full forward, constant memory. See `memory` for how.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .files import Stamp, check_fingerprint, fingerprint, read_stamped, write_stamped
from .float64 import in_float64
from .memory import Stream
from .pooling import average, in_slots
from .stream_config import StreamConfig
from .stream_rows import Id
from .surgery import end_stream_
from .tree import CONTENT, STREAM, M, known_of, unwrap

STAMP = Stamp("ttnorm-stream", 1, "holds no streams: ttnorm.save_stream writes those.")


def stream_(model: M, config: StreamConfig | None = None, **options: Any) -> M:
    """Have a network remember the stream it sees, from now on.

    A batch is normalised with the source's statistics and, as far as alpha goes, with those of the
    last frames instead of its own alone. It starts close to plain BatchNorm: its memory begins as
    four frames of the source.

    Args:
        model: a network with test-time normalization layers, from `load_`, `convert_` or
            `post_train_`. Called again, it starts anew.
        config: see `StreamConfig`.
        options: fields of it, in place of the config's.

    Returns:
        The same model.

    Example:
        >>> from ttnorm import convert_
        >>> model = stream_(convert_(nn.Sequential(nn.BatchNorm1d(2)), alpha=0.5), window=100)
        >>> for _ in range(3):
        ...     output = model(torch.randn(1, 2))
        >>> health(model)[None].frames
        3
    """
    if config is not None and not isinstance(config, StreamConfig):
        raise TypeError(
            f"config is {config!r}, expected a StreamConfig; single options have names, as in "
            "stream_(model, memory='pool', window=100)."
        )
    config = dataclasses.replace(config or StreamConfig(), **options)
    if config.memory is None:
        known = known_of(model, CONTENT) is not None
        config = dataclasses.replace(config, memory="routed" if known else "balanced")
    return attach_(model, Stream(model, config))


def attach_(model: M, stream: Stream) -> M:
    """Have a network remember its stream in this one, which was made for it."""
    network = unwrap(model)
    before = network.__dict__.get(STREAM)
    end_stream_(model)
    if any("standardise" in layer.__dict__ for layer in stream.layers):
        raise ValueError(
            "Layers of this network belong to another one as well, which remembers a stream or is "
            "under MixNorm. Call ttnorm.end_stream_ with the former before, or take a copy of the "
            "network as it was."
        )
    if before is not None:
        stream.select_again(before.ids)  # of the `streams` that this may be called in
    network.__dict__[STREAM] = stream
    stream.hooks = [
        network.register_forward_pre_hook(stream.begin, with_kwargs=True),
        network.register_forward_hook(stream.end),
    ]
    for index, layer in enumerate(stream.layers):
        layer.standardise = partial(stream.standardise, index)  # type: ignore[method-assign]
    return model


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a network that remembers, with memories of its own.

    The copy of a graph, such as `fuse` gives, has neither hooks nor this memory by itself.
    """
    memo: dict[int, Any] = {}
    network = copy.deepcopy(unwrap(model), memo)
    if STREAM not in network.__dict__:
        stream = copy.deepcopy(stream_of(model), memo)
        for layer in stream.layers:  # which are the copy's
            layer.__dict__.pop("standardise", None)
        attach_(network, stream)
    return network


def reset_stream_(model: M, ids: Sequence[Id] | None = None) -> M:
    """Forget what was seen: of all streams, or of those with these ids."""
    stream_of(model).reset(None if ids is None else _plain(ids))
    return model


@contextlib.contextmanager
def streams(model: M, ids: Sequence[Id]) -> Iterator[M]:
    """Inside, the samples of a batch belong to the streams of these ids, one id for each.

    Every stream has a memory of its own; frames of many streams in one forward come out as if each
    stream had run alone. A tensor or an array of ids stands for its numbers; to be saved, ids have
    to be strings or whole numbers. It is a state of the model: threads have to take turns, or need
    models of their own.

    Example:
        >>> from ttnorm import convert_
        >>> model = stream_(convert_(nn.Sequential(nn.BatchNorm1d(2)), alpha=0.5))
        >>> with streams(model, ["door", "yard", "yard"]):
        ...     output = model(torch.randn(3, 2))
        >>> {name: state.frames for name, state in health(model).items()}
        {'door': 1, 'yard': 2}
    """
    before = stream_of(model).ids
    stream_of(model).select(_plain(ids))
    try:
        yield model
    finally:
        stream = unwrap(model).__dict__.get(STREAM)
        if stream is not None:  # and was not ended inside
            stream.select_again(before)


def find_domains(model: nn.Module) -> None:
    """Have a routed memory look for domains in its last frames, if it is time for that.

    A forward does it by itself, but not one that is replayed from a CUDA graph.
    """
    stream_of(model).find_domains()


def save_stream(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what a network remembers to a safetensors file, for another process to go on with.

    Args:
        model: whose streams have strings, whole numbers or None for ids.
        path: the file.
    """
    stream = stream_of(model)
    state = stream.memory_state()
    ids = state.pop("ids")
    odd = [one for one in ids if not isinstance(one, (str, int, type(None)))]
    if odd:
        raise TypeError(
            f"Stream {odd[0]!r} cannot be saved: its id is a {type(odd[0]).__name__}, expected a "
            "string, a whole number or None."
        )
    tensors = {name: t.cpu().contiguous() for name, t in state.items()}
    metadata = {"config": dataclasses.asdict(stream.config), "ids": ids}
    write_stamped(path, STAMP, model, tensors, metadata)


def load_stream_(model: M, path: str | os.PathLike[str]) -> M:
    """Have a network remember what `save_stream` wrote; the same network, on any device.

    With the options that it was saved with, but for `max_streams` where the network remembers
    streams already: that is the network's then, so that a limit can be raised.
    """
    tensors, metadata = read_stamped(path, STAMP)
    advice = "or begin anew with stream_"
    check_fingerprint(path, metadata["fingerprint"], fingerprint(model), advice)
    config, now = StreamConfig(**metadata["config"]), unwrap(model).__dict__.get(STREAM)
    if now is not None:
        most = max(now.config.max_streams, len(metadata["ids"]))
        config = dataclasses.replace(config, max_streams=most)
    stream = Stream(model, config)
    stream.load_memory_state({"ids": metadata["ids"], **tensors})
    return attach_(model, stream)


@dataclasses.dataclass(frozen=True)
class Health:
    """A stream in numbers.

    Args:
        shift: how far its statistics are from the source's: the mean over channels, weighted by
            alpha, of the Gaussian divergence between them. 0 is the source, or that no frame was
            taken yet. Of a routed memory the mean over its domains, by the frames that each had.
        effective_count: frames that its memory is worth, in all its domains together.
        frames: how many it has seen and not rejected.
        rejected: how many were not finite, of one colour or of an impossible scale, and are not
            remembered.
        domains: how many are told apart in it; 1 unless its memory is routed.
    """

    shift: float
    effective_count: float
    frames: int
    rejected: int
    domains: int


@torch.no_grad()
def health(model: nn.Module) -> dict[Id, Health]:
    """How every stream is doing, the one unused for longest first."""
    stream = stream_of(model)
    state, slots = stream.state, stream.slots
    kept = {name: in_slots(state[name], slots) for name in ("mean", "var", "count")}
    mean, var = average(kept["mean"], kept["var"])
    var = var + stream.spread
    alpha = torch.cat([layer.alpha for layer in stream.layers]).to(mean)
    divergence = 0.5 * (var + mean.square() - 1 - var.clamp_min(1e-6).log())
    shift = (divergence * alpha).sum(2) / alpha.sum().clamp_min(1e-12)
    used = state["slot_seen"] if stream.routes else torch.ones_like(shift)
    share = used / used.sum(1, keepdim=True).clamp_min(1)
    count = (kept["count"].sum(2) * (used > 0)).sum(1)
    columns = ((shift * share).sum(1), count, state["seen"], state["rejected"], (used > 0).sum(1))
    table = torch.stack([in_float64(column) for column in columns], 1).tolist()
    return {
        one: Health(*table[row][:2], *map(int, table[row][2:]))
        for one, row in stream.rows.items()
        if any(table[row][2:4])
    }


def stream_state(model: nn.Module, id: Id = None) -> dict[str, Tensor]:
    """What is remembered of one stream, by name: what an exported graph takes beside the batch.

    Args:
        model: the network that was exported, or one like it.
        id: of the stream; forwards without ids belong to None.
    """
    stream = stream_of(model)
    if id not in stream.rows:
        raise ValueError(f"There is no stream {id!r}; there are {list(stream.rows)}.")
    row = stream.rows[id]
    return {name: t[row : row + 1].clone() for name, t in stream.state.items()}


def _plain(ids: Sequence[Id]) -> list[Id]:
    """Ids that are equal where their values are, which tensors are not."""
    if isinstance(ids, (str, bytes)):
        raise ValueError(f"ids is {ids!r}, expected one for each sample: [{ids!r}] for one stream.")
    if hasattr(ids, "tolist"):
        return list(ids.tolist())
    return [one.item() if hasattr(one, "item") else one for one in ids]


def stream_of(model: nn.Module) -> Stream:
    stream = unwrap(model).__dict__.get(STREAM)
    if stream is None:
        raise ValueError("The model remembers no stream. Call ttnorm.stream_ first.")
    return stream
