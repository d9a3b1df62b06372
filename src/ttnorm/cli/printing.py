"""What several commands print: an alpha file, the last epoch of a training."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import artefact

console = Console()


def print_alpha_file(path: Path) -> None:
    """For which network it is, how it was made, and alpha layer by layer."""
    alpha, metadata = artefact.read(path)
    every = torch.cat(list(alpha.values()))
    network = next(iter(metadata["fingerprint"]["statistics"].values()))
    console.print(
        f"{path.name}  {path.stat().st_size / 1024:.1f} KiB, format "
        f"{metadata['format_version']}, ttnorm {metadata['ttnorm']}\n"
        f"network {network[:12]}: {len(alpha)} layers, {len(every)} channels, "
        f"mean alpha {every.mean():.3f}",
        markup=False,
        soft_wrap=True,
    )
    if metadata["config"]:
        # which may have been given another since
        config = metadata["config"] | {"source_count": metadata.get("source_count", 0.0)}
        console.print(
            "  ".join(f"{key}={value}" for key, value in config.items()),
            style="dim",
            markup=False,
        )
    table = Table("layer", "channels", "mean", "min", "max", "alpha 0 … 1")
    table.columns[0].overflow = "fold"  # no name and no bar is cut off in a narrow window
    table.columns[5].min_width = 20
    for column in table.columns[1:5]:
        column.justify = "right"
    for name, a in [*alpha.items(), ("all", every)]:
        numbers = (f"{value:.3f}" for value in (a.mean(), a.min(), a.max()))
        table.add_row(name, str(len(a)), *numbers, histogram(a))
    wide = console if console.is_terminal else Console(width=200)  # a file has no edge
    wide.print(table)


def histogram(alpha: Tensor) -> str:
    """Twenty bins from 0 to 1 as a row of bars; an empty bin is a dot."""
    counts = torch.histc(alpha.float(), 20, 0, 1)
    heights = (counts / counts.max() * 7).ceil().int().tolist()
    return "".join("·▁▂▃▄▅▆▇"[height] for height in heights)


def last_epoch(history: list[dict[str, float]]) -> str:
    """Its numbers, of a history with one row an epoch."""
    if not history:
        return "nothing to optimise"
    return ", ".join(f"{key} {value:.4g}" for key, value in history[-1].items() if key != "epoch")
