"""The paper's ImageNet-C table from a folder with ImageNet: corrupt, post-train, score."""

from __future__ import annotations

import hashlib
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from ..augment import DOMAIN_PARTS, PRIOR_PARTS, domain_shift, prior_shift
from ..data.corrupted import load_corrupted, make_corrupted
from ..data.imagenet import CLASSES, MOST, load_imagenet, split_folder
from ..data.images import Images
from ..models import imagenet
from .job import Domains
from .subject import Setup, Subject
from .variants import SEVERITY, Source

BATCH_SIZE = 64  # the paper's for post-training
RATE = 2.5e-4  # likewise, for 30 epochs of 64,000 images
# With fewer images there are fewer steps, too few for one alpha a channel, and all batch sizes have
# to be seen: benchmarks/choose_alpha_shift.py
FEW: dict[str, Any] = {
    "lr": 1e-2,
    "granularity": "layer",
    "group_sizes": (1, 2, 4, 16, 64),
    "source_count": 4.0,
}
SHIFT_OF_FEW = partial(domain_shift, parts=(*DOMAIN_PARTS, *PRIOR_PARTS[1:]), strength=2.0)


def are_few(images: int) -> bool:
    """Whether they are far fewer than the paper's 64,000, and not because some cannot be read."""
    return images < MOST // 2


class ImageNetBench:
    """A network and ImageNet, and what has been made of them so far.

    Args:
        network: its name; see `models.imagenet`.
        weights: a file of its weights, or None to download them.
        folder: with test (or val) and source (or train), each with folders of classes.
        setup: where it runs, and how much.
        skip_bad: leave out images that cannot be read.
    """

    dataset, records = "imagenet", "imagenet-c.jsonl"

    def __init__(
        self,
        network: str,
        weights: Path | None,
        folder: Path,
        setup: Setup,
        *,
        skip_bad: bool = False,
    ) -> None:
        imagenet.check(network)
        self.name, self.weights, self.folder = network, weights, folder
        self.setup, self.skip_bad = setup, skip_bad
        self.preprocessing = imagenet.preprocessing_of(network)
        setup.make_folders()

    @cached_property
    def model(self) -> nn.Module:
        return imagenet.load(self.name, self.weights, self.setup.device)

    @cached_property
    def subject(self) -> Subject:
        name = self.name.replace("/", "-")
        return Subject(name, self.model, self.source, self.setup.alphas)

    def source(self, variant: str) -> Source:
        return self._source

    @cached_property
    def _source(self) -> Source:
        train = self._images("source", self.setup.scale.train or MOST)
        few = are_few(len(train.labels))
        # for ImageNet the paper has one augmentation for both the prior and alpha
        shift = SHIFT_OF_FEW if few else partial(prior_shift, per="batch")
        return Source(
            lambda: Images(*(t.to(self.setup.device) for t in train)),
            epochs=self.setup.scale.epochs,
            batch_size=min(BATCH_SIZE, len(train.labels)),
            config=FEW if few else {"lr": RATE},
            augment=shift,
        )

    def tests(self, clean: bool) -> list[Domains]:
        return [self._clean if clean else self._corrupted]

    @cached_property
    def _test(self) -> Images:
        return self._images("test", self.setup.scale.images)

    @cached_property
    def _clean(self) -> Domains:
        return Domains("imagenet", 0, {"clean": self._test.images}, self._test.labels).to(
            self.setup.device
        )

    @cached_property
    def _corrupted(self) -> Domains:
        crop, names = self.preprocessing.crop, self.setup.scale.corruptions
        # by what they are made of: networks that want their images alike share them
        digest = hashlib.blake2b(self._test.images.numpy().tobytes()).hexdigest()[:8]
        folder = self.setup.work / f"imagenet-c-{digest}"
        options = {"corruptions": names, "severities": (SEVERITY,), "textures": self.setup.textures}
        make_corrupted(self._test, folder, **options)  # type: ignore[arg-type]
        images = {
            name: load_corrupted(folder, name, SEVERITY, size=(crop, crop), classes=CLASSES).images
            for name in names
        }
        return Domains("imagenet-c", SEVERITY, images, self._test.labels).to(self.setup.device)

    def _images(self, split: str, most: int | None) -> Images:
        folder = split_folder(self.folder, split)
        return load_imagenet(folder, self.preprocessing, most=most, skip_bad=self.skip_bad)
