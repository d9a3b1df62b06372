"""Making the corruptions of CIFAR's test set: seconds for 15 of them at severity 5, on all cores.

python benchmarks/corrupt_cost.py CIFAR TEXTURES [--images 10000]

CIFAR is a folder with CIFAR-10 or CIFAR-100, TEXTURES that of frost's pictures. The limit was set
beforehand, for 10,000 images; of fewer, as many seconds fewer are allowed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import measure

from ttnorm.data.cifar import load_cifar
from ttnorm.data.corrupted import make_corrupted
from ttnorm.data.corruptions import CORRUPTIONS
from ttnorm.data.images import Images

SEVERITY = 5
LIMIT = 120.0  # seconds
WHOLE = 10_000  # images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with CIFAR")
    parser.add_argument("textures", type=Path, help="the folder with frost1.png to frost5.jpg")
    parser.add_argument("--images", type=int, default=WHOLE)
    args = parser.parse_args()
    clean = Images(*(t[: args.images] for t in load_cifar(args.data, "test")))
    count = len(clean.labels)
    taken = _seconds(clean, args.textures)
    case = f"{count:,} images x {len(CORRUPTIONS)} corruptions, {os.cpu_count()} processes"
    case += ", time against the limit"
    limit = LIMIT * count / WHOLE
    measure.write(
        "corrupt_cost", "cpu", [measure.record("corrupt_cost", case, taken, "s", limit, "cpu")]
    )


def _seconds(clean: Images, textures: Path) -> float:
    """From images in memory to files, with the start of the processes that make them."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        make_corrupted(clean, folder, severities=(SEVERITY,), textures=textures)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
