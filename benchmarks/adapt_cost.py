"""One adaptation step of a gradient method: WRN-40-2, 200 samples, entropy, Adam on gamma and beta.

python benchmarks/adapt_cost.py [--device cuda] [--rounds 20]

Recorded as a CUDA graph, against the same step called operation by operation.
"""

from __future__ import annotations

import argparse

import measure
import torch

import ttnorm
from ttnorm.methods.step import AdaptationStep, mean_entropy
from ttnorm.models import zoo
from ttnorm.surgery import ttn_layers

NAME = "wrn40_2-cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    x = torch.rand(200, 3, 32, 32, device=args.device)
    records = []
    for batch_size in (200, 16, 1):
        ours, plain = (_step(args.device, batch_size) for _ in range(2))
        calls = {"ours": lambda s=ours: s(x), "plain": lambda s=plain: s._step(x)}  # type: ignore[misc]
        time = measure.seconds(calls, args.device, args.rounds)
        case = f"WRN-40-2, a window of 200 samples, B = {batch_size}, against plain eager"
        value, other = 1e3 * time["ours"], 1e3 * time["plain"]
        records.append(measure.record("adapt_cost", case, value, "ms", other, args.device))
    measure.write("adapt_cost", args.device, records)


def _step(device: str, batch_size: int) -> AdaptationStep:
    model = zoo.load(NAME, device)
    ttnorm.load_(model, zoo.alpha_files(NAME)["ttn"])
    model.requires_grad_(False)
    parameters = [p for layer in ttn_layers(model).values() for p in (layer.weight, layer.bias)]
    for parameter in parameters:
        parameter.requires_grad_()
    optimiser = torch.optim.Adam(parameters, lr=1e-3, capturable=device == "cuda")
    return AdaptationStep(model, optimiser, mean_entropy, batch_size)


if __name__ == "__main__":
    main()
