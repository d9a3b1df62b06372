"""Streams of held-out training images in simulated domains, frame by frame, for the scripts that
choose how a stream is remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import measure
import torch
from source_data import simulated
from torch import Tensor, nn

import ttnorm
from ttnorm.bench.alongside import alongside
from ttnorm.bench.scenarios import Segment, joined, segments
from ttnorm.tree import STREAM

IMAGES = 500  # in each domain
ORDERS = {
    "random": "single",
    "sorted by class": "class-sorted",
    "come and go": "dirichlet",
    "one after another": "continual",
    "alternating": "alternating-50",
    "mixed": "mixed",
}


class Streams:
    """Images in all simulated domains.

    Args:
        images: in [0, 1], where the networks are.
        labels: of them.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        domains = simulated(images)
        self.names, self.labels = list(domains), labels.cpu()
        self.pictures = torch.stack(list(domains.values()))

    def records(
        self, choice: str, value: str, network: str, model: nn.Module, orders: Iterable[str]
    ) -> list[measure.Record]:
        """What a network makes of the streams in some of the ORDERS, which is printed as well."""
        records = []
        for order, errors in self._errors(model, orders).items():
            mean = sum(errors.values()) / len(errors)
            print(f"{order:17} {value:16} {mean:6.2f}", errors, flush=True)
            records.append(
                {
                    "choice": choice,
                    "value": value,
                    "order": order,
                    "network": network,
                    "images": len(self.labels),
                    "error by domain": errors,
                    "mean error": mean,
                    "device": measure.device_name(self.pictures.device.type),
                }
            )
        return records

    @torch.no_grad()
    def _errors(self, model: nn.Module, orders: Iterable[str]) -> dict[str, dict[str, float]]:
        """Percent wrong by order and domain, frame by frame."""
        streams = {order: self._streams(ORDERS[order]) for order in orders}
        if STREAM not in model.__dict__:  # the order does not matter
            stream = next(iter(streams.values()))
            errors = self._wrong(stream, (self._alone(model, segment) for segment in stream))
            return dict.fromkeys(streams, errors)
        every = [segment for stream in streams.values() for segment in stream]
        alone = [[segment] for segment in every]
        found = iter(next(alongside(model, self._images, alone, 1, len(every))))
        return {order: self._wrong(stream, found) for order, stream in streams.items()}

    def _streams(self, scenario: str) -> list[Segment]:
        stream = segments(scenario, self.names, self.labels, 1, 0)
        return stream if all(segment.reset for segment in stream) else [joined(stream)]

    def _wrong(self, stream: Sequence[Segment], found: Iterator[Tensor]) -> dict[str, float]:
        """Of one order, whose predictions come next."""
        predicted, every = torch.cat([next(found) for _ in stream]).cpu(), joined(stream)
        wrong = (predicted != self.labels[every.images]).double()
        return {
            domain: 100 * wrong[every.domains == index].mean().item()
            for index, domain in enumerate(self.names)
        }

    def _alone(self, model: nn.Module, segment: Segment) -> Tensor:
        """The classes of frames, each without regard to the others."""
        converted = any(isinstance(m, ttnorm.layers.TTNormBase) for m in model.modules())
        with ttnorm.isolated(model, 1) if converted else contextlib.nullcontext():
            parts = zip(segment.domains.split(100), segment.images.split(100), strict=True)
            return torch.cat([model(self._images(*part)) for part in parts]).argmax(1)

    def _images(self, domains: Tensor, numbers: Tensor) -> Tensor:
        return self.pictures[domains, numbers]
