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
    segments: Sequence[Segment],
    batch_size: int,
    at_once: int,
) -> Iterator[list[Tensor]]:
    """The predicted classes of segments that all start anew, each a stream of its own.

    They come in the order of the segments, those together that shared their forwards.

    Args:
        model: with a norm that remembers its stream.
        images: from domains and numbers of images to a batch of them.
        segments: the streams.
        batch_size: of every stream.
        at_once: streams that share a forward.
    """
    stream_of(model).make_room(at_once)
    for first in range(0, len(segments), at_once):
        together = segments[first : first + at_once]
        reset_stream_(model)
        predicted: list[list[Tensor]] = [[] for _ in together]
        for sizes, steps in itertools.groupby(
            range(0, max(len(s.images) for s in together), batch_size),
            key=lambda begin: [len(s.images[begin : begin + batch_size]) for s in together],
        ):
            ids = [index for index, size in enumerate(sizes) for _ in range(size)]
            with streams(model, ids):
                forward = Repeated(model)
                for begin in steps:
                    cut = slice(begin, begin + batch_size)
                    x = images(
                        torch.cat([s.domains[cut] for s in together]),
                        torch.cat([s.images[cut] for s in together]),
                    )
                    classes = forward(x).argmax(1).split(sizes)
                    find_domains(model)  # which no recorded forward does
                    for part, found in zip(predicted, classes, strict=True):
                        part.append(found)
        yield [torch.cat(part) for part in predicted]
