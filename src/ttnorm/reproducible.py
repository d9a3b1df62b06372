"""Randomness that depends on a seed alone, without leaving a trace in anybody's generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator


@contextlib.contextmanager
def reproducible(loader: Iterable[Any], seed: int, epoch: int) -> Iterator[Generator]:
    """Inside, a loader's order and transforms depend on seed and epoch alone.

    Covers torch's CPU generator, numpy's and Python's, and the generators a DataLoader or its
    sampler owns. All of them are put back afterwards. A sampler with `set_epoch` is told the epoch.

    Yields:
        A generator of its own for the caller.
    """
    mixed = (seed * 1_000_003 + epoch) % 2**32
    sampler = getattr(loader, "sampler", None)
    owners = (getattr(owner, "generator", None) for owner in (loader, sampler))
    owned = {id(g): (g, g.get_state()) for g in owners if g is not None}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed)
            random.seed(mixed)
            np.random.seed(mixed)
            for generator, _ in owned.values():
                generator.manual_seed(mixed)
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            yield Generator().manual_seed(mixed)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in owned.values():
            generator.set_state(state)
