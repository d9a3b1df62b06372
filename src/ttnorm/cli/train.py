"""`ttnorm train-source` and `train-segmentation`: source networks to adapt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from . import inputs
from .options import Device, Output, Seed, SkipBad
from .printing import console, last_epoch


def train_source(
    data: Annotated[Path, typer.Argument(help="A folder with CIFAR-10 or CIFAR-100.")],
    output: Output,
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 128,
    depth: Annotated[int, typer.Option(help="6 n + 4 convolutions.")] = 40,
    width: Annotated[int, typer.Option(help="Times as wide as a plain residual network.")] = 2,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Train a wide residual network with AugMix on CIFAR: a source network to adapt."""
    from ..data.cifar import load_cifar
    from ..models import train_source as source
    from ..models import zoo

    config = source.TrainConfig(
        epochs=epochs, batch_size=batch_size, depth=depth, width=width, seed=seed
    )
    device = inputs.device(device)
    inputs.check_writable(output)
    train, test = (load_cifar(data, split) for split in ("train", "test"))
    model, history = source.train_source(train, test, config, device)
    facts = {"device": inputs.device_name(device), "torch": torch.__version__}
    zoo.save_checkpoint(model, output, config, history, **facts)
    stored, _ = zoo.load_checkpoint(output)
    stored_error = source.error(stored.to(device), test)
    console.print(
        f"{output}: test error {history[-1]['test_error']:.2f} %, as stored {stored_error:.2f} %"
    )


def train_segmentation(
    data: Annotated[Path, typer.Argument(help="A folder with CamVid.")],
    output: Output,
    encoder: Annotated[str, typer.Option(help="mobilenet_v2 or resnet50.")] = "mobilenet_v2",
    weights: Annotated[
        Path | None, typer.Option(help="A file of the encoder's ImageNet weights.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the frames.")] = 80,
    batch_size: Annotated[int, typer.Option(help="Frames a step.")] = 8,
    lr: Annotated[float, typer.Option(help="Step size of AdamW.")] = 5e-4,
    amp: Annotated[
        bool | None,
        typer.Option(help="Compute in bfloat16; by default on a GPU. Some CPUs gain by it, too."),
    ] = None,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Train DeepLabV3+ on CamVid's day: every training sequence but 0001TP, the dusk."""
    from ..bench.camvid import source_frames
    from ..data.label_maps import CAMVID_CLASSES
    from ..models import segmentation
    from ..models import train_segmentation as training

    config = training.SegmentationConfig(
        epochs=epochs, batch_size=batch_size, lr=lr, amp=amp, seed=seed
    )
    device = inputs.device(device)
    inputs.check_writable(output)
    frames = source_frames(data, skip_bad=skip_bad)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = segmentation.with_encoder_weights(encoder, len(CAMVID_CLASSES), weights)
    history = training.train_segmentation(model, frames, config, device)
    facts = {"device": inputs.device_name(device), "torch": torch.__version__}
    segmentation.save_checkpoint(model, output, config, history, **facts)
    console.print(f"{output}: {len(frames.labels)} frames, last epoch {last_epoch(history)}")
