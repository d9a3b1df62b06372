"""Time and peak memory of one layer, as ratios to BatchNorm in train mode in the same run.

python benchmarks/layer_cost.py [--device cuda] [--rounds 50]

On a GPU also against the bandwidth limit (x read twice and written once, at the rate of a copy), a
plain eager implementation, and what torch.compile makes of that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

from ttnorm import functional

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
CPU_SHAPES = ((64, 64, 56, 56), (200, 32, 32, 32))
CUDA_SHAPES = ((64, 256, 56, 56), (64, 1024, 14, 14), (200, 32, 32, 32))
CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# compiling takes long, so it is a peer where it matters most
COMPILED = {(torch.float32, "contiguous"), (torch.bfloat16, "channels-last")}
CACHE = 200e6  # bytes of inputs to go through, several times a GPU's cache

Layer = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    records = []
    if args.device == "cuda":
        for shape in CUDA_SHAPES:
            for dtype in CUDA_DTYPES:
                for layout in LAYOUTS:
                    records += _on_gpu(shape, dtype, layout, args.rounds)
        records += _growth(args.rounds)
    else:
        for shape in CPU_SHAPES:
            for dtype in CPU_DTYPES:
                for layout in LAYOUTS:
                    records += _on_cpu(shape, dtype, layout, args.rounds)
    measure.write("layer_cost", args.device, records)


def _on_cpu(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, rounds: int
) -> list[measure.Record]:
    case = f"{_name(shape)} {str(dtype).removeprefix('torch.')} {layout}"
    x = torch.randn(shape, dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
    grad = torch.randn_like(x)
    layers = _layers(x)
    records = []
    for job, run in _jobs(grad).items():
        calls: dict[str, Callable[[], Any]] = {
            name: lambda run=run, layer=layers[name]: run(layer, x)  # type: ignore[misc]
            for name in ("ours", "train", "eval")
        }
        time = measure.seconds(calls, "cpu", rounds)
        for baseline in ("train", "eval"):
            label = f"{case}, {job}, time against {baseline}-mode BatchNorm"
            value, other = 1e3 * time["ours"], 1e3 * time[baseline]
            records.append(measure.record("layer_cost", label, value, "ms", other, "cpu"))
        peak = {name: measure.peak_bytes(calls[name], "cpu") / 2**20 for name in ("ours", "train")}
        label = f"{case}, {job}, peak memory against train-mode BatchNorm"
        records.append(
            measure.record("layer_cost", label, peak["ours"], "MiB", peak["train"], "cpu")
        )
    return records


def _on_gpu(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, rounds: int
) -> list[measure.Record]:
    case = f"{_name(shape)} {str(dtype).removeprefix('torch.')} {layout}"
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
    inputs = [x] + [torch.randn_like(x) for _ in range(int(CACHE // x.nbytes))]
    grad = torch.randn_like(x)
    out = torch.empty_like(x)
    copy = measure.kernel_seconds({"copy": out.copy_}, inputs, rounds)["copy"]
    layers = _layers(x)
    if (dtype, layout) in COMPILED:
        layers["compiled"] = torch.compile(layers["plain"], dynamic=False)
    titles = {
        "train": "train-mode BatchNorm",
        "eval": "eval-mode BatchNorm",
        "plain": "plain eager TTN",
        "compiled": "torch.compile of plain TTN",
    }
    records = []
    for job, run in _jobs(grad).items():
        calls = {n: lambda x, run=run, layer=layer: run(layer, x) for n, layer in layers.items()}
        time = measure.kernel_seconds(calls, inputs, rounds)
        baselines = {titles[name]: t for name, t in time.items() if name != "ours"}
        if job == "inference":
            baselines["the bandwidth limit"] = 1.5 * copy
        for title, other in baselines.items():
            label = f"{case}, {job}, time against {title}"
            value = 1e6 * time["ours"]
            records.append(measure.record("layer_cost", label, value, "us", 1e6 * other, "cuda"))
    torch.compiler.reset()
    return records


def _growth(rounds: int) -> list[measure.Record]:
    """Twice the images or channels cost twice as much, and any number of groups the same."""

    def cost(images: int, channels: int, group_size: int | None) -> float:
        x = torch.randn(images, channels, 32, 32, device="cuda")
        layer = _layers(x, group_size)["ours"]
        return measure.kernel_seconds({"ours": layer}, [x, x.clone()], rounds)["ours"]

    base = cost(400, 64, None)
    cases = {
        "twice the images": (800, 64, None),
        "twice the channels": (400, 128, None),
        "2 groups": (400, 64, 200),
        "25 groups": (400, 64, 16),
        "400 groups": (400, 64, 1),
    }
    records = []
    for name, size in cases.items():
        against = "half the size" if name.startswith("twice") else "one group"
        label = f"400x64x32x32 float32, {name}, against {against}"
        value = 1e6 * cost(*size)
        records.append(measure.record("layer_cost", label, value, "us", 1e6 * base, "cuda"))
    return records


def _jobs(grad: Tensor) -> dict[str, Callable[[Layer, Tensor], None]]:
    @torch.no_grad()
    def inference(layer: Layer, x: Tensor) -> None:
        layer(x)

    def training(layer: Layer, x: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        layer(leaf).backward(grad)

    return {"inference": inference, "forward + backward": training}


def _layers(x: Tensor, group_size: int | None = None) -> dict[str, Layer]:
    channels, device = x.shape[1], x.device
    mean, var = torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5
    weight, bias = (torch.randn(channels, device=device, requires_grad=True) for _ in range(2))
    alpha = torch.rand(channels, device=device)

    def ours(x: Tensor) -> Tensor:
        return functional.test_time_norm(x, mean, var, weight, bias, alpha, group_size=group_size)

    def train(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.0)

    def evaluation(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training=False)

    def plain(x: Tensor) -> Tensor:
        """What one would write down first."""
        x32 = x.float()
        batch_var, batch_mean = torch.var_mean(x32, (0, 2, 3), correction=0)
        mixed_mean = alpha * batch_mean + (1 - alpha) * mean
        mixed_var = alpha * batch_var + (1 - alpha) * var
        mixed_var = mixed_var + alpha * (1 - alpha) * (batch_mean - mean) ** 2
        scale = weight * torch.rsqrt(mixed_var + 1e-5)
        y = (x32 - mixed_mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
        return y.to(x.dtype)

    return {"ours": ours, "train": train, "eval": evaluation, "plain": plain}


def _name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


if __name__ == "__main__":
    main()
