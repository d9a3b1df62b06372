"""How often the prior's shift should invert images, decided on source data alone.

python benchmarks/choose_prior_shift.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The paper names the transforms of the prior but not their strength. For each probability: the prior
from 1,024 training images, taken as alpha, and its errors on 1,000 other training images, at every
batch size, under a mild and a strong shift, each drawn anew for every 200 images: the one that
post-training simulates (`domain_shift`), and inverted colours (`prior_shift`). Errors are divided
by the source network's, so that both shifts count alike; the lowest mean is the default of
`prior_shift`. No test image and no corruption is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import measure
import torch
from torch import Generator, Tensor

import ttnorm
from ttnorm.data.cifar import load_cifar
from ttnorm.data.loader import DeviceLoader
from ttnorm.models import zoo

INVERT = (0.1, 0.2, 0.3, 0.5)
HELD_OUT = 1000
BATCH_SIZES = (200, 64, 16, 4, 2, 1)


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    train = load_cifar(args.data, "train")
    images, labels = train.images.to(args.device), train.labels.to(args.device)
    loader = DeviceLoader(images[:-HELD_OUT], labels[:-HELD_OUT], 64)
    images, labels = images[-HELD_OUT:].float() / 255, labels[-HELD_OUT:]
    shifts: dict[str, Callable[..., Tensor]] = {
        "mild": ttnorm.domain_shift,
        "strong": partial(ttnorm.prior_shift, invert=1.0),
    }
    blocks = {}
    for name, shift in shifts.items():
        draw = Generator().manual_seed(1)
        blocks[name] = [shift(x, draw, per="batch") for x in images.split(200)]
    model = zoo.load(args.network, args.device)
    source = {n: _errors(model, {}, x, labels, BATCH_SIZES[:1])[0] for n, x in blocks.items()}
    records = []
    for invert in INVERT:
        prior = ttnorm.estimate_prior(
            model,
            loader,
            augment=partial(ttnorm.prior_shift, invert=invert),
            generator=Generator().manual_seed(0),
        )
        errors = {name: _errors(model, prior, x, labels, BATCH_SIZES) for name, x in blocks.items()}
        relative = [error / source[name] for name in blocks for error in errors[name]]
        mean = sum(relative) / len(relative)
        records.append(
            {
                "choice": "prior_shift, invert",
                "value": invert,
                "network": args.network,
                "source's error": source,
                "error by batch size": {
                    name: dict(zip(BATCH_SIZES, e, strict=True)) for name, e in errors.items()
                },
                "mean error relative to the source's": mean,
                "mean prior": torch.cat(list(prior.values())).mean().item(),
                "device": measure.device_name(args.device),
            }
        )
        print(f"invert {invert}: {errors}, relative to {source}: mean {mean:.3f}", flush=True)
    measure.keep(f"prior_shift.{args.network}", records)


@torch.no_grad()
def _errors(
    model: torch.nn.Module,
    alpha: dict[str, Tensor],
    blocks: list[Tensor],
    labels: Tensor,
    sizes: Sequence[int],
) -> list[float]:
    """Percent wrong at every batch size; without alpha, the source network's."""
    ttnorm.convert_(model, alpha or 0.0)
    errors = []
    for size in sizes:
        with ttnorm.isolated(model, size):
            predicted = torch.cat([model(x).argmax(1) for x in blocks])
        errors.append(100 * (predicted != labels).double().mean().item())
    ttnorm.revert_(model)
    return errors


if __name__ == "__main__":
    main()
