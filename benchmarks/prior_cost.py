"""The prior from one batched backward per view, against one backward per sample: same scores.

python benchmarks/prior_cost.py [--device cuda] [--images 256]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import measure
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ttnorm import estimate_prior, prior_shift
from ttnorm.models.wide_resnet import WideResNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # or rounding decides signs, in one way or the other
    model = WideResNet().to(args.device)
    with torch.no_grad():  # statistics that fit the images
        for _ in range(20):
            model(torch.rand(64, 3, 32, 32, device=args.device))
    model.eval()
    x = torch.rand(args.images, 3, 32, 32, device=args.device)
    y = torch.randint(10, (args.images,), device=args.device)
    shifted = prior_shift(x, Generator().manual_seed(0))
    batches = list(zip(x.split(args.batch_size), y.split(args.batch_size), strict=True))

    def batched() -> dict[str, Tensor]:
        views = iter(shifted.split(args.batch_size))
        return estimate_prior(
            model, batches, samples=args.images, augment=lambda images, generator: next(views)
        )

    def looped() -> dict[str, Tensor]:
        return per_sample_prior(model, x, shifted, y)

    estimate_prior(model, [(x[:8], y[:8])])  # warm up
    times: dict[str, list[float]] = {"batched": [], "looped": []}
    for _ in range(args.rounds):
        for function in (batched, looped):
            times[function.__name__].append(_seconds(function, args.device))
    ours, theirs = (sorted(values)[args.rounds // 2] for values in times.values())
    difference = torch.cat(list(batched().values())) - torch.cat(list(looped().values()))
    agree = (difference.abs() <= 0.02).double().mean().item()
    print(f"scores within 0.02 of the loop's: {agree:.2%}, mean difference {difference.mean():.1e}")

    case = f"WRN-40-2, {args.images} images, batched against one backward per sample"
    agreement = f"share of channels whose score is the loop's, {args.images} images"
    measure.write(
        "prior_cost",
        args.device,
        [
            measure.record("prior_cost", case, ours, "s", theirs, args.device),
            measure.record("prior_cost", agreement, agree, "of 1", 1.0, args.device),
        ],
    )


def per_sample_prior(model: nn.Module, x: Tensor, shifted: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Eq. 3-5 as they are written: two backwards per sample."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    affine = [p for m in layers.values() for p in (m.weight, m.bias)]
    agreement = [torch.zeros_like(p) for p in affine]
    alive = [torch.zeros_like(p, dtype=torch.bool) for p in affine]
    for i in range(len(x)):
        label = y[i : i + 1]
        clean, other = (
            torch.autograd.grad(F.cross_entropy(model(view[i : i + 1]), label), affine)
            for view in (x, shifted)
        )
        for total, seen, g, h in zip(agreement, alive, clean, other, strict=True):
            total += g.sign() * h.sign()
            seen |= (g * h) != 0
    scores = torch.stack((torch.cat(agreement[::2]), torch.cat(agreement[1::2]))) / len(x)
    either = torch.cat(alive[::2]) | torch.cat(alive[1::2])
    low, high = scores[:, either].min(), scores[:, either].max()
    prior = torch.where(either, (1 - ((scores - low) / (high - low)).mean(0)) ** 2, 0.0)
    sizes = [m.num_features for m in layers.values()]
    return dict(zip(layers, prior.split(sizes), strict=True))


def _seconds(function: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
