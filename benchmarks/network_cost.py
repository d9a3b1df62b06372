"""A forward of whole networks: TTN against BatchNorm in eval mode and in train mode (TBN).

python benchmarks/network_cost.py [--device cuda] [--rounds 20]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable

import measure
import torch
from torch import Tensor, nn

import ttnorm
from ttnorm.models.wide_resnet import WideResNet

BATCH_SIZES = (1, 16, 64, 200)
FORMATS = {
    "float32 contiguous": (torch.float32, torch.contiguous_format),
    "bfloat16 channels-last": (torch.bfloat16, torch.channels_last),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    networks = _networks() if cuda else {"WRN-40-2": (WideResNet, 32)}
    records = []
    for name, (build, pixels) in networks.items():
        for format_name in FORMATS if cuda else ["float32 contiguous"]:
            for size in BATCH_SIZES if cuda else [1, 200]:
                if size * pixels**2 > 64 * 224**2:
                    continue  # more than such a network is ever given
                case = f"{name}, {format_name}, B = {size}"
                records += _costs(case, build(), size, pixels, FORMATS[format_name], args)
    measure.write("network_cost", args.device, records)


def _networks() -> dict[str, tuple[Callable[[], nn.Module], int]]:
    import segmentation_models_pytorch as smp
    import torchvision

    return {
        "WRN-40-2": (WideResNet, 32),
        "ResNet-50": (torchvision.models.resnet50, 224),
        "MobileNetV2": (torchvision.models.mobilenet_v2, 224),
        "DeepLabV3+": (lambda: smp.DeepLabV3Plus("resnet50", encoder_weights=None), 224),
    }


@torch.no_grad()
def _costs(
    case: str,
    model: nn.Module,
    size: int,
    pixels: int,
    form: tuple[torch.dtype, torch.memory_format],
    args: argparse.Namespace,
) -> list[measure.Record]:
    dtype, layout = form
    plain = model.eval().to(args.device, dtype).to(memory_format=layout)  # type: ignore[call-overload]
    adapting = ttnorm.convert_(copy.deepcopy(plain), alpha=0.3)
    batch = copy.deepcopy(plain)
    for module in batch.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()  # statistics of the batch, and no dropout
    x = torch.rand(size, 3, pixels, pixels, device=args.device, dtype=dtype)
    x = x.contiguous(memory_format=layout)
    # train mode refuses a single image where it was pooled to a pixel
    forwards: dict[str, Callable[[Tensor], Tensor]] = {"ours": adapting, "eval": plain}
    if size > 1:
        forwards["train"] = batch
    if args.device == "cuda":
        with contextlib.suppress(ValueError):  # not every network can be traced
            forwards["fused"] = ttnorm.fuse(adapting)
        time = measure.kernel_seconds(forwards, [x], args.rounds)
    else:
        calls = {name: lambda f=f: f(x) for name, f in forwards.items()}  # type: ignore[misc]
        time = measure.seconds(calls, "cpu", args.rounds)
    pairs = [("ours", mode) for mode in ("eval", "train") if mode in time]
    pairs += [("fused", "eval")] if "fused" in time else []
    records = []
    for who, mode in pairs:
        label = f"{case}, {'fused, ' * (who == 'fused')}time against {mode}-mode BatchNorm"
        ours, other = 1e3 * time[who], 1e3 * time[mode]
        records.append(measure.record("network_cost", label, ours, "ms", other, args.device))
    return records


if __name__ == "__main__":
    main()
