"""What experiments are run with: folders, a device and how much; a network and its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torch import nn

from ..data.corruptions import CORRUPTIONS
from ..data.loader import DeviceLoader
from ..files import short_fingerprint, unfinished
from ..methods import METHODS
from ..methods.swr import gradient_agreement
from .experiments import Part
from .job import Network
from .variants import OF_KIND, Source, file_name, fit_variant


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything is run.

    Args:
        corruptions: which.
        images: of the test set; None for all.
        train: images of the training set; None for all.
        epochs: of post-training.
        seeds: of post-training, where it is random and nothing else adapts.
        batch_sizes: instead of an experiment's own.
    """

    corruptions: tuple[str, ...] = CORRUPTIONS
    images: int | None = None
    train: int | None = None
    epochs: int = 30
    seeds: int = 3
    batch_sizes: tuple[int, ...] = ()


FULL = Scale()
QUICK = Scale(
    corruptions=("gaussian_noise", "contrast", "jpeg_compression"),
    images=400,  # methods update after 200
    train=2000,
    epochs=1,
    seeds=1,
    batch_sizes=(200, 16, 1),
)
# of large images
QUICK_LARGE = dataclasses.replace(QUICK, images=32, train=64, batch_sizes=(16, 1))
QUICK_SCENES = dataclasses.replace(
    QUICK_LARGE, corruptions=("fog", "gaussian_noise"), batch_sizes=(2,)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Where a bench runs, and how much.

    Args:
        work: a folder for corrupted images.
        alphas: a folder for alpha files that are not shipped.
        textures: the folder with frost's pictures.
        device: to run on.
        scale: how much.
    """

    work: Path
    alphas: Path
    textures: Path | None = None
    device: str
    scale: Scale

    def make_folders(self) -> None:
        """Those that are written to."""
        for folder in (self.work, self.alphas):
            folder.mkdir(parents=True, exist_ok=True)


class Subject:
    """A network and the files that were made of it so far.

    Args:
        name: of the network.
        model: it is not changed.
        source: from a variant of post-training to what it is fitted with.
        folder: for the files.
    """

    def __init__(
        self, name: str, model: nn.Module, source: Callable[[str], Source], folder: Path
    ) -> None:
        self.name, self.model, self.source, self.folder = name, model, source, folder

    def alpha_file(self, variant: str, seed: int) -> Path:
        """Fitted if it is not there."""
        source = self.source(variant)
        return fit_variant(variant, self.name, self.model, source, seed, self.folder)

    def own_file(self, variant: str, seed: int) -> Path:
        """The alpha file that it has for itself, or would have, in its folder."""
        return self.folder / file_name(variant, self.name, seed)

    def network(self, part: Part) -> Network:
        """The network with what the jobs of a part need."""
        files = {}
        if part.variant is not None:
            path = self.alpha_file(part.variant, part.seed)
            files = dict.fromkeys(OF_KIND, path)
        wanted = any(METHODS[job.method].needs_agreement for job in part.jobs)
        return Network(self.name, self.model, files, self.agreement if wanted else None)

    @cached_property
    def agreement(self) -> dict[str, float]:
        def measure() -> dict[str, float]:
            source = self.source("default")
            batch_size = min(source.batch_size, len(source.train.labels))
            return gradient_agreement(self.model, DeviceLoader(*source.train, batch_size))

        return kept_agreement(self.folder, self.name, self.model, measure)


def kept_agreement(
    folder: Path, name: str, model: nn.Module, measure: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """See `gradient_agreement`; measured where no file in the folder has this network's.

    A GPU, or another CPU, gives other last digits every time, and records name them.
    """
    path = folder / f"{name}-{short_fingerprint(model)}.agreement.json"
    if not path.is_file():
        partial = Path(unfinished(path))
        partial.write_text(json.dumps(measure()))
        partial.replace(path)
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it to have it made anew.") from error
