"""Tables of errors, as pure functions of records; `formats` writes them.

Each cell has our error beside the paper's; for segmentation it is the mean overlap of classes, of
which more is better. A cell is the mean over all domains of the table; where
a run was not finished and domains are missing, the cell is empty rather than wrong.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..data.corruptions import CORRUPTIONS
from ..norms import NORMS
from . import paper
from .cells import Cell, average_of, mean_cell, measure, most_seeds, to_cell
from .experiments import FIRST, Experiment, is_dear
from .names import ABLATIONS, NAMES, row_name
from .records import Record, variant_of
from .variants import OF_KIND


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of errors: a name and a cell per column in every row.

    Args:
        higher: whether more is better.
        apart: names of rows that are not compared with others, as those on fewer images are not.
        domains: by the names of rows, what their cells are means over, where all are over the same.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    note: str
    higher: bool = False
    apart: frozenset[str] = frozenset()
    domains: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)


def split(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records that belong into one table, by a title for it and the scenario.

    A table has one data set, scenario, severity, network and number of images, but for methods that
    are too dear for all of them (`experiments.is_dear`), and for domains of scenes, which differ in
    severity and number.
    """
    records = list(records)
    whole = [r for r in records if not _is_dear(r)]

    def datasets_with_several(value: Callable[[Record], Any]) -> set[str]:
        pairs = {(r["dataset"], value(r)) for r in whole or records}
        return {dataset for dataset, times in Counter(d for d, _ in pairs).items() if times > 1}

    severities = datasets_with_several(lambda r: r["severity"])
    networks = datasets_with_several(lambda r: r["model"]["name"])
    subsets = datasets_with_several(lambda r: r["config"]["subset"])
    found: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        title = [r["dataset"]]
        scenes = "miou" in r
        if not scenes and r["dataset"] in severities:
            title.append(f"severity {r['severity']}")
        if r["dataset"] in networks:
            title.append(r["model"]["name"])
        dear = scenes or _is_dear(r)
        if not dear and r["dataset"] in subsets:
            title.append(f"{r['config']['subset']} images")
        found.setdefault((", ".join(title), r["scenario"]), []).append(r)
    return found


def by_batch_size(records: Iterable[Record], *, dataset: str, scenario: str) -> Table:
    """A row per norm and method, a column per batch size and one for their average."""
    chosen = [r for r in records if r["dataset"] == dataset and r["scenario"] == scenario]
    chosen = [r for r in chosen if is_of_its_norm(r)]
    if not chosen:
        raise ValueError(f"There are no records of {dataset} in the scenario {scenario}.")
    sizes = sorted({r["batch_size"] for r in chosen}, reverse=True)
    domains = {r["domain"] for r in chosen}
    found = {}
    for norm, method in _rows(chosen):
        row = []
        for size in sizes:
            key = (norm, method, size)
            here = [r for r in chosen if (r["norm"], r["method"], r["batch_size"]) == key]
            theirs = paper.error(scenario, dataset, *key) if _as_in_the_paper(chosen) else None
            row.append(measure(here, domains, theirs))
        found[_row_title(norm, method, chosen)] = row
    return Table(
        f"{dataset}, {scenario}: {score_name(chosen)}",
        [*(f"B = {size}" for size in sizes), "average"],
        [(title, [*map(to_cell, row), average_of(row)]) for title, row in found.items()],
        _note(chosen, most_seeds(found.values())),
        "miou" in chosen[0],
        _apart(chosen),
        dict.fromkeys(found, frozenset(domains)),
    )


def by_domain(records: Iterable[Record], *, dataset: str, scenario: str, batch_size: int) -> Table:
    """A row per norm and method, a column per domain and one for their average."""
    chosen = [
        r
        for r in records
        if (r["dataset"], r["scenario"], r["batch_size"]) == (dataset, scenario, batch_size)
        and is_of_its_norm(r)
    ]
    if not chosen:
        raise ValueError(f"There are no records of {dataset}, {scenario} at B = {batch_size}.")
    domains = list(dict.fromkeys(r["domain"] for r in chosen))
    corrupted = [d for d in domains if d in CORRUPTIONS]
    # the day that a network was trained for, and the dusk, are no corruptions
    averaged, of_what = domains, ""
    if corrupted and len(corrupted) < len(domains):
        averaged, of_what = corrupted, " of corruptions"
    published = _as_in_the_paper(chosen)
    rows, most = [], 0
    for norm, method in _rows(chosen):
        here = [r for r in chosen if (r["norm"], r["method"]) == (norm, method)]
        row = {}
        for d in domains:
            cell = (scenario, dataset, norm, method, batch_size, d)
            theirs = paper.corruption_error(*cell) if published else None
            row[d] = measure([r for r in here if r["domain"] == d], {d}, theirs)
        average = average_of([row[d] for d in averaged])
        rows.append((_row_title(norm, method, chosen), [*map(to_cell, row.values()), average]))
        most = max(most, most_seeds([row.values()]))
    title = f"{dataset}, {scenario}, B = {batch_size}: {score_name(chosen)}"
    columns = [*(d.replace("_", " ") for d in domains), "average" + of_what]
    return Table(title, columns, rows, _note(chosen, most), "miou" in chosen[0], _apart(chosen))


def by_corruption(records: Iterable[Record], *, dataset: str, scenario: str) -> Table:
    """TTN alone: a row per corruption and one for their average, a column per batch size."""
    what = (dataset, scenario, "ttn", "none")
    chosen = [
        r
        for r in records
        if (r["dataset"], r["scenario"], r["norm"], r["method"]) == what and is_of_its_norm(r)
    ]
    if not chosen:
        raise ValueError(f"There are no records of TTN on {dataset}, {scenario}.")
    sizes = sorted({r["batch_size"] for r in chosen}, reverse=True)
    published = _as_in_the_paper(chosen)
    found = {}
    for domain in dict.fromkeys(r["domain"] for r in chosen):
        row = []
        for size in sizes:
            here = [r for r in chosen if (r["domain"], r["batch_size"]) == (domain, size)]
            cell = (scenario, dataset, "ttn", "none", size, domain)
            theirs = paper.corruption_error(*cell) if published else None
            row.append(measure(here, {domain}, theirs))
        found[domain] = row
    rows = [(domain.replace("_", " "), [*map(to_cell, row)]) for domain, row in found.items()]
    columns = zip(*found.values(), strict=True)
    rows.append(("average", [average_of(column) for column in columns]))
    domains = {domain.replace("_", " "): frozenset({domain}) for domain in found}
    return Table(
        f"TTN on {dataset}, {scenario}: {score_name(chosen)}",
        [f"B = {size}" for size in sizes],
        rows,
        _note(chosen, most_seeds(found.values())),
        # one corruption is easier than another, not better
        apart=frozenset(title for title, _ in rows),
        domains=domains | {"average": frozenset(found)},
    )


def by_class(
    records: Iterable[Record], *, domain: str, batch_size: int, classes: Sequence[str]
) -> Table:
    """A row per norm and method, a column per class: its overlap in one domain of scenes.

    Args:
        records: of one data set and scenario.
        classes: their names; one that is nowhere in the domain has an empty cell.
    """
    chosen = [r for r in records if (r["domain"], r["batch_size"]) == (domain, batch_size)]
    chosen = [r for r in chosen if is_of_its_norm(r)]
    if not chosen:
        raise ValueError(f"There are no records of {domain} at B = {batch_size}.")
    rows, most = [], 0
    for norm, method in _rows(chosen):
        found = [r["iou"] for r in chosen if (r["norm"], r["method"]) == (norm, method)]
        cells = [
            mean_cell([100 * v for v in values if v is not None])
            for values in zip(*found, strict=True)
        ]
        rows.append((row_name(norm, method), cells))
        most = max(most, len(found))
    title = f"{chosen[0]['dataset']}, {domain}, B = {batch_size}: IoU in %"
    return Table(title, list(classes), rows, _note(chosen, most), higher=True)


def score_name(records: Sequence[Record]) -> str:
    return "mIoU in %" if "miou" in records[0] else "error in %"


def by_variant(
    records: Iterable[Record], *, dataset: str, names: Mapping[str, str], title: str
) -> Table:
    """A row per variant of post-training, a column per batch size and one for their average
    where there are several.

    Args:
        names: what readers call a variant, in the order of the rows.
    """
    found: dict[str, dict[int, list[Record]]] = {}
    for r in records:
        what = (r["dataset"], r["scenario"], r["norm"], r["method"])
        fitted = variant_of(r)
        if what == (dataset, "single", "ttn", "none") and fitted and fitted[0] in names:
            found.setdefault(fitted[0], {}).setdefault(r["batch_size"], []).append(r)
    if not found:
        raise ValueError(f"There are no records of {dataset} for {title}.")
    # the default was run at more batch sizes, for other tables
    ablated = [by_size for variant, by_size in found.items() if variant != "default"]
    sizes = sorted(set().union(*(ablated or found.values())), reverse=True)
    chosen = [r for by_size in found.values() for size in sizes for r in by_size.get(size, [])]
    domains = {r["domain"] for r in chosen}
    published = _as_in_the_paper(chosen)
    measured = {}
    for variant, name in names.items():
        row = []
        for size in sizes:
            theirs = paper.variant_error(dataset, variant, size) if published else None
            row.append(measure(found.get(variant, {}).get(size, []), domains, theirs))
        measured[name] = row
    several = len(sizes) > 1
    return Table(
        f"{dataset}, {title}: error in %",
        [f"B = {size}" for size in sizes] + ["average"] * several,
        [(name, [*map(to_cell, r), *([average_of(r)] * several)]) for name, r in measured.items()],
        _note(chosen, most_seeds(measured.values())),
        domains=dict.fromkeys(measured, frozenset(domains)),
    )


def source_error(records: Iterable[Record], domains: frozenset[str]) -> Cell:
    """The source network's mean over these domains, ours and the paper's.

    No batch size changes it: it is taken from the first that has all the domains.

    Args:
        records: of one data set and scenario.
    """
    by_size: dict[int, list[Record]] = {}
    for r in records:
        if (r["norm"], r["method"]) == ("source", "none") and r["domain"] in domains:
            by_size.setdefault(r["batch_size"], []).append(r)
    for here in by_size.values():
        what = (here[0]["scenario"], here[0]["dataset"], "source", "none")
        published = [paper.error(*what, size) for size in paper.BATCH_SIZES]
        known = [error for error in published if error is not None and _as_in_the_paper(here)]
        measured = measure(here, set(domains), known[0] if known else None)
        if measured.ours:
            return to_cell(measured)
    return Cell(None)


def of_experiment(experiment: Experiment, records: Iterable[Record]) -> list[Table]:
    """The tables that show an experiment, of all that is in the records."""
    found = []
    for (_, scenario), group in split(records).items():
        dataset = group[0]["dataset"]
        if dataset.removesuffix("-c") not in experiment.datasets:
            continue
        here = [r for r in group if (r["norm"], r["method"]) in experiment.rows]
        if scenario in experiment.scenarios and any(is_of_its_norm(r) for r in here):
            found.append(by_batch_size(here, dataset=dataset, scenario=scenario))
            if found[-1].higher:  # domains are as different as weather and dusk
                found += every_domain(here, dataset, scenario).values()
            if experiment.each_corruption:
                found.append(by_corruption(here, dataset=dataset, scenario=scenario))
        variants = fitted_variants(group)
        for title, names in ABLATIONS.items():
            shown = set(experiment.variants) == names.keys() and variants & names.keys()
            if shown and scenario == "single":
                found.append(by_variant(group, dataset=dataset, names=names, title=title))
    return found


def fitted_variants(records: Iterable[Record]) -> set[str]:
    """The variants of post-training that were scored as the norm "ttn"."""
    return {v[0] for r in records if r["norm"] == "ttn" and (v := variant_of(r))}


def every_domain(records: Sequence[Record], dataset: str, scenario: str) -> dict[int, Table]:
    """`by_domain` for every batch size, the smallest first."""
    return {
        size: by_domain(records, dataset=dataset, scenario=scenario, batch_size=size)
        for size in sorted({r["batch_size"] for r in records})
    }


def _rows(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Norms and methods in the order of NAMES, whatever was run first; constants by value."""
    order = list(NAMES)

    def place(pair: tuple[str, str]) -> tuple[Any, ...]:
        norm, method = pair
        known = norm in NAMES
        return (method != "none", method, not known, order.index(norm) if known else norm)

    return sorted({(r["norm"], r["method"]) for r in records}, key=place)


def _is_dear(record: Record) -> bool:
    few = record["config"]["subset"] == FIRST
    return few and is_dear(record["norm"], record["method"])


def _row_title(norm: str, method: str, records: Sequence[Record]) -> str:
    """The row's name, with its number of images where other rows have more."""
    own = _images_of_rows(records)[norm, method]
    fewer = own < max(_images_of_rows(records).values())
    name = row_name(norm, method)
    if norm == "ttn-counted" and not all(_is_strong(r) for r in records if r["norm"] == norm):
        name = name.replace("stronger prior, ", "")  # of an alpha file of the user's
    return name + (f" ({own:,} images)" if fewer else "")


def _is_strong(record: Record) -> bool:
    variant = variant_of(record)
    return variant is not None and variant[0] == OF_KIND["strong"]


def _apart(records: Sequence[Record]) -> frozenset[str]:
    """The names of rows that were run on fewer images than others."""
    images = _images_of_rows(records)
    most = max(images.values())
    return frozenset(_row_title(*row, records) for row, own in images.items() if own < most)


def _images_of_rows(records: Sequence[Record]) -> dict[tuple[str, str], int]:
    images: dict[tuple[str, str], int] = {}
    for r in records:
        row = (r["norm"], r["method"])
        images[row] = max(r["config"]["subset"], images.get(row, 0))
    return images


def is_of_its_norm(record: Record) -> bool:
    """Whether its alpha is the one that the norm stands for, and no ablation of it."""
    if record.get("experiment") == "evaluate":
        return True  # which scores what it is given
    variant = variant_of(record)
    norm = NORMS.get(record["norm"])
    own = OF_KIND.get(norm.alpha_file or "") if norm else None
    return variant is None or variant[0] in ("default", "dynamic", own)


def _as_in_the_paper(records: Sequence[Record]) -> bool:
    """Whether these are all the domains of the paper's tables, at its severity."""
    domains, severities = _domains_of(records), {r["severity"] for r in records}
    return (domains == set(CORRUPTIONS) and severities == {5}) or domains == {"clean"}


def _domains_of(records: Sequence[Record]) -> set[str]:
    """Whose images were met, one domain by itself or several in one stream."""
    found: set[str] = set()
    for r in records:
        together = r["config"].get("domains", [])
        found |= {r["domain"]} if r["domain"] in together or not together else set(together)
    return found


def _note(records: Sequence[Record], seeds: int) -> str:
    """What a table is of, where a cell has up to so many seeds."""
    models = sorted({r["model"]["name"] for r in records})
    images = sorted({r["config"]["subset"] for r in records})
    count = " or ".join(f"{n:,}" for n in images)
    runs = f", up to {seeds} seeds" if seeds > 1 else ""
    divided = {r["batch_size"] for r in records if "streams" in r["config"]}
    sizes = ", ".join(map(str, sorted(divided, reverse=True)))
    streams = f" At B = {sizes}, streams that are remembered have a share of the images each."
    streams = streams if sizes else ""
    scenes = " mIoU in percent: more is better." if "miou" in records[0] else ""
    each = "" if records[0]["scenario"] == "mixed-once" else " a domain"
    corruptions = len(_domains_of(records) & set(CORRUPTIONS))
    of = ""
    if corruptions:
        severities = " and ".join(map(str, sorted({r["severity"] for r in records} - {0})))
        of = f"{corruptions} corruption{'s' * (corruptions > 1)} of severity {severities}; "
    return f"{', '.join(models)}; {of}{count} images{each}{runs}.{streams}{scenes}"
