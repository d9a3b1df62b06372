"""How streams are remembered: the choices that a user has."""

from __future__ import annotations

import dataclasses

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
            stream, which it tells apart by what enters the first layers.
        source: frames that the source counts for at the beginning.
        buckets: that a balanced memory has for classes, at most: class c is in bucket c modulo
            their number.
        slots: domains that a routed memory holds, at most.
        max_streams: that are remembered at once; the one unused for longest is forgotten first.
    """

    window: float = 200
    memory: str = "balanced"
    source: float = 4.0
    buckets: int = 10
    slots: int = 8
    max_streams: int = 64

    def __post_init__(self) -> None:
        if self.memory not in MEMORIES:
            raise ValueError(f"memory is {self.memory!r}, expected {' or '.join(MEMORIES)}.")
        for name in ("window", "buckets", "slots", "max_streams"):
            if not getattr(self, name) >= 1:  # NaN is neither
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1.")
        if not self.source > 0:
            raise ValueError(f"source is {self.source}, expected a positive number.")
