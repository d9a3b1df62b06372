"""SWR over TTN: its learning rate and how strongly it holds parameters, on source data alone.

python benchmarks/choose_swr_over_ttn.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

What holds parameters in SWR is the distance from where they were a step ago, so that it counts for
less where steps are smaller. As in choose_learning_rate.py: the error while adapting to 10,000
training images in each of six simulated domains, starting anew in each.
"""

from __future__ import annotations

import itertools

import measure
from choose_learning_rate import error
from source_data import held_out, simulated

import ttnorm
from ttnorm.methods.swr import gradient_agreement, swr
from ttnorm.models import zoo

BATCH_SIZES = (200, 64, 16)
SETTINGS = (  # learning rate and strength
    *itertools.product((5e-5, 1e-4), (10.0, 40.0, 160.0)),
    *itertools.product((2e-4, 5e-4), (40.0, 160.0, 640.0)),
)


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    loader, images, labels = held_out(args)
    weights = gradient_agreement(zoo.load(args.network, args.device), loader)
    domains = simulated(images)
    records = []
    for batch_size, (rate, strength) in itertools.product(BATCH_SIZES, SETTINGS):
        model = zoo.load(args.network, args.device)
        ttnorm.load_(model, zoo.alpha_files(args.network)["ttn"])
        method = swr(model.eval(), batch_size, weights=weights, lr=rate, strength=strength)
        errors = {d: error(method, x, labels) for d, x in domains.items()}
        records.append(
            {
                "choice": "swr over ttn",
                "lr": rate,
                "strength": strength,
                "batch size": batch_size,
                "network": args.network,
                "error by domain": errors,
                "mean error": sum(errors.values()) / len(errors),
                "device": measure.device_name(args.device),
            }
        )
        print(
            f"B = {batch_size} {rate:g} {strength:g}: {records[-1]['mean error']:.2f}", flush=True
        )
    measure.keep(f"swr_over_ttn.{args.network}", records)


if __name__ == "__main__":
    main()
