"""Scoring with groups against the sequential loop: seconds, and whether predictions are equal.

python benchmarks/evaluate_cost.py [--device cuda] [--images 1000]
"""

from __future__ import annotations

import argparse
import time

import measure
import torch
from torch import Tensor

from ttnorm.bench.job import Domains, Job, Network
from ttnorm.bench.predict import predictions
from ttnorm.data.cifar import load_cifar
from ttnorm.demo import ASSETS
from ttnorm.models import zoo

BATCH_SIZES = (200, 64, 16, 4, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    name = "wrn40_2-cifar10"
    network = Network(name, zoo.load(name, args.device), zoo.alpha_files(name))
    test = load_cifar(ASSETS / "cifar10", "test")
    data = Domains("cifar10", 0, {"clean": test.images}, test.labels)
    data = data.subset(args.images).to(args.device)
    # TF32 rounds differently in convolutions of different batch sizes
    torch.backends.cudnn.allow_tf32 = False
    _run(network, data, BATCH_SIZES[0], grouped=True)  # warm up
    records = []
    for size in BATCH_SIZES:
        grouped, sequential = (_run(network, data, size, grouped=g) for g in (True, False))
        differing = int((grouped[1] != sequential[1]).sum())
        case = f"TTN, {args.images} images, B = {size}: {differing} predictions differ"
        case += ", time against one batch after another"
        records.append(
            measure.record("evaluate_cost", case, grouped[0], "s", sequential[0], args.device)
        )
    measure.write("evaluate_cost", args.device, records)


def _run(network: Network, data: Domains, size: int, *, grouped: bool) -> tuple[float, Tensor]:
    started = time.perf_counter()
    ((_, predicted),) = predictions(
        network, data, Job(norm="ttn", batch_size=size), grouped=grouped
    )
    predicted = predicted.cpu()
    return time.perf_counter() - started, predicted


if __name__ == "__main__":
    main()
