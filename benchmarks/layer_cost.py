"""Time and peak memory of one layer, as ratios to BatchNorm in train mode in the same run.

python benchmarks/layer_cost.py [--device cuda] [--rounds 50]
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

SHAPES = ((64, 64, 56, 56), (200, 32, 32, 32))
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    records = []
    for shape in SHAPES:
        for name, layout in LAYOUTS.items():
            case = f"{'x'.join(map(str, shape))} float32 {name}"
            x = torch.randn(shape, device=args.device).contiguous(memory_format=layout)
            records += _costs(case, x, args.device, args.rounds)
    measure.write("layer_cost", args.device, records)


def _costs(case: str, x: Tensor, device: str, rounds: int) -> list[measure.Record]:
    ours, train, evaluation = _layers(x.shape[1], device)
    grad = torch.randn_like(x)

    @torch.no_grad()
    def inference(layer: Callable[..., Tensor]) -> None:
        layer(x)

    def training(layer: Callable[..., Tensor]) -> None:
        leaf = x.detach().requires_grad_()
        layer(leaf).backward(grad)

    records = []
    for job, run in {"inference": inference, "forward + backward": training}.items():
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda run=run: run(ours),  # type: ignore[misc]
            "train": lambda run=run: run(train),  # type: ignore[misc]
            "eval": lambda run=run: run(evaluation),  # type: ignore[misc]
        }
        time = measure.seconds(calls, device, rounds)
        peak = {name: measure.peak_bytes(calls[name], device) for name in ("ours", "train")}
        for baseline in ("train", "eval"):
            label = f"{case}, {job}, time against {baseline}-mode BatchNorm"
            records.append(
                measure.record(
                    "layer_cost", label, 1e3 * time["ours"], "ms", 1e3 * time[baseline], device
                )
            )
        label = f"{case}, {job}, peak memory against train-mode BatchNorm"
        mib = {name: value / 2**20 for name, value in peak.items()}
        records.append(
            measure.record("layer_cost", label, mib["ours"], "MiB", mib["train"], device)
        )
    return records


def _layers(channels: int, device: str) -> list[Callable[[Tensor], Tensor]]:
    mean, var = torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5
    weight, bias = (torch.randn(channels, device=device, requires_grad=True) for _ in range(2))
    alpha = torch.rand(channels, device=device)
    return [
        lambda x: functional.test_time_norm(x, mean, var, weight, bias, alpha),
        lambda x: F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.0),
        lambda x: F.batch_norm(x, mean, var, weight, bias, training=False),
    ]


if __name__ == "__main__":
    main()
