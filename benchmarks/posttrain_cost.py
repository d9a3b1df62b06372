"""Post-training of WRN-40-2 on CIFAR's shapes: the time of a step, and of the prior.

python benchmarks/posttrain_cost.py [--device cuda]

Random images cost what CIFAR's do; 30 epochs of CIFAR-10 are 7,500 steps. On a GPU the step as it
is, recorded as a CUDA graph, against the same step called operation by operation; on a CPU the step
in bfloat16 against float32.
"""

from __future__ import annotations

import argparse
import time
from typing import Literal
from unittest import mock

import measure
import torch

import ttnorm
from ttnorm.data.loader import DeviceLoader
from ttnorm.models import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    steps = 250 if args.device == "cuda" else 10
    model = zoo.load("wrn40_2-cifar10", args.device)
    images = torch.randint(0, 256, (200 * steps, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),))
    loader = DeviceLoader(images.to(args.device), labels.to(args.device), 200)

    def fit(epochs: int, amp: Literal["bfloat16"] | None = None) -> float:
        config = ttnorm.PostTrainConfig(epochs=epochs, amp=amp)
        result = ttnorm.optimise_alpha(model, loader, prior, config)
        return float(result.history[-1]["seconds"]) / steps

    ttnorm.estimate_prior(model, [next(iter(loader))], samples=16)  # warm up
    started = time.perf_counter()
    prior = ttnorm.estimate_prior(model, loader, samples=1024)
    torch.cat(list(prior.values())).sum().item()  # waits for a GPU
    prior_seconds = time.perf_counter() - started
    float32 = fit(2)  # the second epoch: nothing is compiled or recorded in it any more
    if args.device == "cuda":
        with mock.patch("ttnorm.fitting.Repeated", lambda function, **_: function):
            plain = 1e3 * fit(1)
        cases = [
            ("a step of 200 images, against one without a CUDA graph", 1e3 * float32, "ms", plain),
            ("30 epochs of CIFAR-10, 7,500 steps, against the limit", 7500 * float32, "s", 75.0),
            ("the prior, 1,024 images, against the limit", prior_seconds, "s", 2.0),
        ]
    else:
        half = fit(2, amp="bfloat16")
        cases = [("a step of 200 images in bfloat16, against float32", half, "s", float32)]
    measure.write(
        "posttrain_cost",
        args.device,
        [
            measure.record("posttrain_cost", f"WRN-40-2, {case}", value, unit, other, args.device)
            for case, value, unit, other in cases
        ],
    )


if __name__ == "__main__":
    main()
