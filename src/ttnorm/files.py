"""Files of tensors: written whole or not at all, checked when read, and for which network they are.

safetensors, with metadata as JSON. What is in them is up to `artefact`, `stream` and `checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn

from .tree import batchnorm_layers, check_statistics
from .version import __version__


class Stamp(NamedTuple):
    """A kind of file: its name, the newest version of it, and what others are told to be."""

    format: str
    version: int
    otherwise: str


def unfinished(path: str | os.PathLike[str]) -> str:
    """What a file is called until it is whole; other writers of it, if any, have other names."""
    return f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.partial"


def write_atomically(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write a file that is either the old one or the new one, whenever the process dies."""
    encoded = {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    partial = unfinished(path)
    try:
        # not save_file, which leaves a file to its owner alone whatever the umask says
        Path(partial).write_bytes(serialise(dict(tensors), metadata=encoded))
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and decoded metadata of a file that `write_atomically` wrote."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            raw = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, damaged or no safetensors file: {error}") from error
    return tensors, {key: _decoded(value) for key, value in raw.items()}


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value  # not ours: others write {"format": "pt"}


def write_stamped(
    path: str | os.PathLike[str],
    stamp: Stamp,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> None:
    """Write a file that says what it is, for which network, and what its content has to be."""
    stamped = {
        "format": stamp.format,
        "format_version": stamp.version,
        "ttnorm": __version__,
        "fingerprint": fingerprint(model),
        **metadata,
    }
    write_atomically(path, tensors, {**stamped, "sha256": checksum(tensors, stamped)})


def read_stamped(
    path: str | os.PathLike[str], stamp: Stamp
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_stamped` wrote; raises where it is something else, newer or damaged."""
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != stamp.format:
        raise ValueError(f"{path} {stamp.otherwise}")
    written = metadata.get("format_version")
    if isinstance(written, int) and written > stamp.version:
        raise ValueError(
            f"{path} has format {written}, written by ttnorm {metadata.get('ttnorm')}; this "
            f"version reads up to {stamp.version}. Upgrade ttnorm."
        )
    if metadata.pop("sha256", None) != checksum(tensors, metadata):
        raise ValueError(
            f"{path} is damaged: its content does not match its checksum. Copy it anew."
        )
    return tensors, metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Over names, values and metadata: no byte of a file can change unnoticed."""
    values = _hash(tensors[name] for name in sorted(tensors))
    text = json.dumps([values, sorted(tensors), metadata], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Layer names, channels, and a hash of the running statistics that tells networks apart.

    The hash is taken in float32 and in both half precisions, so that a network which was cast to
    one of them for production is still recognised; of that network, in its own.
    """
    layers = batchnorm_layers(model)
    for name, layer in layers.items():
        check_statistics(name, layer)
    stats = [t for m in layers.values() for t in (m.running_mean, m.running_var)]
    stats = [t.detach().cpu() for t in stats]  # type: ignore[operator]
    own, half = stats[0].dtype, [torch.float16, torch.bfloat16]
    precisions = [own] if own in half else [torch.float32, *half]
    return {
        "layers": [[name, m.running_mean.numel()] for name, m in layers.items()],  # type: ignore[operator]
        "statistics": {
            str(p).removeprefix("torch."): _hash(t.to(p) for t in stats) for p in precisions
        },
    }


def short_fingerprint(model: nn.Module) -> str:
    """Twelve letters that tell networks apart."""
    return next(iter(fingerprint(model)["statistics"].values()))[:12]


def check_fingerprint(
    path: str | os.PathLike[str],
    theirs: dict[str, Any],
    ours: dict[str, Any],
    advice: str,
    *,
    strict: bool = True,
) -> None:
    """Raise if a file was made for another network than ours.

    Args:
        theirs, ours: see `fingerprint`.
        advice: what to do about other running statistics.
        strict: whether these have to be the same, too.
    """
    if theirs["layers"] != ours["layers"]:
        pairs = zip(theirs["layers"], ours["layers"], strict=False)
        first = next((f"{a} there, {b} here" for a, b in pairs if a != b), "one has more layers")
        raise ValueError(
            f"{path} was made for another network: {len(theirs['layers'])} layers there, "
            f"{len(ours['layers'])} here; first difference: {first}."
        )
    common = theirs["statistics"].keys() & ours["statistics"].keys()
    if strict and not common:
        raise ValueError(
            f"{path} was saved from a {'/'.join(theirs['statistics'])} network and this one is "
            f"{'/'.join(ours['statistics'])}: their statistics cannot be compared. Load the file "
            f"before casting the network, {advice}."
        )
    if strict and any(theirs["statistics"][p] != ours["statistics"][p] for p in common):
        raise ValueError(
            f"{path} was made for a network with other running statistics: another checkpoint, or "
            f"the weights are not loaded yet. Load the weights first, {advice}."
        )


def _hash(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
