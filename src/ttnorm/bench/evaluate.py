"""Scoring norm x method x scenario x batch size, one record per cell that is not on file yet."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import inspect
import json
import logging
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import artefact
from ..files import short_fingerprint
from ..methods import method_named
from ..norms import norm_named
from ..progress import Progress
from ..version import __version__
from .job import Domains, Job, Network, check, method_options
from .predict import Run, shares_forwards
from .records import Record, RecordFile
from .scenarios import SCENARIOS, Segment, apart, joined
from .scores import score

logger = logging.getLogger("ttnorm")


def evaluate(
    network: Network,
    data: Domains,
    jobs: Iterable[Job],
    records: RecordFile,
    *,
    grouped: bool = True,
    experiment: str = "evaluate",
) -> None:
    """Run the jobs and append a record for every cell that is not on file yet.

    Args:
        network: what is tested, on the device to test on.
        data: on what; see `Domains.to`.
        jobs: see `Job`.
        records: where cells go, and what has been done already.
        grouped: False runs batches one after another.
        experiment: a name for these cells in the records.
    """
    jobs = list(dict.fromkeys(jobs))
    check(network, data, jobs)
    _warn_of_few_images(network, data, jobs)
    bundles = _bundles(jobs, data, grouped)
    # in images, for a job may take hours
    progress = Progress("evaluate", sum(plan.images for plans in bundles for plan in plans))
    known: dict[tuple[Any, ...], Record] = {}
    for together in bundles:
        job, before = together[0].job, progress.done
        progress.step(f"{job.method} {job.norm} {job.scenario} B = {job.batch_size}", by=0)
        run = partial(Run, network, data, job, grouped, progress)
        if together[0].shares_forwards:
            found = _score_alongside(network, data, together, records, run)
        else:
            found = _score_alone(network, data, together[0], records, known, run)
        for record in found:
            records.append(record | {"experiment": experiment})
        if job.method != "none":
            gc.collect()  # its network and graphs, which refer to each other
        # what was on file, or was run again in smaller parts, counts as well
        progress.done = before + sum(plan.images for plan in together)
    progress.step(by=0)
    progress.close()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A job and its stream."""

    job: Job
    stream: Sequence[Segment]
    shares_forwards: bool

    @property
    def images(self) -> int:
        return sum(len(segment.images) for segment in self.stream)

    def cells(self, network: Network, data: Domains) -> list[Record]:
        """What is known of every segment's record before it is scored."""
        about = _about(network, data, self.job)
        return [
            about | {"domain": s.domain, "n": len(s.images), "data": _data(data, s)}
            for s in self.stream
        ]

    def streams(self, data: Domains, missing: Sequence[bool]) -> list[list[tuple[int, Segment]]]:
        """What runs side by side, in parts with the number of the cell that each belongs to."""
        if self.job.streams > 1:
            return [list(enumerate(shard)) for shard in self.job.shards(data)]
        numbers = iter(range(len(self.stream)))
        parts = [[(next(numbers), segment) for segment in part] for part in apart(self.stream)]
        return [part for part in parts if any(missing[number] for number, _ in part)]


def _bundles(jobs: Sequence[Job], data: Domains, grouped: bool) -> list[list[_Plan]]:
    """Jobs that run together: those whose streams can share forwards, and every other alone."""
    found: dict[Any, list[_Plan]] = {}
    for number, job in enumerate(jobs):
        shared = job.streams > 1 or (grouped and shares_forwards(job))
        key = (job.norm, job.batch_size) if shared else number
        found.setdefault(key, []).append(_Plan(job, job.segments(data), shared))
    return list(found.values())


def _score_alone(
    network: Network,
    data: Domains,
    plan: _Plan,
    records: RecordFile,
    known: dict[tuple[Any, ...], Record],
    make_run: Callable[[], Run],
) -> Iterator[Record]:
    """The records of a job that are not on file, in the order of the stream."""
    job, stream, cells = plan.job, plan.stream, plan.cells(network, data)
    missing = [cell not in records for cell in cells]
    if not any(missing):
        return
    # Where batches do not matter, another batch size has had the same predictions already.
    same = norm_named(job.norm).per_sample and job.method == "none"
    same = same and all(s.reset for s in stream)  # and there is no state to carry on
    run = None
    last = max(index for index, is_missing in enumerate(missing) if is_missing)
    for index, segment in enumerate(stream[: last + 1]):
        key = (job.norm, job.scenario, job.seed, _digest(segment))
        if not missing[index] and all(s.reset for s in stream[index + 1 :]):
            continue  # it is on file, and nothing later depends on it
        if same and key in known:
            outcome = known[key] | {"seconds": 0.0}
        else:
            run = run or make_run()
            outcome = _score(run, data, segment)
            if same:
                known[key] = outcome
        if missing[index]:
            yield cells[index] | outcome


def _score_alongside(
    network: Network,
    data: Domains,
    plans: Sequence[_Plan],
    records: RecordFile,
    make_run: Callable[[], Run],
) -> Iterator[Record]:
    """The records of jobs that are not on file: all their streams side by side."""
    cells: dict[tuple[int, int], Record] = {}  # by the number of the job, and of its segment
    parts: list[list[tuple[tuple[int, int], Segment]]] = []  # of every stream
    for number, plan in enumerate(plans):
        all_cells = plan.cells(network, data)
        missing = [cell not in records for cell in all_cells]
        if any(missing):
            cells |= {(number, i): c for i, c in enumerate(all_cells) if missing[i]}
            streams = plan.streams(data, missing)
            parts += [[((number, i), s) for i, s in stream] for stream in streams]
    if not cells:
        return
    run = make_run()
    left = Counter(cell for stream in parts for cell, _ in stream)
    scored: dict[tuple[int, int], list[tuple[Segment, Tensor]]] = defaultdict(list)
    started, waiting = _now(run.device), iter(parts)
    for together in run.alongside([[s for _, s in stream] for stream in parts]):
        ready = []
        for classes, stream in zip(together, waiting, strict=False):
            lengths = [len(segment.images) for _, segment in stream]
            for (cell, segment), predicted in zip(stream, classes.split(lengths), strict=True):
                scored[cell].append((segment, predicted))
                left[cell] -= 1
                if not left[cell] and cell in cells:
                    ready.append(cell)
        now = _now(run.device)
        for cell in ready:
            segment = joined([segment for segment, _ in scored[cell]])
            predicted = torch.cat([predicted for _, predicted in scored.pop(cell)])
            seconds = (now - started) / len(ready)
            yield cells[cell] | _outcome(run, data, segment, predicted, seconds)
        started = now if ready else started


def _score(run: Run, data: Domains, segment: Segment) -> Record:
    started = _now(run.device)
    predicted = run(segment)
    return _outcome(run, data, segment, predicted, _now(run.device) - started)


def _outcome(
    run: Run, data: Domains, segment: Segment, predicted: Tensor, seconds: float
) -> Record:
    undone = run.method.report()
    labels = data.labels[segment.images.to(data.labels.device)].to(run.device)
    return {
        **score(predicted, labels, run.classes),
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
        if norm.remembers:
            alpha["source"] = artefact.short_source_checksum(path)
        alpha["config"] = artefact.read(path).metadata["config"]  # how it was fitted
    return {
        "dataset": data.dataset,
        "severity": data.severity,
        "scenario": job.scenario,
        "norm": job.norm,
        "method": job.method,
        "batch_size": job.batch_size,
        "seed": job.seed,
        "model": {"name": network.name, "fingerprint": short_fingerprint(network.model)},
        "alpha": alpha,
        "config": config,
    }


def _method_config(network: Network, data: Domains, job: Job) -> dict[str, Any]:
    """Everything that a method was made with: the defaults as well, and which weights."""
    spec = method_named(job.method)
    parameters = inspect.signature(spec.make).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    config = defaults | method_options(network, data, job)
    if config.get("momentum", ...) is None:
        del config["momentum"]  # Adam, as in records from before there was a choice
    if spec.needs_agreement:
        text = json.dumps(network.agreement, sort_keys=True)
        config["weights"] = hashlib.blake2b(text.encode()).hexdigest()[:12]
    return config


def _warn_of_few_images(network: Network, data: Domains, jobs: Iterable[Job]) -> None:
    """Say so where methods start anew before their first update has met an image."""
    for job in jobs:
        config = _method_config(network, data, job)
        window = (config.get("window") or 0) if "lr" in config else 0
        if SCENARIOS[job.scenario].apart and window >= len(data.labels):
            logger.warning(
                "%s updates after %d images, and there are %d in a domain: nothing adapts.",
                job.method,
                window,
                len(data.labels),
            )
            return


def _data(data: Domains, segment: Segment) -> str | dict[str, str]:
    """Which images a segment is made of."""
    return data.fingerprints.get(segment.domain) or data.fingerprints


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
