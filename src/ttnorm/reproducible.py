"""Randomness that depends on a seed alone, without leaving a trace in anybody's generators."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator

logger = logging.getLogger("ttnorm")


@contextlib.contextmanager
def reproducible(loader: Iterable[Any], seed: int, epoch: int) -> Iterator[Generator]:
    """Inside, a loader's order and transforms depend on seed and epoch alone.

    Covers torch's CPU generator, numpy's and Python's, and the generators that a DataLoader, its
    sampler or its batch sampler own. All of them are put back afterwards. Samplers with `set_epoch`
    are told the epoch. Out of reach are workers that outlive an epoch (`persistent_workers`).

    Yields:
        A generator of its own for the caller.
    """
    mixed = (seed * 1_000_003 + epoch) % 2**32
    owners = list(_owners(loader))
    generators = [getattr(owner, "generator", None) for owner in owners]
    owned = {id(g): (g, g.get_state()) for g in generators if isinstance(g, Generator)}
    epochs = [(owner, getattr(owner, "epoch", None)) for owner in owners]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed)
            random.seed(mixed)
            np.random.seed(mixed)
            for generator, _ in owned.values():
                generator.manual_seed(mixed)
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            yield Generator().manual_seed(mixed)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in owned.values():
            generator.set_state(state)
        for owner, before in epochs:
            if hasattr(owner, "set_epoch") and isinstance(before, int):
                owner.set_epoch(before)


def warn_of_lasting_workers(loader: Iterable[Any]) -> None:
    """Say so where a resumed run may see other random transforms than an uninterrupted one."""
    if getattr(loader, "persistent_workers", False):
        logger.warning(
            "The loader has persistent_workers=True: their random state survives an epoch but not "
            "a restart. If its transforms are random, a resumed run ends a little differently."
        )


def _owners(loader: Any) -> Iterator[Any]:
    """The loader and the samplers below it."""
    yield loader
    sampler, batch_sampler = (getattr(loader, n, None) for n in ("sampler", "batch_sampler"))
    for owner in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if owner is not None:
            yield owner
