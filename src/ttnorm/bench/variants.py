"""Variants of post-training that the paper's ablations compare, by name.

Each is the default with one thing changed. Alpha files are called NETWORK.VARIANT.seedN; those that
are shipped with a network, by kind, are variants of seed 0.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .. import artefact
from ..augment import DOMAIN_PARTS, PRIOR_PARTS, Augment, domain_shift, prior_shift
from ..data.corruptions import CORRUPTIONS, corrupt
from ..data.images import Images
from ..data.loader import DeviceLoader
from ..files import read_safetensors, write_atomically
from ..fitting import averaged
from ..models import zoo
from ..posttrain import optimise_alpha, post_train_
from ..posttrain_config import PostTrainConfig, as_json
from ..prior import estimate_prior
from ..surgery import convert_
from ..tree import CONFIG, remember_

SEVERITY = 5  # of the corruptions that are taken for augmentation
OF_KIND = {"ttn": "default", "dynamic": "dynamic", "strong": "prior-strong"}  # of alpha files
MOST_UNDER_TRUE = 10_000  # training images, the first ones: there are thirty such fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from the default.

    Args:
        config: of `PostTrainConfig`.
        prior: of `prior_shift`.
        parts: of `domain_shift`.
        average: the default's alpha, averaged over each "layer" or everything ("constant").
        prior_corruption: a true corruption in place of the prior's shift.
        corruption: a true corruption in place of the shift that alpha is optimised under.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prior: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] | None = None
    average: str | None = None
    prior_corruption: str | None = None
    corruption: str | None = None

    @property
    def most(self) -> int | None:
        """Training images that it is fitted to; None for all."""
        return MOST_UNDER_TRUE if self.prior_corruption or self.corruption else None


VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "dynamic": Variant(config={"dynamic_batch": (4, 200)}),
    # components: what alpha starts from, and what pulls at it
    "random-mse": Variant(config={"init": "random", "ce": False}),
    "random-ce": Variant(config={"init": "random", "mse": False}),
    "random-ce-mse": Variant(config={"init": "random"}),
    "prior-alone": Variant(config={"ce": False, "mse": False}),
    "prior-ce": Variant(config={"mse": False}),
    # strength of the regulariser; 0 is "prior-ce"
    "lambda-0.1": Variant(config={"lambda_": 0.1}),
    "lambda-10": Variant(config={"lambda_": 10.0}),
    # granularity
    "layer-mean": Variant(average="layer"),
    "constant-mean": Variant(average="constant"),
    "layer": Variant(config={"granularity": "layer"}),
    # augmentation, a part at a time; padding alone changes nothing that is not cropped again
    "prior-jitter": Variant(prior={"parts": ("jitter",)}),
    "prior-grayscale": Variant(prior={"parts": ("jitter", "grayscale")}),
    "prior-blur": Variant(prior={"parts": (*PRIOR_PARTS, "blur")}),
    "prior-flip": Variant(prior={"parts": (*PRIOR_PARTS, "blur", "flip")}),
    "alpha-jitter": Variant(parts=DOMAIN_PARTS[:1]),
    "alpha-affine": Variant(parts=DOMAIN_PARTS[:2]),
    "alpha-blur": Variant(parts=DOMAIN_PARTS[:3]),
    # SimCLR's jitter for ImageNet and torchvision's RandomInvert: a prior as high as the paper's
    "prior-strong": Variant(prior={"strength": 2.0, "invert": 0.5}),
    **{f"prior-{c}": Variant(prior_corruption=c) for c in CORRUPTIONS},
    **{f"alpha-{c}": Variant(corruption=c) for c in CORRUPTIONS},
}


@dataclasses.dataclass(frozen=True)
class Source:
    """What variants are fitted with.

    Args:
        read: gives the training set, on the device to train on, once it is needed.
        corrupted: from a corruption to the training set under it, likewise.
        textures: the folder with frost's pictures.
        epochs: of post-training.
        batch_size: likewise.
        config: of `PostTrainConfig`, what is not as for CIFAR.
        augment: the shift that alpha is optimised under; `domain_shift` by default.
        prior: of `prior_shift`, what is not as for CIFAR.
    """

    read: Callable[[], Images]
    corrupted: Mapping[str, Images] = dataclasses.field(default_factory=dict)
    textures: Path | None = None
    epochs: int = 30
    batch_size: int = 200
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    augment: Augment | None = None
    prior: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @cached_property
    def train(self) -> Images:
        return self.read()


def fit_variant(
    name: str, network: str, model: nn.Module, source: Source, seed: int, folder: Path
) -> Path:
    """The alpha file of a variant, fitted if it is not there; a killed run goes on.

    Args:
        name: one of VARIANTS.
        network: the name of `model`, which is not changed.
        seed: of everything that is random.
        folder: with the alpha files that are there.
    """
    shipped = shipped_file(name, network, seed) if source.epochs == 30 else None
    if shipped is not None:
        return shipped
    path = folder / file_name(name, network, seed)
    variant = VARIANTS[name]
    if path.exists():
        _check_config(path, _config(variant, source, seed))
        return path
    model = copy.deepcopy(model)
    if variant.average is not None:
        default = fit_variant("default", network, model, source, seed, folder)
        convert_(model, averaged(artefact.read(default)[0], variant.average))
    else:
        checkpoint = path.with_suffix(".checkpoint")
        _fit_(variant, model, source, seed, checkpoint)
        checkpoint.unlink(missing_ok=True)
    artefact.save(model, path)
    return path


def file_name(name: str, network: str, seed: int) -> str:
    """Of a variant's alpha file, where it is not one that came with the library."""
    return f"{network}.{name}.seed{seed}.ttn.safetensors"


def shipped_file(name: str, network: str, seed: int) -> Path | None:
    """The file that came with the library, where it is that very variant."""
    kinds = [kind for kind, variant in OF_KIND.items() if variant == name]
    if not kinds or seed != 0 or network not in zoo.NETWORKS:
        return None
    return zoo.alpha_files(network)[kinds[0]]


def _config(variant: Variant, source: Source, seed: int) -> PostTrainConfig:
    return PostTrainConfig(epochs=source.epochs, seed=seed, **{**source.config, **variant.config})


def _check_config(path: Path, config: PostTrainConfig) -> None:
    """Raise where a file was fitted otherwise; options that came after it are at their defaults."""
    written, defaults = artefact.read(path).metadata["config"], as_json(PostTrainConfig())
    for option, wanted in as_json(config).items():
        found = written.get(option, defaults[option])
        if written and found != wanted:  # an average of other files says nothing of itself
            raise ValueError(
                f"{path} was fitted with {option} = {found}, expected {wanted}. Delete it, or take "
                "another folder for records."
            )


def _fit_(variant: Variant, model: nn.Module, source: Source, seed: int, checkpoint: Path) -> None:
    config = _config(variant, source, seed)
    clean = DeviceLoader(*source.train, source.batch_size, seed)
    options = {**source.prior, **variant.prior}
    shift: Augment = partial(prior_shift, **options) if options else prior_shift
    if variant.prior_corruption is not None:
        shift = partial(_corrupted, corruption=variant.prior_corruption, textures=source.textures)
    if variant.corruption is None:
        augment = source.augment
        if variant.parts is not None:
            augment = partial(domain_shift, parts=variant.parts)
        post_train_(
            model, clean, config, prior_augment=shift, augment=augment, checkpoint=checkpoint
        )
        return
    # the prior from clean images as ever, alpha from corrupted ones
    state = checkpoint.with_suffix(".prior")
    if not state.exists():
        generator = Generator().manual_seed(seed)
        prior = estimate_prior(model, clean, samples=config.prior_samples, generator=generator)
        write_atomically(state, prior, {})
    device = source.train.images.device
    prior = {name: t.to(device) for name, t in read_safetensors(state)[0].items()}
    loader = DeviceLoader(*source.corrupted[variant.corruption], source.batch_size, seed)
    result = optimise_alpha(model, loader, prior, config, augment=_as_it_is, checkpoint=checkpoint)
    state.unlink()
    convert_(model, result.alpha, source_count=config.source_count)
    remember_(model, CONFIG, as_json(config) | {"augmentation": variant.corruption})


def _as_it_is(images: Tensor, generator: Generator | None) -> Tensor:
    return images


def _corrupted(
    images: Tensor, generator: Generator | None, *, corruption: str, textures: Path | None
) -> Tensor:
    """A true corruption as an augmentation."""
    seed = int(torch.randint(2**31, (), generator=generator))
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    moved = corrupt(pixels, corruption, SEVERITY, seed=seed, textures=textures)
    return torch.from_numpy(moved).permute(0, 3, 1, 2).to(images) / 255
