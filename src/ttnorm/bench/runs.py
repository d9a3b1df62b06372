"""What `ttnorm evaluate` puts together: a network with its alpha files, and test sets on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from ..data.cifar import load_cifar
from ..data.corrupted import load_corrupted
from ..data.corruptions import CORRUPTIONS
from ..data.imagenet import CLASSES, Preprocessing, load_imagenet, load_imagenet_c
from ..data.images import Images
from ..models import zoo
from ..progress import Progress
from .job import Domains, Network, check_labels


def network_under_test(
    name: str,
    model: nn.Module,
    alpha: Path | None,
    dynamic_alpha: Path | None,
    agreement: Mapping[str, float] | None = None,
) -> Network:
    """A network with the alpha files given, and those that are shipped with it."""
    files = zoo.alpha_files(name) if name in zoo.NETWORKS else {}
    given = {"ttn": alpha, "dynamic": dynamic_alpha}
    for kind, path in given.items():
        if path is not None:
            if not path.is_file():
                raise FileNotFoundError(f"There is no file {path}.")
            files[kind] = path
    return Network(Path(name).name, model.eval(), files, agreement)


def load_domains(
    network: Network,
    dataset: str,
    folder: Path | None,
    clean: bool,
    corruptions: Sequence[str],
    severity: int,
    *,
    preprocessing: Preprocessing | None = None,
    skip_bad: bool = False,
    asked: Sequence[str] | None = None,
    exchange: Callable[[list[str]], list[str]] = list,
) -> Domains:
    """The test set that a network is scored on.

    Args:
        dataset: "cifar", of as many classes as the network has, or "imagenet".
        folder: with the test set, if `clean`, or with its corruptions.
        corruptions, severity: which of them.
        preprocessing: what ImageNet's networks want.
        skip_bad: leave out files that cannot be used.
        asked, exchange: where other processes load other corruptions: see `load_imagenet_c`.
    """
    if folder is None:
        raise ValueError(
            "The scenario source needs --clean, a folder with the test set."
            if clean
            else "Scoring under corruptions needs --data, a folder with npy files, the official "
            "ones or what ttnorm corrupt wrote, or with ImageNet-C."
        )
    for corruption in asked or corruptions:
        if corruption not in CORRUPTIONS:
            raise ValueError(
                f"There is no corruption {corruption!r}; there are {', '.join(CORRUPTIONS)}."
            )
    size = (preprocessing or Preprocessing()).crop if dataset == "imagenet" else 32
    classes = network.classes((size, size))
    name = "imagenet" if dataset == "imagenet" else f"cifar{classes}"
    if clean:
        if dataset == "imagenet":
            test = load_imagenet(folder, preprocessing, skip_bad=skip_bad)
        else:
            test = load_cifar(folder, "test")
        return _of(network, classes, Domains(name, 0, {"clean": test.images}, test.labels))
    if dataset == "imagenet" and not (folder / "labels.npy").is_file():
        loaded = load_imagenet_c(
            folder,
            corruptions,
            severity,
            preprocessing,
            skip_bad=skip_bad,
            asked=asked,
            exchange=exchange,
        )
    else:
        loaded = _from_arrays(folder, corruptions, severity, size)
    labels = next(iter(loaded.values())).labels
    images = {c: x.images for c, x in loaded.items()}
    return _of(network, classes, Domains(f"{name}-c", severity, images, labels))


def _from_arrays(
    folder: Path, corruptions: Sequence[str], severity: int, size: int
) -> dict[str, Images]:
    progress, most = Progress("read", len(corruptions)), 100 if size == 32 else CLASSES
    loaded = {
        c: load_corrupted(folder, c, severity, size=(size, size), classes=most)
        for c in progress.track(corruptions)
    }
    progress.close()
    return loaded


def _of(network: Network, classes: int, data: Domains) -> Domains:
    """The data, if they have as many classes as the network, or ImageNet's are no more."""
    check_labels("The data set", data.labels, network.name, classes, every=data.task != "imagenet")
    return data
