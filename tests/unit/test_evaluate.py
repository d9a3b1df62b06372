"""Evaluation: groups against the plain loop, the identities of norms, and going on after a stop."""

import copy
import dataclasses
import json
from collections import Counter

import pytest
import small_network
import torch
from torch import nn

import ttnorm
from ttnorm.bench import evaluate as scoring
from ttnorm.bench import predict
from ttnorm.bench.evaluate import evaluate
from ttnorm.bench.job import Job, Network, count_classes
from ttnorm.bench.predict import Run, predictions
from ttnorm.bench.records import RecordFile, read_records
from ttnorm.bench.scenarios import SCENARIOS
from ttnorm.methods import METHODS
from ttnorm.norms import NORMS
from ttnorm.tree import CONFIG, CONTENT


@pytest.fixture
def network(tmp_path):
    return small_network.with_alphas(tmp_path)


@pytest.fixture
def run(tmp_path, network):
    def score(data, *jobs, name="r.jsonl"):
        path = tmp_path / name
        evaluate(network, data, jobs, RecordFile(path))
        return read_records([path])

    return score


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return {"logits": self.conv(x)}


WITHOUT_MEMORY = [name for name, n in NORMS.items() if name != "mixnorm" and not n.remembers]


def wrong(records):
    return [r["wrong"] for r in records]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("size", [6, 1])
def test_groups_give_the_predictions_of_the_plain_loop(network, norm, scenario, size, monkeypatch):
    monkeypatch.setitem(predict.SAMPLES_AT_ONCE, "cpu", 20)
    job = Job(norm=norm, scenario=scenario, batch_size=size)
    data = small_network.domains()
    pairs = zip(
        predictions(network, data, job),
        predictions(network, data, job, grouped=False),
        strict=True,
    )
    for (segment, grouped), (_, sequential) in pairs:
        assert len(grouped) == len(segment.images)
        assert torch.equal(grouped, sequential)


def test_the_plain_loop_is_what_a_user_would_write(network):
    data = small_network.domains(23, ("dark",))
    ((segment, found),) = predictions(network, data, Job(norm="tbn", batch_size=5), grouped=False)
    model = small_network.network().train()
    x = data.images["dark"][segment.images].float() / 255
    with torch.no_grad():
        expected = torch.cat([model(part).argmax(1) for part in x.split(5)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", WITHOUT_MEMORY)
def test_single_equals_continual(run, norm):
    data = small_network.domains()
    jobs = [Job(norm=norm, scenario=s, batch_size=7) for s in ("single", "continual")]
    records = run(data, *jobs)
    assert wrong(records[:3]) == wrong(records[3:])


@pytest.mark.parametrize("norm", WITHOUT_MEMORY)
def test_one_image_a_batch_class_sorted_equals_single(run, norm):
    data = small_network.domains()
    jobs = [Job(norm=norm, scenario=s, batch_size=1) for s in ("single", "class-sorted")]
    records = run(data, *jobs)
    assert wrong(records[:3]) == wrong(records[3:])


def test_the_ragged_last_batch_counts(run):
    records = run(small_network.domains(50), Job(norm="tbn", batch_size=16))
    assert [r["n"] for r in records] == [50, 50, 50]


def test_norms_that_ignore_the_batch_run_once(run, monkeypatch):
    scored = []
    score = scoring._score
    monkeypatch.setattr(scoring, "_score", lambda *args: scored.append(1) or score(*args))
    records = run(small_network.domains(), *(Job(norm="source", batch_size=b) for b in (8, 4, 1)))
    assert len(records) == 9
    assert len(scored) == 3
    assert wrong(records[:3]) == wrong(records[3:6]) == wrong(records[6:])


def test_a_record_tells_how_it_came_about(run):
    (record,) = run(
        small_network.domains(20), Job(norm="ttn-scaled", scenario="mixed", batch_size=4, seed=3)
    )
    expected = {
        "dataset": "cifar10-c",
        "severity": 5,
        "domain": "mixed",
        "scenario": "mixed",
        "norm": "ttn-scaled",
        "method": "none",
        "batch_size": 4,
        "seed": 3,
        "n": 60,
    }
    assert expected.items() <= record.items()
    assert record["model"]["name"] == "small"
    assert len(record["model"]["fingerprint"]) == len(record["alpha"]["fingerprint"]) == 12
    assert record["config"] == {
        "norm": {"scale": 0.4},
        "subset": 20,
        "order": "random over all domains",
        "reset": "never",
        "domains": ["dark", "light", "red"],
    }
    assert {"seconds", "versions", "device", "wrong"} <= record.keys()


@pytest.mark.parametrize("norm", ["ttn", "mixnorm", "ttn-stream"])
@pytest.mark.parametrize("scenario", ["single", "continual"])
@pytest.mark.parametrize("kept", [0, 1, 2, 4, 5])
def test_a_stopped_run_goes_on(run, tmp_path, norm, scenario, kept):
    data = small_network.domains()
    jobs = [Job(norm=norm, scenario=scenario, batch_size=b) for b in (7, 1)]
    whole = run(data, *jobs, name="whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:kept]))
    assert wrong(run(data, *jobs, name="part.jsonl")) == wrong(whole)


@pytest.mark.parametrize("lost", range(6))
def test_a_stream_that_lost_a_record_is_run_again_from_its_beginning(run, tmp_path, lost):
    data = small_network.domains()
    jobs = [Job(norm="mixnorm", scenario="continual", batch_size=b) for b in (7, 1)]
    whole = run(data, *jobs, name="whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:lost] + lines[lost + 1 :]))
    found = run(data, *jobs, name="part.jsonl")
    key = lambda r: (r["batch_size"], r["domain"])  # noqa: E731
    assert wrong(sorted(found, key=key)) == wrong(sorted(whole, key=key))


def test_other_images_are_other_cells(run):
    job = Job(norm="ttn", batch_size=7)
    first = run(small_network.domains(), job)
    other = small_network.domains()
    other.images["red"][0] = 0
    both = run(other, job)
    assert len(both) == len(first) + 1  # the domain that differs


def test_what_is_on_file_is_not_run_again(run, monkeypatch):
    data, job = small_network.domains(), Job(norm="ttn", batch_size=7)
    records = run(data, job)
    monkeypatch.setattr(scoring, "_score", lambda *_: pytest.fail("it ran again"))
    assert run(data, job) == records


def test_a_record_says_how_alpha_was_fitted(network, run):
    path = network.alpha_files["ttn"]
    model = ttnorm.load_(copy.deepcopy(network.model), path)
    model.__dict__[CONFIG] = {"lr": 0.01, "granularity": "layer"}
    ttnorm.save(model, path)
    records = run(small_network.domains(), *(Job(norm=n, batch_size=7) for n in ("ttn", "tbn")))
    assert all(r["alpha"]["config"] == model.__dict__[CONFIG] for r in records[:3])
    assert all(r["alpha"] is None for r in records[3:])


@pytest.mark.parametrize("norm", ["ttn", "ttn-stream"])
def test_records_from_before_they_said_so_are_not_run_again(run, tmp_path, monkeypatch, norm):
    data, job = small_network.domains(), Job(norm=norm, batch_size=7)
    records = run(data, job)
    for record in records:
        del record["alpha"]["config"]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    monkeypatch.setattr(scoring, "_outcome", lambda *_: pytest.fail("it ran again"))
    assert run(data, job, name="old.jsonl") == records


def test_the_network_is_not_changed(network, run):
    before = {name: t.clone() for name, t in network.model.state_dict().items()}
    run(small_network.domains(), *(Job(norm=norm, batch_size=7) for norm in NORMS))
    after = network.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_network_in_train_mode_is_only_looked_at(network):
    network.model.train()
    before = {name: t.clone() for name, t in network.model.state_dict().items()}
    assert count_classes(network.model, (32, 32)) == 10
    assert network.model.training
    after = network.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_network_is_asked_once_for_its_classes(network, monkeypatch):
    assert network.classes((32, 32)) == 10
    monkeypatch.setattr(
        "ttnorm.bench.job.count_classes", lambda *_: pytest.fail("it was asked again")
    )
    assert network.classes((32, 32)) == 10


def test_large_images_run_in_smaller_parts(network, monkeypatch):
    monkeypatch.setitem(predict.PIXELS_AT_ONCE, "cpu", 9 * 32 * 32)
    run = Run(network, small_network.domains(), Job(norm="tbn", batch_size=4), True)
    assert run.samples == 8


def test_images_that_would_fill_a_gpu_stay_where_they_are(monkeypatch):
    data = small_network.domains(50)
    size = 3 * 50 * 3 * 32 * 32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size - 2, 10 * size))
    assert data.to("cuda") is data


class TestErrors:
    def test_an_alpha_file_of_another_network_before_anything_runs(self, run, network, tmp_path):
        network.model[1].running_mean.add_(1)
        jobs = [Job(norm=norm, batch_size=4) for norm in ("source", "ttn")]
        with pytest.raises(ValueError, match="made for a network with other running statistics"):
            run(small_network.domains(), *jobs)
        assert not (tmp_path / "r.jsonl").exists()

    def test_labels_out_of_range(self, run):
        data = small_network.domains()
        data.labels[3] = 10
        with pytest.raises(ValueError, match="labels from 0 to 10; small has 10 classes"):
            run(data, Job(norm="tbn", batch_size=4))

    def test_no_alpha_file(self, tmp_path):
        network = Network("bare", small_network.network())
        file = RecordFile(tmp_path / "r.jsonl")
        with pytest.raises(ValueError, match="ttn needs an alpha file of bare"):
            evaluate(network, small_network.domains(), [Job(norm="ttn", batch_size=4)], file)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"norm": "x"}, "no norm 'x'"),
            ({"norm": "tbn", "method": "x"}, "no method 'x'; there are none"),
            ({"norm": "tbn", "scenario": "x"}, "no scenario 'x'"),
            ({"norm": "tbn", "batch_size": 0}, "batch_size is 0"),
        ],
    )
    def test_unknown_names_are_refused_before_anything_runs(self, run, options, message, tmp_path):
        good = Job(norm="source", batch_size=4)
        with pytest.raises(ValueError, match=message):
            run(small_network.domains(), good, Job(**{"batch_size": 4, **options}))
        assert not (tmp_path / "r.jsonl").exists()

    def test_subset(self):
        assert len(small_network.domains(50).subset(20).labels) == 20
        with pytest.raises(ValueError, match="subset is 51 images, expected 1 to 50"):
            small_network.domains(50).subset(51)


@pytest.mark.parametrize("method", ["tent", "swr", "cotta", "ttn-online"])
@pytest.mark.parametrize("scenario", ["single", "continual"])
def test_methods_in_windows_predict_as_batch_by_batch(network, method, scenario):
    # 50 images in batches of 16 leave a window open at the end of a domain
    data = small_network.domains(names=("dark", "light"))
    job = Job(norm="ttn", method=method, scenario=scenario, batch_size=16)
    network = dataclasses.replace(network, agreement=agreement(network.model))
    runs = [list(predictions(network, data, job, grouped=g)) for g in (True, False)]
    for (_, grouped), (_, sequential) in zip(*runs, strict=True):
        assert torch.equal(grouped, sequential)


def agreement(model):
    return {name: 0.5 for name, _ in model.named_parameters()}


def test_a_record_says_how_a_method_was_set(network, tmp_path):
    path = tmp_path / "r.jsonl"
    cells = [("tbn", "single"), ("tbn", "mixed"), ("ttn", "single")]
    jobs = [Job(norm=n, method="tent", scenario=s, batch_size=16) for n, s in cells]
    evaluate(network, small_network.domains(), jobs, RecordFile(path))
    settings = {(r["norm"], r["scenario"]): r["config"]["method"] for r in read_records([path])}
    assert settings == {
        ("tbn", "single"): {"lr": 1e-4, "window": 200},
        ("tbn", "mixed"): {"lr": 1e-4, "window": 200},
        ("ttn", "single"): {"lr": 5e-5, "window": 200},
    }


def test_a_record_says_which_weights_a_method_had(network, tmp_path):
    job = Job(norm="tbn", method="swr", batch_size=16)
    path = tmp_path / "r.jsonl"
    for value in (0.5, 0.7):
        weights = dict.fromkeys(agreement(network.model), value)
        tested = dataclasses.replace(network, agreement=weights)
        evaluate(tested, small_network.domains(names=("dark",)), [job], RecordFile(path))
    first, second = (r["config"]["method"] for r in read_records([path]))
    assert first["weights"] != second["weights"]
    assert first["strength"] == 10.0


def test_another_methods_predictions_are_not_taken_for_those_of_the_norm(network, tmp_path):
    data = small_network.domains(names=("dark",))
    jobs = [Job(norm="source", method=m, batch_size=4) for m in ("ttn-online", "none")]
    found = []
    for name, order in (("a", jobs), ("b", jobs[::-1])):
        path = tmp_path / f"{name}.jsonl"
        evaluate(network, data, order, RecordFile(path))
        found.append({r["method"]: r["wrong"] for r in read_records([path])})
    assert found[0] == found[1]


def test_swr_without_source_images_is_refused(network, tmp_path):
    job = Job(norm="tbn", method="swr", batch_size=16)
    with pytest.raises(ValueError, match="source images"):
        evaluate(network, small_network.domains(), [job], RecordFile(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("norm", ["ttn", "mixnorm"])
@pytest.mark.parametrize("method", ["none", "tent"])
def test_too_little_memory_means_smaller_parts_and_the_same_predictions(
    network, norm, method, monkeypatch, caplog
):
    data = small_network.domains(names=("dark",))
    job = Job(norm=norm, method=method, batch_size=4)
    ((_, expected),) = predictions(network, data, job)
    spec = METHODS[method]

    def cramped(*args, **options):
        return Cramped(spec.make(*args, **options))

    monkeypatch.setitem(METHODS, method, dataclasses.replace(spec, make=cramped))
    ((_, found),) = predictions(network, data, job)
    assert torch.equal(found, expected)
    assert "out of memory" in caplog.text


class Cramped:
    """A method on a device that holds 12 samples, and notices only after having begun."""

    def __init__(self, method):
        self.method = method

    def __getattr__(self, name):
        return getattr(self.method, name)

    def __call__(self, x):
        output = self.method(x)
        if len(x) > 12:
            raise torch.OutOfMemoryError
        return output


@pytest.mark.parametrize("norm", ["ttn-stream", "ttn-balanced"])
@pytest.mark.parametrize("scenario", ["continual", "mixed"])
def test_streams_side_by_side_are_as_if_each_ran_alone(network, tmp_path, norm, scenario):
    data, job = small_network.domains(), Job(norm=norm, scenario=scenario, batch_size=4)
    path = tmp_path / "together.jsonl"
    evaluate(network, data, [dataclasses.replace(job, streams=2)], RecordFile(path))
    together = {r["domain"]: r for r in read_records([path])}
    alone = dict.fromkeys(together, 0)
    for first in (0, 1):
        images = {domain: x[first::2] for domain, x in data.images.items()}
        part = dataclasses.replace(data, images=images, labels=data.labels[first::2])
        evaluate(network, part, [job], RecordFile(tmp_path / f"{first}.jsonl"))
        for r in read_records([tmp_path / f"{first}.jsonl"]):
            alone[r["domain"]] += r["wrong"]
    assert {domain: r["wrong"] for domain, r in together.items()} == alone
    assert all(r["config"]["streams"] == 2 for r in together.values())
    assert sum(r["n"] for r in together.values()) == 150


def test_what_remembers_nothing_has_one_stream(network, tmp_path):
    job = Job(norm="tbn", batch_size=4, streams=2)
    with pytest.raises(ValueError, match="tbn with none remembers no streams"):
        evaluate(network, small_network.domains(), [job], RecordFile(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("at_once", [3, 200])  # samples
def test_streams_of_many_jobs_share_forwards_and_go_on_after_a_stop(run, monkeypatch, at_once):
    monkeypatch.setitem(predict.SAMPLES_AT_ONCE, "cpu", at_once)
    data = small_network.domains()
    jobs = [Job(norm="ttn-stream", scenario=s, batch_size=1) for s in ("single", "class-sorted")]
    jobs.append(Job(norm="ttn-stream", scenario="continual", batch_size=1, streams=2))
    alone = [r for job in jobs for r in run(data, job, name=f"{job.scenario}.jsonl")]
    scenarios = {(r["scenario"], r["domain"]): r["wrong"] for r in alone}
    forwards = []
    whole = Run.alongside
    monkeypatch.setattr(Run, "alongside", lambda *args: forwards.append(args) or whole(*args))
    with monkeypatch.context() as patch:
        outcome, left = scoring._outcome, iter(range(4))
        patch.setattr(scoring, "_outcome", lambda *args: (next(left), outcome(*args))[1])
        with pytest.raises(RuntimeError, match="StopIteration"):
            run(data, *jobs)
    assert len(run(data, *jobs)) == len(alone)
    assert {(r["scenario"], r["domain"]): r["wrong"] for r in run(data, *jobs)} == scenarios
    assert len(forwards) == 2  # one run before the stop and one after it; the third had all on file


def test_what_a_stream_knows_of_the_source_is_part_of_its_cell(tmp_path):
    """Another file with the same alpha is another cell to norms that remember, and to no other."""
    network = small_network.with_alphas(tmp_path)
    data, file = small_network.domains(8), network.alpha_files["ttn"]
    jobs = [Job(norm=norm, batch_size=4) for norm in ("ttn", "ttn-stream")]
    records = RecordFile(tmp_path / "records.jsonl")
    evaluate(network, data, jobs, records)
    model = ttnorm.load_(copy.deepcopy(network.model), file)
    model.__dict__[CONTENT] = model.__dict__[CONTENT]._replace(
        whitening=2 * model.__dict__[CONTENT].whitening
    )
    ttnorm.save(model, file)
    evaluate(network, data, jobs, records)
    found = Counter(r["norm"] for r in read_records([records.path]))
    assert found["ttn-stream"] == 2 * found["ttn"] > 0


def test_a_method_that_never_gets_to_adapt_is_warned_of(run, caplog):
    run(small_network.domains(), Job(norm="tbn", method="tent", scenario="single", batch_size=10))
    assert "tent updates after 200 images, and there are 50 in a domain" in caplog.text
    caplog.clear()
    run(small_network.domains(), Job(norm="tbn", method="sliding", scenario="single", batch_size=9))
    assert not caplog.text


def test_progress_is_told_in_images_and_ends_at_all_of_them(network, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(scoring.Progress, "step", lambda self, note=None, by=1: told.append(by))
    jobs = [Job(norm="tbn", batch_size=size) for size in (10, 25)]
    evaluate(network, small_network.domains(), jobs, RecordFile(tmp_path / "r.jsonl"))
    assert sum(told) == 2 * 3 * 50
    assert max(told) <= 50


def test_progress_counts_what_was_on_file(network, tmp_path, monkeypatch):
    made = []

    class Noted(scoring.Progress):
        def close(self):
            made.append(self)

    monkeypatch.setattr(scoring, "Progress", Noted)
    data, jobs = small_network.domains(), [Job(norm=n, batch_size=10) for n in ("tbn", "ttn")]
    for count in (1, 2):
        evaluate(network, data, jobs[:count], RecordFile(tmp_path / "r.jsonl"))
    assert [(p.done, p.total) for p in made] == [(150, 150), (300, 300)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (nn.Conv2d(1, 4, 3), r"does not take images \(2, 3, 32, 32\)"),
        (Named(), "returned a dict, expected"),
    ],
)
def test_a_network_that_cannot_be_scored_is_told_so(broken, message):
    with pytest.raises((ValueError, TypeError), match=message):
        count_classes(broken, (32, 32))
