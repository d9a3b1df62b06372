"""What each part of a stream's memory is worth, on simulated shifts of source data.

python benchmarks/stream_ablation.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The images, domains and orders of choose_stream_memory.py, with one thing at a time other than the
default: how many frames are remembered, how many the source counts for, how many domains are held,
whether domains or classes are told apart at all, and by how many norms domains are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
from simulated_streams import IMAGES, Streams
from source_data import held_out
from torch import nn

import ttnorm
from ttnorm.data.loader import DeviceLoader
from ttnorm.models import zoo
from ttnorm.shallow import content_of
from ttnorm.tree import CLASSES, CONTENT

COLUMNS = ("random", "sorted by class", "alternating", "mixed")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "window": (50, 100, 500, 1000),
    "source": (0.01, 1, 16),
    "slots": (1, 2, 4, 16),
    "memory": ("corrected", "balanced", "pool"),
}
DEPTHS = (1, 9)


def main() -> None:
    args = measure.source_data_parser(__doc__, IMAGES).parse_args()
    others, images, labels = held_out(args)
    streams = Streams(images, labels)
    alpha = zoo.alpha_files(args.network)["ttn"]
    model = ttnorm.load_(zoo.load(args.network, args.device), alpha)
    records = [
        record
        for row, changed in _variants(model, alpha, others)
        for record in streams.records("stream, ablation", row, args.network, changed, COLUMNS)
    ]
    measure.keep(f"stream_ablation.{args.network}", records)


def _variants(
    model: nn.Module, alpha: Path, others: DeviceLoader
) -> Iterator[tuple[str, nn.Module]]:
    """The network with its default memory, and with each of the others in turn."""
    yield "default", ttnorm.stream_(model)
    for option, values in OPTIONS.items():
        for value in values:
            yield f"{option} {value}", ttnorm.stream_(model, **{option: value})
    for depth in DEPTHS:
        ttnorm.end_stream_(model)
        model.__dict__[CONTENT] = content_of(model, others, depth=depth)
        yield f"depth {depth}", ttnorm.stream_(model)
    ttnorm.load_(model, alpha)
    del model.__dict__[CLASSES]
    yield "classes unknown", ttnorm.stream_(model)


if __name__ == "__main__":
    main()
