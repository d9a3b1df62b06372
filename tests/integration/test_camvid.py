"""CamVid from frames to tables and pictures: train, post-train, score."""

import dataclasses

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ttnorm.bench import formats, subject, tables
from ttnorm.bench.camvid import CORRUPTIONS
from ttnorm.bench.experiments import EXPERIMENTS
from ttnorm.bench.records import read_records
from ttnorm.bench.report import write_report
from ttnorm.cli import app

SEQUENCES = {
    "train": ("0006R0", "0016E5", "0001TP"),
    "val": ("0016E5",),
    "test": ("Seq05VD", "0001TP"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two frames of every sequence, and the first five frost pictures."""
    root = tmp_path_factory.mktemp("camvid")
    rng = np.random.default_rng(0)
    for split, sequences in SEQUENCES.items():
        for where in (split, f"{split}annot"):
            (root / where).mkdir()
        for name in (f"{s}_{i:05d}" for s in sequences for i in range(2)):
            masks = np.repeat(rng.permutation(12), 4)[:, None] * np.ones(64, int)
            frame = (masks[..., None] * 20 + rng.integers(0, 20, (48, 64, 3))).astype(np.uint8)
            dark = 4 if name.startswith("0001TP") else 1
            Image.fromarray(frame // dark).save(root / f"{split}/{name}.png")
            Image.fromarray(masks.astype(np.uint8)).save(root / f"{split}annot/{name}.png")
    (root / "frost").mkdir()
    for name in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        texture = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)  # smaller than a frame
        Image.fromarray(texture).save(root / "frost" / name)
    return root


def ttnorm(line):
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_from_frames_to_tables_and_pictures(folder, tmp_path, monkeypatch):
    scale = dataclasses.replace(subject.QUICK_SCENES, images=4, train=4, corruptions=CORRUPTIONS)
    monkeypatch.setattr(subject, "QUICK_SCENES", scale)
    network = tmp_path / "deeplab.safetensors"
    line = f"train-segmentation {folder} {network} --epochs 1 --batch-size 4 --device cpu"
    assert "4 frames, last epoch loss" in ttnorm(line)  # of training, without the dusk
    line = (
        f"reproduce table6 --camvid {folder} --camvid-network {network} --textures {folder}/frost "
        f"--records {tmp_path}/unused --work {tmp_path}/work --quick --device cpu "
        f"--pictures {tmp_path}/pictures"
    )
    output = ttnorm(line)
    assert "mIoU in %" in output
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == [
        "camvid-dusk.png",
        "camvid-fog.png",
    ]
    records = read_records([tmp_path / "work/quick/records"])
    rows = EXPERIMENTS["table6"].rows
    domains = {"day", "dusk", "fog", "snow", "frost", "brightness", "motion_blur", "gaussian_noise"}
    assert {(r["norm"], r["method"]) for r in records} == set(rows)
    assert {r["domain"] for r in records} == domains
    assert {r["domain"]: r["n"] for r in records}["dusk"] == 4
    ttnorm(line)
    assert read_records([tmp_path / "work/quick/records"]) == records


def test_an_experiment_without_its_network_is_refused(folder, tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "table6", "--camvid", str(folder)])
    assert "--camvid needs --camvid-network" in str(result.exception)


def record(domain, norm, miou, seed=0, size=2):
    return {
        "dataset": "camvid",
        "severity": 5 if domain == "fog" else 0,
        "domain": domain,
        "scenario": "single",
        "norm": norm,
        "method": "none",
        "batch_size": size,
        "seed": 0,
        "n": 4 if domain == "dusk" else 6,
        "miou": miou,
        "iou": [miou] * 10 + [None],
        "model": {"name": "deeplab"},
        "alpha": {"name": f"deeplab.default.seed{seed}.ttn.safetensors"} if norm == "ttn" else None,
        "config": {"subset": 4 if domain == "dusk" else 6},
    }


SCORES = {"day": 0.7, "dusk": 0.4, "fog": 0.3}


@pytest.fixture
def records():
    found = [record(d, "source", s, size=b) for d, s in SCORES.items() for b in (2, 4)]
    for seed in range(3):
        found += [record(d, "ttn", s + 0.01 * seed, seed, b) for d, s in SCORES.items()
                  for b in (2, 4)]  # fmt: skip
    return found


def test_a_table_of_scenes_has_deviations_and_the_highest_is_best(records):
    both, small, large = tables.of_experiment(EXPERIMENTS["table6"], records)
    assert small.columns == ["day", "dusk", "fog", "average of corruptions"]
    (_, source), (_, ttn) = small.rows
    assert [round(c.ours) for c in source] == [70, 40, 30, 30]
    assert ttn[0].ours == pytest.approx(71)
    assert ttn[0].deviation == pytest.approx(1)
    assert "**71.00 ± 1.00**" in formats.to_markdown(small)
    assert both.columns == ["B = 4", "B = 2", "average"]
    assert large.title.endswith("B = 4: mIoU in %")


def test_the_report_has_a_table_for_every_batch_size(records, tmp_path):
    write_report(records, tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "B = 2:" in page
    assert (tmp_path / "results/camvid-single-B4.csv").is_file()
    header, _, ttn = (tmp_path / "results/camvid-single-dusk-classes.csv").read_text().splitlines()
    assert header.startswith("row,sky,sky deviation")
    assert ttn.startswith("TTN,41.0000,1.0000")
    assert ttn.endswith(",,,")  # no bicyclist anywhere
