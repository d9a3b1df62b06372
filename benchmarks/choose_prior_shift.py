"""How often the prior's shift should invert images, decided on source data alone.

python benchmarks/choose_prior_shift.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The paper names the transforms of the prior but not their strength. For each probability: alpha
post-trained on 40,000 training images, in 10 epochs, and its errors on the other 10,000 in six
simulated domains (source_data.py) at every batch size. The default of `prior_shift` is the
one with the lowest mean over domains and batch sizes. No test image and no corruption is looked at.
"""

from __future__ import annotations

from functools import partial

import measure
import torch
from source_data import error, held_out, simulated
from torch import Tensor, nn

import ttnorm
from ttnorm.models import zoo

INVERT = (0.1, 0.2, 0.3, 0.5)
BATCH_SIZES = (200, 64, 16, 4, 2, 1)


def main() -> None:
    parser = measure.source_data_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    loader, images, labels = held_out(args)
    domains = simulated(images)
    model = zoo.load(args.network, args.device)
    ttnorm.convert_(model, 0.0)
    source = {name: _errors(model, x, labels)[200] for name, x in domains.items()}
    ttnorm.revert_(model)
    print("source:", source, flush=True)
    records = []
    for invert in INVERT:
        result = ttnorm.post_train_(
            model,
            loader,
            ttnorm.PostTrainConfig(epochs=args.epochs),
            prior_augment=partial(ttnorm.prior_shift, invert=invert),
        )
        errors = {name: _errors(model, x, labels) for name, x in domains.items()}
        ttnorm.revert_(model)
        every = [e for by_size in errors.values() for e in by_size.values()]
        prior = result.prior or {}
        records.append(
            {
                "choice": "prior_shift, invert",
                "value": invert,
                "network": args.network,
                "epochs": args.epochs,
                "images": args.images,
                "source's error": source,
                "error by batch size": errors,
                "mean error": sum(every) / len(every),
                "mean prior": torch.cat(list(prior.values())).mean().item(),
                "mean alpha": torch.cat(list(result.alpha.values())).mean().item(),
                "device": measure.device_name(args.device),
            }
        )
        print(records[-1], flush=True)
    measure.keep(f"prior_shift.{args.network}", records)


def _errors(model: nn.Module, images: Tensor, labels: Tensor) -> dict[int, float]:
    """Percent wrong at every batch size."""
    return {size: error(model, images, labels, size) for size in BATCH_SIZES}


if __name__ == "__main__":
    main()
