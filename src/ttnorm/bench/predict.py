"""The predictions of a job: a network under a norm and a method, going over a stream.

Many small batches run as one forward with groups, so every batch size costs about the same; where a
norm remembers its stream, streams that start anew run side by side instead. With `grouped=False`
batches run one after another, to the same predictions.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..norms import norm_named
from ..progress import Progress
from ..tree import device_of
from .alongside import alongside
from .job import Domains, Job, Network, adapting
from .scenarios import Segment, apart

logger = logging.getLogger("ttnorm")
SAMPLES_AT_ONCE = {"cuda": 2000, "cpu": 200}
# 96 channels of half the size, as MobileNetV2 has, stay far below 2^31 values
PIXELS_AT_ONCE = {"cuda": 512 * 224**2, "cpu": 32 * 224**2}


@torch.no_grad()
def predictions(
    network: Network, data: Domains, job: Job, *, grouped: bool = True
) -> Iterator[tuple[Segment, Tensor]]:
    """The predicted classes of a job, segment after segment, in the order of arrival."""
    stream = job.segments(data)
    run = Run(network, data, job, grouped)
    if not (grouped and shares_forwards(job)):
        for segment in stream:
            yield segment, run(segment)
        return
    parts = apart(stream)
    for part, found in zip(parts, itertools.chain.from_iterable(run.alongside(parts)), strict=True):
        yield from zip(part, found.split([len(s.images) for s in part]), strict=True)


def shares_forwards(job: Job) -> bool:
    """Whether streams that do not depend on each other run side by side."""
    return norm_named(job.norm).remembers and job.method == "none"


class Run:
    """A network under a norm and a method, going over a stream; `progress` counts its images."""

    def __init__(
        self,
        network: Network,
        data: Domains,
        job: Job,
        grouped: bool,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress
        self.model, self.method = adapting(network, data, job)
        self.batch_size = job.batch_size
        self.classes = network.classes(data.image_size)
        self.pictures = list(data.images.values())
        self.device = device_of(self.model)
        height, width = data.image_size
        kind = self.device.type if self.device.type in SAMPLES_AT_ONCE else "cpu"
        whole = min(SAMPLES_AT_ONCE[kind], PIXELS_AT_ONCE[kind] // (height * width))
        batches = max(1, whole // job.batch_size) if grouped else 1
        self.samples = batches * job.batch_size

    def alongside(self, streams: Sequence[Sequence[Segment]]) -> Iterator[list[Tensor]]:
        """Of streams that all start anew, under a norm that remembers: see `alongside`."""
        left = list(streams)
        while left:
            at_once = self.samples // self.batch_size
            try:
                for found in alongside(self.model, self._images, left, self.batch_size, at_once):
                    yield found
                    left = left[len(found) :]
            except torch.OutOfMemoryError:
                if at_once == 1:
                    raise
                self._take_fewer()

    def __call__(self, segment: Segment) -> Tensor:
        if segment.reset:
            self.method.reset()
        before = self.method.state_dict()
        while True:
            try:
                return self._predict(segment)
            except torch.OutOfMemoryError:
                if self.samples <= self.batch_size:
                    raise
            # From the segment's beginning: a method, or a norm with a state, may have been in the
            # middle of something.
            self.method.load_state_dict(before)
            self._take_fewer()

    def _take_fewer(self) -> None:
        """Samples at once, after a GPU ran out of memory."""
        self.samples = max(1, self.samples // self.batch_size // 2) * self.batch_size
        logger.warning("out of memory; trying %d samples at a time", self.samples)
        gc.collect()
        torch.cuda.empty_cache()

    def _predict(self, segment: Segment) -> Tensor:
        predicted, begin = [], 0
        while begin < len(segment.images):
            end = begin + min(self.samples, self.method.room or self.samples)
            x = self._images(segment.domains[begin:end], segment.images[begin:end])
            predicted.append(self.method(x).argmax(1))
            begin = end
        return torch.cat(predicted)

    def _images(self, domains: Tensor, images: Tensor) -> Tensor:
        if self.progress is not None:
            self.progress.step(by=len(images))
        order = domains.argsort(stable=True)
        there, counts = domains[order].unique_consecutive(return_counts=True)
        parts = images[order].to(self.pictures[0].device).split(counts.tolist())
        pairs = zip(there.tolist(), parts, strict=True)
        x = torch.cat([self.pictures[domain][part] for domain, part in pairs]).to(self.device)
        if not bool((order[1:] > order[:-1]).all()):
            x = x[order.argsort().to(self.device)]
        return x.float() / 255
