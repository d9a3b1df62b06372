"""The states of many streams: a row of some tensors for each, by the stream's id.

At most `max_streams` are kept; the one unused for longest is forgotten first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .stream_config import StreamConfig

logger = logging.getLogger("ttnorm")
Id = Hashable
State = dict[str, Tensor]  # the first dimension is that of streams
# What a state is made of must not be an inference tensor, which only inference mode may change.
outside_inference_mode = torch.inference_mode(False)


class StreamRows:
    """Which row belongs to which stream.

    Args:
        config: see `StreamConfig`.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.told = False  # that streams are forgotten
        self.start_anew()

    @outside_inference_mode
    def start_anew(self) -> None:
        """A single stream, that of samples without ids, which has seen nothing."""
        self.rows: dict[Id, int] = {}  # of streams, in the order of their last use
        self.state = self._blank(1)
        self.select([None])

    def _blank(self, streams: int) -> State:
        """Streams that have seen nothing."""
        raise NotImplementedError

    def select(self, ids: Sequence[Id]) -> None:
        """Whose the samples to come are: one id for each, or one for all."""
        together = list(dict.fromkeys(ids))
        if len(together) > self.config.max_streams:
            raise ValueError(
                f"{len(together)} streams in one batch, expected at most "
                f"{self.config.max_streams}: stream_(model, max_streams=...)."
            )
        self.waiting = False
        for one in together:
            row = self.rows.pop(one, None)
            self.rows[one] = self._new_row(together) if row is None else row
        self._point_to(ids, together)

    def select_again(self, ids: Sequence[Id]) -> None:
        """Return to these ids. One that has lost its row gets a new one at the next forward only:
        there may be none."""
        together = list(dict.fromkeys(ids))
        self.waiting = any(one not in self.rows for one in together)
        self._point_to(ids, [] if self.waiting else together)

    def used(self) -> None:
        """Have the streams that are selected be the last that were used."""
        self.rows |= {one: self.rows.pop(one) for one in dict.fromkeys(self.ids)}

    def _point_to(self, ids: Sequence[Id], together: Sequence[Id]) -> None:
        options = {"dtype": torch.long, "device": self.state["seen"].device}
        place = {one: index for index, one in enumerate(together)}
        group = [place[one] for one in ids] if together else []
        self.ids = list(ids)
        self.active = torch.tensor([self.rows[one] for one in together], **options)  # type: ignore[arg-type]
        self.group = torch.tensor(group, **options)  # type: ignore[arg-type]

    def make_room(self, streams: int) -> None:
        """For so many at least."""
        most = max(streams, self.config.max_streams)
        self.config = dataclasses.replace(self.config, max_streams=most)

    def reset(self, ids: Sequence[Id] | None = None) -> None:
        """All streams, or those of these ids, as if they had never been."""
        ids = list(self.rows if ids is None else dict.fromkeys(ids))
        unknown = [one for one in ids if one not in self.rows]
        if unknown:
            raise ValueError(f"There is no stream {unknown[0]!r}; there are {list(self.rows)}.")
        for one in ids:
            self._clear(self.rows[one])
            if one not in self.ids:
                del self.rows[one]

    def memory_state(self) -> dict[str, Any]:
        """All that the next forward depends on: a row of every tensor for each id."""
        rows = list(self.rows.values())
        return {"ids": list(self.rows)} | {name: t[rows].clone() for name, t in self.state.items()}

    @outside_inference_mode
    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        """Have what `memory_state` gave, and nothing else."""
        expected = {"ids", *self.state}
        if set(state) != expected:
            raise ValueError(
                f"The state has {', '.join(sorted(state))}; expected {', '.join(sorted(expected))}."
            )
        ids = list(state["ids"])
        if len(ids) > self.config.max_streams:
            raise ValueError(
                f"The state has {len(ids)} streams, expected at most {self.config.max_streams}: "
                "stream_(model, max_streams=...)."
            )
        for name, tensor in self._blank(1).items():
            wanted = (len(ids), *tensor.shape[1:])
            if state[name].shape != wanted:
                raise ValueError(
                    f"{name} of the state has shape {tuple(state[name].shape)}, expected {wanted}. "
                    "Was it saved with another network, or another StreamConfig?"
                )
        self.rows = {one: row for row, one in enumerate(ids)}
        blank = self._blank(max(0, 1 - len(ids)))
        self.state = {
            name: torch.cat((state[name].to(t), blank[name])) for name, t in self.state.items()
        }
        self.select_again(self.ids)

    @outside_inference_mode
    def _new_row(self, keep: Sequence[Id]) -> int:
        """A row for one more stream; where there is no room, the one unused for longest goes."""
        room = len(self.state["seen"])
        if len(self.rows) == self.config.max_streams:
            oldest = next(one for one in self.rows if one not in keep)
            row = self.rows.pop(oldest)
            # or it was there before any other and never met a frame
            known = int(self.state["seen"][row] + self.state["rejected"][row])
            if known and not self.told:
                logger.warning(
                    "stream %r is forgotten, for there are more than max_streams=%d of them. Where "
                    "that many take turns none remembers anything: stream_(model, max_streams=...)",
                    oldest, self.config.max_streams,
                )  # fmt: skip
                self.told = True
        else:
            if len(self.rows) == room:
                more = self._blank(min(room, self.config.max_streams - room))
                self.state = {name: torch.cat((t, more[name])) for name, t in self.state.items()}
            row = min(set(range(len(self.state["seen"]))) - set(self.rows.values()))
        self._clear(row)
        return row

    def _clear(self, row: int) -> None:
        for name, blank in self._blank(1).items():
            self.state[name][row] = blank[0]
