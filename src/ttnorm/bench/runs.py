"""What `ttnorm evaluate` puts together: a network with its alpha files, and test sets on disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.cifar import load_cifar
from ..data.corrupted import load_corrupted, load_labels, open_corrupted
from ..data.corruptions import CORRUPTIONS
from ..data.imagenet import CLASSES, Preprocessing, load_imagenet, load_imagenet_c, usable_files
from ..data.images import Images
from ..models import zoo
from .job import Domains, Network, check_count, check_labels

BYTES_AT_ONCE = 8 * 2**30  # of images; a corruption of ImageNet-C has 7.5 GB of them


def network_under_test(
    name: str,
    model: nn.Module,
    alpha: Path | None,
    dynamic_alpha: Path | None,
    agreement: Mapping[str, float] | None = None,
) -> Network:
    """A network with the alpha files given, and those that are shipped with it.

    Args:
        alpha: of all norms but that with the dynamic batch size.
    """
    files = zoo.alpha_files(name) if name in zoo.NETWORKS else {}
    given = {"ttn": alpha, "strong": alpha, "dynamic": dynamic_alpha}
    for kind, path in given.items():
        if path is not None:
            if not path.is_file():
                raise FileNotFoundError(f"There is no file {path}.")
            files[kind] = path
    return Network(Path(name).name, model.eval(), files, agreement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDomains:
    """A test set on disk, whose domains are read when their turn comes.

    Args:
        dataset, severity, labels: see `Domains`.
        size: of its images, height and width.
        readers: from a domain to what reads it.
    """

    dataset: str
    severity: int
    labels: Tensor
    size: tuple[int, int]
    readers: Mapping[str, Callable[[], Images]]

    def read(self, domains: Sequence[str]) -> Domains:
        """Some of the domains."""
        images = {domain: self.readers[domain]().images for domain in domains}
        return Domains(self.dataset, self.severity, images, self.labels)

    def outline(self, domains: Sequence[str]) -> Domains:
        """What `read` gives, but for the values of pixels: enough to check what is asked of it."""
        pixel = torch.zeros((), dtype=torch.uint8)
        images = pixel.expand(len(self.labels), 3, *self.size)  # which takes no memory
        return Domains(self.dataset, self.severity, dict.fromkeys(domains, images), self.labels)

    def parts(self, domains: Sequence[str]) -> list[Sequence[str]]:
        """The domains, as many at a time as fit into BYTES_AT_ONCE, or one by one."""
        each = len(self.labels) * 3 * math.prod(self.size)
        count = max(1, BYTES_AT_ONCE // each)
        return [domains[first : first + count] for first in range(0, len(domains), count)]


def stored_domains(
    network: Network,
    dataset: str,
    folder: Path | None,
    clean: bool,
    corruptions: Sequence[str],
    severity: int,
    *,
    preprocessing: Preprocessing | None = None,
    skip_bad: bool = False,
    subset: int | None = None,
    ours: Sequence[str] | None = None,
    exchange: Callable[[list[str]], list[str]] = list,
) -> StoredDomains:
    """The test set that a network is scored on.

    Args:
        dataset: "cifar", of as many classes as the network has, or "imagenet".
        folder: with the test set, if `clean`, or with its corruptions.
        corruptions, severity: which of them.
        preprocessing: what ImageNet's networks want.
        skip_bad: leave out files that cannot be used.
        subset: so many images of every domain: the first, and of ImageNet, whose images come class
            after class, some of all classes. None for all.
        ours, exchange: where there are other processes: see `usable_files`.
    """
    folder = check_folder(folder, clean)
    for corruption in corruptions:
        if corruption not in CORRUPTIONS:
            raise ValueError(
                f"There is no corruption {corruption!r}; there are {', '.join(CORRUPTIONS)}."
            )
    side = (preprocessing or Preprocessing()).crop if dataset == "imagenet" else 32
    size = (side, side)
    classes = network.classes(size)
    name = "imagenet" if dataset == "imagenet" else f"cifar{classes}"
    readers: dict[str, Callable[[], Images]]
    if clean:
        if dataset == "imagenet":
            test = load_imagenet(folder, preprocessing, skip_bad=skip_bad)
        else:
            test = load_cifar(folder, "test")
        labels = test.labels
        which = _subset(labels, subset, dataset)
        readers = {"clean": lambda: Images(test.images[which], labels[which])}
    elif dataset == "imagenet" and not (folder / "labels.npy").is_file():
        files = usable_files(
            folder, corruptions, severity, skip_bad=skip_bad, ours=ours, exchange=exchange
        )
        labels = torch.tensor(list(files.values()))
        which = _subset(labels, subset, dataset)
        there = list(files.items())
        files = dict(there[which] if isinstance(which, slice) else [there[i] for i in which])
        load = partial(_from_pictures, folder, severity, preprocessing, files)
        readers = {c: partial(load, c) for c in corruptions}
    else:
        most = 100 if dataset == "cifar" else CLASSES
        labels = load_labels(folder, severity, classes=most)
        which = _subset(labels, subset, dataset)
        for corruption in corruptions:  # all of them are looked at before one is scored
            open_corrupted(folder, corruption, severity, size=size)
        load = partial(
            load_corrupted, folder, severity=severity, size=size, classes=most, which=which
        )
        readers = {c: partial(load, c) for c in corruptions}
    # ImageNet's may be some of the classes, CIFAR's have to be all
    check_labels(str(folder), labels, network.name, classes, every=dataset != "imagenet")
    return StoredDomains(
        dataset=name if clean else f"{name}-c",
        severity=0 if clean else severity,
        labels=labels[which],
        size=size,
        readers=readers,
    )


def _subset(labels: Tensor, count: int | None, dataset: str) -> slice | list[int]:
    """Which images are scored, of those with these labels."""
    check_count(count, labels)
    if count is None or dataset != "imagenet":
        return slice(count)
    return (torch.arange(count) * len(labels) // count).tolist()


def check_folder(folder: Path | None, clean: bool) -> Path:
    """The folder, or an error that says which one is wanted."""
    if folder is None:
        raise ValueError(
            "The scenario source needs --clean, a folder with the test set."
            if clean
            else "Scoring under corruptions needs --data, a folder with npy files, the official "
            "ones or what ttnorm corrupt wrote, or with ImageNet-C."
        )
    return folder


def _from_pictures(
    folder: Path,
    severity: int,
    preprocessing: Preprocessing | None,
    files: Mapping[str, int],
    corruption: str,
) -> Images:
    return load_imagenet_c(folder, [corruption], severity, preprocessing, files=files)[corruption]
