"""What is tested: a network, on images in several domains, job by job; and whether it can be."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import describe
from ..data.images import VOID
from ..methods import Method, method_named
from ..methods.setting import Setting
from ..norms import apply_norm_, norm_named
from ..tree import device_of
from . import scenarios
from .scenarios import SCENARIOS, Segment

logger = logging.getLogger("ttnorm")


@dataclasses.dataclass(frozen=True)
class Network:
    """A network under test.

    Args:
        name: what records call it.
        model: with BatchNorm layers, taking images in [0, 1]; never changed.
        alpha_files: its alpha files by kind: see `norms.Norm`.
        agreement: of gradients, by parameter, for methods that want it: `gradient_agreement`.
    """

    name: str
    model: nn.Module
    alpha_files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    agreement: Mapping[str, float] | None = None
    _classes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict, init=False)

    def can_have(self, norm: str) -> bool:
        """Whether it has the alpha file that a norm needs, if it needs one, and in that what a
        memory needs, if it has one."""
        kind = norm_named(norm).alpha_file
        if kind is None or kind not in self.alpha_files or not norm_named(norm).remembers:
            return kind in (None, *self.alpha_files)
        try:
            self.under(norm, 1)
        except ValueError as error:
            logger.warning("%s is left out: %s", norm, error)
            return False
        return True

    def under(self, norm: str, batch_size: int) -> nn.Module:
        """A copy of it that has the norm."""
        return apply_norm_(
            copy.deepcopy(self.model),
            norm,
            batch_size=batch_size,
            alpha_file=self.alpha_files.get(norm_named(norm).alpha_file or ""),
        )

    def classes(self, size: tuple[int, int]) -> int:
        """How many classes it tells apart, asked once for every size of images."""
        if size not in self._classes:
            self._classes[size] = count_classes(self.model, size)
        return self._classes[size]


@dataclasses.dataclass(frozen=True)
class Domains:
    """The same images in several domains.

    Args:
        dataset: "cifar10-c", ...
        severity: of the corruptions; 0 for clean images.
        images: uint8 (N, C, H, W) by domain.
        labels: (N,), or masks (N, H, W) with VOID where a pixel does not count.
    """

    dataset: str
    severity: int
    images: Mapping[str, Tensor]
    labels: Tensor

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Twelve letters for every domain that tell its images and labels from others."""
        found = {}
        for domain, x in self.images.items():
            digest = hashlib.blake2b()
            for part in (self.labels, x):
                digest.update(part.cpu().contiguous().numpy().data.cast("B"))
            found[domain] = digest.hexdigest()[:12]
        return found

    @property
    def image_size(self) -> tuple[int, int]:
        height, width = next(iter(self.images.values())).shape[-2:]
        return height, width

    @property
    def task(self) -> str:
        """What kind of problem it is, which the paper's settings depend on."""
        if self.labels.dim() > 1:
            return "segmentation"
        return "imagenet" if self.dataset.startswith("imagenet") else "cifar"

    def subset(self, count: int) -> Domains:
        """The first `count` images of every domain."""
        check_count(count, self.labels)
        images = {domain: x[:count] for domain, x in self.images.items()}
        return dataclasses.replace(self, images=images, labels=self.labels[:count])

    def to(self, device: str) -> Domains:
        """On the device; or where they are, if they took more than half of what a GPU has free.

        Batches are moved there one by one then.
        """
        if torch.device(device).type == "cuda":
            size = sum(x.numel() for x in self.images.values() if not x.is_cuda)
            if size > torch.cuda.mem_get_info(device)[0] // 2:
                return self
        images = {domain: x.to(device) for domain, x in self.images.items()}
        return dataclasses.replace(self, images=images, labels=self.labels.to(device))


def check_count(count: int | None, labels: Tensor) -> None:
    """Raise if there are not as many images as a subset is to have."""
    if count is not None and not 1 <= count <= len(labels):
        raise ValueError(f"The subset is {count} images, expected 1 to {len(labels)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one run over a stream is made of.

    Args:
        norm, method: what is scored.
        batch_size, scenario, seed: in which stream.
        streams: that the images are divided among, to run side by side, where the norm remembers.
    """

    norm: str
    batch_size: int
    scenario: str = "single"
    method: str = "none"
    seed: int = 0
    streams: int = 1

    def segments(self, data: Domains) -> list[Segment]:
        """The stream of images, all of them in one."""
        return scenarios.segments(*self._what(data))

    def shards(self, data: Domains) -> list[list[Segment]]:
        """As many streams as the images are divided among."""
        return scenarios.shards(*self._what(data), self.streams)

    def _what(self, data: Domains) -> tuple[str, list[str], Tensor, int, int]:
        return self.scenario, list(data.images), data.labels.cpu(), self.batch_size, self.seed


def check(network: Network, data: Domains, jobs: Iterable[Job]) -> None:
    """Raise on what `evaluate` would refuse: before hours of work, not after."""
    jobs = list(jobs)
    for job in jobs:
        _check(job, network, data)
    # the same norms and methods as later, made once each
    for norm, method, size, scenario in {
        (job.norm, job.method, job.batch_size, job.scenario): None for job in jobs
    }:
        adapting(network, data, Job(norm=norm, method=method, batch_size=size, scenario=scenario))
    check_labels(data.dataset, data.labels, network.name, network.classes(data.image_size))


def check_pair(norm: str, method: str) -> None:
    """Raise on names that are not there, and on a method that does not run over a norm."""
    if norm_named(norm).has_memory and not method_named(method).over_memory:
        raise ValueError(
            f"{method} is for norms without a memory, and {norm} has one. Leave one of them out."
        )


def check_labels(
    data: str, labels: Tensor, network: str, classes: int, *, every: bool = False
) -> None:
    """Raise if images are of classes that a network does not tell apart.

    Args:
        data, network: what they are called.
        labels: of images, or of pixels with VOID among them.
        every: whether all of the network's classes are to be among them.
    """
    known = labels if labels.dim() == 1 else labels[labels != VOID]
    low, high = int(known.min()), int(known.max())
    if high >= classes or low < 0:
        raise ValueError(
            f"{data} has labels from {low} to {high}; {network} has {classes} classes."
        )
    if every and high + 1 < classes:
        raise ValueError(
            f"{data} has labels from {low} to {high}; {network} has {classes} classes. Is it the "
            "right data set?"
        )


def _check(job: Job, network: Network, data: Domains) -> None:
    """Raise on names and sizes that are not there."""
    check_pair(job.norm, job.method)
    norm = norm_named(job.norm)
    if job.streams != 1 and not (norm.remembers and job.method == "none"):
        raise ValueError(f"{job.norm} with {job.method} remembers no streams: expected one.")
    if not 1 <= job.streams <= len(data.labels):
        raise ValueError(f"streams is {job.streams}, expected 1 to {len(data.labels)}.")
    if method_named(job.method).needs_agreement and network.agreement is None:
        raise ValueError(
            f"{job.method} looks at source images before it adapts: --source, a folder with the "
            "training set."
        )
    if data.task == "segmentation":
        if not method_named(job.method).per_pixel:
            raise ValueError(f"{job.method} is for networks that predict a class for an image.")
        if job.scenario in SCENARIOS and SCENARIOS[job.scenario].needs_classes:
            raise ValueError(f"{job.scenario} is for images of one class each.")
    job.segments(data)  # which knows its scenarios
    if norm.alpha_file is not None and norm.alpha_file not in network.alpha_files:
        raise ValueError(
            f"{job.norm} needs an alpha file of {network.name} ({norm.alpha_file}): "
            "post-train it, or leave that norm out."
        )


def adapting(network: Network, data: Domains, job: Job) -> tuple[nn.Module, Method]:
    """A copy of the network under the job's norm, and the job's method around it."""
    model = network.under(job.norm, job.batch_size)
    spec, options = method_named(job.method), method_options(network, data, job)
    if spec.needs_agreement:
        options["weights"] = network.agreement
    return model, spec.make(model.eval(), job.batch_size, **options)


def method_options(network: Network, data: Domains, job: Job) -> dict[str, Any]:
    """The paper's settings of a method."""
    setting = Setting(
        scenario=job.scenario,
        batch_size=job.batch_size,
        classes=network.classes(data.image_size),
        norm=job.norm,
        task=data.task,
    )
    return method_named(job.method).settings(setting)


@torch.no_grad()
def count_classes(model: nn.Module, size: tuple[int, int]) -> int:
    """How many classes a network tells apart, found by asking a copy of it."""
    asked, shape = copy.deepcopy(model).eval(), (2, 3, *size)
    try:
        output = asked(torch.zeros(shape, device=device_of(model)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"The network does not take images {shape}: {error}") from error
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise TypeError(f"The network returned {describe(output)}, expected (N, classes).")
    return output.shape[1]
