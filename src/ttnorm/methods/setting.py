"""Where a method is run: what the paper's hyper-parameters depend on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A stream, a network and a task.

    Args:
        scenario: see `bench.scenarios`.
        batch_size: of test batches.
        classes: that the network tells apart.
        norm: that the method runs over.
        task: "cifar", "imagenet" or "segmentation".
    """

    scenario: str = "single"
    batch_size: int = 200
    classes: int = 10
    norm: str = "tbn"
    task: str = "cifar"

    @property
    def endless(self) -> bool:
        """Whether the method goes on from one domain to the next."""
        return self.scenario.startswith(("continual", "mixed", "alternating"))

    @property
    def large(self) -> bool:
        """Whether batches are as large as those that the paper names a rate for."""
        return self.batch_size >= 200

    @property
    def learned(self) -> bool:
        """Whether the norm's alpha was learned."""
        return self.norm.startswith("ttn")
