"""What the benchmarks share: time and memory of functions side by side, and their records."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Freed memory is kept, or whether a call pays for zeroing fresh pages is a matter of
# luck: glibc gives large blocks back when they happen to lie at the end of its heap.
with contextlib.suppress(OSError, AttributeError):  # not glibc
    for option in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
        ctypes.CDLL("libc.so.6").mallopt(option, 2**30)

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


def seconds(
    functions: Mapping[str, Callable[[], Any]], device: str, rounds: int
) -> dict[str, float]:
    """Median seconds of each function, called in turns so that all meet the same machine."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_once(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def kernel_seconds(
    functions: Mapping[str, Callable[[Any], Any]], inputs: Sequence[Any], rounds: int
) -> dict[str, float]:
    """Median seconds of the GPU's own work for one input: calls over all inputs in one graph.

    Several inputs, so that none is still in the cache when its turn comes again.
    """
    graphs = {}
    for name, function in functions.items():
        for x in (inputs[0], *inputs):
            function(x)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for x in inputs:
                function(x)
    replays = {name: graph.replay for name, graph in graphs.items()}
    return {name: t / len(inputs) for name, t in seconds(replays, "cuda", rounds).items()}


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Most memory that is allocated at once while the function runs, beyond what already was."""
    gc.collect()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    total = peak = 0
    for event in sorted(changes, key=lambda e: e["args"]["Ev Idx"]):
        total += event["args"]["Bytes"]
        peak = max(peak, total)
    return peak


def record(
    benchmark: str, case: str, value: float, unit: str, baseline: float, device: str
) -> Record:
    return {
        "benchmark": benchmark,
        "case": case,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": value / baseline,
        "device": device_name(device),
    }


def write(name: str, device: str, records: Sequence[Record], setting: str = "") -> None:
    """Print the records as a table and write them to results/NAME.DEVICE[-SETTING].json."""
    width = max(len(r["case"]) for r in records)
    print(f"{name} on {device_name(device)}, torch {torch.__version__}")
    print(f"{'case':{width}}  {'value':>10}  {'baseline':>10}  ratio")
    for r in records:
        values = f"{r['value']:10.4g}  {r['baseline']:10.4g}"
        print(f"{r['case']:{width}}  {values}  {r['ratio']:5.2f}  {r['unit']}")
    keep(f"{name}.{device}-{setting}" if setting else f"{name}.{device}", records)


def keep(name: str, records: Sequence[Record]) -> None:
    """Write records to results/NAME.json, one a line."""
    RESULTS.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in records)
    (RESULTS / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def source_data_parser(description: str | None, images: int = 10000) -> argparse.ArgumentParser:
    """The arguments of scripts that choose something on source data.

    Args:
        description: of the script.
        images: that it holds out, unless told otherwise.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", type=Path, help="a folder with CIFAR")
    parser.add_argument("--network", default="wrn40_2-cifar10")
    parser.add_argument("--images", type=int, default=images, help="held out, in each domain")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _once(function: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
