"""The paper's segmentation tables on CamVid: a network for daylight meets dusk and bad weather.

The source is the training set but for sequence 0001TP, which was filmed at dusk. Scored are the day
frames of the test set, the dusk sequence, and the day frames under corruptions.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ..augment import domain_shift
from ..data.corrupted import load_corrupted, make_corrupted
from ..data.images import Images
from ..data.label_maps import CAMVID_CLASSES
from ..data.segmentation import load_scenes
from ..models.segmentation import load_checkpoint
from .experiments import Part
from .figures import scenes
from .job import Domains, Job
from .predict import predictions
from .subject import Setup, Subject
from .variants import SEVERITY, VARIANTS, Source

DUSK = "0001TP"
CORRUPTIONS = ("fog", "snow", "frost", "brightness", "motion_blur", "gaussian_noise")
BATCH_SIZE = 2  # the paper's for post-training, and for its main table
PARTS = ("jitter", "blur")  # they leave pixels where they are, as masks do
EPOCHS = 10
FIT: dict[str, Any] = {"lr": 4e-3, "amp": "bfloat16"}
# benchmarks/choose_alpha_shift.py
SHIFT = partial(domain_shift, parts=PARTS, strength=2.0)
PRIOR = VARIANTS["prior-strong"].prior


def source_frames(folder: Path, *, skip_bad: bool = False) -> Images:
    """What a network is trained and post-trained on: the training set without the dusk."""
    return load_scenes("camvid", folder, "train", keep=_is_day, skip_bad=skip_bad)


def validation_frames(folder: Path, *, skip_bad: bool = False) -> Images:
    """What settings are chosen on: by day too, and no network was trained on them."""
    return load_scenes("camvid", folder, "val", keep=_is_day, skip_bad=skip_bad)


def dusk_frames(folder: Path, *, skip_bad: bool = False) -> Images:
    """The sequence that no network has seen."""
    parts = [
        load_scenes("camvid", folder, split, keep=_is_dusk, skip_bad=skip_bad)
        for split in ("train", "test")
    ]
    return Images(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class CamvidBench:
    """A network and CamVid, and what has been made of them so far.

    Args:
        checkpoint: the network, as `ttnorm train-segmentation` wrote it.
        folder: with CamVid.
        setup: where it runs, and how much.
        severity: of the corruptions.
        skip_bad: leave out frames that cannot be used.
    """

    dataset, records = "camvid", "camvid.jsonl"

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        setup: Setup,
        *,
        severity: int = SEVERITY,
        skip_bad: bool = False,
    ) -> None:
        self.checkpoint, self.folder, self.setup = checkpoint, folder, setup
        self.severity, self.skip_bad = severity, skip_bad
        setup.make_folders()

    @cached_property
    def model(self) -> nn.Module:
        return load_checkpoint(self.checkpoint, self.setup.device)

    @cached_property
    def subject(self) -> Subject:
        name = self.checkpoint.name.split(".")[0]
        return Subject(name, self.model, self.source, self.setup.alphas)

    def source(self, variant: str) -> Source:
        return self._source

    @cached_property
    def _source(self) -> Source:
        return Source(
            self._frames,
            epochs=min(self.setup.scale.epochs, EPOCHS),
            batch_size=BATCH_SIZE,
            config=FIT,
            augment=SHIFT,
            prior=PRIOR,
        )

    def _frames(self) -> Images:
        frames = source_frames(self.folder, skip_bad=self.skip_bad)
        return Images(*(t[: self.setup.scale.train].to(self.setup.device) for t in frames))

    def tests(self, clean: bool) -> list[Domains]:
        return self._tests[:1] if clean else self._tests

    @cached_property
    def _tests(self) -> list[Domains]:
        """The day, the dusk, and the day under corruptions."""
        options = {"keep": _is_day, "skip_bad": self.skip_bad}
        day = load_scenes("camvid", self.folder, "test", **options)  # type: ignore[arg-type]
        dusk = dusk_frames(self.folder, skip_bad=self.skip_bad)
        day, dusk = (Images(*(t[: self.setup.scale.images] for t in x)) for x in (day, dusk))
        found = [
            Domains("camvid", 0, {"day": day.images}, day.labels),
            Domains("camvid", 0, {"dusk": dusk.images}, dusk.labels),
            Domains("camvid", self.severity, self._corrupted(day.images), day.labels),
        ]
        return [domains.to(self.setup.device) for domains in found]

    def _corrupted(self, frames: Tensor) -> dict[str, Tensor]:
        folder, numbers = self.setup.work / "camvid-c", torch.arange(len(frames))
        names = [name for name in CORRUPTIONS if name in self.setup.scale.corruptions]
        make_corrupted(
            Images(frames, numbers),
            folder,
            corruptions=names,
            severities=(self.severity,),
            textures=self.setup.textures,
        )
        height, width = frames.shape[-2:]
        limits = {"size": (height, width), "classes": len(frames)}
        return {
            name: load_corrupted(folder, name, self.severity, **limits).images  # type: ignore[arg-type]
            for name in names
        }

    def picture(self, domain: str, frames: int = 3) -> Figure:
        """Some frames of a domain beside their masks, true and predicted, at B = 2."""
        network = self.subject.network(Part("camvid", "default", 0, ()))
        data = next(d for d in self._tests if domain in d.images)
        x, shown = data.images[domain], torch.linspace(0, len(data.labels) - 1, frames).long()
        rows = {"input": x[shown], "truth": data.labels[shown]}
        alone = Domains(data.dataset, data.severity, {domain: x}, data.labels)
        for norm in ("source", "tbn", "ttn"):
            ((segment, found),) = predictions(network, alone, Job(norm=norm, batch_size=BATCH_SIZE))
            in_order = torch.empty_like(found)
            in_order[segment.images] = found
            rows[norm] = in_order[shown]
        title = f"{domain}, B = {BATCH_SIZE}"
        return scenes({name: t.cpu() for name, t in rows.items()}, CAMVID_CLASSES, title)


def _is_day(name: str) -> bool:
    return not _is_dusk(name)


def _is_dusk(name: str) -> bool:
    return name.startswith(DUSK)
