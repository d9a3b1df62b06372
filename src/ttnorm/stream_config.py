"""How streams are remembered: the choices that a user has."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .arguments import check_whole

MEMORIES = ("pool", "balanced", "corrected", "routed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How streams are remembered.

    Args:
        window: frames that are remembered, roughly: their weight falls exponentially.
        memory: "pool" remembers all frames alike, for networks that predict no class. The others
            see to it that a run of one class does not take over: "corrected" remembers frames as if
            they were of no class, which takes an alpha file that knows what classes do to
            statistics; "balanced" remembers frames by predicted class and counts all classes
            alike. "routed" is "corrected" for each of the domains that alternate or mix in a
            stream, which it tells apart by what enters the first layers. None is "routed" where
            the network knows how source images vary, as post-training measures it and alpha files
            say it, and "balanced" where it does not.
        source: frames that the source counts for at the beginning.
        buckets: at most how many classes a balanced memory keeps apart; class c goes into bucket
            c % buckets.
        slots: at most how many domains a routed memory tells apart.
        max_streams: how many streams are remembered at once; the one unused for longest is
            forgotten first.
        between_frames: whether how frames differ from each other is part of a memory's variance.
            Without it variances are averaged as means are, which is what running statistics do.
    """

    window: float = 200
    memory: Literal["pool", "balanced", "corrected", "routed"] | None = None
    source: float = 4.0
    buckets: int = 10
    slots: int = 8
    max_streams: int = 64
    between_frames: bool = True

    def __post_init__(self) -> None:
        if self.memory not in (*MEMORIES, None):
            raise ValueError(f"memory is {self.memory!r}, expected {' or '.join(MEMORIES)}.")
        for name in ("window", "source"):  # a NumPy number does not go into files
            object.__setattr__(self, name, float(getattr(self, name)))
        if not self.window >= 1:  # NaN is neither
            raise ValueError(f"window is {self.window}, expected at least 1.")
        for name in ("buckets", "slots", "max_streams"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), at_least=1))
        if not self.source > 0:
            raise ValueError(f"source is {self.source}, expected a positive number.")
