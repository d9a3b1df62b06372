"""The alpha file: what post-training learned, in kilobytes, and for which network.

safetensors, one tensor per layer, and metadata: the format's version, the library's, how alpha
was made, a checksum, and a fingerprint of the network it was fitted on. How source images vary is
there as well, where it is known, for streams in which domains alternate. A file is checked in full
before the model is touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .classes import Classes
from .files import Stamp, check_fingerprint, checksum, fingerprint, read_stamped, write_stamped
from .routing import Content
from .surgery import alphas, convert_, refuse_stream
from .tree import CLASSES, CONFIG, CONTENT, M, known_of, remember_, ttn_layers

STAMP = Stamp(
    "ttnorm-alpha", 1, "is a safetensors file but no alpha file: ttnorm.save writes those."
)
# What streams need to know of source images: prefixes of tensors that are no layer's alpha
KNOWN: dict[str, tuple[str, Any]] = {
    CONTENT: ("content/", Content),
    CLASSES: ("classes/", Classes),
}


class AlphaFile(NamedTuple):
    """An alpha file's content: alpha by layer, and the metadata as it was written."""

    alpha: dict[str, Tensor]
    metadata: dict[str, Any]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's alphas, and what streams have to know of the source, to a safetensors file.

    None of its weights are in it.

    Args:
        model: a converted network.
        path: by convention `NAME.ttn.safetensors`.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/network.ttn.safetensors"
        >>> save(convert_(nn.Sequential(nn.BatchNorm2d(8)), alpha=0.1), path)
        >>> load_(nn.Sequential(nn.BatchNorm2d(8)), path)[0]
        TTNorm2d(8, eps=1e-05, alpha=0.100 [0.100, 0.100])
    """
    tensors = {name: a.detach().float().cpu().contiguous() for name, a in alphas(model).items()}
    _check_values(tensors, "The model")
    for attribute, (prefix, _) in KNOWN.items():
        known = known_of(model, attribute)
        if known is not None:
            parts = {f"{prefix}{k}": t.half().cpu() for k, t in known._asdict().items()}
            _check_finite(parts, "The model")
            tensors |= parts
    metadata = {
        "config": known_of(model, CONFIG) or {},
        "cross_term": _of_all_layers(model, "cross_term"),
        "source_count": _of_all_layers(model, "source_count"),
    }
    write_stamped(path, STAMP, model, tensors, metadata)


def _of_all_layers(model: nn.Module, option: str) -> Any:
    """An option's value, of which a file has one."""
    values = {getattr(layer, option) for layer in ttn_layers(model).values()}
    if len(values) > 1:
        raise ValueError(
            f"Layers have {option} of {', '.join(map(str, sorted(values)))}, expected one for all: "
            "a file cannot hold more. Convert the network as a whole."
        )
    return values.pop()


def load_(
    model: M,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    source_count: float | None = None,
) -> M:
    """Turn BatchNorm layers into test-time normalization layers with the alphas of a file.

    Args:
        model: the network the file was made for, converted or not.
        path: what `save` wrote.
        strict: False accepts a network of the same layers with other running statistics, such as
            another checkpoint of the same architecture. What a stream needs is then left out.
        source_count: see `convert_`; the file's by default, which is 0 unless it was fitted with
            another.

    Returns:
        The same model.

    Raises:
        ValueError: when the file is damaged, from a newer version or for another network. The model
            is then as it was.
    """
    tensors, metadata = _read_checked(path)
    advice = "post-train this checkpoint, or pass strict=False"
    refuse_stream(model, "load_")
    ours, theirs = fingerprint(model), metadata["fingerprint"]
    check_fingerprint(path, theirs, ours, advice, strict=strict)
    same = ours["statistics"].items() & theirs["statistics"].items()
    if source_count is None:
        source_count = metadata.get("source_count", 0.0)
    options = {"cross_term": metadata["cross_term"], "source_count": source_count}
    convert_(model, _alphas_of(tensors, metadata), **options)
    remember_(model, CONFIG, metadata["config"])
    for attribute, (prefix, kind) in KNOWN.items():
        known = None
        # what was measured on another checkpoint says nothing about this one
        if same and any(name.startswith(prefix) for name in tensors):
            known = kind(**{k: tensors[prefix + k].float() for k in kind._fields})
        remember_(model, attribute, known)
    return model


def read(path: str | os.PathLike[str]) -> AlphaFile:
    """The content of an alpha file, checked as far as that goes without the network."""
    tensors, metadata = _read_checked(path)
    return AlphaFile(_alphas_of(tensors, metadata), metadata)


def _read_checked(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, metadata = read_stamped(path, STAMP)
    _check_values(_alphas_of(tensors, metadata), path)
    _check_finite(tensors, path)
    return tensors, metadata


def _alphas_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensors[name] for name, _ in metadata["fingerprint"]["layers"]}


def short_checksum(path: str | os.PathLike[str]) -> str:
    """Twelve letters that tell alpha files apart, whatever streams know by them."""
    alpha, metadata = read(path)
    return checksum(alpha, metadata)[:12]


def short_source_checksum(path: str | os.PathLike[str]) -> str:
    """Twelve letters that tell apart what streams know of the source."""
    tensors, _ = _read_checked(path)
    prefixes = tuple(prefix for prefix, _ in KNOWN.values())
    return checksum({n: t for n, t in tensors.items() if n.startswith(prefixes)}, {})[:12]


def _check_values(tensors: Mapping[str, Tensor], where: object) -> None:
    for name, alpha in tensors.items():
        if not bool(((alpha >= 0) & (alpha <= 1)).all()):  # NaN is neither
            raise ValueError(f"{where}: alpha for {name!r} has values outside [0, 1] or NaN.")


def _check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{where}: {name}, which streams need, has values that are not finite. Post-train "
                "the network again."
            )
