"""`ttnorm demo`: the main job, shown on a small example."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import inputs
from .printing import console


def demo(
    output: Annotated[Path, typer.Option(help="The folder for figures and the page.")] = Path(
        "ttnorm-demo"
    ),
) -> None:
    """Post-train a network and score it on corrupted images; nothing to download, minutes."""
    from ..demo.cifar import run

    inputs.check_folder(output)
    run(console, output)
