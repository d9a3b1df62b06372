"""Learning rates of TENT and SWR over batch statistics and over TTN, on source data alone.

python benchmarks/choose_learning_rate.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The paper adapts batches of 200 at 1e-3 on CIFAR and does not say whether the rate is another over
TTN; on ImageNet it is, by a factor of 50. For each rate: the error while adapting to 10,000
training images in each of six simulated domains (source_data.py), starting anew in each. No
test image and no corruption is looked at.
"""

from __future__ import annotations

import measure
import torch
from source_data import held_out, simulated
from torch import Tensor

import ttnorm
from ttnorm.methods import METHODS, Method
from ttnorm.methods.swr import gradient_agreement
from ttnorm.models import zoo

RATES = (1e-3, 5e-4, 2.5e-4, 1e-4, 5e-5, 0.0)
CELLS = (("tbn", 200), ("ttn", 200), ("ttn", 4))  # norm and batch size


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    loader, images, labels = held_out(args)
    agreement = gradient_agreement(zoo.load(args.network, args.device), loader)
    domains = simulated(images)
    records = []
    for name in ("tent", "swr"):
        options = {"weights": agreement} if METHODS[name].needs_agreement else {}
        for norm, batch_size in CELLS:
            for rate in RATES:
                model = zoo.load(args.network, args.device)
                if norm == "ttn":
                    ttnorm.load_(model, zoo.alpha_files(args.network)["ttn"])
                else:
                    ttnorm.convert_(model, 1.0)
                method = METHODS[name].make(model.eval(), batch_size, lr=rate, **options)
                errors = {d: error(method, x, labels) for d, x in domains.items()}
                records.append(
                    {
                        "choice": f"{name}, lr",
                        "value": rate,
                        "norm": norm,
                        "batch size": batch_size,
                        "network": args.network,
                        "error by domain": errors,
                        "mean error": sum(errors.values()) / len(errors),
                        "device": measure.device_name(args.device),
                    }
                )
                mean = records[-1]["mean error"]
                print(f"{name} {norm} B = {batch_size} {rate:g}: {mean:.2f}", errors, flush=True)
    measure.keep(f"learning_rate.{args.network}", records)


@torch.no_grad()
def error(method: Method, images: Tensor, labels: Tensor) -> float:
    """Percent wrong while adapting, from the beginning."""
    method.reset()
    predicted = torch.cat([method(x).argmax(1) for x in images.split(200)])
    return 100 * (predicted != labels).double().mean().item()


if __name__ == "__main__":
    main()
