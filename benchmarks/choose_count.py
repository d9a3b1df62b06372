"""How many samples the source counts for in `ttn-counted`, decided on source data alone.

python benchmarks/choose_count.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

Alpha is fitted in large batches, and tiny ones say less than it takes them to: B / (B + source) of
it is left. For each number: errors of the shipped alphas on training images in six
simulated domains (source_data.py) at every batch size. 0 is plain TTN. No test image and no
corruption that is scored is looked at.
"""

from __future__ import annotations

import itertools

import measure
from source_data import error, held_out, simulated

import ttnorm
from ttnorm.models import zoo

SOURCE = (0.0, 1.0, 2.0, 4.0, 8.0)
BATCH_SIZES = (200, 64, 16, 4, 2, 1)


def main() -> None:
    args = measure.source_data_parser(__doc__, images=400).parse_args()
    _, images, labels = held_out(args)
    domains = simulated(images)
    records = []
    for kind, source in itertools.product(("ttn", "strong"), SOURCE):
        errors: dict[str, dict[int, float]] = {name: {} for name in domains}
        model = zoo.load(args.network, args.device)
        ttnorm.load_(model, zoo.alpha_files(args.network)[kind], source_count=source)
        for size in BATCH_SIZES:
            for name, x in domains.items():
                errors[name][size] = error(model, x, labels, size)
        every = [e for by_size in errors.values() for e in by_size.values()]
        records.append(
            {
                "choice": "ttn-counted, source",
                "value": source,
                "alpha": kind,
                "network": args.network,
                "images": args.images,
                "error by batch size": errors,
                "mean error": sum(every) / len(every),
                "device": measure.device_name(args.device),
            }
        )
        print(records[-1], flush=True)
    measure.keep(f"count.{args.network}", records)


if __name__ == "__main__":
    main()
