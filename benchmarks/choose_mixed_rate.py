"""TENT's learning rate over TTN where domains are mixed, on source data alone.

python benchmarks/choose_mixed_rate.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

In that scenario the paper adapts at a tenth of its rate for single domains, 1e-4, and does not say
whether the rate is another over TTN. For each rate: the error while adapting to 10,000 training
images in each of six simulated domains (source_data.py), all of them in one random order.
"""

from __future__ import annotations

import itertools

import measure
import torch
from choose_learning_rate import error
from source_data import held_out, simulated

import ttnorm
from ttnorm.methods.tent import tent
from ttnorm.models import zoo

BATCH_SIZES = (200, 16)
RATES = (1e-4, 5e-5, 2e-5, 5e-6, 0.0)


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    _, images, labels = held_out(args)
    domains = simulated(images).values()
    order = torch.randperm(
        len(labels) * len(domains), generator=torch.Generator().manual_seed(0)
    ).to(args.device)
    images, labels = torch.cat([*domains])[order], labels.repeat(len(domains))[order]
    records = []
    for batch_size, rate in itertools.product(BATCH_SIZES, RATES):
        model = zoo.load(args.network, args.device)
        ttnorm.load_(model, zoo.alpha_files(args.network)["ttn"])
        wrong = error(tent(model.eval(), batch_size, lr=rate), images, labels)
        records.append(
            {
                "choice": "tent, lr",
                "value": rate,
                "norm": "ttn",
                "batch size": batch_size,
                "network": args.network,
                "mean error": wrong,
                "device": measure.device_name(args.device),
            }
        )
        print(f"B = {batch_size} {rate:g}: {wrong:.2f}", flush=True)
    measure.keep(f"mixed_rate.{args.network}", records)


if __name__ == "__main__":
    main()
