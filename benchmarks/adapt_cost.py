"""One adaptation step of a gradient method: TENT, WRN-40-2, 200 samples.

python benchmarks/adapt_cost.py [--device cuda] [--rounds 20]

Recorded as a CUDA graph, against the same step called operation by operation.
"""

from __future__ import annotations

import argparse

import measure
import torch

import ttnorm
from ttnorm.methods.step import AdaptationStep
from ttnorm.methods.tent import tent
from ttnorm.models import zoo

NAME = "wrn40_2-cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    x = torch.rand(200, 3, 32, 32, device=args.device)
    records = []
    for batch_size in (200, 16, 1):
        ours, plain = (_tent(args.device, batch_size) for _ in range(2))
        calls = {"ours": lambda s=ours: s(x), "plain": lambda s=plain: s._window(x)}  # type: ignore[misc]
        time = measure.seconds(calls, args.device, args.rounds)
        case = f"WRN-40-2, a window of 200 samples, B = {batch_size}, against plain eager"
        value, other = 1e3 * time["ours"], 1e3 * time["plain"]
        records.append(measure.record("adapt_cost", case, value, "ms", other, args.device))
    measure.write("adapt_cost", args.device, records)


def _tent(device: str, batch_size: int) -> AdaptationStep:
    model = zoo.load(NAME, device)
    ttnorm.load_(model, zoo.alpha_files(NAME)["ttn"])
    return tent(model, batch_size)


if __name__ == "__main__":
    main()
