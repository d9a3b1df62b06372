"""The paper's experiments: what they consist of, and that they run, once."""

import pytest
import torch
from typer.testing import CliRunner

from ttnorm.bench import cifar, tables, variants
from ttnorm.bench.cifar import CifarBench
from ttnorm.bench.experiments import EXPERIMENTS, Only, experiments_named, parts
from ttnorm.bench.records import read_records, variant_of
from ttnorm.bench.reproduce import reproduce
from ttnorm.bench.scenarios import SCENARIOS
from ttnorm.bench.subject import Scale, Setup
from ttnorm.bench.variants import VARIANTS
from ttnorm.cli import app
from ttnorm.data.images import Images
from ttnorm.demo import ASSETS
from ttnorm.methods import METHODS
from ttnorm.norms import norm_named


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_name_what_there_is(name):
    experiment = EXPERIMENTS[name]
    for norm, method in experiment.rows:
        assert norm_named(norm)
        assert method in METHODS
    assert set(experiment.variants) <= set(VARIANTS)
    assert set(experiment.scenarios) <= set(SCENARIOS)
    assert experiment.rows or experiment.variants


def test_post_training_is_repeated_where_it_is_random_and_nothing_else_adapts():
    found = [
        (part.variant, part.seed, part.jobs[0].norm, part.jobs[0].method)
        for part in parts(EXPERIMENTS["table1"], seeds=3)
        if part.dataset == "cifar10"
    ]
    assert [f for f in found if f[2:] == ("ttn", "none")] == [
        ("default", seed, "ttn", "none") for seed in range(3)
    ]
    assert [f for f in found if f[2:] == ("ttn", "tent")] == [("default", 0, "ttn", "tent")]
    assert [f for f in found if f[2] == "tbn"] == [
        (None, 0, "tbn", method) for method in ("none", "tent", "swr")
    ]


def test_true_corruptions_are_thirty_post_trainings():
    found = list(parts(EXPERIMENTS["figure5"], seeds=3))
    assert len(found) == 30
    assert all(len(part.jobs) == 1 for part in found)


def test_images_are_divided_among_streams_only_where_a_norm_has_them_and_domains_mix():
    jobs = [job for part in parts(EXPERIMENTS["streams"], seeds=3) for job in part.jobs]
    divided = {(job.norm, job.scenario) for job in jobs if job.streams == 10}
    norms = ("ttn-stream", "ttn-pool", "ema")
    assert divided == {(norm, "mixed") for norm in norms}
    assert {job.batch_size for job in jobs if job.streams == 10} == {4, 2, 1}


def test_a_part_of_a_table_can_be_run_apart():
    def of(only, *names):
        return only.of_all(experiments_named(names))

    part = of(Only(rows=("ttn", "tent+ttn"), batch_sizes=(16, 1)), "table1")["table1"]
    assert part.rows == (("ttn", "none"), ("ttn", "tent"))
    assert part.batch_sizes == (16, 1)
    parts = of(Only(rows=("lambda-10", "cotta")), "table2", "table5", "table9")
    assert list(parts) == ["table2", "table9"]  # the other has neither row
    assert parts["table9"].variants == ("lambda-10",)
    assert parts["table2"].rows == (("tbn", "cotta"),)
    assert of(Only(), "table3") == {"table3": EXPERIMENTS["table3"]}
    with pytest.raises(ValueError, match="table5 has no row lambda-10; there is source, tbn, ttn"):
        of(Only(rows=("ttn", "lambda-10")), "table5")
    with pytest.raises(ValueError, match="table3 has no scenario single; there is mixed-once"):
        of(Only(scenarios=("single",)), "table3")
    with pytest.raises(ValueError, match="No one of table10, table3 has all of that together"):
        of(Only(rows=("constant-0.3",), scenarios=("mixed",)), "table10", "table3")


def test_all_is_all():
    assert experiments_named(["all"]) == EXPERIMENTS
    with pytest.raises(ValueError, match="There is no experiment 'table16'"):
        experiments_named(["table1", "table16"])


@pytest.fixture
def bench(tmp_path):
    scale = Scale(
        corruptions=("contrast",), images=8, train=200, epochs=1, seeds=1, batch_sizes=(4,)
    )
    folders = {"work": tmp_path / "work", "alphas": tmp_path / "alphas"}
    setup = Setup(**folders, device="cpu", scale=scale)
    return {"cifar10": CifarBench("cifar10", ASSETS / "cifar10", setup)}


def test_an_experiment_runs_once(bench, tmp_path, caplog):
    records = tmp_path / "records"
    reproduce(["table8"], bench, records)
    found = read_records([records])
    assert [variant_of(r)[0] for r in found] == list(EXPERIMENTS["table8"].variants)
    assert all(r["experiment"] == "table8" and r["n"] == 8 for r in found)
    (table,) = tables.of_experiment(EXPERIMENTS["table8"], found)
    assert all(cell.ours is not None for _, cells in table.rows for cell in cells)
    reproduce(["table8", "table14"], bench, records)  # the latter is the default
    assert read_records([records]) == found


def test_alpha_whose_file_was_lost_is_not_fitted_anew_beside_its_records(bench, tmp_path, caplog):
    records = tmp_path / "records"
    only = Only(rows=("lambda-10",))
    reproduce(["table9"], bench, records, only)
    found = read_records([records])
    (file,) = (tmp_path / "alphas").glob("*.safetensors")
    file.unlink()
    reproduce(["table9"], bench, records, only)
    assert read_records([records]) == found
    assert not file.exists()
    path = records / "cifar10-c.jsonl"
    assert f"Not fitted anew, for {path} has cells of them: {file.name}." in caplog.text
    reproduce(["table9"], bench, tmp_path / "others", only)
    assert file.exists()


def test_under_true_corruptions_the_first_images_are_fitted_to(bench, monkeypatch):
    monkeypatch.setattr(variants, "MOST_UNDER_TRUE", 50)
    source = {name: bench["cifar10"].source(name) for name in ("default", "prior-fog", "alpha-fog")}
    assert [len(s.train.labels) for s in source.values()] == [200, 50, 50]
    assert [len(s.corrupted) for s in source.values()] == [0, 0, 1]
    labels = source["alpha-fog"].corrupted["fog"].labels
    assert torch.equal(labels, source["default"].train.labels[:50])


def test_the_folder_of_another_data_set_is_refused_before_anything_is_made(
    bench, tmp_path, monkeypatch
):
    whole = Images(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1, 2, 99]))
    monkeypatch.setattr(cifar, "load_cifar", lambda folder, split: whole)
    with pytest.raises(ValueError, match="has labels from 0 to 99; wrn40_2-cifar10 has 10 classes"):
        reproduce(["table4"], bench, tmp_path / "records")
    assert not any((tmp_path / "work").iterdir())


def test_methods_and_the_clean_test_set(bench, tmp_path):
    reproduce(["table4"], bench, tmp_path / "records")
    found = read_records([tmp_path / "records"])
    assert {(r["norm"], r["method"]) for r in found} == set(EXPERIMENTS["table4"].rows)
    assert {(r["dataset"], r["domain"]) for r in found} == {("cifar10", "clean")}


def test_what_is_missing_is_said(bench, tmp_path, caplog):
    reproduce(["figure4"], bench, tmp_path / "records")
    assert "without cifar100" in caplog.text
    result = CliRunner().invoke(app, ["reproduce", "table1", "--work", str(tmp_path / "w")])
    assert isinstance(result.exception, ValueError)
    assert "--cifar10" in str(result.exception)
