"""`ttnorm post-train`: from a network and labelled source data to an alpha file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from .. import artefact
from ..augment import prior_shift
from ..data.loader import DeviceLoader
from ..distributed import rank, world_size
from ..posttrain import post_train_
from ..posttrain_config import PostTrainConfig
from . import inputs
from .options import Dataset, Device, Network, Output, Seed, SkipBad, Weights
from .printing import console, last_epoch, print_alpha_file

DEFAULTS = PostTrainConfig()


def post_train(
    network: Network,
    loader: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION that returns a loader of (x, y), or a folder of source images."
        ),
    ],
    output: Output,
    dataset: Dataset = "cifar",
    weights: Weights = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of a folder's images; 200, and 64 of ImageNet's.")
    ] = None,
    skip_bad: SkipBad = False,
    loss: Annotated[
        str, typer.Option(help="MODULE:FUNCTION, called as loss(output, y); cross-entropy if none.")
    ] = "",
    augment: Annotated[
        str,
        typer.Option(
            help="MODULE:FUNCTION, called as augment(images, generator): the shift to fit alpha "
            "under; ours if none."
        ),
    ] = "",
    prior_augment: Annotated[
        str, typer.Option(help="Likewise, the shift that the prior is measured with.")
    ] = "",
    mean: Annotated[
        str, typer.Option(help="What the loader subtracts, e.g. 0.485,0.456,0.406.")
    ] = "",
    std: Annotated[str, typer.Option(help="What the loader divides by.")] = "",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Written every epoch; resumed from if there.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the loader.")] = DEFAULTS.epochs,
    lr: Annotated[
        float, typer.Option(help="Step size; the paper's for ImageNet is 2.5e-4.")
    ] = DEFAULTS.lr,
    schedule: Annotated[str, typer.Option(help="cosine or constant.")] = DEFAULTS.schedule,
    init: Annotated[str, typer.Option(help="prior, random, or a number in [0, 1].")] = str(
        DEFAULTS.init
    ),
    ce: Annotated[bool, typer.Option(help="Whether the loss of the network counts.")] = DEFAULTS.ce,
    mse: Annotated[
        bool, typer.Option(help="Whether the distance to the prior counts.")
    ] = DEFAULTS.mse,
    lambda_: Annotated[
        float, typer.Option("--lambda", help="Weight of that distance.")
    ] = DEFAULTS.lambda_,
    granularity: Annotated[
        str, typer.Option(help="channel, layer or constant.")
    ] = DEFAULTS.granularity,
    average: Annotated[
        str | None, typer.Option(help="Average alpha afterwards: layer or constant.")
    ] = DEFAULTS.average,
    dynamic_batch: Annotated[
        tuple[int, int] | None, typer.Option(help="Draw batch sizes from a range, e.g. 4 200.")
    ] = DEFAULTS.dynamic_batch,
    group_sizes: Annotated[
        str,
        typer.Option(
            help="Normalise batches in groups of a size that is drawn, e.g. from 1,4,16,64."
        ),
    ] = "",
    source_count: Annotated[
        float,
        typer.Option(help="Samples that the source counts for beside those of a batch."),
    ] = DEFAULTS.source_count,
    shift: Annotated[
        str, typer.Option(help="One simulated shift per batch or per image.")
    ] = DEFAULTS.shift,
    early_stop: Annotated[
        float | None, typer.Option(help="Stop when the MSE changes by less than this share ...")
    ] = DEFAULTS.early_stop,
    patience: Annotated[int, typer.Option(help="... for so many epochs.")] = DEFAULTS.patience,
    steps_per_epoch: Annotated[
        int | None, typer.Option(help="End an epoch after so many batches.")
    ] = DEFAULTS.steps_per_epoch,
    amp: Annotated[str | None, typer.Option(help="bfloat16 or float16.")] = DEFAULTS.amp,
    sync_statistics: Annotated[
        bool, typer.Option(help="Ranks of a data-parallel run share their statistics.")
    ] = DEFAULTS.sync_statistics,
    prior_samples: Annotated[
        int, typer.Option(help="Samples the prior looks at.")
    ] = DEFAULTS.prior_samples,
    seed: Seed = DEFAULTS.seed,
    device: Device = None,
) -> None:
    """Learn, once and with labelled source data, how far each channel should trust the batch.

    Under torchrun (torchrun --nproc-per-node 8 -m ttnorm post-train ...) the work is shared; a
    loader function then has to give every rank its part, with a DistributedSampler for instance.
    For ImageNet alpha is optimised under the shift that the prior is measured with, and under
    CIFAR's, with jitter and blur twice as wide, grayscale and invert, where a folder has fewer than
    32,000 images. With a few thousand --lr 1e-2 --granularity layer --group-sizes 1,2,4,16,64
    --source-count 4 does better.
    """
    given = locals()
    options = {f.name: given[f.name] for f in dataclasses.fields(PostTrainConfig)}
    if init not in ("prior", "random"):
        options["init"] = inputs.number("--init", init)
    options["group_sizes"] = inputs.sizes("--group-sizes", group_sizes) or None
    config = PostTrainConfig(**options)
    for path in (output, checkpoint):
        inputs.check_writable(path)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    where = inputs.device(device, local_rank)
    with _ranks(where):
        model = inputs.network(network, where, weights)
        source = inputs.loader(
            loader, where, dataset, network=network, batch_size=batch_size, skip_bad=skip_bad
        )
        if isinstance(source, DeviceLoader) and (mean or std):
            raise ValueError(
                f"--mean and --std are for loaders of your own; the images of {loader} are given "
                "as they are, in [0, 1]. Have the network normalise them itself."
            )
        if isinstance(source, DeviceLoader) or not loss:  # which may want labels of its own
            inputs.check_loader(source, loader, model, network, dataset)
        images = len(source.images) * world_size() if isinstance(source, DeviceLoader) else None
        result = post_train_(
            model,
            source,
            config,
            loss=inputs.resolve(loss) if loss else None,
            augment=inputs.resolve(augment) if augment else inputs.augment(dataset, shift, images),
            prior_augment=inputs.resolve(prior_augment) if prior_augment else prior_shift,
            mean=inputs.floats(mean),
            std=inputs.floats(std),
            checkpoint=checkpoint,
        )
        if rank() == 0:
            artefact.save(model, output)
            console.print(f"{len(result.history)} epochs, last: {last_epoch(result.history)}")
            print_alpha_file(output)


@contextlib.contextmanager
def _ranks(device: str) -> Iterator[None]:
    """The process group that torchrun announces in the environment; nothing without it."""
    if "LOCAL_RANK" not in os.environ:
        yield
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
