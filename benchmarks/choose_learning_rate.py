"""Learning rates of TENT and SWR over batch statistics and over TTN, on source data alone.

python benchmarks/choose_learning_rate.py CIFAR_FOLDER METHOD [--network wrn40_2-cifar10]
    [--device cuda]

The paper adapts batches of 200 at 1e-3 on CIFAR and does not say whether the rate is another over
TTN or for smaller batches; on ImageNet it is both. For each rate, and for SWR with several weights
of its regulariser, which counts for less where steps are smaller: the error while adapting to
10,000 training images in each of six simulated domains (source_data.py), starting anew in each. No
test image and no corruption is looked at.
"""

from __future__ import annotations

from typing import Any

import measure
import torch
from source_data import held_out, simulated
from torch import Tensor

import ttnorm
from ttnorm.methods import METHODS, Method
from ttnorm.methods.swr import gradient_agreement
from ttnorm.models import zoo

CELLS = (("tbn", 200), ("ttn", 200), ("ttn", 64), ("ttn", 16), ("ttn", 4))  # norm and batch size
RATES = (1e-3, 2.5e-4, 1e-4, 5e-5, 2.5e-5)
STRENGTHS = (10.0, 40.0, 160.0)  # of SWR's regulariser


def main() -> None:
    parser = measure.source_data_parser(__doc__)
    parser.add_argument("method", choices=("tent", "swr"))
    parser.add_argument("--images", type=int, default=10000)
    args = parser.parse_args()
    loader, images, labels = held_out(args, args.images)
    domains = simulated(images)
    fixed: dict[str, Any] = {}
    if METHODS[args.method].needs_agreement:
        fixed["weights"] = gradient_agreement(zoo.load(args.network, args.device), loader)
    choices: list[dict[str, float]] = [{"lr": rate} for rate in RATES]
    if args.method == "swr":
        choices = [{**c, "strength": strength} for strength in STRENGTHS for c in choices]
    records = []
    for norm, batch_size in CELLS:
        for choice in [{"lr": 0.0}, *choices]:
            model = zoo.load(args.network, args.device)
            if norm == "ttn":
                ttnorm.load_(model, zoo.alpha_files(args.network)["ttn"])
            else:
                ttnorm.convert_(model, 1.0)
            method = METHODS[args.method].make(model.eval(), batch_size, **choice, **fixed)
            errors = {d: _error(method, x, labels) for d, x in domains.items()}
            records.append(
                {
                    "choice": f"{args.method}, lr",
                    "value": choice["lr"],
                    "strength": choice.get("strength"),
                    "norm": norm,
                    "batch size": batch_size,
                    "network": args.network,
                    "error by domain": errors,
                    "mean error": sum(errors.values()) / len(errors),
                    "device": measure.device_name(args.device),
                }
            )
            mean = records[-1]["mean error"]
            print(f"{args.method} {norm} B = {batch_size} {choice}: {mean:.2f}", errors, flush=True)
    measure.keep(f"learning_rate_{args.method}.{args.network}", records)


@torch.no_grad()
def _error(method: Method, images: Tensor, labels: Tensor) -> float:
    """Percent wrong while adapting, from the beginning."""
    method.reset()
    predicted = torch.cat([method(x).argmax(1) for x in images.split(200)])
    return 100 * (predicted != labels).double().mean().item()


if __name__ == "__main__":
    main()
