"""What `ttnorm evaluate` puts together: a network with its alpha files, and test sets on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from ..data.cifar import load_cifar
from ..data.corrupted import load_corrupted
from ..data.corruptions import CORRUPTIONS
from ..models import zoo
from ..progress import Progress
from .evaluate import Domains, Network, classes_of


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
    folder: Path | None,
    clean: bool,
    corruptions: Sequence[str] | None,
    severity: int,
) -> Domains:
    """The test set that a network is scored on, named after its number of classes."""
    classes = classes_of(network.model, size=32)
    name = f"cifar{classes}"
    if folder is None:
        raise ValueError(
            "The scenario source needs --clean, a folder with CIFAR."
            if clean
            else "Scoring under corruptions needs --data, a folder with CIFAR-C npy files: the "
            "official ones, or what ttnorm corrupt wrote."
        )
    if clean:
        test = load_cifar(folder, "test")
        return _of(network, classes, Domains(name, 0, {"clean": test.images}, test.labels))
    chosen = corruptions or CORRUPTIONS
    for corruption in chosen:
        if corruption not in CORRUPTIONS:
            raise ValueError(
                f"There is no corruption {corruption!r}; there are {', '.join(CORRUPTIONS)}."
            )
    progress = Progress("read", len(chosen))
    loaded = {c: load_corrupted(folder, c, severity) for c in progress.track(chosen)}
    progress.close()
    labels = next(iter(loaded.values())).labels
    images = {c: x.images for c, x in loaded.items()}
    return _of(network, classes, Domains(f"{name}-c", severity, images, labels))


def _of(network: Network, classes: int, data: Domains) -> Domains:
    """The data, if they have as many classes as the network."""
    low, high = int(data.labels.min()), int(data.labels.max())
    if high + 1 != classes:
        raise ValueError(
            f"The labels go from {low} to {high}; {network.name} has {classes} classes. Is it the "
            "right data set?"
        )
    return data
