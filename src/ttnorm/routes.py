"""Which of a stream's domains its frames belong to: what a routed memory keeps of its last frames.

Tensors of a stream's state, beside its memories: descriptions of the last frames and the slots they
were in, and the groups that frames are told apart by. Every few frames groups are looked for anew,
and memories go to the slots that their frames are in from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .pooling import in_slots
from .routing import Content, Groups, Luck, draw, find_groups, heirs, nearest
from .stream_rows import State

RECENT = 512  # frames of a stream in which domains are looked for
EVERY = 16  # frames after which they are looked for anew
FIRST = 32  # frames that have to be there for that
SAME = 0.8  # of a slot's frames: a new slot with more of them inherits its memory in full
READ = ("frames", "seen")  # what a look needs and leaves alone
GROUPS = ("middles", "there", "reach")  # see `routing.Groups`
# what belongs to a slot
MEMORY = ("mean", "var", "count", "slot_seen", "excess", "runs", "within", "compared")
# what a look is given
SORTED = (*READ, "looked", "frame_slot", *MEMORY, *GROUPS)


class Routes:
    """Slots for the domains of streams: one for each of them, and a last one for frames of none.

    Args:
        content: how source images vary.
        domains: that a stream may have, at most.
    """

    def __init__(self, content: Content, domains: int) -> None:
        self.content, self.domains, self.slots = content, domains, domains + 1
        self.luck = draw(RECENT, domains, content.mean)  # here, for a graph cannot

    def to(self, device: torch.device) -> None:
        self.content = Content(*(t.to(device) for t in self.content))
        self.luck = Luck(*(t.to(device) for t in self.luck))

    def blank(self, streams: int) -> State:
        """Of streams that have seen nothing: there is one domain, and everything belongs to it."""
        like, size = self.content.mean, len(self.content.mean)
        first = torch.arange(self.domains, device=like.device) == 0
        return {
            "slot_seen": like.new_zeros(streams, self.slots, dtype=torch.long),
            "looked": like.new_zeros(streams, dtype=torch.long),
            "frames": like.new_zeros(streams, RECENT + 1, size),
            "frame_slot": like.new_zeros(streams, RECENT + 1, dtype=torch.long),
            "middles": like.new_zeros(streams, self.domains, size),
            "there": first.expand(streams, -1).clone(),
            "reach": like.new_full((streams,), torch.inf),
        }

    def whiten(self, descriptions: Tensor) -> Tensor:
        return (descriptions.to(self.content.mean) - self.content.mean) @ self.content.whitening.T

    def slot(self, state: State, rows: Tensor, frames: Tensor) -> Tensor:
        """The slot of every frame, (N, D), of the streams in these rows of the state, (N,)."""
        return nearest(frames[:, None], Groups(*(state[name][rows] for name in GROUPS)))[:, 0]

    def remember(
        self, state: State, rows: Tensor, frames: Tensor, slot: Tensor, counts: Tensor
    ) -> None:
        """Keep frames in place of the oldest ones of their stream.

        Args:
            state: from before these frames.
            rows: of their streams, (N,).
            frames, slot: see `slot`.
            counts: 1, or 0 for a frame that is not to be kept.
        """
        same = (rows[:, None] == rows) & (counts > 0)
        before = same.tril(-1).sum(1)  # frames of the same stream that come earlier in the batch
        place = (state["seen"][rows] + before) % RECENT
        place = torch.where(counts > 0, place, RECENT)  # beyond what is looked at
        state["frames"][rows, place] = frames
        state["frame_slot"][rows, place] = slot

    def look(self, state: State, rows: Tensor, blank: Callable[[int], State]) -> None:
        """Look for domains, in the streams of these rows in which it is time for that.

        Args:
            blank: the state of so many streams that have seen nothing.
        """
        seen = state["seen"][rows]
        due = (seen // EVERY > state["looked"][rows]) & (seen >= FIRST)
        if torch.compiler.is_exporting():
            self._look_in_graph(state, due[0], blank(1))
            return
        rows = rows[due]
        if not len(rows):
            return
        found = self._sort(_recent(state, rows), blank(1), self.luck)
        state["frame_slot"][rows, :RECENT] = found.pop("frame_slot")
        for name, value in found.items():
            state[name][rows] = value

    def _look_in_graph(self, state: State, due: Tensor, blank: State) -> None:
        """The same for a graph, which has a single stream and cannot write where it reads."""
        # detached: where gradients could flow, torch.cond would be traced anew with every frame
        before = {name: state[name].detach() for name in SORTED if name in state}
        fresh = {name: blank[name] for name in MEMORY if name in state}
        changing = [name for name in before if name not in READ]

        known, new = list(before), list(fresh)

        def look(*given: Tensor) -> list[Tensor]:
            then = dict(zip(known, given[: len(known)], strict=True))
            blank = dict(zip(new, given[len(known) : -2], strict=True))
            found = self._sort(_recent(then, slice(None)), blank, Luck(*given[-2:]))
            last = then["frame_slot"][:, RECENT:]
            found["frame_slot"] = torch.cat((found["frame_slot"], last), 1)
            return [found[name] for name in changing]

        def keep(*given: Tensor) -> list[Tensor]:
            then = dict(zip(known, given[: len(known)], strict=True))
            return [then[name].clone() for name in changing]

        # all that they read is given to both, for what they knew by themselves could overlap; and
        # tensors alone, as torch 2.11 wants it
        given = (*before.values(), *fresh.values(), *self.luck)
        found = torch.cond(due, look, keep, given)
        state.update(zip(changing, found, strict=True))

    def _sort(self, state: State, blank: State, luck: Luck) -> State:
        """Look for domains in the last frames of streams: all that changes by that.

        Args:
            state: see `_recent`.
            blank: of a stream that has seen nothing.
            luck: see `routing.find_groups`.
        """
        frames, seen = state["frames"], state["seen"]
        there = (torch.arange(RECENT, device=seen.device) < seen[:, None]).to(frames)
        groups = find_groups(frames, there, self.domains, luck)
        slot = nearest(frames, groups)
        memory = self._inherit(state, blank, *heirs(slot, state["frame_slot"], there, self.slots))
        found = dict(zip(GROUPS, groups, strict=True))
        return {"looked": seen // EVERY, "frame_slot": slot, **memory, **found}

    def _inherit(self, state: State, blank: State, parent: Tensor, share: Tensor) -> State:
        """Give every slot the memory of the one that its frames were in, as far as they were.

        Args:
            parent: a slot for every slot, (S, slots).
            share: of that slot's frames that are here now, (S, slots); with 0 a slot starts anew.
        """
        share = torch.where(share > SAME, 1.0, share)
        each = torch.arange(len(share), device=share.device)[:, None]
        memory = {}
        for name in [name for name in MEMORY if name in state]:
            fresh, value = (in_slots(t, self.slots) for t in (blank[name], state[name]))
            weight = share.view(*share.shape, *[1] * (value.dim() - 2))
            value = value[each, parent]
            if name == "count":
                value = torch.maximum(value * weight, fresh)
            elif name == "slot_seen":
                value = (value * weight).long()
            memory[name] = torch.where(weight > 0, value, fresh).flatten(1, 2)
        return memory


def _recent(state: State, rows: Tensor | slice) -> State:
    """What a look needs of these rows, or changes."""
    names = [name for name in SORTED if name in state]
    some = {name: state[name][rows, :RECENT] for name in ("frames", "frame_slot")}
    return {name: some[name] if name in some else state[name][rows] for name in names}
