"""How strong SWR's regulariser should be, decided on source data alone.

python benchmarks/choose_swr_strength.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The weights in its loss are recalled from its paper and not confirmed by code. For each strength:
the error while adapting, with batch statistics and B = 200, to 10,000 training images under each of
three simulated shifts (`prior_shift` with every image inverted, one draw for all). TBN and TENT for
comparison. No test image and no corruption is looked at. The default of `swr` is the strength whose
worst shift is the best; the means of that one and of a quarter of it are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import torch
from source_data import held_out
from torch import Generator, Tensor

import ttnorm
from ttnorm.methods import Method
from ttnorm.methods.none import NoAdaptation
from ttnorm.methods.swr import gradient_agreement, swr
from ttnorm.methods.tent import tent
from ttnorm.models import zoo

STRENGTHS = (250.0, 100.0, 25.0, 10.0, 2.5, 0.0)
SHIFTS = (0, 1, 2)  # seeds


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    loader, images, labels = held_out(args)
    weights = gradient_agreement(zoo.load(args.network, args.device), loader)
    shifted = [
        ttnorm.prior_shift(images, Generator().manual_seed(seed), invert=1.0, per="batch")
        for seed in SHIFTS
    ]
    methods: dict[str, Callable[..., Method]] = {"TBN": NoAdaptation, "TENT": tent}
    methods |= {f"SWR, {s:g}": partial(swr, weights=weights, strength=s) for s in STRENGTHS}
    records: list[dict[str, Any]] = []
    for name, make in methods.items():
        errors = [_error(make, args, x, labels) for x in shifted]
        mean = sum(errors) / len(errors)
        records.append(
            {
                "choice": "swr, strength",
                "value": name,
                "network": args.network,
                "errors": errors,
                "mean error": mean,
                "device": measure.device_name(args.device),
            }
        )
        print(f"{name:10} " + "  ".join(f"{e:.2f}" for e in errors) + f"  mean {mean:.2f}")
    measure.keep(f"swr_strength.{args.network}", records)


def _error(
    make: Callable[..., Method], args: argparse.Namespace, x: Tensor, labels: Tensor
) -> float:
    """Percent wrong while adapting."""
    model = ttnorm.convert_(zoo.load(args.network, args.device), alpha=1.0)
    method = make(model, 200)
    parts = zip(x.split(200), labels.split(200), strict=True)
    wrong = sum((method(batch).argmax(1) != y).sum() for batch, y in parts)
    return 100 * int(torch.as_tensor(wrong)) / len(labels)


if __name__ == "__main__":
    main()
