"""A frame at a time: a network that remembers its stream against one that does not.

python benchmarks/stream_cost.py [--device cuda] [--rounds 40]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import measure
import torch
from torch import Tensor, nn

import ttnorm
from ttnorm.models import zoo
from ttnorm.routes import EVERY
from ttnorm.stream_config import MEMORIES

WARM_UP = 600  # frames: more than any memory looks back
FRAMES = EVERY  # one after another in a call: a routed memory looks for domains after so many


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    name = "wrn40_2-cifar10"

    def network() -> nn.Module:
        return ttnorm.load_(zoo.load(name, args.device), zoo.alpha_files(name)["ttn"])

    networks = {"offline": network()}
    networks |= {memory: ttnorm.stream_(network(), memory=memory) for memory in MEMORIES}
    x = torch.rand(1, 3, 32, 32, device=args.device)
    for model in networks.values():
        for _ in range(WARM_UP):
            model(torch.rand_like(x))
    calls: dict[str, Callable[[], list[Tensor]]] = {
        name: lambda model=model: [model(x) for _ in range(FRAMES)]  # type: ignore[misc]
        for name, model in networks.items()
    }
    time = measure.seconds(calls, args.device, args.rounds)
    records = []
    for memory in MEMORIES:
        label = f"WRN-40-2, a frame, {memory} memory, time against TTN without one"
        ours, other = (1e3 * time[which] / FRAMES for which in (memory, "offline"))
        records.append(measure.record("stream_cost", label, ours, "ms", other, args.device))
        size = sum(t.nbytes for t in ttnorm.stream_state(networks[memory]).values()) / 2**10
        weights = sum(p.nbytes for p in networks[memory].parameters()) / 2**10
        label = f"WRN-40-2, a stream, {memory} memory, size against the weights"
        records.append(measure.record("stream_cost", label, size, "KiB", weights, args.device))
    measure.write("stream_cost", args.device, records)


if __name__ == "__main__":
    main()
