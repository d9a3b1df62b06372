"""What `fold_` costs in accuracy and saves in time: WRN-40-2, CIFAR-10 under three corruptions.

python benchmarks/fold_cost.py [--device cuda] [--images 400] [--rounds 10]

Of the images that come with the demo. A layer is folded when none of its alphas is above the
tolerance; the batch is then not looked at there any more.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import measure
import torch
from torch import Tensor, nn

import ttnorm
from ttnorm.data.cifar import load_cifar
from ttnorm.data.corruptions import corrupt
from ttnorm.demo import ASSETS
from ttnorm.models import zoo

NAME = "wrn40_2-cifar10"
CORRUPTIONS = ("gaussian_noise", "contrast", "jpeg_compression")
TOLERANCES = (0.32, 0.4, 0.5)
BATCH_SIZES = (200, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    test = load_cifar(ASSETS / "cifar10", "test")
    clean = test.images[: args.images].permute(0, 2, 3, 1).numpy()
    moved = [torch.from_numpy(corrupt(clean, c, 5)).permute(0, 3, 1, 2) for c in CORRUPTIONS]
    images = torch.stack(moved).to(args.device).float() / 255
    labels = test.labels[: args.images].to(args.device)
    plain = ttnorm.load_(zoo.load(NAME, args.device), zoo.alpha_files(NAME)["ttn"])
    layers = len(ttnorm.alphas(plain))
    batch, records = images[0, :200], []
    for tolerance in TOLERANCES:
        folded = copy.deepcopy(plain)
        count = len(ttnorm.fold_(folded, tolerance))
        case = f"tolerance {tolerance}: {count} of {layers} layers folded"
        for size in BATCH_SIZES:
            errors = [_error(model, images, labels, size) for model in (folded, plain)]
            label = f"{case}, B = {size}, error against nothing folded"
            records.append(
                measure.record("fold_cost", label, errors[0], "%", errors[1], args.device)
            )
        calls = {"folded": partial(folded, batch), "plain": partial(plain, batch)}
        with torch.no_grad():
            time = measure.seconds(calls, args.device, args.rounds)
        label = f"{case}, B = {len(batch)}, time against nothing folded"
        value, other = 1e3 * time["folded"], 1e3 * time["plain"]
        records.append(measure.record("fold_cost", label, value, "ms", other, args.device))
    measure.write("fold_cost", args.device, records)


@torch.no_grad()
def _error(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> float:
    """Percent wrong over all corruptions."""
    wrong = 0
    with ttnorm.isolated(model, batch_size):
        for domain in images:
            parts = zip(domain.split(200), labels.split(200), strict=True)
            wrong += sum(int((model(x).argmax(1) != y).sum()) for x, y in parts)
    return 100 * wrong / (len(images) * len(labels))


if __name__ == "__main__":
    main()
