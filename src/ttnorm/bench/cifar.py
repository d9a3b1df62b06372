"""The paper's CIFAR tables and figures, from a folder with CIFAR: corrupt, post-train, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from torch import nn

from ..data.cifar import load_cifar
from ..data.corrupted import load_corrupted, make_corrupted
from ..data.images import Images
from ..models import zoo
from .job import Domains, check_labels, count_classes
from .subject import Setup, Subject
from .variants import SEVERITY, VARIANTS, Source


class CifarBench:
    """A data set, its network, and what has been made of them so far.

    Args:
        dataset: "cifar10" or "cifar100".
        folder: with that data set.
        setup: where it runs, and how much.
    """

    def __init__(self, dataset: str, folder: Path, setup: Setup) -> None:
        self.dataset, self.folder, self.setup = dataset, folder, setup
        self.name, self.records = f"wrn40_2-{dataset}", f"{dataset}-c.jsonl"
        setup.make_folders()

    @cached_property
    def model(self) -> nn.Module:
        return zoo.load(self.name, self.setup.device)

    @cached_property
    def test(self) -> Images:
        test = self._load("test")
        return Images(*(t[: self.setup.scale.images] for t in test))

    @cached_property
    def train(self) -> Images:
        train = self._load("train")
        return Images(*(t[: self.setup.scale.train].to(self.setup.device) for t in train))

    @cached_property
    def clean(self) -> Domains:
        return Domains(self.dataset, 0, {"clean": self.test.images}, self.test.labels).to(
            self.setup.device
        )

    @cached_property
    def corrupted(self) -> Domains:
        loaded = self._under(self.test, "test", self.setup.scale.corruptions)
        images = {name: x.images for name, x in loaded.items()}
        return Domains(f"{self.dataset}-c", SEVERITY, images, self.test.labels).to(
            self.setup.device
        )

    @cached_property
    def subject(self) -> Subject:
        return Subject(self.name, self.model, self.source, self.setup.alphas)

    def source(self, variant: str) -> Source:
        corruption, most = VARIANTS[variant].corruption, VARIANTS[variant].most

        def train() -> Images:
            return Images(*(t[:most] for t in self.train))

        corrupted = self._under(train(), "train", (corruption,)) if corruption else {}
        corrupted = {
            name: Images(*(t.to(self.setup.device) for t in x)) for name, x in corrupted.items()
        }
        return Source(train, corrupted, self.setup.textures, self.setup.scale.epochs)

    def tests(self, clean: bool) -> list[Domains]:
        return [self.clean if clean else self.corrupted]

    def _load(self, split: str) -> Images:
        images = load_cifar(self.folder, split)
        classes = count_classes(self.model, (32, 32))
        # before they are used
        check_labels(str(self.folder), images.labels, self.name, classes, every=True)
        return images

    def _under(self, clean: Images, split: str, names: Sequence[str]) -> Mapping[str, Images]:
        folder = self.setup.work / f"{self.dataset}-c-{split}"
        clean = Images(*(t.cpu() for t in clean))
        make_corrupted(
            clean, folder, corruptions=names, severities=(SEVERITY,), textures=self.setup.textures
        )
        return {name: load_corrupted(folder, name, SEVERITY) for name in names}
