"""Scoring norm x method x scenario x batch size, one record per cell that is not on file yet."""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import artefact
from ..methods import method_named
from ..norms import norm_named
from ..progress import Progress
from ..version import __version__
from .job import Domains, Job, Network, check, method_options
from .predict import Run, share_forwards
from .records import Record, RecordFile
from .scenarios import SCENARIOS, Segment, joined
from .scores import score


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


def _cells(
    network: Network,
    data: Domains,
    job: Job,
    records: RecordFile,
    known: dict[tuple[Any, ...], Record],
    grouped: bool,
) -> Iterator[Record]:
    """The records of a job that are not on file, in the order of the stream."""
    stream = job.segments(data)
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
        yield from _score_shards(Run(network, data, job, grouped), data, job, cells)
        return
    if grouped and share_forwards(job, stream):
        todo = [(s, cell) for s, cell, m in zip(stream, cells, missing, strict=True) if m]
        yield from _score_alongside(Run(network, data, job, grouped), data, todo)
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
            run = run or Run(network, data, job, grouped)
            outcome = _score(run, data, segment)
            if same:
                known[key] = outcome
        if missing[index]:
            yield cells[index] | outcome


def _score(run: Run, data: Domains, segment: Segment) -> Record:
    started = _now(run.device)
    predicted = run(segment)
    return _outcome(run, data, segment, predicted, _now(run.device) - started)


def _score_alongside(
    run: Run, data: Domains, todo: Sequence[tuple[Segment, Record]]
) -> Iterator[Record]:
    started = _now(run.device)
    found = run.alongside([segment for segment, _ in todo])
    for (segment, predicted), (_, cell) in zip(found, todo, strict=True):
        seconds = (_now(run.device) - started) / len(todo)
        yield cell | _outcome(run, data, segment, predicted, seconds)


def _score_shards(run: Run, data: Domains, job: Job, cells: Sequence[Record]) -> Iterator[Record]:
    """Streams that each have a share of the images, side by side; cells are over all of them."""
    started = _now(run.device)
    streams = job.shards(data)
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


def _outcome(
    run: Run, data: Domains, segment: Segment, predicted: Tensor, seconds: float
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
