"""Scoring norm x method x scenario x batch size, one record per cell.

Many small batches run as one forward with groups, so every batch size costs about the same; where a
norm remembers its stream, segments that start anew run side by side as streams instead. With
`grouped=False` batches run one after another, to the same predictions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import inspect
import json
import logging
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import artefact
from ..data.images import VOID
from ..methods import method_named
from ..methods.setting import Setting
from ..norms import apply_norm_, norm_named
from ..progress import Progress
from ..surgery import device_of
from ..version import __version__
from .alongside import alongside
from .records import Record, RecordFile
from .scenarios import SCENARIOS, Segment, joined, segments, shards
from .scores import score

logger = logging.getLogger("ttnorm")
SAMPLES_AT_ONCE = {"cuda": 2000, "cpu": 200}
# 96 channels of half the size, as MobileNetV2 has, stay far below 2^31 values
PIXELS_AT_ONCE = {"cuda": 512 * 224**2, "cpu": 32 * 224**2}


@dataclasses.dataclass(frozen=True)
class Network:
    """A network under test.

    Args:
        name: what records call it.
        model: with BatchNorm layers, taking images in [0, 1]; never changed.
        alpha_files: its alpha files by kind: "ttn", "dynamic".
        agreement: of gradients, by parameter, for methods that want it: `gradient_agreement`.
    """

    name: str
    model: nn.Module
    alpha_files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    agreement: Mapping[str, float] | None = None
    _classes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict, init=False)

    def can_have(self, norm: str) -> bool:
        """Whether it has the alpha file that a norm needs, if it needs one."""
        return norm_named(norm).alpha_file in (None, *self.alpha_files)

    def classes(self, size: tuple[int, int]) -> int:
        """How many classes it tells apart, asked once for every size of images."""
        if size not in self._classes:
            self._classes[size] = classes_of(self.model, size)
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
        labels = self.labels.cpu().numpy().tobytes()
        return {
            domain: hashlib.blake2b(labels + x.cpu().numpy().tobytes()).hexdigest()[:12]
            for domain, x in self.images.items()
        }

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
        if not 1 <= count <= len(self.labels):
            raise ValueError(f"The subset is {count} images, expected 1 to {len(self.labels)}.")
        images = {domain: x[:count] for domain, x in self.images.items()}
        return dataclasses.replace(self, images=images, labels=self.labels[:count])

    def to(self, device: str) -> Domains:
        images = {domain: x.to(device) for domain, x in self.images.items()}
        return dataclasses.replace(self, images=images, labels=self.labels.to(device))


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


def evaluate(
    network: Network,
    data: Domains,
    jobs: Iterable[Job],
    records: RecordFile,
    *,
    grouped: bool = True,
    experiment: str | None = None,
) -> None:
    """Run the jobs and append a record for every cell that is not on file yet.

    Args:
        network: what is tested, on the device to test on.
        data: on what, on the same device.
        jobs: see `Job`.
        records: where cells go, and what has been done already.
        grouped: False runs batches one after another.
        experiment: a name for these cells in the records.
    """
    jobs = list(jobs)
    check(network, data, jobs)
    progress = Progress("evaluate", len(jobs))
    known: dict[tuple[Any, ...], Record] = {}
    for job in jobs:
        for record in _cells(network, data, job, records, known, grouped):
            records.append(record | ({"experiment": experiment} if experiment else {}))
        if job.method != "none":
            gc.collect()  # its network and graphs, which refer to each other
        progress.step(f"{job.norm} {job.scenario} B = {job.batch_size}")
    progress.close()


def check(network: Network, data: Domains, jobs: Iterable[Job]) -> None:
    """Raise on what `evaluate` would refuse: before hours of work, not after."""
    kinds = {kind for job in jobs if (kind := _check(job, network, data)) is not None}
    for kind in sorted(kinds):
        artefact.load_(copy.deepcopy(network.model), network.alpha_files[kind])
    classes = network.classes(data.image_size)
    known = data.labels if data.labels.dim() == 1 else data.labels[data.labels != VOID]
    low, high = int(known.min()), int(known.max())
    if high >= classes or low < 0:
        raise ValueError(
            f"{data.dataset} has labels from {low} to {high}; {network.name} has {classes} classes."
        )


@torch.no_grad()
def predictions(
    network: Network, data: Domains, job: Job, *, grouped: bool = True
) -> Iterator[tuple[Segment, Tensor]]:
    """The predicted classes of a job, segment after segment, in the order of arrival."""
    stream = segments(job.scenario, list(data.images), data.labels.cpu(), job.batch_size, job.seed)
    run = _Run(network, data, job, grouped)
    if grouped and _alongside(job, stream):
        yield from run.alongside(stream)
        return
    for segment in stream:
        yield segment, run(segment)


class _Run:
    """A network under a norm and a method, going over a stream."""

    def __init__(self, network: Network, data: Domains, job: Job, grouped: bool) -> None:
        norm = norm_named(job.norm)
        model = apply_norm_(
            copy.deepcopy(network.model),
            job.norm,
            batch_size=job.batch_size,
            alpha_file=network.alpha_files.get(norm.alpha_file or ""),
        )
        spec = method_named(job.method)
        options = _method_options(network, data, job)
        if spec.needs_agreement:
            options["weights"] = network.agreement
        self.method = spec.make(model.eval(), job.batch_size, **options)
        self.model, self.batch_size = model, job.batch_size
        self.classes = network.classes(data.image_size)
        self.pictures = list(data.images.values())
        self.device = self.pictures[0].device
        height, width = data.image_size
        kind = self.device.type if self.device.type in SAMPLES_AT_ONCE else "cpu"
        whole = min(SAMPLES_AT_ONCE[kind], PIXELS_AT_ONCE[kind] // (height * width))
        batches = max(1, whole // job.batch_size) if grouped else 1
        self.samples = batches * job.batch_size

    def alongside(self, stream: Sequence[Segment]) -> Iterator[tuple[Segment, Tensor]]:
        """Segments that all start anew, under a norm that remembers its stream."""
        left = list(stream)
        while left:
            at_once = self.samples // self.batch_size
            try:
                for pair in alongside(self.model, self._images, left, self.batch_size, at_once):
                    yield pair
                    left = left[1:]
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
        order = domains.argsort(stable=True)
        there, counts = domains[order].unique_consecutive(return_counts=True)
        parts = images[order].to(self.device).split(counts.tolist())
        pairs = zip(there.tolist(), parts, strict=True)
        x = torch.cat([self.pictures[domain][part] for domain, part in pairs])
        if not bool((order[1:] > order[:-1]).all()):
            x = x[order.argsort().to(self.device)]
        return x.float() / 255


def _cells(
    network: Network,
    data: Domains,
    job: Job,
    records: RecordFile,
    known: dict[tuple[Any, ...], Record],
    grouped: bool,
) -> Iterator[Record]:
    """The records of a job that are not on file, in the order of the stream."""
    stream = segments(job.scenario, list(data.images), data.labels.cpu(), job.batch_size, job.seed)
    about = _about(network, data, job)
    cells = [
        about | {"domain": s.domain, "n": len(s.images), "data": _data(data, s)} for s in stream
    ]
    missing = [cell not in records for cell in cells]
    if not any(missing):
        return
    # Where batches do not matter, another batch size has had the same predictions already.
    same = norm_named(job.norm).per_sample and job.method == "none"
    same = same and all(s.reset for s in stream)  # and there is no state to carry on
    if job.streams > 1:
        yield from _score_shards(_Run(network, data, job, grouped), data, job, cells)
        return
    if grouped and _alongside(job, stream):
        todo = [(s, cell) for s, cell, m in zip(stream, cells, missing, strict=True) if m]
        yield from _score_alongside(_Run(network, data, job, grouped), data, todo)
        return
    run = None
    last = max(index for index, is_missing in enumerate(missing) if is_missing)
    for index, segment in enumerate(stream[: last + 1]):
        key = (job.norm, job.scenario, job.seed, _digest(segment))
        if not missing[index] and all(s.reset for s in stream[index + 1 :]):
            continue  # it is on file, and nothing later depends on it
        if same and key in known:
            outcome = known[key] | {"seconds": 0.0}
        else:
            run = run or _Run(network, data, job, grouped)
            outcome = _score(run, data, segment)
            if same:
                known[key] = outcome
        if missing[index]:
            yield cells[index] | outcome


def _alongside(job: Job, stream: Sequence[Segment]) -> bool:
    """Whether segments are streams that can share their forwards."""
    remembers = norm_named(job.norm).remembers and job.method == "none"
    return remembers and all(s.reset for s in stream)


def _score_alongside(
    run: _Run, data: Domains, todo: Sequence[tuple[Segment, Record]]
) -> Iterator[Record]:
    started = _now(run.device)
    found = run.alongside([segment for segment, _ in todo])
    for (segment, predicted), (_, cell) in zip(found, todo, strict=True):
        seconds = (_now(run.device) - started) / len(todo)
        yield cell | _outcome(run, data, segment, predicted, seconds)


def _score_shards(run: _Run, data: Domains, job: Job, cells: Sequence[Record]) -> Iterator[Record]:
    """Streams that each have a share of the images, side by side; cells are over all of them."""
    started = _now(run.device)
    what = (job.scenario, list(data.images), data.labels.cpu(), job.batch_size, job.seed)
    streams = shards(*what, job.streams)
    found = [classes for _, classes in run.alongside([joined(stream) for stream in streams])]
    parts = [
        classes.split([len(s.images) for s in stream])
        for stream, classes in zip(streams, found, strict=True)
    ]
    seconds = (_now(run.device) - started) / len(cells)
    for index, cell in enumerate(cells):
        segment = joined([stream[index] for stream in streams])
        predicted = torch.cat([part[index] for part in parts])
        yield cell | _outcome(run, data, segment, predicted, seconds)


def _data(data: Domains, segment: Segment) -> str | dict[str, str]:
    """Which images a segment is made of."""
    return data.fingerprints.get(segment.domain) or data.fingerprints


def _score(run: _Run, data: Domains, segment: Segment) -> Record:
    started = _now(run.device)
    predicted = run(segment)
    return _outcome(run, data, segment, predicted, _now(run.device) - started)


def _outcome(
    run: _Run, data: Domains, segment: Segment, predicted: Tensor, seconds: float
) -> Record:
    undone = run.method.report()
    return {
        **score(predicted, data.labels[segment.images.to(run.device)], run.classes),
        **({"undone": undone} if undone else {}),
        "seconds": round(seconds, 4),
        "versions": {
            "ttnorm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": _device_name(run.device),
    }


def _about(network: Network, data: Domains, job: Job) -> Record:
    """Everything that says which run a cell belongs to."""
    norm, scenario = norm_named(job.norm), SCENARIOS[job.scenario]
    config = {
        "norm": dict(norm.options),
        "subset": len(data.labels),
        "order": scenario.order,
        "reset": scenario.reset,
    }
    if job.streams > 1:
        config["streams"] = job.streams
    if job.method != "none":
        config["method"] = _method_config(network, data, job)
    if scenario.reset == "never":  # then a cell depends on what was there before it, or with it
        config["domains"] = list(data.images)
    alpha = None
    if norm.alpha_file is not None:
        path = network.alpha_files[norm.alpha_file]
        alpha = {"name": path.name, "fingerprint": artefact.short_checksum(path)}
    return {
        "dataset": data.dataset,
        "severity": data.severity,
        "scenario": job.scenario,
        "norm": job.norm,
        "method": job.method,
        "batch_size": job.batch_size,
        "seed": job.seed,
        "model": {"name": network.name, "fingerprint": artefact.short_fingerprint(network.model)},
        "alpha": alpha,
        "config": config,
    }


def _check(job: Job, network: Network, data: Domains) -> str | None:
    """Raise on names and sizes that are not there; returns the kind of alpha file it needs."""
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
        if SCENARIOS[job.scenario].needs_classes:
            raise ValueError(f"{job.scenario} is for images of one class each.")
    segments(job.scenario, list(data.images), data.labels.cpu(), job.batch_size, job.seed)
    if norm.alpha_file is not None and norm.alpha_file not in network.alpha_files:
        raise ValueError(
            f"{job.norm} needs an alpha file of {network.name} ({norm.alpha_file}): "
            "post-train it, or leave that norm out."
        )
    return norm.alpha_file


def _method_options(network: Network, data: Domains, job: Job) -> dict[str, Any]:
    """The paper's settings of a method."""
    setting = Setting(
        scenario=job.scenario,
        batch_size=job.batch_size,
        classes=network.classes(data.image_size),
        norm=job.norm,
        task=data.task,
    )
    return method_named(job.method).settings(setting)


def _method_config(network: Network, data: Domains, job: Job) -> dict[str, Any]:
    """Everything that a method was made with: the defaults as well, and which weights."""
    spec = method_named(job.method)
    parameters = inspect.signature(spec.make).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    config = defaults | _method_options(network, data, job)
    if config.get("momentum", ...) is None:
        del config["momentum"]  # Adam, as in records from before there was a choice
    if spec.needs_agreement:
        text = json.dumps(network.agreement, sort_keys=True)
        config["weights"] = hashlib.blake2b(text.encode()).hexdigest()[:12]
    return config


@torch.no_grad()
def classes_of(model: nn.Module, size: tuple[int, int]) -> int:
    """How many classes a network tells apart, found by asking a copy of it."""
    asked = copy.deepcopy(model).eval()
    return asked(torch.zeros(2, 3, *size, device=device_of(model))).shape[1]


def _digest(segment: Segment) -> int:
    return hash((segment.domains.numpy().tobytes(), segment.images.numpy().tobytes()))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
