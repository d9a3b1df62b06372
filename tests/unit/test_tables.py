"""Tables and figures are functions of records and nothing else."""

import csv
import io
import time

import pytest
import torch
from made_records import RECORDS, all_domains, fitted

from ttnorm.bench import figures, formats, paper, tables
from ttnorm.bench.cells import Cell
from ttnorm.bench.experiments import EXPERIMENTS
from ttnorm.data.corruptions import CORRUPTIONS


def table(records=RECORDS):
    return tables.by_batch_size(records, dataset="cifar10-c", scenario="single")


def test_a_cell_is_the_mean_over_domains_beside_the_paper_s():
    rows = dict(table().rows)
    assert table().columns == ["B = 200", "B = 1", "average"]
    assert rows["TTN"][0] == Cell(12.0, None, 11.67)
    assert rows["α = 0.3"][1] == Cell(15.0, None, 17.42)
    assert rows["TTN"][2].paper == pytest.approx((11.67 + 17.99) / 2)


def test_streams_that_share_the_images_are_mentioned():
    divided = [r | {"config": r["config"] | {"streams": 10}} for r in all_domains("ema", 1, 7)]
    assert "At B = 1, streams" in table(RECORDS + divided).note
    assert "streams" not in table().note


def test_seeds_give_a_deviation():
    more = RECORDS + [r | {"seed": 1, "wrong": r["wrong"] + 2} for r in RECORDS]
    cell = dict(table(more).rows)["TTN"][0]
    assert cell.ours == 13.0
    assert cell.deviation == pytest.approx(2**0.5)
    assert "13.00 ± 1.41" in formats.to_markdown(table(more))


def another_seed(records, **wrong_by_size):
    """As if run once more, with so many more wrong at a batch size."""
    more = {int(size.removeprefix("at_")): wrong for size, wrong in wrong_by_size.items()}
    return [r | {"seed": 1, "wrong": r["wrong"] + more[r["batch_size"]]} for r in records]


def test_an_average_deviates_as_much_as_every_seed_s_own():
    average = dict(table(RECORDS + another_seed(RECORDS, at_200=2, at_1=-1)).rows)["TTN"][-1]
    assert average.ours == 12.25
    assert average.deviation == pytest.approx(0.5 / 2**0.5)  # of 12 and 12.5


def test_an_average_over_cells_of_other_seeds_has_no_deviation():
    more = [r for r in another_seed(RECORDS, at_200=2, at_1=2) if r["batch_size"] == 200]
    cells = dict(table(RECORDS + more).rows)["TTN"]
    assert [cell.deviation is None for cell in cells] == [False, True, True]
    assert cells[-1].ours == 12.5


def test_averages_over_domains_and_over_variants_deviate_too():
    options = {"dataset": "cifar10-c", "scenario": "single"}
    more = RECORDS + another_seed(RECORDS, at_200=2, at_1=-1)
    of_domains = tables.by_domain(more, batch_size=200, **options)
    of_corruptions = tables.by_corruption(more, **options)
    deviations = [cell.deviation for cell in dict(of_corruptions.rows)["average"]]
    assert dict(of_domains.rows)["TTN"][-1].deviation == pytest.approx(2**0.5)
    assert deviations == pytest.approx([2**0.5, 0.5**0.5])
    ttn = [r for r in RECORDS if r["norm"] == "ttn"]
    variants = fitted("layer", 0, ttn) + fitted("layer", 1, another_seed(ttn, at_200=2, at_1=-1))
    names = {"layer": "layer"}
    ((_, cells),) = tables.by_variant(variants, dataset="cifar10-c", names=names, title="t").rows
    assert cells[-1].deviation == pytest.approx(0.5 / 2**0.5)


def test_a_note_counts_the_seeds_of_one_cell():
    """Two of TBN's order, and two of TTN's alpha, are not three."""
    tbn, ttn = ([r for r in RECORDS if r["norm"] == norm] for norm in ("tbn", "ttn"))
    both = tbn + [r | {"seed": 1} for r in tbn] + fitted("default", 0, ttn)
    assert table(both + fitted("default", 1, ttn)).note.endswith("up to 2 seeds.")
    assert "seeds" not in table([*tbn, tbn[0] | {"seed": 1}]).note  # which was not finished


def test_a_cell_that_lacks_a_domain_is_empty():
    cells = dict(table(RECORDS[:-1]).rows)["α = 0.3"]
    assert [c.ours for c in cells] == [15.0, None, None]
    assert "| α = 0.3 | 15.00 (12.05, +2.95) | – (17.42) | –" in formats.to_markdown(
        table(RECORDS[:-1])
    )


def test_other_corruptions_or_severities_are_not_put_beside_the_paper():
    some = [r for r in RECORDS if r["domain"] in ("fog", "snow")]
    mild = [r | {"severity": 3} for r in RECORDS]
    for records in (some, mild):
        assert all(c.paper is None for _, cells in table(records).rows for c in cells)


def test_severities_networks_and_subsets_have_tables_of_their_own():
    mild = [r | {"severity": 3, "wrong": r["wrong"] + 1} for r in RECORDS]
    small = [r | {"config": r["config"] | {"subset": 10}} for r in RECORDS]
    found = tables.split(RECORDS + mild)
    assert list(found) == [
        ("cifar10-c, severity 5", "single"),
        ("cifar10-c, severity 3", "single"),
    ]
    assert found["cifar10-c, severity 3", "single"] == mild
    assert [title for title, _ in tables.split(RECORDS + small)] == [
        "cifar10-c, 100 images",
        "cifar10-c, 10 images",
    ]


def test_a_method_that_is_too_dear_for_all_images_says_how_many_it_had():
    whole = [r | {"config": r["config"] | {"subset": 10000}} for r in RECORDS]
    dear = all_domains(
        "tbn", 200, 1, method="cotta", config=RECORDS[0]["config"] | {"subset": 1000}
    )
    ((title, _), together), *more = tables.split(whole + dear).items()
    assert title == "cifar10-c"
    assert not more
    found = table(together)
    assert "CoTTA (1,000 images)" in dict(found.rows)
    # on other images it is not the best of all
    assert "| CoTTA (1,000 images) | 8.00 | " in formats.to_markdown(found)


def test_two_records_of_one_cell_are_not_mixed_up():
    one, other = (
        [r | {"alpha": {"name": "net.ttn.safetensors", "fingerprint": f}} for r in RECORDS]
        for f in ("0123", "4567")
    )
    said = "two records of source on gaussian_noise at B = 200, of other alpha files"
    with pytest.raises(ValueError, match=said):
        table(one + other)
    others = [r | {"data": "0123"} for r in RECORDS]
    with pytest.raises(ValueError, match=r"gaussian_noise at B = 200, of other images\. Keep"):
        table(RECORDS + others)


def test_records_with_and_without_what_alpha_was_fitted_with_are_of_one_file():
    alpha = {"name": "net.ttn.safetensors", "fingerprint": "0123"}
    mixed = all_domains("ttn", 200, 5, alpha=alpha)
    mixed[3:] = [r | {"alpha": alpha | {"config": {"lr": 0.01}}} for r in mixed[3:]]
    assert dict(table(mixed).rows)["TTN"][0].ours == 12


def test_seeds_of_post_training_are_averaged_and_ablations_left_out():
    ttn = [r for r in RECORDS if r["norm"] == "ttn"]
    worse = [r | {"wrong": r["wrong"] + r["n"] // 50} for r in ttn]
    both = fitted("default", 0, ttn) + fitted("default", 1, worse) + fitted("layer", 0, worse)
    ((name, cells),) = table(both).rows
    ((_, alone),) = table(ttn).rows
    assert name == "TTN"
    assert cells[0].ours == pytest.approx(alone[0].ours + 1)
    assert cells[0].deviation == pytest.approx(2**0.5)


def test_a_table_of_variants_has_the_papers_beside():
    ttn = [r for r in RECORDS if r["norm"] == "ttn"]
    records = fitted("lambda-10", 0, ttn) + fitted("default", 0, ttn) + fitted("layer", 0, ttn)
    names = {"default": "λ = 1", "lambda-10": "λ = 10", "lambda-0.1": "λ = 0.1"}
    found = tables.by_variant(records, dataset="cifar10-c", names=names, title="lambda")
    rows = dict(found.rows)
    assert list(rows) == ["λ = 1", "λ = 10", "λ = 0.1"]
    assert rows["λ = 10"][0].paper == 12.45
    assert rows["λ = 10"][0].ours == rows["λ = 1"][0].ours
    assert rows["λ = 0.1"][0].ours is None
    with pytest.raises(ValueError, match="no records of cifar100-c"):
        tables.by_variant(records, dataset="cifar100-c", names=names, title="lambda")
    hundred = [r | {"dataset": "cifar100-c"} for r in records]
    rows = dict(tables.by_variant(hundred, dataset="cifar100-c", names=names, title="lambda").rows)
    assert (rows["λ = 1"][0].paper, rows["λ = 10"][0].paper) == (35.58, None)


def test_the_average_over_one_batch_size_is_left_out():
    of_one_size = [r for r in RECORDS if r["norm"] == "ttn" and r["batch_size"] == 200]
    records, names = fitted("lambda-10", 0, of_one_size), {"lambda-10": "λ = 10"}
    found = tables.by_variant(records, dataset="cifar10-c", names=names, title="lambda")
    assert found.columns == ["B = 200"]
    assert [len(cells) for _, cells in found.rows] == [1]


def test_what_users_call_their_alpha_files_says_nothing():
    """NETWORK.VARIANT.seedN is a name that `reproduce` gives."""
    mine = {"name": "net.run.seed1.ttn.safetensors", "fingerprint": "a"}
    assert dict(table(all_domains("ttn", 200, 5, alpha=mine)).rows)["TTN"][0].ours == 12
    theirs = {"name": "wrn.lambda-10.seed1.ttn.safetensors", "fingerprint": "a"}
    with pytest.raises(ValueError, match="There are no records"):
        table(all_domains("ttn", 200, 5, alpha=theirs))


def test_alpha_after_the_stronger_prior_is_the_counted_norms_own_and_an_ablation_of_ttn():
    strong = {"name": "wrn.strong.ttn.safetensors", "fingerprint": "a"}
    counted = all_domains("ttn-counted", 200, 5, alpha=strong)
    plain = all_domains("ttn", 200, 7, alpha=strong)
    ((name, cells),) = table(counted + plain).rows
    assert name == "TTN (stronger prior, by batch size)"
    assert cells[0].ours == 12
    assert tables.fitted_variants(counted) == set()
    assert tables.fitted_variants(counted + plain) == {"prior-strong"}
    asked_for = [r | {"experiment": "evaluate"} for r in plain]  # with --alpha
    assert dict(table(asked_for).rows)["TTN"][0].ours == 14


def test_of_an_alpha_file_of_the_user_s_no_prior_is_claimed():
    theirs = all_domains("ttn-counted", 200, 5, alpha={"name": "mine.ttn", "fingerprint": "a"})
    ((name, _),) = table(theirs).rows
    assert name == "TTN (by batch size)"


def test_a_mixture_of_domains_that_has_every_image_once_has_so_many_in_all():
    once = [r | {"scenario": "mixed-once"} for r in RECORDS]
    assert "15 corruptions of severity 5; 100 images a domain" in table().note
    found = tables.by_batch_size(once, dataset="cifar10-c", scenario="mixed-once")
    assert "100 images" in found.note
    assert "a domain" not in found.note


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("other", ["other", "wrn.dynamic"])
def test_alpha_files_are_no_seeds(seed, other):
    """Of one network, but not of one post-training."""
    first = {"name": "mine.ttn.safetensors", "fingerprint": "a"}
    second = {"name": f"{other}.ttn.safetensors", "fingerprint": "b"}
    both = all_domains("ttn", 200, 5, alpha=first)
    both += all_domains("ttn", 200, 7, alpha=second, seed=seed)
    with pytest.raises(ValueError, match=r"two records of ttn.* alpha files"):
        table(both)


def test_many_records_are_split_in_no_time():
    many = [r | {"seed": seed} for seed in range(200) for r in RECORDS]
    started = time.monotonic()
    assert len(tables.split(many)) == 1
    assert time.monotonic() - started < 5  # it was quadratic: minutes


def test_by_domain():
    found = tables.by_domain(RECORDS, dataset="cifar10-c", scenario="single", batch_size=1)
    assert found.columns[:2] == ["gaussian noise", "shot noise"]
    assert [c.ours for c in dict(found.rows)["TTN"]] == [*range(5, 20), 12.0]


def test_by_domain_ttn_is_beside_the_paper_s():
    options = {"dataset": "cifar10-c", "scenario": "single"}
    rows = dict(tables.by_domain(RECORDS, batch_size=1, **options).rows)
    assert rows["TTN"][0] == Cell(5.0, None, 22.03)
    assert rows["TTN"][-1].paper == pytest.approx(17.99, abs=0.005)
    assert all(cell.paper is None for cell in rows["TBN"])
    mild = [r | {"severity": 3} for r in RECORDS]
    rows = dict(tables.by_domain(mild, batch_size=1, **options).rows)
    assert all(cell.paper is None for cell in rows["TTN"])


class TestByCorruption:
    def found(self, records=RECORDS):
        return tables.by_corruption(records, dataset="cifar10-c", scenario="single")

    def test_each_is_beside_the_paper_s_at_every_batch_size(self):
        rows = dict(self.found().rows)
        assert self.found().columns == ["B = 200", "B = 1"]
        assert list(rows) == [*(c.replace("_", " ") for c in CORRUPTIONS), "average"]
        assert rows["shot noise"] == [Cell(6.0, None, 12.78), Cell(6.0, None, 19.97)]

    def test_the_average_is_what_the_table_of_batch_sizes_has(self):
        average, row = dict(self.found().rows)["average"], dict(table().rows)["TTN"]
        for here, there in zip(average, row, strict=False):
            assert here.ours == there.ours
            assert here.paper == pytest.approx(there.paper, abs=0.005)

    def test_no_corruption_is_better_than_another(self):
        assert "**" not in formats.to_markdown(self.found())
        assert "textbf" not in formats.to_latex(self.found())

    def test_one_that_was_not_run_is_empty_and_so_is_the_average(self):
        rest = [r for r in RECORDS if (r["domain"], r["batch_size"]) != ("fog", 1)]
        rows = dict(self.found(rest).rows)
        assert [cell.ours for cell in rows["fog"]] == [14.0, None]
        assert [cell.ours for cell in rows["average"]] == [12.0, None]

    def test_other_severities_are_not_put_beside_the_paper(self):
        mild = [r | {"severity": 3} for r in RECORDS]
        assert all(cell.paper is None for _, cells in self.found(mild).rows for cell in cells)

    def test_no_records_of_it(self):
        with pytest.raises(ValueError, match="no records of TTN on cifar10-c, single"):
            self.found([r for r in RECORDS if r["norm"] == "tbn"])

    def test_it_is_what_table14_shows(self):
        _, shown = tables.of_experiment(EXPERIMENTS["table14"], RECORDS)
        assert shown == self.found()
        assert len(tables.of_experiment(EXPERIMENTS["table1"], RECORDS)) == 1


def test_markdown_marks_the_best_of_a_column():
    text = formats.to_markdown(table())
    assert text.splitlines()[0] == "| | B = 200 | B = 1 | average |"
    row = "| TTN | **12.00** (11.67, +0.33) | **12.00** (17.99, -5.99) | **12.00** (14.83, -2.83) |"
    assert row in text


def test_all_that_are_best_are_marked():
    text = formats.to_markdown(table(all_domains("ttn", 1, 5) + all_domains("tbn", 1, 5)))
    assert text.count("**12.00**") == 4


def test_csv_holds_everything():
    rows = list(csv.reader(io.StringIO(formats.to_csv(table()))))
    assert rows[0][:4] == ["row", "B = 200", "B = 200 deviation", "B = 200 paper"]
    assert ["TTN", "12.0000", "", "11.6700"] in [row[:4] for row in rows]


def test_latex_is_a_tabular():
    text = formats.to_latex(table())
    assert r"$\alpha$ = 0.3" in text
    assert text.count(r"\\") == 5


def test_latex_has_the_paper_s_numbers_beside_ours():
    text = formats.to_latex(table())
    small = ("{\\scriptsize (11.67)}", "{\\scriptsize (17.99)}", "{\\scriptsize (14.83)}")
    assert "TTN & " + " & ".join(rf"\textbf{{12.00}} {paper}" for paper in small) in text
    empty = formats.to_latex(table(RECORDS[:-1]))
    assert r"$\alpha$ = 0.3 & 15.00 {\scriptsize (12.05)} & – {\scriptsize (17.42)} & –" in empty
    without = formats.to_latex(table([r | {"severity": 3} for r in RECORDS]))
    assert r"TTN & \textbf{12.00} & \textbf{12.00} & \textbf{12.00} \\" in without


def test_rich_shows_every_number(capsys):
    from rich.console import Console

    Console(width=120).print(formats.to_rich(table()))
    shown = capsys.readouterr().out
    assert "12.00 (11.67)" in shown
    assert "In brackets the paper's." in " ".join(shown.split())
    assert "cifar10-c, single" in shown


def test_no_records_of_it():
    with pytest.raises(ValueError, match="no records of cifar10-c in the scenario mixed"):
        tables.by_batch_size(RECORDS, dataset="cifar10-c", scenario="mixed")


@pytest.mark.parametrize(
    ("scenario", "dataset", "norm", "method", "average"),
    [
        ("single", "cifar10-c", "ttn", "none", 13.89),
        ("single", "cifar100-c", "ttn", "none", 42.27),
        ("single", "cifar10-c", "tbn", "none", 33.09),
        ("single", "cifar10-c", "adaptive-bn", "none", 13.98),
        ("single", "cifar100-c", "tbn", "swr", 59.88),
        ("mixed", "cifar10-c", "ttn", "none", 14.00),
        # where the paper's own average belongs to another row
        ("mixed", "cifar10-c", "tbn", "swr", 33.10),
        ("mixed", "cifar100-c", "ttn", "swr", 50.29),
        ("continual", "cifar100-c", "tbn", "swr", 58.06),
        ("source", "cifar10", "tbn", "tent", 25.84),
        ("class-sorted", "cifar10-c", "ttn", "none", 30.82),
    ],
)
def test_the_paper_s_cells_have_the_averages_they_should(scenario, dataset, norm, method, average):
    row = [paper.error(scenario, dataset, norm, method, b) for b in paper.BATCH_SIZES]
    assert sum(row) / 6 == pytest.approx(average, abs=0.011)


@pytest.mark.parametrize("batch_size", paper.BATCH_SIZES)
def test_the_paper_s_corruptions_have_the_average_of_its_main_table(batch_size):
    cell = ("single", "cifar10-c", "ttn", "none", batch_size)
    each = [paper.corruption_error(*cell, corruption) for corruption in CORRUPTIONS]
    assert sum(each) / 15 == pytest.approx(paper.error(*cell), abs=0.005)


def test_norms_are_said_to_err_the_same_in_continual_as_in_single():
    for norm in ("source", "tbn", "alpha-bn", "ttn", "ttn-dynamic"):
        both = [paper.error(s, "cifar10-c", norm, "none", 64) for s in ("single", "continual")]
        assert both[0] == both[1] is not None
    assert paper.error("continual", "cifar10-c", "ttn", "tent", 64) == 11.60


def test_a_short_mixture_stands_beside_the_paper_s_as_the_long_one_does():
    for about in (paper.errata, lambda *table: paper.error(*table, "ttn", "swr", 16)):
        assert about("mixed-once", "cifar100-c") == about("mixed", "cifar100-c")
        assert about("mixed", "cifar100-c")


def test_what_the_paper_does_not_have():
    assert paper.corruption_error("single", "cifar10-c", "ttn", "none", 8, "fog") is None
    assert paper.corruption_error("single", "cifar10-c", "tbn", "none", 200, "fog") is None
    assert paper.corruption_error("single", "cifar10-c", "ttn", "none", 200, "mixed") is None
    assert paper.error("single", "cifar10-c", "ttn", "none", 8) is None
    assert paper.error("single", "cifar10-c", "mixnorm", "none", 2) is None
    assert paper.error("dirichlet", "cifar10-c", "ttn", "none", 1) is None


class TestFigures:
    def test_error_by_batch_size_draws_the_numbers_of_the_table(self):
        figure = figures.error_by_batch_size(RECORDS, dataset="cifar10-c", scenario="single")
        lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
        assert lines["TTN"] == [12.0, 12.0]
        assert lines["Source (CBN)"] == [27.0, 27.0]

    def test_a_line_that_leaves_the_picture_says_in_the_legend_how_far(self):
        records = RECORDS + all_domains("tbn", 2, 85)
        options = {"dataset": "cifar10-c", "scenario": "single"}
        axes = figures.error_by_batch_size(records, **options).axes[0]
        labels = {line.get_label() for line in axes.lines}
        assert labels == {"Source (CBN)", "TBN, up to 92 %", "TTN"}

    def test_what_was_scored_at_one_batch_size_is_no_line(self):
        records = RECORDS + all_domains("alpha-bn", 200, 12)
        options = {"dataset": "cifar10-c", "scenario": "single"}
        lines = figures.error_by_batch_size(records, **options).axes[0].lines
        assert {line.get_label() for line in lines} == {"Source (CBN)", "TBN", "TTN"}

    def test_error_by_domain_draws_a_bar_for_each(self):
        options = {"dataset": "cifar10-c", "scenario": "single", "batch_size": 200}
        figure = figures.error_by_domain(RECORDS, **options)
        heights = [[bar.get_height() for bar in group] for group in figure.axes[0].containers]
        assert heights[2] == [*range(5, 20), 12.0]

    def test_alpha_by_depth_draws_every_channel(self):
        alpha = {"a": torch.rand(8), "b": torch.rand(16)}
        axes = figures.alpha_by_depth(alpha, "title").axes[0]
        drawn = [y for line in axes.lines[:2] for y in line.get_ydata()]
        assert drawn == torch.cat(list(alpha.values())).tolist()
