"""Running the paper's experiments from folders with CIFAR: corrupt, post-train, score.

All of it goes on where it was stopped: corrupted images, alpha files and records are kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from torch import nn

from ..data.cifar import load_cifar
from ..data.corrupted import load_corrupted, make_corrupted
from ..data.corruptions import CORRUPTIONS
from ..data.images import Images
from ..data.loader import DeviceLoader
from ..methods import METHODS
from ..methods.swr import gradient_agreement
from ..models import zoo
from .evaluate import Domains, Network, evaluate
from .experiments import Part, experiments_named, parts
from .records import RecordFile
from .variants import SEVERITY, VARIANTS, Source, fit_variant

logger = logging.getLogger("ttnorm")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything is run.

    Args:
        corruptions: which.
        images: of the test set, the first ones; None for all.
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
    images=200,
    train=2000,
    epochs=1,
    seeds=1,
    batch_sizes=(200, 16, 1),
)


class Bench:
    """A data set, its network, and what has been made of them so far.

    Args:
        dataset: "cifar10" or "cifar100".
        folder: with that data set.
        work: for corrupted images.
        alphas: for alpha files that are not shipped.
        textures: the folder with frost's pictures.
        device: to run on.
        scale: how much.
    """

    def __init__(
        self,
        dataset: str,
        folder: Path,
        work: Path,
        alphas: Path,
        textures: Path | None,
        device: str,
        scale: Scale,
    ) -> None:
        self.dataset, self.folder, self.textures = dataset, folder, textures
        self.work, self.alphas, self.device, self.scale = work, alphas, device, scale
        self.name = f"wrn40_2-{dataset}"
        for folder in (work, alphas):
            folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def model(self) -> nn.Module:
        return zoo.load(self.name, self.device)

    @cached_property
    def test(self) -> Images:
        test = load_cifar(self.folder, "test")
        return Images(*(t[: self.scale.images] for t in test))

    @cached_property
    def train(self) -> Images:
        train = load_cifar(self.folder, "train")
        return Images(*(t[: self.scale.train].to(self.device) for t in train))

    @cached_property
    def clean(self) -> Domains:
        return Domains(self.dataset, 0, {"clean": self.test.images}, self.test.labels).to(
            self.device
        )

    @cached_property
    def corrupted(self) -> Domains:
        loaded = self._under(self.test, "test", self.scale.corruptions)
        images = {name: x.images for name, x in loaded.items()}
        return Domains(f"{self.dataset}-c", SEVERITY, images, self.test.labels).to(self.device)

    def alpha_file(self, variant: str, seed: int) -> Path:
        """Fitted if it is not there."""
        corruption = VARIANTS[variant].corruption
        corrupted = self._under(self.train, "train", (corruption,)) if corruption else {}
        corrupted = {name: Images(*(t.to(self.device) for t in x)) for name, x in corrupted.items()}
        source = Source(self.train, corrupted, self.textures, self.scale.epochs)
        return fit_variant(variant, self.name, self.model, source, seed, self.alphas)

    def network(self, part: Part) -> Network:
        files = {}
        if part.variant is not None:
            path = self.alpha_file(part.variant, part.seed)
            files = {"ttn": path, "dynamic": path}
        wanted = any(METHODS[job.method].needs_agreement for job in part.jobs)
        return Network(self.name, self.model, files, self.agreement if wanted else None)

    @cached_property
    def agreement(self) -> dict[str, float]:
        loader = DeviceLoader(*self.train, min(200, len(self.train.labels)))
        return gradient_agreement(self.model, loader)

    def _under(self, clean: Images, split: str, names: Sequence[str]) -> Mapping[str, Images]:
        folder = self.work / f"{self.dataset}-c-{split}"
        clean = Images(*(t.cpu() for t in clean))
        make_corrupted(
            clean, folder, corruptions=names, severities=(SEVERITY,), textures=self.textures
        )
        return {name: load_corrupted(folder, name, SEVERITY) for name in names}


def reproduce(names: Sequence[str], benches: Mapping[str, Bench], records: Path) -> None:
    """Run experiments; cells that are in the records are not run again.

    Args:
        names: of experiments, or "all".
        benches: by data set; experiments leave out those that are not there.
        records: a folder, with a file for every data set.
    """
    records.mkdir(parents=True, exist_ok=True)
    for name, experiment in experiments_named(names).items():
        for dataset in experiment.datasets:
            if dataset not in benches:
                logger.warning("%s: without %s, for no folder with it was given", name, dataset)
        there = [bench for bench in benches.values() if bench.dataset in experiment.datasets]
        for bench in there:
            file = RecordFile(records / f"{bench.dataset}-c.jsonl")
            for part in parts(experiment, bench.scale.seeds, bench.scale.batch_sizes):
                if part.dataset != bench.dataset:
                    continue
                logger.info("%s: %s", name, part)
                clean = experiment.scenarios == ("source",)
                data = bench.clean if clean else bench.corrupted
                evaluate(bench.network(part), data, part.jobs, file, experiment=name)
