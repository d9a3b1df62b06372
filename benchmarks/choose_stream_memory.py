"""Which memory a stream should have, decided on simulated shifts of source data alone.

python benchmarks/choose_stream_memory.py CIFAR_FOLDER [--network wrn40_2-cifar10] [--device cuda]

The last 500 training images in six domains (source_data.py), frame by frame. Each domain as a
stream of its own in random order, sorted by class, and with classes that come and go; and all of
them in one stream: one after another, alternating every 50 frames, and mixed. For comparison the
source network, TTN with single frames for batches, and two memories that were not taken
(other_memories.py). No test image and no corruption is looked at.
"""

from __future__ import annotations

import measure
from other_memories import LongAndShort, Reservoir
from simulated_streams import IMAGES, ORDERS, Streams
from source_data import held_out
from torch import nn

import ttnorm
from ttnorm.models import zoo
from ttnorm.stream import attach_
from ttnorm.stream_config import MEMORIES

OTHERS = {"reservoir": Reservoir, "long and short": LongAndShort}


def main() -> None:
    args = measure.source_data_parser(__doc__, IMAGES).parse_args()
    _, images, labels = held_out(args)
    streams = Streams(images, labels)
    alpha = zoo.alpha_files(args.network)["ttn"]

    def network() -> nn.Module:
        return ttnorm.load_(zoo.load(args.network, args.device), alpha)

    norms = {"source": zoo.load(args.network, args.device), "TTN, B = 1": network()}
    norms |= {name: ttnorm.stream_(network(), memory=name) for name in MEMORIES}
    for name, memory in OTHERS.items():
        model = network()
        norms[name] = attach_(model, memory(model))
    records = [
        record
        for name, model in norms.items()
        for record in streams.records("stream, memory", name, args.network, model, ORDERS)
    ]
    measure.keep(f"stream_memory.{args.network}", records)


if __name__ == "__main__":
    main()
