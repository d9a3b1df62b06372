"""Memories that `ttnorm`'s own are compared with, for streams that come one frame at a time.

Both bound what a run of one class can do in another way than by a cell for every class. They take
one frame of every stream in a forward, and are made where the network runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from ttnorm.functional import Moments
from ttnorm.memory import NEGLIGIBLE, Stream
from ttnorm.pooling import remember, share_of_new
from ttnorm.stream_config import StreamConfig
from ttnorm.stream_frames import Frames, Places

KEPT = 200  # frames in a reservoir
WINDOW = ("count", "mean", "var")  # of a window, as `remember` takes and gives them
DRAWS = 4096  # rows of random numbers, used over and over


class Reservoir(Stream):
    """The moments of at most 200 frames, of as many for every predicted class as there are.

    A frame of a class that has fewer than the fullest one takes the place of one of those; a frame
    of the fullest class takes the place of one of its own as often as makes all that were seen
    equally likely to be there (NOTE, Gong et al. 2022).

    Args:
        model: a converted network.
    """

    def __init__(self, model: nn.Module) -> None:
        # classes beyond as many as frames share, for no more could be there at once
        super().__init__(model, StreamConfig(memory="balanced", window=KEPT, buckets=KEPT))
        # from a table, for a recorded forward to draw anew and a stream to be as if it were alone
        luck = torch.rand(DRAWS, KEPT + 1, generator=Generator().manual_seed(0))
        self.luck = luck.to(self.source_mean)

    def _blank(self, streams: int) -> dict[str, Tensor]:
        number = self.source_mean.new_zeros(streams, KEPT, dtype=torch.long)
        # KEPT is the class of a place that is empty
        return super()._blank(streams) | {"class": number + KEPT, "class_seen": number}

    def _recall(self, places: Places | None) -> Moments:
        """Of the frames that are there and a few of the source."""
        mean, var = self._read("mean", places), self._read("var", places)
        there = (self._read("class", places) < KEPT).to(mean)
        share = (there / (there.sum(1, keepdim=True) + self.config.source))[:, None]
        of_source = 1 - share.sum(2)
        middle = share @ mean
        spread = share @ (var + (mean - middle).square())
        middle, spread = middle[:, 0], spread[:, 0]
        return middle, spread + of_source * (1 + middle.square())

    def _take(self, now: Frames, moments: Moments, output: Any) -> None:
        _one_frame_each(now, self.active)
        rows, usable = self.active, now.counts > 0
        classes, luck = self.state["class"][rows], self.luck[self.state["seen"][rows] % DRAWS]
        own = output.argmax(1) % KEPT
        self.state["class_seen"][rows, own] += usable.long()
        seen = self.state["class_seen"][rows, own]
        held = (classes[:, :, None] == torch.arange(KEPT + 1, device=own.device)).sum(1)
        of_own = held.gather(1, own[:, None])[:, 0]
        held[:, KEPT] *= KEPT  # the fullest, as long as there is an empty place
        most, fullest = held.max(1)
        room = of_own < most
        loser = torch.where(room, fullest, own)
        place = luck[:, :KEPT].masked_fill(classes != loser[:, None], -1).argmax(1)
        taken = usable & (room | (luck[:, KEPT] * seen < of_own))
        for name, value in zip(("mean", "var", "class"), (*moments, own), strict=True):
            before = self.state[name][rows, place]
            chosen = taken.view(-1, *[1] * (value.dim() - 1))
            self.state[name][rows, place] = torch.where(chosen, value, before)


class LongAndShort(Stream):
    """Two windows over all frames, of which the one that is more like the source is used.

    Args:
        model: a converted network.
        windows: frames that the long and the short one remember.
    """

    def __init__(self, model: nn.Module, windows: tuple[float, float] = (1000, 50)) -> None:
        self.windows = windows
        super().__init__(model, StreamConfig(memory="pool"))

    def _blank(self, streams: int) -> dict[str, Tensor]:
        state = super()._blank(streams)
        return state | {name: state[name].repeat_interleave(2, 1) for name in WINDOW}

    def _recall(self, places: Places | None) -> Moments:
        short = self._short()[:, None]
        mean, var = (self._read(name, places) for name in ("mean", "var"))
        return torch.where(short, mean[:, 1], mean[:, 0]), torch.where(short, var[:, 1], var[:, 0])

    def _trust_in_batch(self, new: Tensor, places: Places | None) -> Tensor:
        count = self._read("count", places)
        long, short = (
            share_of_new(count[:, index], new, window)[0]
            for index, window in enumerate(self.windows)
        )
        trust = torch.where(self._short(), short, long)
        return torch.where(trust < NEGLIGIBLE, 0.0, trust)

    def _short(self) -> Tensor:
        """Whether a stream's short window is less far from the source, as `health` measures it."""
        mean, var = (self._read(name, None) for name in ("mean", "var"))
        alpha = self._flat([layer.alpha for layer in self.layers])
        divergence = (var + mean.square() - 1 - var.clamp_min(1e-6).log()) @ alpha
        return divergence[:, 1] < divergence[:, 0]

    def _take(self, now: Frames, moments: Moments, output: Any) -> None:
        _one_frame_each(now, self.active)
        new_mean, new_var = moments
        for index, window in enumerate(self.windows):
            after = remember(
                **{name: self._read(name, None)[:, index] for name in WINDOW},
                new=now.counts,
                new_mean=new_mean,
                new_var=new_var,
                window=window,
                cross_term=self.cross_term,
            )
            for name, value in zip(WINDOW, after, strict=True):
                self.state[name][self.active, index] = value


def _one_frame_each(now: Frames, streams: Tensor) -> None:
    if len(now.group) != len(streams):
        raise ValueError(
            f"{len(now.group)} frames of {len(streams)} streams, expected one of each: "
            "these memories are only there to be compared frame by frame."
        )
