"""Streams of held-out training images in simulated domains, frame by frame, for the scripts that
choose how a stream is remembered."""

from __future__ import annotations

import contextlib

import measure
import torch
from source_data import simulated
from torch import Tensor, nn

import ttnorm
from ttnorm.bench.alongside import alongside
from ttnorm.bench.scenarios import Segment, joined, segments
from ttnorm.surgery import STREAM

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

    def record(
        self, choice: str, value: str, network: str, order: str, model: nn.Module
    ) -> measure.Record:
        """What a network makes of the streams in one of the ORDERS, which is printed as well."""
        errors = self._errors(model, ORDERS[order])
        mean = sum(errors.values()) / len(errors)
        print(f"{order:17} {value:16} {mean:6.2f}", errors, flush=True)
        return {
            "choice": choice,
            "value": value,
            "order": order,
            "network": network,
            "images": len(self.labels),
            "error by domain": errors,
            "mean error": mean,
            "device": measure.device_name(self.pictures.device.type),
        }

    @torch.no_grad()
    def _errors(self, model: nn.Module, scenario: str) -> dict[str, float]:
        """Percent wrong in each domain, frame by frame."""
        stream = segments(scenario, self.names, self.labels, 1, 0)
        if not all(segment.reset for segment in stream):
            stream = [joined(stream)]
        if STREAM in model.__dict__:
            side_by_side = alongside(model, self._images, stream, 1, len(stream))
            found = [predicted for _, predicted in side_by_side]
        else:
            found = [self._alone(model, segment) for segment in stream]
        every = joined(stream)
        wrong = (torch.cat(found).cpu() != self.labels[every.images]).double()
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
