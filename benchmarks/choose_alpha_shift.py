"""How alpha is fitted to few large images, decided on source data alone.

python benchmarks/choose_alpha_shift.py imagenet FOLDER --network mobilenet_v2=FILE [--device cuda]
python benchmarks/choose_alpha_shift.py camvid FOLDER --network CHECKPOINT [--device cuda]

For ImageNet the paper fits alpha under the prior's shift, for street scenes it does not say: the
shift here is that of alpha, in ranges some times as wide, alone or with the prior's grayscale and
inversion ("both"). With a few thousand images there are few steps, perhaps too few for one alpha a
channel: what shares one alpha, and the sizes of the batches that it is fitted in, are settings as
well. For each setting:
alpha fitted on every other source image and the network scored on the rest, or, for CamVid, on the
training set and on the validation set; as they are and under the corruptions that ImageNet-C's
authors set aside for choosing (source_data.py), as a percentage that is wrong: images, or what
masks lack of overlapping (100 - mIoU); at every batch size, or for CamVid at 2, the paper's.
The lowest mean is the choice, for ImageNet over both networks. No test image and no corruption that
is scored is looked at.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from source_data import for_validation
from torch import Tensor, nn

import ttnorm
from ttnorm.augment import DOMAIN_PARTS, PRIOR_PARTS
from ttnorm.bench.camvid import PARTS, CamvidBench, validation_frames
from ttnorm.bench.imagenet import ImageNetBench
from ttnorm.bench.job import count_classes
from ttnorm.bench.scores import score
from ttnorm.bench.subject import FULL, Setup
from ttnorm.bench.variants import VARIANTS
from ttnorm.data.images import Images
from ttnorm.data.loader import DeviceLoader

PARTS_OF = {"imagenet": DOMAIN_PARTS, "camvid": PARTS}
SHORT: dict[str, Any] = {"epochs": 10, "strength": 2.0}
LAYER: dict[str, Any] = {"granularity": "layer", "lr": 1e-2, "group_sizes": (1, 2, 4, 16, 64)}
STRONG = dict(VARIANTS["prior-strong"].prior)
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "imagenet": (
        LAYER,
        LAYER | {"source_count": 2.0},
        LAYER | {"source_count": 4.0},
        LAYER | {"source_count": 8.0},
        LAYER | {"source_count": 8.0, "group_sizes": (16, 64)},
        LAYER | {"source_count": 4.0, "strength": 2.0},
        LAYER | {"source_count": 4.0, "strength": 3.0},
        LAYER | {"source_count": 8.0, "strength": 2.0},
        LAYER | {"source_count": 4.0, "strength": 2.0, "shift": "domain shift"},
        LAYER | {"source_count": 4.0, "strength": 2.0, "granularity": "channel", "lr": 4e-3},
    ),
    "camvid": (
        {"epochs": 0},  # the prior itself
        {"epochs": 0, "prior": STRONG},
        SHORT,
        SHORT | {"prior": STRONG},
        SHORT | {"prior": STRONG, "shift": "both"},
    ),
}
DEFAULTS: dict[str, Any] = {
    "epochs": 30,
    "granularity": "channel",
    "lr": 4e-3,
    "lambda_": 1.0,
    "group_sizes": None,
    "source_count": 0.0,
    "strength": 1.0,
    "prior": {},
}
SHIFT_OF = {"imagenet": "both", "camvid": "domain shift"}
CONSTANTS = {"imagenet": (0.0, 0.1, 0.2), "camvid": (0.0, 0.1, 0.2, 0.5, 1.0)}  # for comparison
BATCH_SIZES = {"imagenet": (64, 16, 4, 2, 1), "camvid": (2,)}
AT_ONCE = {"imagenet": 256, "camvid": 16}


def main() -> None:
    args = _parser().parse_args()
    bench = _bench(args)
    source, model = bench.source("default"), bench.model
    fitted_to, scored = _two_parts(bench, source.train, args)
    loader = DeviceLoader(*fitted_to, min(source.batch_size, len(fitted_to.labels)))
    # at random, for files come sorted by class or time, and test batches do not
    order = torch.randperm(len(scored.labels), generator=torch.Generator().manual_seed(0))
    images, labels = (t[order].to(args.device) for t in scored)
    unshifted = images.float() / 255
    domains = {"clean": unshifted} | for_validation(unshifted)
    classes = count_classes(model, (images.shape[-2], images.shape[-1]))
    sizes, at_once = BATCH_SIZES[args.data], AT_ONCE[args.data]
    found = partial(_wrong, labels=labels, classes=classes, sizes=sizes, at_once=at_once)
    records = []

    def keep(value: str, **options: Any) -> None:
        """What the network as it is makes of all domains."""
        errors = {domain: found(model, x) for domain, x in domains.items()}
        every = [error for by_size in errors.values() for error in by_size.values()]
        records.append(
            {
                "choice": "alpha, shift and options",
                "value": value,
                **options,
                "network": bench.subject.name,
                "images": len(labels),
                "error by batch size": errors,
                "mean error": sum(every) / len(every),
                "device": measure.device_name(args.device),
            }
        )
        ttnorm.revert_(model)
        print(records[-1], flush=True)

    for constant in CONSTANTS[args.data]:
        ttnorm.convert_(model, constant)
        keep(f"alpha = {constant:g}")
    for setting in SETTINGS[args.data]:
        options = DEFAULTS | setting
        shift, strength = options.pop("shift", SHIFT_OF[args.data]), options.pop("strength")
        parts = PARTS_OF[args.data] + (PRIOR_PARTS[1:] if shift == "both" else ())
        augment = partial(ttnorm.domain_shift, parts=parts, strength=strength)
        prior = options.pop("prior")
        ttnorm.post_train_(
            model,
            loader,
            ttnorm.PostTrainConfig(**options, amp=args.amp),
            augment=augment,
            prior_augment=partial(ttnorm.prior_shift, **prior),
        )
        keep(shift, strength=strength, **options, prior=prior, amp=args.amp)
    measure.keep(f"alpha_shift.{bench.subject.name}", records)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=tuple(SETTINGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", required=True, help="NAME=FILE, or a checkpoint for camvid")
    parser.add_argument("--images", type=int, help="of the source; all of them if not given")
    parser.add_argument("--amp", choices=("bfloat16",), help="to fit in")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def _bench(args: argparse.Namespace) -> ImageNetBench | CamvidBench:
    setup = Setup(work=args.work, alphas=args.work, device=args.device, scale=FULL)
    if args.data == "camvid":
        return CamvidBench(Path(args.network), args.folder, setup)
    name, _, file = args.network.partition("=")
    return ImageNetBench(name, Path(file) if file else None, args.folder, setup)


def _two_parts(
    bench: ImageNetBench | CamvidBench, source: Images, args: argparse.Namespace
) -> tuple[Images, Images]:
    """What alpha is fitted to, and what the network is scored on, which it was not trained on."""
    every = Images(*(t[: args.images] for t in source))
    if isinstance(bench, CamvidBench):
        return every, Images(*(t[: args.images] for t in validation_frames(args.folder)))
    return Images(*(t[::2] for t in every)), Images(*(t[1::2].cpu() for t in every))


@torch.no_grad()
def _wrong(
    model: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    classes: int,
    sizes: tuple[int, ...],
    at_once: int,
) -> dict[int, float]:
    """Percent wrong at every batch size."""
    errors = {}
    for size in sizes:
        with ttnorm.isolated(model, size):
            found = torch.cat([model(x).argmax(1) for x in images.split(at_once)])
        result = score(found, labels, classes)
        right = result["miou"] if "miou" in result else 1 - result["wrong"] / len(labels)
        errors[size] = 100 * (1 - right)
    return errors


if __name__ == "__main__":
    main()
