"""Streams side by side: a norm that remembers takes the batches of a stream one after another, but
streams that do not depend on each other share their forwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..capture import Repeated
from ..stream import find_domains, reset_stream_, stream_of, streams
from .scenarios import Segment


def alongside(
    model: nn.Module,
    images: Callable[[Tensor, Tensor], Tensor],
    segments: Sequence[Sequence[Segment]],
    batch_size: int,
    at_once: int,
) -> Iterator[list[Tensor]]:
    """The predicted classes of streams that all start anew.

    They come in the order of the streams, those together that shared their forwards.

    Args:
        model: with a norm that remembers its stream.
        images: from domains and numbers of images to a batch of them.
        segments: of every stream, each cut into batches from its beginning.
        batch_size: of every stream.
        at_once: streams that share a forward.
    """
    stream_of(model).make_room(at_once)
    for first in range(0, len(segments), at_once):
        together = [_batches(stream, batch_size) for stream in segments[first : first + at_once]]
        reset_stream_(model)
        predicted: list[list[Tensor]] = [[] for _ in together]
        nothing = (torch.empty(0, dtype=torch.long),) * 2
        every_step = itertools.zip_longest(*together, fillvalue=nothing)
        for sizes, steps in itertools.groupby(every_step, lambda step: [len(d) for d, _ in step]):
            ids = [index for index, size in enumerate(sizes) for _ in range(size)]
            with streams(model, ids):
                forward = Repeated(model)
                for step in steps:
                    x = images(*(torch.cat(column) for column in zip(*step, strict=True)))
                    classes = forward(x).argmax(1).split(sizes)
                    find_domains(model)  # which no recorded forward does
                    for part, found in zip(predicted, classes, strict=True):
                        part.append(found)
        yield [torch.cat(part) for part in predicted]


def _batches(stream: Sequence[Segment], batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Domains and numbers of the images of every batch."""
    parts = ((s.domains.split(batch_size), s.images.split(batch_size)) for s in stream)
    return [batch for part in parts for batch in zip(*part, strict=True)]
