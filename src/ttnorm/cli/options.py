"""Arguments and options that several commands have, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Network = Annotated[
    str,
    typer.Argument(
        help="A shipped network, resnet50, mobilenet_v2, efficientnet_lite0 or timm/NAME for "
        "ImageNet, a checkpoint, or MODULE:FUNCTION that returns one."
    ),
]
Output = Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU if there is one.")]
Dataset = Annotated[str, typer.Option(help="What the folders hold: cifar or imagenet.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out files that cannot be used, and count them.")
]
Weights = Annotated[
    Path | None, typer.Option(help="A file of weights, for a network that is not shipped.")
]
Seed = Annotated[int, typer.Option(help="Fixes everything that is random.")]
