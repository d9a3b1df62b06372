"""Tables for a terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from .cells import Cell
from .tables import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def to_rich(table: Table) -> RichTable:
    """For a terminal: our error, and the paper's in brackets."""
    from rich.table import Table as RichTable

    has_theirs = any(cell.paper is not None for _, cells in table.rows for cell in cells)
    note = f"{table.note} In brackets the paper's." if has_theirs else table.note
    out = RichTable("", *table.columns, title=table.title, caption=note)
    for column in out.columns[1:]:
        column.justify = "right"
    bold = _bold(table)
    for name, cells in table.rows:
        texts = []
        for cell in cells:
            text = _ours(cell)
            text = f"[bold]{text}[/bold]" if id(cell) in bold else text
            texts.append(text + ("" if cell.paper is None else f" [dim]({cell.paper:.2f})[/dim]"))
        out.add_row(name, *texts)
    return out


def to_markdown(table: Table) -> str:
    """For a document: our error, the best of a column in bold, the paper's and the difference in
    brackets."""
    bold = _bold(table)
    lines = [
        "| | " + " | ".join(table.columns) + " |",
        "|---" * (len(table.columns) + 1) + "|",
    ]
    for name, cells in table.rows:
        texts = []
        for cell in cells:
            text = _ours(cell)
            text = f"**{text}**" if id(cell) in bold else text
            texts.append(text + _beside(cell))
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", table.note, ""])


def to_latex(table: Table) -> str:
    """For a paper: booktabs, our error, the best of a column in bold, the paper's small in
    brackets."""
    bold = _bold(table)
    lines = [
        f"% {table.title}. {table.note}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(["", *table.columns]) + r" \\",
        r"\midrule",
    ]
    for name, cells in table.rows:
        texts = [_ours(cell, r"$\pm$") for cell in cells]
        for index, cell in enumerate(cells):
            if id(cell) in bold:
                texts[index] = rf"\textbf{{{texts[index]}}}"
            if cell.paper is not None:
                texts[index] += rf" {{\scriptsize ({cell.paper:.2f})}}"
        lines.append(
            " & ".join([name.replace("α", r"$\alpha$").replace("λ", r"$\lambda$"), *texts]) + r" \\"
        )
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(table: Table) -> str:
    """For a spreadsheet: every column thrice: ours, the deviation over seeds, the paper's."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kinds = ("", " deviation", " paper")
    writer.writerow(["row", *(column + kind for column in table.columns for kind in kinds)])
    for name, cells in table.rows:
        values = [value for cell in cells for value in cell]
        writer.writerow([name, *("" if v is None else f"{v:.4f}" for v in values)])
    return out.getvalue()


def _bold(table: Table) -> set[int]:
    """The ids of cells that no other of their column is better than, to the digits that are shown;
    of rows on the same images."""
    rows = [cells for name, cells in table.rows if name not in table.apart]
    found = set()
    for column in zip(*rows, strict=True):
        known = [cell for cell in column if cell.ours is not None]
        best = (max if table.higher else min)((round(c.ours, 2) for c in known), default=None)
        found |= {id(cell) for cell in known if round(cell.ours, 2) == best}
    return found


def _ours(cell: Cell, plus_minus: str = "±") -> str:
    if cell.ours is None:
        return "–"
    if cell.deviation is None:
        return f"{cell.ours:.2f}"
    return f"{cell.ours:.2f} {plus_minus} {cell.deviation:.2f}"


def _beside(cell: Cell) -> str:
    """The paper's error, and by how many points ours is higher."""
    if cell.paper is None:
        return ""
    if cell.ours is None:
        return f" ({cell.paper:.2f})"
    return f" ({cell.paper:.2f}, {cell.ours - cell.paper:+.2f})"
