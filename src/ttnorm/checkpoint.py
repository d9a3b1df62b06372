"""What a fit wrote after an epoch, for another process to go on from."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from .distributed import of_rank_0, rank
from .files import read_safetensors

FORMAT = "ttnorm-checkpoint"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `Fit.checkpoint` wrote."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @classmethod
    def read(
        cls, path: str | os.PathLike[str] | None, identity: dict[str, Any]
    ) -> Checkpoint | None:
        """The checkpoint of this very run, or None where there is no file."""
        # rank 0 alone wrote it, perhaps to a disk of its own
        found = rank() == 0 and path is not None and Path(path).exists()
        read = of_rank_0(read_safetensors(path) if found and path is not None else None)
        if read is None:
            return None
        tensors, metadata = read
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{path} is no checkpoint of post-training. Give this run a file of its own."
            )
        for name, ours in identity.items():
            if metadata.get(name) != ours:
                raise ValueError(
                    f"{path} is a checkpoint of another run: its {name} differs. Delete the file "
                    "to start anew, or give this run a file of its own. (A function that keeps "
                    "something of its calls differs after them: make it anew.)"
                )
        return cls(tensors, metadata)

    def prior(self) -> dict[str, Tensor] | None:
        if "prior" not in self.tensors:
            return None
        names, sizes = zip(*self.metadata["network"]["layers"], strict=True)
        return dict(zip(names, self.tensors["prior"].split(sizes), strict=True))
