"""corrupt, evaluate and report on the command line, and what they say to bad input."""

import json
import sys
import textwrap

import numpy as np
import pytest
import small_network
from PIL import Image

from ttnorm import artefact, cli, surgery
from ttnorm.bench import runs
from ttnorm.bench.records import read_records

USER_CODE = """
    import small_network
    import torch

    def network():
        return small_network.network()

    def of_three_classes():
        return small_network.network(classes=3)

    def another():
        model = network()
        model[1].running_mean += 1
        return model

    def without_statistics():
        model = network()
        model[1] = torch.nn.BatchNorm2d(8, track_running_stats=False)
        return model
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with twelve CIFAR images and two of their corruptions."""
    folder = tmp_path_factory.mktemp("bench")
    rng = np.random.default_rng(0)
    sheet = rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)
    (folder / "cifar").mkdir()
    for split in ("test", "train"):
        Image.fromarray(sheet).save(folder / f"cifar/{split}_0.webp", lossless=True)
        labels = json.dumps({"fine": [*range(10), 0, 1]})
        (folder / f"cifar/{split}_labels.json").write_text(labels)
    (folder / "mine.py").write_text(textwrap.dedent(USER_CODE))
    return folder


@pytest.fixture
def ttnorm(template, tmp_path, monkeypatch, capsys):
    """Call the command line as a shell would; returns (exit code, output, errors)."""
    for path in template.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(line):
        monkeypatch.setattr(sys, "argv", ["ttnorm", *line.split()])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        output = capsys.readouterr()
        return stop.value.code or 0, output.out, " ".join(output.err.split())

    return call


@pytest.fixture
def corrupted(ttnorm):
    line = "corrupt cifar cc --severity 5 --corruption fog --corruption contrast --workers 1"
    code, output, errors = ttnorm(line)
    assert (code, errors) == (0, "")
    assert "cc: 2 corruptions and labels" in output


EVALUATE = (
    "evaluate r.jsonl --network mine:network --data cc --clean cifar --norm source --norm tbn "
    "--corruption fog --corruption contrast --batch-size 4 --batch-size 1 --device cpu"
)


def test_from_images_to_a_report(ttnorm, corrupted, tmp_path):
    scenarios = "--scenario single --scenario mixed --scenario source"
    code, output, _ = ttnorm(f"{EVALUATE} {scenarios} --batch-size 2")
    assert code == 0
    for title in ("cifar10-c, single", "cifar10-c, mixed", "cifar10, source"):
        assert title in output
    records = read_records([tmp_path / "r.jsonl"])
    assert len(records) == 2 * 3 * (2 + 1 + 1)
    code, output, _ = ttnorm("report r.jsonl --output page")
    assert code == 0
    assert "page/results.md" in output
    assert (tmp_path / "page/results.md").read_text().count("![") == 4


def test_a_second_call_adds_nothing_and_sequential_is_the_same(ttnorm, corrupted, tmp_path):
    assert "r.jsonl: 8 new records, 0 from before" in ttnorm(EVALUATE)[1]
    before = (tmp_path / "r.jsonl").read_bytes()
    code, output, _ = ttnorm(EVALUATE)
    assert code == 0
    assert "r.jsonl: 0 new records, 8 from before" in output
    assert (tmp_path / "r.jsonl").read_bytes() == before
    ttnorm(EVALUATE.replace("r.jsonl", "s.jsonl") + " --sequential")
    grouped, sequential = (read_records([tmp_path / f"{name}.jsonl"]) for name in "rs")
    assert [r["wrong"] for r in grouped] == [r["wrong"] for r in sequential]


@pytest.mark.parametrize(("images", "at_once"), [(12, 1), (23, 1), (24, 2)])
def test_domains_are_read_as_many_at_a_time_as_there_is_room_for(
    ttnorm, corrupted, tmp_path, monkeypatch, images, at_once
):
    """And scored as if all were there; where one follows on another, all of them are."""
    line = EVALUATE + " --norm ttn-stream --alpha a.safetensors"
    ttnorm("post-train mine:network cifar a.safetensors --epochs 0 --device cpu")
    ttnorm(f"{line} --scenario single")
    monkeypatch.setattr(runs, "BYTES_AT_ONCE", images * 3 * 32 * 32)
    read, plain = [], runs.StoredDomains.read

    def noted(self, domains):
        read.append(list(domains))
        return plain(self, domains)

    monkeypatch.setattr(runs.StoredDomains, "read", noted)
    ttnorm(line.replace("r.jsonl", "s.jsonl") + " --scenario single --scenario mixed")
    both = ["fog", "contrast"]
    assert read == ([both] if at_once == 2 else [["fog"], ["contrast"]]) + [both]
    every, parts = (read_records([tmp_path / f"{name}.jsonl"]) for name in "rs")
    key = ("domain", "norm", "batch_size", "data", "wrong")
    every, parts = (
        sorted(tuple(r[k] for k in key) for r in found if r["scenario"] == "single")
        for found in (every, parts)
    )
    assert every == parts
    assert len(every) == 2 * 2 * 3


@pytest.mark.parametrize("scenario", ["single", "source"])
def test_of_a_subset_no_other_image_is_kept(ttnorm, corrupted, tmp_path, monkeypatch, scenario):
    read, plain = [], runs.StoredDomains.read

    def noted(self, domains):
        read.append(plain(self, domains))
        return read[-1]

    monkeypatch.setattr(runs.StoredDomains, "read", noted)
    assert ttnorm(f"{EVALUATE} --subset 5 --scenario {scenario}")[0] == 0
    assert [len(x) for tests in read for x in tests.images.values()] == [5] * (
        2 if scenario == "single" else 1
    )
    assert {r["n"] for r in read_records([tmp_path / "r.jsonl"])} == {5}
    if scenario == "single":
        assert {len(x.untyped_storage()) for x in read[0].images.values()} == {5 * 3 * 32 * 32}


def test_what_can_be_known_before_images_are_read_is_said_before(ttnorm, corrupted, monkeypatch):
    monkeypatch.setattr(runs, "stored_domains", lambda *_, **__: pytest.fail("read"))
    code, _, errors = ttnorm(
        "evaluate r.jsonl --network mine:network --data cc --scenario single --scenario source"
    )
    assert (code, "needs --clean" in errors) == (2, True)
    code, _, errors = ttnorm(EVALUATE.replace("r.jsonl", "mine.py"))
    assert (code, "mine.py, line 1 is no record" in errors) == (2, True)


def test_records_say_that_evaluate_wrote_them_and_older_ones_still_count(
    ttnorm, corrupted, tmp_path
):
    ttnorm(EVALUATE)
    records = read_records([tmp_path / "r.jsonl"])
    assert {r.pop("experiment", None) for r in records} == {"evaluate"}
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "r.jsonl: 0 new records, 8 from before" in ttnorm(EVALUATE)[1]


def test_without_a_wish_norms_are_those_that_alpha_files_allow(ttnorm, corrupted, tmp_path):
    line = EVALUATE.replace("--norm source --norm tbn ", "").replace("--batch-size 1", "")
    assert ttnorm(line)[0] == 0
    norms = {r["norm"] for r in read_records([tmp_path / "r.jsonl"])}
    assert norms == {"source", "tbn", "alpha-bn", "adaptive-bn", "mixnorm", "ema"}


def test_what_an_alpha_file_does_not_know_leaves_out_the_norms_that_want_it(
    ttnorm, corrupted, tmp_path, caplog
):
    artefact.save(surgery.convert_(small_network.network(), 0.3), tmp_path / "a.safetensors")
    line = EVALUATE.replace("--norm source --norm tbn ", "").replace("--batch-size 1", "")
    assert ttnorm(f"{line} --alpha a.safetensors")[0] == 0
    norms = {r["norm"] for r in read_records([tmp_path / "r.jsonl"])}
    assert {"ttn", "ttn-balanced"} < norms
    assert "ttn-stream" not in norms
    assert "ttn-stream is left out: " in caplog.text
    code, _, errors = ttnorm(f"{EVALUATE} --alpha a.safetensors --norm ttn-stream")
    assert (code, "Post-train the network again" in errors) == (2, True)


def test_of_several_streams_only_norms_that_remember_them_are_scored(ttnorm, corrupted, tmp_path):
    line = EVALUATE.replace("--norm source --norm tbn ", "").replace("--batch-size 1", "")
    assert ttnorm(f"{line} --streams 2")[0] == 0
    assert {r["norm"] for r in read_records([tmp_path / "r.jsonl"])} == {"ema"}


def test_what_swr_measures_is_kept_by_the_network(ttnorm, corrupted, tmp_path):
    """Another machine would give other last digits, and every cell were run again."""
    line = f"{EVALUATE} --method swr --source cifar"
    assert "8 new records" in ttnorm(line)[1]
    (kept,) = tmp_path.glob("r.jsonl.mine-network-*.agreement.json")
    other = {name: value + 1e-6 for name, value in json.loads(kept.read_text()).items()}
    assert "0 new records, 8 from before" in ttnorm(line)[1]
    kept.write_text(json.dumps(other))  # it is the file that is asked
    assert "8 new records, 8 from before" in ttnorm(line)[1]
    ttnorm(line.replace("mine:network", "mine:another"))
    assert len(list(tmp_path.glob("*.agreement.json"))) == 2
    kept.write_text("{")
    code, _, errors = ttnorm(line)
    assert code == 2
    assert f"{kept.name} is damaged" in errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--norm ttm", "There is no norm 'ttm'; there are source, tbn"),
        ("--norm ttn", "ttn needs an alpha file of mine:network"),
        ("--norm ttn --alpha absent", "There is no file absent"),
        ("--method tint", "There is no method 'tint'; there are none"),
        ("--scenario mixd", "There is no scenario 'mixd'; there are single"),
        ("--corruption mist", "There is no corruption 'mist'; there are gaussian_noise"),
        ("--batch-size 0", "batch_size is 0, expected at least 1"),
        ("--severity 7", "severity is 7, expected 1 to 5"),
        ("--severity 3", "holds no images of severity 3"),
        ("--subset 13", "The subset is 13 images, expected 1 to 12"),
        ("--data absent", "There is no file absent/labels.npy"),
        ("--clean absent --scenario source", "There is no folder absent"),
        ("--network :network", "':network' names no function, expected MODULE:FUNCTION"),
        ("--device xpu", "--device is 'xpu', and torch sees no such GPU here"),
        ("--network wrn", "'wrn' is no network: expected wrn40_2-cifar10"),
        ("--network mine:without_statistics", "1 (BatchNorm2d) keeps no running statistics"),
        (
            "--method sliding --norm mixnorm",
            "sliding is for norms without a memory, and mixnorm has",
        ),
        ("--method sliding --batch-size 300", "window is 200, expected at least the batch size"),
        ("--network mine:of_three_classes", "labels from 0 to 9; mine:of_three_classes has 3"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(ttnorm, corrupted, tmp_path, line, message):
    code, _, errors = ttnorm(f"{EVALUATE} {line}")
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "r.jsonl").exists()


def test_nothing_runs_when_a_later_scenario_is_wrong(ttnorm, corrupted, tmp_path):
    code, _, errors = ttnorm(f"{EVALUATE} --scenario single --scenario mixd")
    assert code == 2
    assert "There is no scenario 'mixd'" in errors
    assert not (tmp_path / "r.jsonl").exists()


def test_damaged_files(ttnorm, corrupted, tmp_path):
    path, labels = tmp_path / "cc/fog.npy", tmp_path / "cc/labels.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "fog.npy is truncated or no npy file" in ttnorm(EVALUATE)[2]
    np.save(path, np.zeros((60, 8, 8, 3), np.uint8))
    assert "fog.npy has shape (60, 8, 8, 3), expected (60, 32, 32, 3)" in ttnorm(EVALUATE)[2]
    path.write_bytes(whole)
    np.save(labels, np.full(60, 100))
    assert "labels from 100 to 100, expected 0-99" in ttnorm(EVALUATE)[2]
    np.save(labels, np.full(60, 0.5))
    assert "labels.npy has float64, expected whole numbers" in ttnorm(EVALUATE)[2]
    np.save(labels, np.full(60, 99))
    code, _, errors = ttnorm(EVALUATE)
    assert "cc has labels from 99 to 99; mine:network has 10 classes" in errors
    assert code == 2
    assert not (tmp_path / "r.jsonl").exists()


def test_a_folder_is_no_file_of_records(ttnorm, corrupted, tmp_path):
    (tmp_path / "r.jsonl").mkdir()
    code, _, errors = ttnorm(EVALUATE)
    assert code == 2
    assert "r.jsonl is a folder, expected a file" in errors


def test_somebody_s_file_is_not_written_to(ttnorm, corrupted, tmp_path):
    (tmp_path / "r.jsonl").write_text("dear diary")
    code, _, errors = ttnorm(EVALUATE)
    assert code == 2
    assert "r.jsonl is no file of records" in errors
    assert (tmp_path / "r.jsonl").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("corrupt absent out", "There is no folder absent"),
        ("corrupt cifar out --severity 0", "severity is 0, expected 1 to 5"),
        ("corrupt cifar out --corruption frost", "frost needs its textures"),
        ("corrupt cifar out --corruption frost --textures cifar", "There is no picture cifar/fr"),
        ("corrupt cifar out --corruption fog --workers 0", "workers is 0, expected at least 1"),
        ("corrupt cifar out --corruption fog --seed -1", "seed is -1, expected 0 or more"),
        ("corrupt cifar mine.py", "mine.py cannot be a folder to write to"),
        ("report absent.jsonl --output out", "There is no file absent.jsonl"),
        ("report cifar --output mine.py/x", "mine.py/x cannot be a folder to write to"),
        ("demo --output mine.py", "mine.py cannot be a folder to write to"),
        ("post-train mine:network nowhere out", "'nowhere' is no folder that is there"),
        ("report cifar --output out", "There are no records to report on"),
        ("train-source cifar out --batch-size 0", "batch_size is 0, expected a positive number"),
        ("train-source cifar out --epochs 0", "epochs is 0, expected a positive number"),
        ("train-source cifar out --width 0", "width is 0, expected a positive number"),
        (
            "post-train mine:network cifar out --batch-size 0",
            "--batch-size is 0, expected at least 1",
        ),
        ("post-train mine:network cifar out --group-sizes 1,x", "expected whole numbers, as in"),
        ("post-train mine:network cifar out --lr nan", "lr is nan, expected a positive number"),
        (
            "post-train mine:network mine:network out --batch-size 4",
            "--batch-size is for folders; mine:network says its own",
        ),
        (
            "post-train mine:network cifar out --mean 0.5,0.5,0.5 --std 0.2,0.2,0.2",
            "--mean and --std are for loaders of your own; the images of cifar are given as they",
        ),
        (
            "post-train mine:of_three_classes cifar out --device cpu",
            "cifar has labels from 0 to 9; mine:of_three_classes has 3 classes",
        ),
    ],
)
def test_bad_input_of_the_others(ttnorm, tmp_path, line, message):
    code, _, errors = ttnorm(line)
    assert code == 2
    assert message in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("table1 --cifar10 absent", "There is no folder absent"),
        ("table1 --cifar10 .", "holds no CIFAR test set"),
        ("table1 --cifar10 cifar --cifar100 absent", "There is no folder absent"),
        ("table1 --cifar10 cifar --only nothing", "table1 has no row nothing"),
        ("all --cifar10 cifar --only ttn --only ttm", "no row ttm; there is source, tbn"),
        ("table1 --cifar10 cifar --textures absent", "There is no picture absent/frost1.png"),
        ("table1 --cifar10 cifar --work mine.py/w", "mine.py/w cannot be a folder to write to"),
        ("table6 --cifar10 cifar", "table6: wants a folder with camvid"),
        ("table6 --camvid cifar", "--camvid needs --camvid-network"),
        ("table6 --camvid cifar --camvid-network absent", "There is no file absent"),
        ("table6 --camvid absent --camvid-network mine.py", "There is no folder absent"),
        ("table13 --imagenet absent", "absent has no folder test or val"),
        ("table13 --imagenet images --network nothing", "There is no network 'nothing'"),
        ("table13 --imagenet images --network resnet50=absent", "There is no file absent"),
        ("table13 --imagenet images --network a=b --network a=c", "--network has a twice"),
        ("all --cifar10 cifar --imagenet absent", "absent has no folder test or val"),
    ],
)
def test_reproduce_makes_nothing_of_bad_input(ttnorm, tmp_path, line, message):
    (tmp_path / "images/test").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    code, _, errors = ttnorm(f"reproduce {line}")
    assert code == 2
    assert message in errors
    assert sorted(tmp_path.iterdir()) == before
