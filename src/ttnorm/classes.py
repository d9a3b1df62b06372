"""What a frame's class does to its moments, measured on source images.

The moments of a frame tell of its domain and of what it shows. What its class does to them is known
from the source, and can be taken off: then a run of one class moves a memory no further than any
other frames of its domain. What is taken off is what a class does beyond the classes that are usual
in the stream: under a shift a network predicts some classes too often, and to take off what these
would do, which is not there, would add an error. Moments are in units of the source, T channels of
all layers in a row; K classes are told by R directions, for many are much alike.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import Loader, are_chances, batches, describe
from .float64 import in_float64
from .functional import Moments
from .layers import TTNormBase
from .pooling import FARTHEST, of_all_uses
from .shallow import entering
from .surgery import borrowed
from .tree import device_of

logger = logging.getLogger("ttnorm")

SAMPLES = 8192  # source images that are looked at
RANK = 32  # directions that classes differ in
SMALLEST = 1e-4  # variance, for its logarithm
AGREEMENT = 0.2  # with the labels, beyond chance, from which outputs of any loss are predictions
USUAL = 5000.0  # frames: the window of a stream's mean prediction, which is what is usual in it
ALIKE = 1000.0  # frames, of all classes alike, that this mean starts with


class Classes(NamedTuple):
    """How far each class is along every direction, (K, R), and these directions, (R, 2 T): of
    means, then of log variances. Classes without a source image are at 0."""

    codes: Tensor
    directions: Tensor


class Sums(NamedTuple):
    """Over images: how many there are of each class, (K,), the sums of their means and log
    variances, (K, 2 T), and those of all squares, (2 T)."""

    images: Tensor
    total: Tensor
    squares: Tensor


def sum_up(mean: Tensor, var: Tensor, labels: Tensor, number: int) -> Sums:
    """Of some images; sums of others can be added.

    Args:
        mean, var: of every image, (N, T).
        labels: its class, (N,).
        number: of classes, K.
    """
    x = in_float64(torch.cat((mean, var.clamp_min(SMALLEST).log()), 1))
    member = F.one_hot(labels.long(), number).to(x)
    return Sums(member.sum(0), member.T @ x, x.square().sum(0))


def measure_classes(sums: Sums) -> Classes:
    """What classes do to moments.

    Example:
        >>> labels = torch.arange(2).repeat(50)
        >>> mean = 3.0 * labels[:, None] + 0.1 * torch.randn(100, 1)
        >>> classes = measure_classes(sum_up(mean, torch.ones(100, 1), labels, 2))
        >>> (classes.codes @ classes.directions)[:, 0].round(decimals=1).abs()
        tensor([1.5000, 1.5000])
    """
    there = sums.images > 0  # a network may know more classes than the source images are of
    count, total = sums.images[there], sums.total[there]
    middle = total / count[:, None]
    apart = middle - middle.mean(0)
    # of a few images, the mean is in part chance
    within = (sums.squares - (count[:, None] * middle.square()).sum(0)) / count.sum()
    chance = within * (1 / count).mean()
    between = apart.square().mean(0)
    apart = apart * ((between - chance) / between.clamp_min(1e-12)).clamp(0, 1)
    left, sizes, directions = torch.linalg.svd(apart, full_matrices=False)
    found = (left * sizes)[:, :RANK]
    codes = found.new_zeros(len(there), found.shape[1])
    codes[there] = found
    return Classes(codes.float(), directions[:RANK].float().contiguous())


def predicted(output: Any, classes: Classes) -> Tensor:
    """The chance that a frame is of each class, (N, K), by the logits or chances it got."""
    fits = isinstance(output, Tensor) and output.dim() == 2
    if not fits or output.shape[1] != len(classes.codes):
        raise ValueError(
            f"The network returned {describe(output)}, expected predictions (N, "
            f"{len(classes.codes)}): so many classes were measured. For a network that gives "
            "something else: stream_(model, memory='pool')."
        )
    output = output.to(classes.codes)
    # a network may end in a softmax: another one would make all classes alike
    certain = (output >= 0).all(1) & ((output.sum(1) - 1).abs() < 0.01)
    chance = torch.where(certain[:, None], output, output.softmax(1))
    # a frame that is not finite has no class, and is not remembered
    return chance.nan_to_num(0.0)


def effect_of(chance: Tensor, classes: Classes) -> Moments:
    """What classes do to the mean and the log variance of frames, (N, T) each.

    Args:
        chance: that a frame is of a class, (N, K), or by how much it is higher than usual.
    """
    of_mean, of_log_var = ((chance @ classes.codes) @ classes.directions).chunk(2, 1)
    return of_mean, of_log_var


def without_class(moments: Moments, effect: Moments) -> Moments:
    """Moments of frames, (N, T), without what their classes did to them."""
    (mean, var), (of_mean, of_log_var) = moments, effect
    mean = (mean - of_mean).clamp(-FARTHEST, FARTHEST)
    return mean, (var * (-of_log_var).exp()).clamp(0.0, FARTHEST**2)


def spread_of(classes: Classes) -> Tensor:
    """The variance that classes add to that of frames of no class, (T,)."""
    of_mean, _ = (classes.codes @ classes.directions).chunk(2, 1)
    known = (classes.codes != 0).any(1).sum().clamp_min(1)
    return (of_mean.square().sum(0) / known).clamp_max(0.9)  # of the source's whole variance, 1


def classes_of(
    model: nn.Module, loader: Loader, *, predictions: bool = True, samples: int = SAMPLES
) -> Classes | None:
    """Of a network's source images; None without any, and where they are not of one class each.

    Args:
        model: the network, converted or not; it is left as it was.
        loader: yields (x, y) of source images, as the network takes them.
        predictions: whether outputs are known to be of classes; else they have to agree with the
            labels, or an embedding would be taken for predictions.
        samples: images to look at, at most.
    """
    sums: Sums | None = None
    said: list[Tensor] = []  # predicted classes and labels, (2, N)
    with borrowed(model, alpha=0.0) as layers, torch.no_grad():
        for x, y in batches(loader, device_of(model)):
            output, moments = _frames(model, list(layers.values()), x)
            labels = _labels(output, y)
            if moments is None or labels is None:
                _say_why(output)
                return None
            known = labels >= 0  # others are left out of the loss as well
            said.append(torch.stack((output.argmax(1), labels))[:, known])
            mean, var = (m[known] for m in moments)
            more = sum_up(mean, var, labels[known], output.shape[1])
            sums = more if sums is None else Sums(*map(torch.add, sums, more))
            if sums.images.sum() >= samples:
                break
    if sums is None or not sums.images.sum():
        return None
    if not predictions and agreement(*torch.cat(said, 1)) < AGREEMENT:
        logger.warning(
            "post-training: the network's outputs do not agree with the labels, and are taken for "
            "no predictions of classes. A stream will not know what classes do to statistics."
        )
        return None
    return Classes(*(t.cpu() for t in measure_classes(sums)))


def agreement(one: Tensor, other: Tensor) -> float:
    """Cohen's kappa of two lists of classes: 0 is chance, 1 is the same.

    Example:
        >>> agreement(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 1, 0]))
        0.0
    """
    number = int(max(one.max(), other.max())) + 1
    shares = [torch.bincount(classes, minlength=number) / len(classes) for classes in (one, other)]
    chance = float(shares[0] @ shares[1])
    same = float((one == other).float().mean())
    return (same - chance) / max(1 - chance, 1e-12)


def _say_why(output: Any) -> None:
    """Nothing is known of classes: as it should be for scenes, say, or a surprise."""
    if isinstance(output, Tensor):
        logger.info("post-training: source images are not of one class each")
    else:
        logger.warning(
            "post-training: the network returned %s, expected (N, classes). A stream will not know "
            "what classes do to statistics; have the network return its logits alone if it should.",
            describe(output),
        )


def _labels(output: Any, y: Tensor) -> Tensor | None:
    """The class of every image, (N,); None if there is no such thing."""
    if not isinstance(output, Tensor) or output.dim() != 2:
        return None
    if y.shape == output.shape:
        return y.argmax(1) if are_chances(y) else None  # or numbers to predict
    if y.shape != (len(output),) or y.is_floating_point() or y.max() >= output.shape[1]:
        return None
    return y


def _frames(model: nn.Module, layers: list[TTNormBase], x: Tensor) -> tuple[Any, Moments | None]:
    """A network's output, and the moments in all of its norms, (N, T).

    Of norms that are not used they are the source's. None if one sees other samples than the
    network.
    """
    outputs: list[Any] = []
    uses: dict[int, list[Moments]] = {}
    for index, moments in entering(layers, lambda: outputs.append(model(x.clone()))):
        uses.setdefault(index, []).append(moments)
        if len(moments[0]) != len(x):
            return outputs[0], None
    parts = []
    for index, layer in enumerate(layers):
        source = torch.zeros(len(x), layer.running_mean.numel(), device=x.device)
        parts.append(of_all_uses(uses.get(index, [(source, source + 1)])))
    mean, var = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
    return outputs[0], (mean, var)
