"""The demo's page: pictures, predictions, curves and the table, in one file that needs no other."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from ..bench import figures
from ..bench.job import Domains
from ..bench.names import NAMES
from ..bench.records import Record
from ..bench.tables import Table
from ..posttrain import PostTrainResult

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PICTURES = 8  # of each corruption

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #007a5a; --bad: #c04f00; }
@media (prefers-color-scheme: dark) { :root { --good: #2fc79d; --bad: #ff8a3d; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.best { font-weight: 700; }
.strip { display: grid; grid-template-columns: 7rem repeat(8, 1fr); gap: .3rem; margin: .6rem 0; }
.strip > * { min-width: 0; font-size: .72rem; text-align: center; overflow-wrap: anywhere; }
.strip .name { text-align: left; font-size: .85rem; overflow-wrap: normal; }
.strip img { width: 100%; image-rendering: pixelated; border-radius: 3px; }
.good { color: var(--good); } .bad { color: var(--bad); }
figure { margin: 1rem 0; background: #fff; border-radius: 6px; padding: .5rem; }
figure { overflow-x: auto; }
figure svg { width: 100%; min-width: 40rem; height: auto; display: block; }
@media (max-width: 40rem) {
  .strip { grid-template-columns: 4.5rem repeat(4, 1fr); }
  .strip .more { display: none; }
}
"""


def write_page(
    folder: Path,
    data: Domains,
    predicted: Mapping[str, Mapping[str, Tensor]],
    records: Sequence[Record],
    table: Table,
    result: PostTrainResult,
) -> Path:
    """Write index.html and its figures; returns its path.

    Args:
        folder: there already.
        data: the corrupted images.
        predicted: classes by norm and corruption, of the first images.
        records, table: the errors.
        result: of the post-training.
    """
    assert result.prior is not None
    options = {"dataset": data.dataset, "scenario": "single"}
    drawn = {
        "batch-size": figures.error_by_batch_size(records, **options),
        "corruptions": figures.error_by_domain(records, **options, batch_size=200),
        "alpha": figures.alpha_by_depth(result.alpha, "after post-training", result.prior),
    }
    svg = {name: _svg(figure, folder / f"{name}.svg") for name, figure in drawn.items()}
    path = folder / "index.html"
    path.write_text(_document(data, predicted, table, svg))
    return path


def _document(
    data: Domains,
    predicted: Mapping[str, Mapping[str, Tensor]],
    table: Table,
    svg: Mapping[str, str],
) -> str:
    strips = "".join(_strip(data, domain, predicted) for domain in data.images)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ttnorm demo</title>
<style>{STYLE}</style>
<h1>What a shift does to BatchNorm, and what TTN does about it</h1>
<p>A WRN-40-2 trained on clean CIFAR-10 looks at images as worse cameras and weather would deliver
them. Its weights are the same everywhere on this page; what differs is whose statistics its
BatchNorm layers use: the <b>source</b>'s, the test batch's (<b>TBN</b>), or a mixture that was
learned for every channel (<b>TTN</b>), here with the few steps of post-training you have just
watched.</p>
<h2>What it sees, and what it says</h2>
<p>Pictures on which the three disagree, what they show, and the network's answers in batches of
200: <span class="good">right</span> or <span class="bad">wrong</span>.</p>
{strips}
<h2>Error in %</h2>
<p>B is the number of images in a test batch; numbers are means over the corruptions above. α-BN
takes a tenth of the batch's statistics in every channel, and the stream remembers the images
before, so that it needs no large batch.</p>
{_html_table(table)}
<p>{html.escape(table.note)}</p>
<h2>Small batches</h2>
<p>Statistics of a small batch are noise, and batch statistics alone fall to chance at one image a
batch.</p>
<figure>{svg["batch-size"]}</figure>
<h2>Corruption by corruption</h2>
<p>In batches of 200. Which statistics are right depends on the corruption.</p>
<figure>{svg["corruptions"]}</figure>
<h2>Where the network trusts the batch</h2>
<p>The prior says how much each channel's gradients change under a simulated shift; post-training
starts there. Early layers see the shift and follow the batch, late layers see classes and keep the
source's statistics.</p>
<figure>{svg["alpha"]}</figure>
</html>
"""


def _strip(data: Domains, domain: str, predicted: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Rows of one corruption: pictures, what they show, and what every norm says."""
    chosen = _telling(data.labels, {norm: p[domain] for norm, p in predicted.items()})
    truth = [int(data.labels[index]) for index in chosen]
    pictures = [f'<img src="{_picture(data.images[domain][i])}" alt="">' for i in chosen]
    rows = [
        _row(f"<b>{domain.replace('_', ' ')}</b>", pictures),
        _row("shown", [CLASSES[label] for label in truth]),
    ]
    for norm, found in predicted.items():
        answers = [int(found[domain][index]) for index in chosen]
        cells = [
            f'<span class="good">✓ {CLASSES[answer]}</span>'
            if answer == label
            else f'<span class="bad">✗ {CLASSES[answer]}</span>'
            for answer, label in zip(answers, truth, strict=True)
        ]
        rows.append(_row(NAMES[norm], cells))
    return f'<div class="strip">{"".join(rows)}</div>'


def _row(name: str, cells: Sequence[str]) -> str:
    shown = [f"<div>{cell}</div>" for cell in cells[: PICTURES // 2]]
    shown += [f'<div class="more">{cell}</div>' for cell in cells[PICTURES // 2 :]]  # not on phones
    return f'<div class="name">{name}</div>{"".join(shown)}'


def _telling(labels: Tensor, predicted: Mapping[str, Tensor]) -> list[int]:
    """Images on which the norms disagree come first; of those, as they are in the data set."""
    answers = list(predicted.values())
    count = len(answers[0])
    disagree = [len({int(a[i]) for a in answers}) > 1 for i in range(count)]
    return sorted(sorted(range(count), key=lambda i: not disagree[i])[:PICTURES])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{column}</th>" for column in ("", *table.columns))
    columns = list(zip(*(cells for _, cells in table.rows), strict=True))
    best = [min(c.ours for c in column if c.ours is not None) for column in columns]
    rows = []
    for name, cells in table.rows:
        row = "".join(
            f'<td class="{"best" if cell.ours == low else ""}">{cell.ours:.2f}</td>'
            for cell, low in zip(cells, best, strict=True)
        )
        rows.append(f"<tr><td>{name}</td>{row}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _picture(image: Tensor) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _svg(figure: Figure, path: Path) -> str:
    figures.save(figure, path)
    text = path.read_text()
    return text[text.index("<svg") :]
