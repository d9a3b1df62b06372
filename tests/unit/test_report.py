"""The report: a page of tables and figures, and a file for each."""

import itertools
import re

import numpy as np
import pytest
import torch
from made_records import RECORDS, fitted

from ttnorm import artefact, surgery
from ttnorm.bench import figures
from ttnorm.bench.report import write_report
from ttnorm.data.corruptions import CORRUPTIONS


class TestReport:
    def test_it_is_complete_and_the_same_every_time(self, tmp_path):
        model = surgery.convert_(torch.nn.Sequential(torch.nn.BatchNorm2d(8)), 0.3)
        artefact.save(model, tmp_path / "net.ttn.safetensors")
        records = RECORDS + [r | {"batch_size": 16} for r in RECORDS if r["batch_size"] == 1]
        for folder in ("one", "two"):
            write_report(records, tmp_path / folder, [tmp_path / "net.ttn.safetensors"])
        files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
        assert len(files) == 12
        for file in files:
            first, second = ((tmp_path / f / file).read_bytes() for f in ("one", "two"))
            assert first == second, file

    def test_a_curve_has_more_than_two_points_and_a_first_look_at_what_it_is_of(self, tmp_path):
        sizes = (200, 16, 1)
        stream = [r | {"norm": "ttn-stream"} for r in RECORDS if r["norm"] == "ttn"]
        small = [r | {"batch_size": 16} for r in RECORDS + stream if r["batch_size"] == 1]
        for name, records in (("two", RECORDS + stream), ("three", RECORDS + stream + small)):
            write_report(records, tmp_path / name)
            drawn = {path.stem for path in (tmp_path / name / "results").glob("*.svg")}
            curves = {f"cifar10-c-single{ending}" for ending in ("", "-in-short", "-stream")}
            assert drawn & curves == (curves if name == "three" else set())
        figure = figures.in_short(RECORDS + stream + small, dataset="cifar10-c")
        (axes,) = figure.axes
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(b) for b in sizes]
        assert {text.get_text().partition(",")[0] for text in axes.texts} == {
            "the network as it is",
            "batch statistics",
            "TTN",
            "TTN with a stream's memory",
        }
        ends = sorted(t.get_position()[1] for t in axes.texts if "batch" not in t.get_text())
        low, high = axes.get_ylim()
        assert min(b - a for a, b in itertools.pairwise(ends)) > 0.05 * (high - low)

    def test_a_first_look_has_errors_at_their_batch_sizes_and_none_that_are_missing(self):
        few = [r | {"norm": "ttn-stream"} for r in RECORDS if r["norm"] == "ttn"]
        few = [r for r in few if r["batch_size"] == 1]
        unfinished = [r | {"norm": "tbn", "batch_size": 16} for r in RECORDS if r["norm"] == "tbn"]
        records = RECORDS + few + unfinished[:1]
        (axes,) = figures.in_short(records, dataset="cifar10-c").axes
        drawn = {line.get_color(): np.asarray(line.get_ydata()) for line in axes.lines}
        sizes = [tick.get_text() for tick in axes.get_xticklabels()]
        assert sizes == ["200", "16", "1"]
        found = [np.isfinite(errors).tolist() for errors in drawn.values()]
        assert sorted(found) == [[False, False, True], *[[True, False, True]] * 3]

    def test_ablations_alone_are_a_report(self, tmp_path):
        """What `reproduce figure5` leaves."""
        ttn = [r for r in RECORDS if r["norm"] == "ttn" and r["batch_size"] == 200]
        write_report([r for c in CORRUPTIONS for r in fitted(f"prior-{c}", 0, ttn)], tmp_path)
        assert [p.name for p in tmp_path.rglob("*.svg")] == ["cifar10-c-corruptions-prior.svg"]

    def test_two_alpha_files_of_one_name_are_refused_before_anything_is_written(self, tmp_path):
        model = surgery.convert_(torch.nn.Sequential(torch.nn.BatchNorm2d(8)), 0.3)
        files = [tmp_path / folder / "net.ttn.safetensors" for folder in ("a", "b")]
        for file in files:
            file.parent.mkdir()
            artefact.save(model, file)
        with pytest.raises(ValueError, match="Two alpha files are called net"):
            write_report(RECORDS, tmp_path / "page", files)
        assert not (tmp_path / "page").exists()

    def test_the_page_has_tables_gains_and_pictures_that_are_there(self, tmp_path):
        write_report(RECORDS, tmp_path)
        text = (tmp_path / "results.md").read_text()
        assert "| TTN | 55.6 % (36.1 %) | 55.6 % (1.5 %) | 55.6 % (18.8 %) |" in text  # 1 - 12 / 27
        every = text.index("TTN under every corruption, at every batch size:")
        assert "| glass blur | 9.00 (17.87, -8.87) | 9.00 (26.99, -17.99) |" in text[every:]
        pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
        assert pictures
        assert all((tmp_path / picture).is_file() for picture in pictures)

    def test_it_begins_with_links_to_its_sections(self, tmp_path):
        clean = [r | {"dataset": "cifar10", "scenario": "source"} for r in RECORDS]
        others = [r | {"dataset": "another"} for r in RECORDS]
        write_report([*clean, *others, *RECORDS], tmp_path)
        text = (tmp_path / "results.md").read_text()
        contents = re.findall(r"^- \*\*(.*?)\*\*: \[(.*?)\]\(#(.*?)\)$", text, re.MULTILINE)
        assert contents == [
            (
                "CIFAR-10-C",
                "Single domain",
                "cifar-10-c-single-domain-one-corruption-after-another-starting-anew-at-each",
            ),
            ("CIFAR-10", "Source", "cifar-10-source-the-clean-test-set"),
            (
                "another",
                "Single domain",
                "another-single-domain-one-corruption-after-another-starting-anew-at-each",
            ),
        ]
        headings = re.findall("^## (.*)$", text, re.MULTILINE)
        assert [heading.split(".")[0] for heading in headings] == [name for name, *_ in contents]

    def test_what_reproduce_made_says_how_to_run_it_again(self, tmp_path):
        write_report([r | {"experiment": "table1"} for r in RECORDS], tmp_path / "ours")
        assert "`ttnorm reproduce table1 table10" in (tmp_path / "ours" / "results.md").read_text()
        write_report([r | {"experiment": "evaluate"} for r in RECORDS], tmp_path / "theirs")
        assert "ttnorm reproduce" not in (tmp_path / "theirs" / "results.md").read_text()

    def shares(self, folder, records):
        """Of the source's error, as lines of the page."""
        write_report(records, folder)
        text = (folder / "results.md").read_text()
        return re.findall("<details><summary>The same as the share.*?</details>", text, re.DOTALL)

    def test_constants_and_corruptions_have_gains_as_well(self, tmp_path):
        _, constants, corruptions = self.shares(tmp_path, RECORDS)
        assert "| α = 0.3 | 44.4 % (34.0 %) | 44.4 % (4.7 %) | 44.4 % (19.3 %) |" in constants
        assert "| gaussian noise | 75.0 % | 75.0 % |" in corruptions  # the paper has no source's
        assert "| average | 55.6 % (36.1 %) | 55.6 % (1.5 %) |" in corruptions

    def test_variants_have_gains_as_well(self, tmp_path):
        ttn = [r for r in RECORDS if r["norm"] == "ttn"]
        *_, gains = self.shares(tmp_path, RECORDS[:60] + fitted("lambda-10", 0, ttn))
        assert "| λ = 10 | 55.6 % (31.9 %) | 55.6 % (-1.6 %) | 55.6 % (15.1 %) |" in gains

    def test_the_source_at_one_batch_size_is_the_source_at_all(self, tmp_path):
        rest = [r for r in RECORDS if (r["norm"], r["batch_size"]) != ("source", 1)]
        for gains in self.shares(tmp_path, rest):
            assert "–" not in gains

    def test_gains_are_on_the_same_domains(self, tmp_path):
        fog = [r for r in RECORDS if r["norm"] == "ttn" and r["domain"] == "fog"]
        *_, gains = self.shares(tmp_path, RECORDS[:60] + fitted("lambda-10", 0, fog))
        assert "| λ = 10 | 51.7 % | 51.7 % | 51.7 % |" in gains  # 1 - 14 / 29

    def test_there_are_no_gains_without_the_source_on_every_domain(self, tmp_path):
        ttn = [r for r in RECORDS if r["norm"] == "ttn"]
        records = RECORDS + fitted("lambda-10", 0, ttn)
        none = [r for r in records if r["norm"] != "source"]
        assert not self.shares(tmp_path, none)
        without_fog = [r for r in records if (r["norm"], r["domain"]) != ("source", "fog")]
        (corruptions,) = self.shares(tmp_path, without_fog)
        assert "| fog | – | – |" in corruptions
        assert "| frost | 53.6 % | 53.6 % |" in corruptions  # 1 - 13 / 28
        assert "| average | – | – |" in corruptions

    def test_how_alpha_was_fitted_on_imagenet_is_said_below(self, tmp_path):
        write_report([r | {"dataset": "imagenet-c"} for r in RECORDS], tmp_path)
        text = (tmp_path / "results.md").read_text()
        assert "the channels of a layer share one" in text
        assert "docs/method.md, ImageNet and segmentation" in text

    @pytest.mark.parametrize(
        "chosen",
        [
            lambda r: r["norm"] == "tbn",
            lambda r: r["norm"].startswith("constant"),
            lambda r: r["norm"] == "ttn" and r["domain"] != "fog",
            lambda r: (r["norm"], r["batch_size"]) in (("constant-0.3", 200), ("source", 1)),
        ],
    )
    def test_whatever_is_there_is_reported(self, tmp_path, chosen):
        assert write_report([r for r in RECORDS if chosen(r)], tmp_path)

    def test_ablations_and_true_corruptions_have_their_own_places(self, tmp_path):
        ttn = [r for r in RECORDS if r["norm"] == "ttn"]
        records = RECORDS[:60] + fitted("default", 0, ttn) + fitted("lambda-10", 0, ttn)
        for corruption in CORRUPTIONS[:3]:
            records += fitted(f"prior-{corruption}", 0, ttn)
        write_report(records, tmp_path)
        text = (tmp_path / "results.md").read_text()
        assert "12.00 (12.45, -0.45)" in text.replace("**", "")
        assert "Components" not in text
        assert (tmp_path / "results" / "cifar10-c-corruptions-prior.svg").is_file()
        assert not (tmp_path / "results" / "cifar10-c-corruptions-alpha.svg").exists()

    def test_an_ablation_of_ttn_is_not_shown_as_ttn(self, tmp_path):
        ttn = [r for r in RECORDS if r["norm"] == "ttn"]
        write_report(RECORDS[:60] + fitted("lambda-10", 0, ttn), tmp_path)
        assert "TTN under every corruption" not in (tmp_path / "results.md").read_text()

    @pytest.mark.parametrize("dataset", ["office-home/art", "my data"])
    def test_data_sets_may_be_called_anything(self, tmp_path, dataset):
        mine = [r | {"dataset": dataset} for r in RECORDS]
        write_report(mine, tmp_path / "page")
        text = (tmp_path / "page/results.md").read_text()
        assert dataset in text
        files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")]
        assert files
        assert all(len(path.parts) == 3 and " " not in path.name for path in files)

    def test_scenes_of_ones_own_have_classes_by_number(self, tmp_path):
        scenes = {"dataset": "acdc", "severity": 0, "miou": 0.5, "iou": [0.4, 0.6, None]}
        records = [r | scenes for r in RECORDS if r["domain"] == "fog"]
        write_report(records, tmp_path)
        assert "class 2" in (tmp_path / "results.md").read_text()

    def test_nothing_to_report(self, tmp_path):
        with pytest.raises(ValueError, match="no records"):
            write_report([], tmp_path)
