"""Figures, as pure functions of records and alpha files; each returns a matplotlib Figure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ..data.corruptions import CORRUPTIONS
from .names import METHOD_NAMES, NAMES, data_name, scenario_name
from .records import Record, variant_of
from .tables import by_batch_size, by_domain, score_name

# Okabe and Ito's colours and Tol's, for colour-blind readers; TTN always has the same one
_COLOURS = {
    "Source (CBN)": "#7f7f7f",
    "TBN": "#d55e00",
    "α-BN": "#56b4e9",
    "AdaptiveBN": "#0072b2",
    "MixNorm": "#cc79a7",
    "EMA": "#aa4499",
    "TTN": "#009e73",
    "TTN (scaled)": "#ddcc77",
    "TTN (stronger prior, by batch size)": "#e69f00",
    "TTN (dynamic)": "#000000",
    "TTN (stream)": "#882255",
    "TTN (stream, one domain)": "#117733",
    "TTN (stream, balanced)": "#332288",
    "TTN (stream, one pool)": "#999933",
}
_THICK = ("TTN", "TTN (stream)")
# A norm has its colour whatever adapts over it; what does has a line and a marker, and so have
# norms whose colours some readers cannot tell from another's
_LINES = {"": "o-", "TENT": "^--", "SWR": "s:", "CoTTA": "D-.", "online": "v-."}
_LINES |= {METHOD_NAMES["sliding"]: "x-."}
_NORM_LINES = {
    "Source (CBN)": "-",
    "AdaptiveBN": "P-",
    "α-BN": "X-",
    "MixNorm": "d--",
    "EMA": "*--",
    "TTN (stronger prior, by batch size)": "D-",
    "TTN (stream, one pool)": "o--",
}
# Lines of a first look, and what newcomers call them
_IN_SHORT = {
    "source": "the network as it is",
    "tbn": "batch statistics",
    "adaptive-bn": "AdaptiveBN",
    "ttn": "TTN",
    "ttn-stream": "TTN with a stream's memory",
}
# Tol's muted colours and two greys, for CamVid's classes in their order
_MASKS = (
    "#88ccee", "#dddddd", "#882255", "#555555", "#ddcc77", "#117733",
    "#cc6677", "#999933", "#332288", "#aa4499", "#44aa99",
)  # fmt: skip


def error_by_batch_size(records: Iterable[Record], *, dataset: str, scenario: str) -> Figure:
    """Error against the size of the test batch, a line per norm (the paper's Fig. 1d)."""
    records = [r for r in records if not r["norm"].startswith("constant-")]
    table = by_batch_size(records, dataset=dataset, scenario=scenario)
    sizes = [column.removeprefix("B = ") for column in table.columns[:-1]]
    figure, axes = _figure(7.4, 4.0)
    plain = []
    for name, cells in table.rows:
        method, norm = _method_and_norm(name)
        errors = [float("nan") if c.ours is None else c.ours for c in cells[:-1]]
        if np.isfinite(errors).sum() < 2 <= len(sizes):
            continue  # one point is no line
        line_style = _LINES.get(method, "o-") if method else _NORM_LINES.get(norm, "o-")
        colour = _COLOURS.get(norm)
        (line,) = axes.plot(sizes, errors, line_style, markersize=4, label=name, color=colour)
        if name in _THICK:  # and pale below the thin ones: both are seen where they are the same
            line.set(linewidth=5, alpha=0.45, zorder=3)
        else:
            line.set(linewidth=1.3, zorder=4)
        if not method and norm not in ("TBN", "EMA"):
            plain += [error for error in errors if error == error]
    # Batch statistics fall to chance at B = 1, and what follows or adapts over them; the view stays
    # where the others differ.
    if plain and not table.higher:
        every = [c.ours for _, cells in table.rows for c in cells[:-1] if c.ours is not None]
        ceiling = min(1.6 * max(plain), 1.05 * max(every), 101.0)
        axes.set_ylim(min(every) * 0.9, ceiling)
        _tell_what_is_above(axes, ceiling)
    axes.set_xlabel("images in a test batch")
    axes.set_ylabel(score_name(records))
    axes.set_title(_what(records, dataset, scenario), loc="left", fontsize=9)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure


def in_short(records: Iterable[Record], *, dataset: str) -> Figure:
    """Error against the size of the test batch, of what a newcomer should know of and no more.

    Lines have their names where they end; batch statistics leave the picture at the top.
    """
    chosen = [r for r in records if r["norm"] in _IN_SHORT and r["method"] == "none"]
    table = by_batch_size(chosen, dataset=dataset, scenario="single")
    errors = {
        name: np.array([np.nan if c.ours is None else c.ours for c in cells[:-1]])
        for name, cells in table.rows
        if any(c.ours is not None for c in cells[:-1])
    }
    others = [error for name, line in errors.items() if name != NAMES["tbn"] for error in line]
    figure, axes = _figure(7.4, 3.6)
    low, high = 0.9 * np.nanmin(others), min(1.15 * np.nanmax(others), 97.0)
    axes.set_ylim(low, high)
    ends: dict[str, float] = {}
    there = {norm: text for norm, text in _IN_SHORT.items() if NAMES[norm] in errors}
    for norm, text in there.items():
        line, colour = errors[NAMES[norm]], _COLOURS[NAMES[norm]]
        axes.plot(range(len(line)), line, "-" if norm == "source" else "o-", color=colour)
        thin = norm == "adaptive-bn"
        axes.lines[-1].set(linewidth=1 if thin else 2, markersize=3 if thin else 5)
        (places,) = np.isfinite(line).nonzero()  # of batch sizes that have been scored
        if norm == "tbn":
            end = np.interp(high, line[places], places) + 0.12
            axes.text(end, high, f"{text}, up to {np.nanmax(line):.0f} %", color=colour, va="top")
        else:
            ends[norm] = line[places[-1]]
    for norm, height in _apart(ends, 0.06 * (high - low)).items():
        place = len(table.columns) - 2 + 0.12
        axes.text(place, height, _IN_SHORT[norm], color=_COLOURS[NAMES[norm]], va="center")
    axes.set_xlim(-0.2, len(table.columns) + 0.6)
    sizes = [column.removeprefix("B = ") for column in table.columns[:-1]]
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlabel("images in a test batch", loc="left")
    title = f"{_what(chosen, dataset, 'single')}: {score_name(chosen)}"
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def _apart(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """The same heights, raised where one would be less than a gap above another."""
    placed: dict[str, float] = {}
    lowest = -np.inf
    for name in sorted(heights, key=lambda name: heights[name]):
        placed[name] = max(heights[name], lowest)
        lowest = placed[name] + gap
    return placed


def _what(records: Sequence[Record], dataset: str, scenario: str) -> str:
    """The data set, the network, the scenario and what is averaged."""
    domains = {r["domain"] for r in records}
    mean = f", {len(domains)} corruptions" if len(domains) > 1 else ""
    what = "clean test set" if scenario == "source" else scenario_name(scenario)
    return f"{_data_and_network(records, dataset)}, {what}{mean}"


def _data_and_network(records: Sequence[Record], dataset: str) -> str:
    networks = ", ".join(sorted({r["model"]["name"] for r in records}))
    return f"{data_name(dataset)} ({networks})"


def _method_and_norm(row: str) -> tuple[str, str]:
    """Of a row's name: methods without a norm's run over TBN."""
    method, _, norm = re.sub(r" \([\d,]+ images\)", "", row).rpartition(" + ")
    if not method and norm in _LINES:
        return norm, "TBN"
    return method, norm


def error_by_domain(
    records: Iterable[Record],
    *,
    dataset: str,
    scenario: str,
    batch_size: int,
) -> Figure:
    """Error under every corruption, a bar for source, TBN and TTN, or for all norms if none is."""
    records = [r for r in records if r["method"] == "none"]
    chosen = [r for r in records if r["norm"] in ("source", "tbn", "ttn")] or records
    table = by_domain(chosen, dataset=dataset, scenario=scenario, batch_size=batch_size)
    figure, axes = _figure(9.0, 3.8)
    width = 0.8 / len(table.rows)
    for index, (name, cells) in enumerate(table.rows):
        offset = (index - (len(table.rows) - 1) / 2) * width
        places = [place + offset for place in range(len(cells))]
        heights = [float("nan") if cell.ours is None else cell.ours for cell in cells]
        axes.bar(places, heights, width, label=name, color=_COLOURS.get(name))
    axes.set_xticks(range(len(table.columns)), table.columns, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(score_name(chosen))
    if table.columns[-1].startswith("average"):
        axes.axvline(len(table.columns) - 1.5, color="0.6", linewidth=0.8)
    data = _data_and_network(chosen, dataset)
    title = f"{data}, {scenario_name(scenario)}, B = {batch_size}"
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(frameon=False, fontsize=8, ncols=len(table.rows), loc="outside upper right")
    return figure


def alpha_by_depth(
    alpha: Mapping[str, Tensor], title: str, prior: Mapping[str, Tensor] | None = None
) -> Figure:
    """Every channel's alpha over the depth of the network, and the layers' means (Fig. 4).

    Args:
        prior: the layers' means of which are drawn as well.
    """
    figure, axes = _figure(8.0, 3.6)
    start, ends, centres, means = 0, [], [], []
    for values in alpha.values():
        places = range(start, start + len(values))
        label = None if start else "a channel"
        (dots,) = axes.plot(
            places, values.tolist(), ".", markersize=1.8, color="#56b4e9", label=label
        )
        dots.set_rasterized(True)  # thousands of channels make a large drawing
        centres.append(start + len(values) / 2)
        means.append(values.mean().item())
        start += len(values)
        ends.append(start)
    axes.plot(centres, means, color="#d55e00", linewidth=2, label="mean of a layer")
    if prior is not None:
        before = [prior[name].mean().item() for name in alpha]
        axes.plot(centres, before, "--", color="#0072b2", label="mean of its prior")
    for end in ends[:-1]:
        axes.axvline(end, color="0.92", linewidth=0.6, zorder=0)
    axes.set_xlim(0, start)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("channel, from the first layer to the last; lines are between layers")
    axes.set_ylabel("alpha: 0 source, 1 batch")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8, markerscale=4)
    return figure


def corruption_by_corruption(
    records: Iterable[Record], *, dataset: str, what: str, batch_size: int = 200
) -> Figure:
    """Error under each corruption (rows) where another stood in for the simulated shift (columns).

    Colours are points above and below the row's last column, the default augmentation (the paper's
    Fig. 5), or below its mean where that is not there.

    Args:
        what: "prior" or "alpha", that the corruption was an augmentation for.
    """
    errors: dict[str, dict[str, list[float]]] = {}
    for r in records:
        what_is_scored = (r["dataset"], r["scenario"], r["norm"], r["method"], r["batch_size"])
        fitted = variant_of(r)
        if what_is_scored == (dataset, "single", "ttn", "none", batch_size) and fitted:
            column = errors.setdefault(fitted[0].removeprefix(f"{what}-"), {})
            column.setdefault(r["domain"], []).append(100 * r["wrong"] / r["n"])
    columns = [c for c in (*CORRUPTIONS, "default") if c in errors]
    rows = [c for c in CORRUPTIONS if all(c in errors[column] for column in columns)]
    grid = np.array([[np.mean(errors[column][row]) for column in columns] for row in rows])
    usual = grid[:, -1:] if columns[-1] == "default" else grid.mean(1, keepdims=True)
    worse = grid - usual
    most = np.abs(worse).max() or 1.0
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    axes = figure.subplots()
    # orange and purple, for all eyes; worse is orange
    shown = axes.imshow(worse, cmap="PuOr_r", aspect="auto", vmin=-most, vmax=most)
    for (row, column), value in np.ndenumerate(grid):
        dark = abs(worse[row, column]) > 0.7 * most
        colour = "white" if dark else "black"
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(shown, ax=axes, label="points above the last column", shrink=0.6)
    names = [c.replace("_", " ") for c in columns]
    axes.set_xticks(range(len(columns)), names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), [c.replace("_", " ") for c in rows], fontsize=8)
    axes.set_xlabel("augmentation for " + ("the prior" if what == "prior" else "optimising alpha"))
    axes.set_ylabel("test corruption")
    axes.set_title(f"{data_name(dataset)}: error in %, B = {batch_size}", loc="left", fontsize=11)
    return figure


def scenes(rows: Mapping[str, Tensor], classes: Sequence[str], title: str) -> Figure:
    """Frames beside their masks, side by side: a column for each of `rows`, a row for each frame.

    Args:
        rows: "input" are frames, uint8 (N, 3, H, W); others are masks of classes (N, H, W), and
            VOID is black.
        classes: their names, 11 at most.
        title: of the whole.
    """
    palette = to_rgba_array(_MASKS[: len(classes)])[:, :3]
    colours = np.concatenate([palette, np.zeros((256 - len(classes), 3))])
    count = len(next(iter(rows.values())))
    figure = Figure(figsize=(2.6 * len(rows), 2.0 * count + 0.6), layout="constrained")
    grid = figure.subplots(count, len(rows), squeeze=False)
    for column, (name, values) in enumerate(rows.items()):
        for row, value in enumerate(values.numpy()):
            axes = grid[row][column]
            axes.imshow(value.transpose(1, 2, 0) if name == "input" else colours[value])
            axes.set_axis_off()
            if row == 0:
                axes.set_title(NAMES.get(name, name), fontsize=9)
    named = {**dict(zip(classes, palette, strict=True)), "void": "black"}
    handles = [Patch(color=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _tell_what_is_above(axes: Axes, ceiling: float) -> None:
    """Have the legend say how far lines go that leave the picture at the top."""
    for line in axes.lines:
        highest = np.nanmax(np.asarray(line.get_ydata(), dtype=float), initial=0.0)
        if highest > ceiling:
            line.set_label(f"{line.get_label()}, up to {highest:.0f} %")


def save(figure: Figure, path: str | Path, dpi: int = 200) -> None:
    """Write a figure; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": Path(path).name}):
        figure.savefig(path, metadata={"Date": None}, dpi=dpi)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes
