"""How often the prior's shift should invert images, decided on source data alone.

python benchmarks/choose_prior_shift.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The paper names the transforms of the prior but not their strength. For each probability: the prior
from 1,024 training images, taken as alpha, and its errors on 2,000 other training images under the
shift that post-training simulates (`domain_shift`, drawn anew for every 200 images), at every batch
size. The lowest mean is the default of `prior_shift`. No test image and no corruption is looked at.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import measure
import torch
from torch import Generator, Tensor

import ttnorm
from ttnorm.data.cifar import load_cifar
from ttnorm.data.loader import DeviceLoader
from ttnorm.models import zoo

INVERT = (0.1, 0.2, 0.3, 0.5)
BATCH_SIZES = (200, 64, 16, 4, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--network", default="wrn40_2-cifar10")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    train = load_cifar(args.data, "train")
    images, labels = train.images.to(args.device), train.labels.to(args.device)
    loader = DeviceLoader(images[:-2000], labels[:-2000], 64)
    blocks = [x.float() / 255 for x in images[-2000:].split(200)]
    shift = Generator().manual_seed(1)
    blocks = [ttnorm.domain_shift(x, shift, per="batch") for x in blocks]
    model = zoo.load(args.network, args.device)
    records = []
    for invert in INVERT:
        prior = ttnorm.estimate_prior(
            model,
            loader,
            augment=partial(ttnorm.prior_shift, invert=invert),
            generator=Generator().manual_seed(0),
        )
        errors = _errors(model, prior, blocks, labels[-2000:])
        mean = sum(errors) / len(errors)
        records.append(
            {
                "choice": "prior_shift, invert",
                "value": invert,
                "network": args.network,
                "error by batch size": dict(zip(BATCH_SIZES, errors, strict=True)),
                "mean error": mean,
                "mean prior": torch.cat(list(prior.values())).mean().item(),
                "device": measure.device_name(args.device),
            }
        )
        print(f"invert {invert}: " + "  ".join(f"{e:.2f}" for e in errors) + f"  mean {mean:.2f}")
    path = measure.RESULTS / f"prior_shift.{args.network}.json"
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")


@torch.no_grad()
def _errors(
    model: torch.nn.Module, alpha: dict[str, Tensor], blocks: list[Tensor], labels: Tensor
) -> list[float]:
    """Percent wrong at every batch size."""
    ttnorm.convert_(model, alpha)
    errors = []
    for size in BATCH_SIZES:
        with ttnorm.isolated(model, size):
            predicted = torch.cat([model(x).argmax(1) for x in blocks])
        errors.append(100 * (predicted != labels).double().mean().item())
    ttnorm.revert_(model)
    return errors


if __name__ == "__main__":
    main()
