"""From what a user typed to what the library takes: devices, networks, numbers, files to write."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..augment import Augment, prior_shift
from ..batches import Loader
from ..distributed import rank, world_size
from ..files import read_safetensors
from ..surgery import eval_mode
from ..tree import device_of

if TYPE_CHECKING:
    from ..data.imagenet import Preprocessing
    from ..data.images import Images

DATASETS = {"cifar": 200, "imagenet": 64}  # and the paper's batch sizes for post-training
BATCH_SIZES = {"cifar": (200, 64, 16, 4, 2, 1), "imagenet": (64, 16, 4, 2, 1)}  # of its tests


def device(wanted: str | None, local_rank: int = 0) -> str:
    """The device asked for, if it can be had; without a wish a GPU, if there is one."""
    if wanted is None:
        return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError:
        raise ValueError(f"--device is {wanted!r}, expected cpu, cuda, cuda:1, mps, ...") from None
    available: dict[str, Callable[[], bool]] = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "xpu": torch.xpu.is_available,
    }
    if kind not in available:
        raise ValueError(f"--device is {wanted!r}, expected cpu, cuda, cuda:1, mps, ...")
    if not available[kind]():
        raise ValueError(f"--device is {wanted!r}, and torch sees no such GPU here.")
    return wanted


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def check_writable(path: Path | None) -> None:
    """Before hours of work, not after."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a file to write to.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: {folder} has to be a folder you may write to.")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written: you may only read it.")


def check_folder(path: Path) -> None:
    """Whether files can be written into it, or it can be made."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{path} cannot be a folder to write to: {there} is in the way.")


def check_file(path: Path | None) -> None:
    """Whether a file that is to be read is there, if one was named."""
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")


def check_test_set(dataset: str, folder: Path) -> None:
    """Whether a folder has the test set of cifar10, cifar100, imagenet or camvid."""
    from ..data import cifar, imagenet

    if dataset.startswith("cifar"):
        cifar.load_cifar(folder, "test")  # a second; the others take minutes to read
    elif dataset == "imagenet":
        imagenet.split_folder(folder, "test")
    elif not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")


def network(spec: str, device: str = "cpu", weights: Path | None = None) -> nn.Module:
    """A network by name, one from a checkpoint file, or what MODULE:FUNCTION returns."""
    from ..models import imagenet, segmentation, zoo

    if imagenet.is_named(spec):
        return imagenet.load(spec, weights, device)
    if weights is not None:
        raise ValueError(f"--weights are for {', '.join(imagenet.NETWORKS)} and timm/NAME.")
    if spec in zoo.NETWORKS:
        return zoo.load(spec, device)
    if Path(spec).is_file():
        if "segmentation_classes" in read_safetensors(spec)[1]:
            return segmentation.load_checkpoint(spec, device)
        return zoo.load_checkpoint(spec, device)[0]
    if ":" not in spec:
        names = (*zoo.NETWORKS, *imagenet.NETWORKS, "timm/NAME")
        raise ValueError(
            f"{spec!r} is no network: expected {', '.join(names)}, a checkpoint file that is "
            "there, or MODULE:FUNCTION."
        )
    found = resolve(spec)
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{spec} returned a {type(model).__name__}, expected a torch.nn.Module.")
    return model.to(device)


def dataset_named(name: str) -> str:
    """The data set asked for, whether its test set is to be clean or corrupted."""
    kind = name.removesuffix("-c")
    if kind not in DATASETS:
        raise ValueError(f"--dataset is {name!r}, expected {' or '.join(DATASETS)}.")
    return kind


def preprocessing(network: str) -> Preprocessing | None:
    """What images a network's weights want, for networks whose names say so."""
    from ..models.imagenet import is_named, preprocessing_of

    return preprocessing_of(network) if is_named(network) else None


def images(
    folder: Path, dataset: str, split: str, *, network: str = "", skip_bad: bool = False
) -> Images:
    """The images of a folder: CIFAR's of that split, or ImageNet's as the network wants them."""
    from ..data import cifar, imagenet

    if dataset_named(dataset) == "cifar":
        return cifar.load_cifar(folder, split)
    most = imagenet.MOST if split == "train" else None
    return imagenet.load_imagenet(folder, preprocessing(network), most=most, skip_bad=skip_bad)


def loader(
    spec: str,
    device: str,
    dataset: str = "cifar",
    *,
    network: str = "",
    batch_size: int | None = None,
    skip_bad: bool = False,
) -> Loader:
    """What MODULE:FUNCTION returns, or batches of the source images in a folder.

    Under torchrun every process has its share of the images, and of a batch.
    """
    if not Path(spec).is_dir():
        if ":" not in spec:
            raise ValueError(f"{spec!r} is no folder that is there, and no MODULE:FUNCTION.")
        if batch_size is not None:
            raise ValueError(f"--batch-size is for folders; {spec} says its own.")
        return resolve(spec)()
    from ..data.loader import DeviceLoader

    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch-size is {batch_size}, expected at least 1.")
    train = images(Path(spec), dataset, "train", network=network, skip_bad=skip_bad)
    size = batch_size or min(DATASETS[dataset_named(dataset)], len(train.labels))
    # as many for each: ranks take every step together
    shared = len(train.labels) // world_size() * world_size()
    x, y = (t[rank() : shared : world_size()].to(device) for t in train)
    return DeviceLoader(x, y, max(1, size // world_size()))


def check_loader(loader: Loader, spec: str, model: nn.Module, network: str, dataset: str) -> None:
    """Raise if images do not fit the network, or are of classes that it does not tell apart."""
    from ..bench.job import check_labels, count_classes
    from ..data.loader import DeviceLoader

    if isinstance(loader, DeviceLoader):
        height, width = loader.images.shape[-2:]
        every = dataset_named(dataset) == "cifar"
        check_labels(
            spec, loader.labels, network, count_classes(model, (height, width)), every=every
        )
    elif not isinstance(loader, Iterable):
        raise TypeError(f"{spec} returned a {type(loader).__name__}, expected batches (x, y).")
    elif not isinstance(loader, Iterator):  # what one gives it gives once
        _check_batch(next(iter(loader), None), spec, model, network)


def _check_batch(batch: Any, spec: str, model: nn.Module, network: str) -> None:
    """Likewise, for the first batch of a user's own loader."""
    from ..bench.job import check_labels

    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return  # post-training says what is wrong with that
    x, y = batch
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and y.dim() == 1 and len(y)):
        return
    try:
        with eval_mode(model), torch.no_grad():
            output = model(x[:2].to(device_of(model)))
    except (RuntimeError, ValueError) as error:
        shape = tuple(x[:2].shape)
        raise ValueError(f"{network} does not take {shape} of {spec}: {error}") from error
    if isinstance(output, Tensor) and output.dim() == 2:
        if y.is_floating_point():
            raise TypeError(f"{spec} has labels of {y.dtype}, expected whole numbers: y.long().")
        check_labels(spec, y, network, output.shape[1])


def augment(dataset: str, shift: str, images: int | None) -> Augment | None:
    """The shift to optimise alpha under: for ImageNet that of the prior, as in the paper, unless
    there are few images."""
    from ..bench.imagenet import SHIFT_OF_FEW, are_few

    if dataset_named(dataset) == "cifar":
        return None
    few = images is not None and are_few(images)
    return partial(SHIFT_OF_FEW if few else prior_shift, per=shift)  # type: ignore[arg-type]


def resolve(spec: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names; modules of the working directory count."""
    module, _, function = spec.partition(":")
    if not module or not function:
        raise ValueError(f"{spec!r} names no function, expected MODULE:FUNCTION.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks something itself
        raise ValueError(f"There is no module {error.name!r} to import {spec!r} from.") from None
    if not callable(found):
        raise ValueError(f"{module} has no function {function!r}.")
    return found


def floats(text: str) -> list[float] | None:
    return [number("--mean or --std", part) for part in text.split(",")] if text else None


def sizes(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}, expected whole numbers, as in 1,4,16,64.")
    return tuple(int(part) for part in parts)


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}, which is no number.") from None
