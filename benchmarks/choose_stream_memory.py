"""Which memory a stream should have, decided on simulated shifts of source data alone.

python benchmarks/choose_stream_memory.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The last 500 training images in six domains (source_data.py), frame by frame. Each domain as a
stream of its own in random order, sorted by class, and with classes that come and go; and all of
them in one stream: one after another, alternating every 50 frames, and mixed. For comparison the
source network, and TTN with single frames for batches. No test image and no corruption is looked
at.
"""

from __future__ import annotations

import measure
import torch
from source_data import simulated
from torch import Tensor, nn

import ttnorm
from ttnorm.bench.alongside import alongside
from ttnorm.bench.scenarios import Segment, joined, segments
from ttnorm.data.cifar import load_cifar
from ttnorm.models import zoo

FRAMES = 500
ORDERS = {
    "random": "single",
    "sorted by class": "class-sorted",
    "come and go": "dirichlet",
    "one after another": "continual",
    "alternating": "alternating-50",
    "mixed": "mixed",
}
MEMORIES = {name: {"memory": name} for name in ("pool", "balanced", "routed")}


def main() -> None:
    args = measure.source_data_parser(__doc__).parse_args()
    train = load_cifar(args.data, "train")
    labels = train.labels[-FRAMES:]
    domains = simulated(train.images[-FRAMES:].float() / 255)
    alpha = zoo.alpha_files(args.network)["ttn"]

    def network() -> nn.Module:
        return ttnorm.load_(zoo.load(args.network, args.device), alpha)

    norms = {"source": zoo.load(args.network, args.device), "TTN, B = 1": network()}
    norms |= {name: ttnorm.stream_(network(), **options) for name, options in MEMORIES.items()}
    records = []
    for order, scenario in ORDERS.items():
        for name, model in norms.items():
            errors = _errors(model, domains, labels, scenario, name, args.device)
            mean = sum(errors.values()) / len(errors)
            records.append(
                {
                    "choice": "stream, memory",
                    "value": name,
                    "order": order,
                    "network": args.network,
                    "error by domain": errors,
                    "mean error": mean,
                    "device": measure.device_name(args.device),
                }
            )
            print(f"{order:16} {name:12} {mean:6.2f}", errors, flush=True)
    measure.keep(f"stream_memory.{args.network}", records)


@torch.no_grad()
def _errors(
    model: nn.Module,
    domains: dict[str, Tensor],
    labels: Tensor,
    scenario: str,
    name: str,
    device: str,
) -> dict[str, float]:
    """Percent wrong in each domain, frame by frame."""
    pictures = list(domains.values())

    def images(which: Tensor, number: Tensor) -> Tensor:
        pairs = zip(which.tolist(), number.tolist(), strict=True)
        return torch.stack([pictures[domain][index] for domain, index in pairs]).to(device)

    def plain(batch: Segment) -> Tensor:
        parts = zip(batch.domains.split(100), batch.images.split(100), strict=True)
        return torch.cat([model(images(*part)) for part in parts]).argmax(1)

    stream = segments(scenario, list(domains), labels, 1, 0)
    if not all(segment.reset for segment in stream):
        stream = [joined(stream)]
    if name in MEMORIES:
        found = next(alongside(model, images, stream, 1, len(stream)))
    elif name == "source":
        found = [plain(segment) for segment in stream]
    else:
        with ttnorm.isolated(model, 1):
            found = [plain(segment) for segment in stream]
    every = joined(stream)
    wrong = (torch.cat(found).cpu() != labels[every.images]).double()
    return {
        domain: 100 * wrong[every.domains == index].mean().item()
        for index, domain in enumerate(domains)
    }


if __name__ == "__main__":
    main()
