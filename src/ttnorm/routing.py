"""Which domain a frame belongs to, told by the moments that enter a network's first layers.

A frame is described by the means and log variances of its channels there, with the source's
statistics inside, whitened by what source images vary in: directions in which content varies count
for little. Frames of one domain then lie together. The groups that the last frames of a stream fall
into are found by k-means on half of them, as many as are allowed; groups that the other half cannot
tell apart are merged. Pure functions, over S streams at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .float64 import in_float64

APART = 3.5  # standard deviations between two groups, along the line through their middles
ROUNDS = 10  # of k-means
FEWEST = 6  # frames by which a group is told from another
UNSURE = 4.0  # deviations beyond the mean distance from its group: a frame that far is of none
STEADY = 0.01  # of the source's deviations: what varies less, where nothing fires, stays small
MANY = 25  # frames or middles: where torch.cdist begins to multiply
RIDGE = 0.1  # of the identity in the content's correlations, which a few thousand images measure


class Content(NamedTuple):
    """How descriptions of source images vary: their mean, (D,), and a whitening matrix, (D, D)."""

    mean: Tensor
    whitening: Tensor


class Groups(NamedTuple):
    """Groups of frames: middles, (S, K, D), which exist, (S, K), and how far they reach, (S,)."""

    middles: Tensor
    there: Tensor
    reach: Tensor


def describe(moments: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Frames by their moments in units of the source, (N, C) in each layer: (N, D)."""
    parts = [part for mean, var in moments for part in (mean, var.clamp_min(1e-4).log())]
    return torch.cat(parts, 1)


def measure_content(descriptions: Tensor) -> Content:
    """Of source images, (N, D).

    Example:
        >>> content = measure_content(torch.randn(500, 3) * torch.tensor([1.0, 5.0, 0.1]) + 2)
        >>> [round(scale) for scale in (1 / content.whitening.diagonal()).tolist()]
        [1, 5, 0]
    """
    x = in_float64(descriptions)
    mean, spread = x.mean(0), x.std(0).clamp_min(STEADY)
    correlation = torch.cov(((x - mean) / spread).T)
    correlation = (1 - RIDGE) * correlation + RIDGE * torch.eye(len(mean)).to(correlation)
    values, vectors = torch.linalg.eigh(correlation)
    whitening = vectors @ torch.diag(values.rsqrt()) @ vectors.T / spread
    return Content(mean.float(), whitening.float())


def nearest(frames: Tensor, groups: Groups) -> Tensor:
    """The group of every frame, (S, M, D) to (S, M), or K where it is of none."""
    distance, index = _distances(frames, groups.middles, groups.there).min(2)
    return torch.where(distance > groups.reach[:, None], groups.middles.shape[1], index)


class Luck(NamedTuple):
    """What is drawn for a look, the same every time: an order of frames, (M,), and the chance of
    each in one half of them to be the first of a group, (K, M / 2)."""

    order: Tensor
    chance: Tensor


def draw(number: int, most: int, like: Tensor) -> Luck:
    """For so many frames and groups."""
    # at random, for domains may alternate in any rhythm
    order = torch.randperm(number, generator=Generator().manual_seed(1)).to(like.device)
    chance = torch.rand(most, -(-number // 2), generator=Generator().manual_seed(0))
    return Luck(order, -(-chance.clamp(1e-6, 1 - 1e-6).log()).log().to(like))  # Gumbel's


def find_groups(frames: Tensor, counts: Tensor, most: int, luck: Luck | None = None) -> Groups:
    """The groups that frames fall into.

    Args:
        frames: (S, M, D).
        counts: 1, or 0 for one that is not to be looked at, (S, M).
        most: K.
        luck: what `draw` gives for M frames and K groups; by default it is drawn here.
    """
    luck = draw(frames.shape[1], most, frames) if luck is None else luck
    halves = [(frames[:, half], counts[:, half]) for half in luck.order.chunk(2)]
    middles = _seeds(*halves[0], luck.chance)
    there = torch.ones_like(middles[..., 0], dtype=torch.bool)
    for _ in range(ROUNDS):
        member = _members(*halves[0], middles, there)
        size = member.sum(1)
        means = member.transpose(1, 2) @ halves[0][0] / size.clamp_min(1e-9)[..., None]
        middles = torch.where(size[..., None] > 0, means, middles)
    there = size > 0
    for _ in range(most - 1):
        apart = _apart(halves[1][0], _members(*halves[1], middles, there), middles, there)
        middles, size, there = _merge_closest(apart, middles, size, there)
    distance = _distances(frames, middles, there).amin(2)
    number = counts.sum(1).clamp_min(1)
    mean = (distance * counts).sum(1) / number
    spread = (((distance - mean[:, None]).square() * counts).sum(1) / number).sqrt()
    return Groups(middles, there, mean + UNSURE * spread)


def _distances(frames: Tensor, middles: Tensor, there: Tensor) -> Tensor:
    # a graph may have to do without cdist, which ONNX has not
    between = _between if torch.compiler.is_exporting() else torch.cdist
    return between(frames, middles).masked_fill(~there[:, None], torch.inf)


def _between(x: Tensor, y: Tensor) -> Tensor:
    """torch.cdist, step by step: where there are many, it multiplies as well."""
    # not max(): up to torch 2.8 an export has one of its own, which a branch of a graph cannot call
    if x.shape[1] <= MANY and y.shape[1] <= MANY:
        return (x[:, :, None] - y[:, None]).square().sum(3).sqrt()
    squares = [t.square().sum(2, keepdim=True) for t in (x, y)]
    one, other = (torch.ones_like(t) for t in squares)
    x, y = torch.cat((-2 * x, squares[0], one), 2), torch.cat((y, other, squares[1]), 2)
    return (x @ y.transpose(1, 2)).clamp_min(0).sqrt()


def _members(frames: Tensor, counts: Tensor, middles: Tensor, there: Tensor) -> Tensor:
    """What a frame counts for in every group, (S, M, K)."""
    group = _distances(frames, middles, there).argmin(2)
    return F.one_hot(group, middles.shape[1]) * counts[..., None]


def _seeds(frames: Tensor, counts: Tensor, luck: Tensor) -> Tensor:
    """k-means++: frames that are far from each other, drawn with the same luck every time."""
    chosen: list[Tensor] = []
    far = counts
    for chance in luck.unbind():
        index = (far.clamp_min(1e-12).log() + chance).masked_fill(counts == 0, -torch.inf).argmax(1)
        chosen.append(frames.gather(1, index[:, None, None].expand(-1, 1, frames.shape[2])))
        distance = (frames - chosen[-1]).square().sum(2)
        far = distance if len(chosen) == 1 else torch.minimum(far, distance)
    return torch.cat(chosen, 1)


def _apart(frames: Tensor, member: Tensor, middles: Tensor, there: Tensor) -> Tensor:
    """Between two groups, in standard deviations of their frames along the line: (S, K, K)."""
    line = F.normalize(middles[:, :, None] - middles[:, None], dim=3)
    along = torch.einsum("smd,sijd->smij", frames, line)
    size = member.sum(1)
    member = member / size.clamp_min(1)[:, None]
    # of group i on the line from i to j; of j on it is the negative of j's on the line from j to i
    mean = torch.einsum("smi,smij->sij", member, along)
    var = torch.einsum("smi,smij->sij", member, along.square()) - mean.square()
    spread = ((var + var.transpose(1, 2)) / 2).clamp_min(1e-9).sqrt()
    apart = (mean + mean.transpose(1, 2)).abs() / spread
    told = size >= FEWEST
    apart = torch.where(told[:, :, None] & told[:, None], apart, 0.0)
    pairs = (there[:, :, None] & there[:, None]).triu(1)
    return apart.masked_fill(~pairs, torch.inf)


def _merge_closest(
    apart: Tensor, middles: Tensor, size: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The two groups that are least apart as one, unless they are apart."""
    least, pair = apart.flatten(1).min(1)
    ends = torch.stack((pair // middles.shape[1], pair % middles.shape[1]), 1)
    merging = (least < APART)[:, None]
    weight = size.gather(1, ends)
    both = middles.gather(1, ends[..., None].expand(-1, -1, middles.shape[2]))
    total = weight.sum(1, keepdim=True)
    middle = (both * weight[..., None]).sum(1) / total.clamp_min(1e-9)
    keep, drop = (F.one_hot(end, middles.shape[1]).bool() & merging for end in ends.unbind(1))
    middles = torch.where(keep[..., None], middle[:, None], middles)
    return middles, torch.where(keep, total, size), there & ~drop


def heirs(slot: Tensor, before: Tensor, counts: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Where the frames of every slot were before: in which slot most were, and what share of that
    slot's frames they are.

    Args:
        slot: of every frame, now, (S, M).
        before: likewise, until now.
        counts: see `find_groups`.
        slots: K; the last one is for frames of no group, and inherits nothing.

    Returns:
        (S, K) each; a slot without frames has a share of 0.
    """
    now, then = (F.one_hot(t, slots).to(counts) * counts[..., None] for t in (slot, before))
    # of groups; not written in place, which a branch of a graph does not stand up to torch 2.11
    real = (torch.arange(slots, device=slot.device) < slots - 1).to(counts)
    common = now.transpose(1, 2) @ then * real  # (S, now, then)
    most, parent = common.max(2)
    share = most / then.sum(1).clamp_min(1).gather(1, parent)
    return parent, share * real
