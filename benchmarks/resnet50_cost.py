"""Post-training of a ResNet-50 at 224 pixels: images a second and memory, with and without AMP.

python benchmarks/resnet50_cost.py [--device cuda] [--steps 20]
torchrun --nproc-per-node 2 benchmarks/resnet50_cost.py --device cuda

Random images and weights cost what ImageNet's do. Under torchrun every process has batches of its
own, and their statistics are common; where there are fewer GPUs than processes they share one, over
gloo, which shows that it works and not how fast it can be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import measure
import torch
import torch.distributed as dist
import torchvision
from torch import Generator, Tensor, nn

import ttnorm
from ttnorm.data.loader import DeviceLoader
from ttnorm.distributed import rank, world_size

NAME = "resnet50_cost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of every process")
    parser.add_argument("--size", type=int, default=224)
    args = parser.parse_args()
    with _processes(args.device) as device:
        model = torchvision.models.resnet50().eval().to(device)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        alphas = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        loader = DeviceLoader(*_images(args, device), args.batch_size)
        found = {amp: _fit(model, loader, amp, device) for amp in ("bfloat16", None)}
        if rank() > 0:
            return
        images = args.batch_size * args.steps * world_size()
        (seconds, memory), (plain_seconds, plain_memory) = found["bfloat16"], found[None]
        what = f"ResNet-50, {alphas:,} alphas, {args.size} px, {world_size()} x {args.batch_size}"
        cases = [
            ("time of an image", 1e3 * seconds / images, "ms", 1e3 * plain_seconds / images),
            (
                "images a second, where more is better",
                images / seconds,
                "images/s",
                images / plain_seconds,
            ),
        ]
        if args.device == "cuda":
            gib = (memory / 2**30, plain_memory / 2**30)
            cases.append(("peak memory of a process", gib[0], "GiB", gib[1]))
        records = [
            measure.record(
                NAME, f"{what}, bfloat16, {case}, against float32", value, unit, other, args.device
            )
            for case, value, unit, other in cases
        ]
        measure.write(NAME, args.device, records, f"x{world_size()}")


def _images(args: argparse.Namespace, device: str) -> tuple[Tensor, Tensor]:
    """Other ones for every process."""
    count, generator = args.batch_size * args.steps, Generator().manual_seed(rank())
    shape = (count, 3, args.size, args.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 1000, (count,), generator=generator)
    return images.to(device), labels.to(device)


def _fit(
    model: nn.Module, loader: DeviceLoader, amp: str | None, device: str
) -> tuple[float, float]:
    """Seconds of an epoch in which nothing is compiled any more, and bytes at the most."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    config = ttnorm.PostTrainConfig(epochs=2, init=0.1, mse=False, lr=2.5e-4, amp=amp)  # type: ignore[arg-type]
    result = ttnorm.optimise_alpha(model, loader, None, config)
    memory = torch.cuda.max_memory_allocated(device) if cuda else float("nan")
    return result.history[-1]["seconds"], memory


@contextlib.contextmanager
def _processes(device: str) -> Iterator[str]:
    """The device of this process, in the group that torchrun announces, if it does."""
    if "LOCAL_RANK" not in os.environ:
        yield device
        return
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device == "cuda":
        device = f"cuda:{local % there}"
        torch.cuda.set_device(device)
    alone = device != "cpu" and there >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if alone else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
