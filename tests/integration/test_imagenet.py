"""ImageNet on the command line: from folders of pictures to records, in one process and in two."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ttnorm import artefact
from ttnorm.bench import paper, tables
from ttnorm.bench.experiments import EXPERIMENTS
from ttnorm.bench.imagenet import ImageNetBench
from ttnorm.bench.records import read_records
from ttnorm.bench.reproduce import reproduce
from ttnorm.bench.shards import merge
from ttnorm.bench.subject import Scale, Setup

USER_CODE = """
    import torch
    from torch import nn

    def network():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 6, 8, stride=8),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 1000),
        )
        for _ in range(20):
            model(torch.rand(16, 3, 224, 224))
        return model.eval()
"""
CORRUPTIONS = ("fog", "contrast", "pixelate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight pictures to learn from, eight to test on and, of these, ImageNet-C."""
    root = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(0)
    names = [f"{label:04d}/{number}.JPEG" for label in (3, 500, 998) for number in range(3)][:8]
    sets = {"source": 250, "test": 200, **{f"c/{c}/5": 250 - 40 * i for i, c in
                                          enumerate(CORRUPTIONS)}}  # fmt: skip
    for where, bright in sets.items():
        for name in names:
            path = root / where / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, bright, (7, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((224, 224)).save(path)
    (root / "mine.py").write_text(textwrap.dedent(USER_CODE))
    return root


def ttnorm(folder, line, processes=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = [sys.executable, *(torchrun if processes > 1 else []), "-m", "ttnorm"]
    source = Path(__file__).parents[2] / "src"
    result = subprocess.run(
        [*program, *line.split(), "--device", "cpu"] if "corrupt" not in line
        else [*program, *line.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


EVALUATE = (
    "evaluate {} --network mine:network --dataset imagenet-c --data c --source source "
    "--norm source --norm tbn --norm ttn --norm ttn-stream --alpha a.ttn.safetensors "
    "--method none --method swr --batch-size 4 --batch-size 1 "
    + " ".join(f"--corruption {c}" for c in CORRUPTIONS)
)


@pytest.fixture(scope="module")
def alpha(folder):
    line = "post-train mine:network source a.ttn.safetensors --dataset imagenet --epochs 1"
    assert "1 epochs" in ttnorm(folder, line)
    return folder / "a.ttn.safetensors"


def outcomes(path):
    key = ("scenario", "domain", "norm", "method", "batch_size", "n", "data", "wrong")
    return {tuple(str(r[k]) for k in key) for r in read_records([path])}


def test_two_processes_have_the_records_of_one(folder, alpha):
    for processes in (1, 2):
        line = f"{EVALUATE.format(f'{processes}.jsonl')} --scenario single --scenario continual"
        ttnorm(folder, line, processes)
    one, two = (outcomes(folder / f"{n}.jsonl") for n in (1, 2))
    assert one == two
    assert len(one) == len(read_records([folder / "2.jsonl"])) == 2 * 4 * 2 * 2 * 3
    assert not list(folder.glob("2.jsonl.rank*"))
    (weights,) = {
        r["config"]["method"]["weights"]
        for n in (1, 2)
        for r in read_records([folder / f"{n}.jsonl"])
        if r["method"] == "swr"
    }
    assert weights


def test_two_processes_leave_out_the_bad_files_that_one_does(folder, tmp_path):
    """Those of corruptions that another has as well; and of three, one has nothing to do."""
    shutil.copytree(folder / "c", tmp_path / "c")
    shutil.copy(folder / "mine.py", tmp_path)
    (tmp_path / "c/fog/5/0003/1.JPEG").write_bytes(b"no picture")
    (tmp_path / "c/contrast/5/0500/2.JPEG").unlink()
    line = "evaluate {}.jsonl --network mine:network --dataset imagenet-c --data c --norm tbn "
    line += "--corruption fog --corruption contrast --scenario single --scenario continual "
    for processes in (1, 2, 3):
        ttnorm(tmp_path, line.format(processes) + "--batch-size 4 --skip-bad", processes)
    one, two, three = (outcomes(tmp_path / f"{n}.jsonl") for n in (1, 2, 3))
    assert one == two == three
    assert {r["n"] for r in read_records([tmp_path / "1.jsonl"])} == {6}


def test_what_a_killed_process_left_is_not_lost(folder, alpha, tmp_path):
    ttnorm(folder, f"{EVALUATE.format(tmp_path / 'r.jsonl')} --method none")
    lines = (tmp_path / "r.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "r.jsonl.rank0").write_text("".join(lines[2:5]))
    (tmp_path / "r.jsonl.rank1").write_text("".join(lines[5:7]) + lines[7][:30])
    merge(tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").read_text() == "".join(lines[:7])
    # no part of a rank, but what swr measured
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".json"}


def test_corruptions_that_were_made_here_are_scored_as_well(folder):
    line = "corrupt test made --dataset imagenet --severity 5 --corruption contrast --workers 1"
    assert "1 corruptions and labels" in ttnorm(folder, line)
    line = "evaluate m.jsonl --network mine:network --dataset imagenet-c --data made --clean test "
    line += "--norm tbn --corruption contrast --scenario single --scenario source"
    assert "imagenet-c, single" in ttnorm(folder, line)
    records = read_records([folder / "m.jsonl"])
    assert [r["batch_size"] for r in records] == [64, 16, 4, 2, 1] * 2
    assert {(r["dataset"], r["domain"]) for r in records} == {
        ("imagenet-c", "contrast"),
        ("imagenet", "clean"),
    }


def test_the_papers_table_is_run_once(folder, tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pth")
    scale = Scale(("contrast", "pixelate"), images=6, train=8, epochs=1, seeds=2, batch_sizes=(4,))
    folders = {"work": tmp_path / "work", "alphas": tmp_path / "alphas"}
    setup = Setup(**folders, device="cpu", scale=scale)
    bench = ImageNetBench("timm/test_resnet", tmp_path / "w.pth", folder, setup)
    for _ in range(2):
        reproduce(["table13"], {"any": bench}, tmp_path / "records")
    records = read_records([tmp_path / "records"])
    rows = EXPERIMENTS["table13"].rows
    assert {(r["norm"], r["method"]) for r in records} == set(rows)
    repeated = ("ttn", "none"), ("ttn-stream", "none")
    (file, _) = sorted((tmp_path / "alphas").glob("*.default.*.safetensors"))
    config = artefact.read(file).metadata["config"]  # so few images have a recipe of their own
    assert (config["granularity"], config["group_sizes"]) == ("layer", [1, 2, 4, 16, 64])
    assert config["augmentation"].startswith("domain_shift(parts=('jitter', 'affine', 'blur'")
    assert len(records) == 2 * (len(rows) + len(repeated))
    assert {r["dataset"] for r in records} == {"imagenet-c"}
    (table,) = tables.of_experiment(EXPERIMENTS["table13"], records)
    assert all(cell.ours is not None for _, cells in table.rows for cell in cells)
    # the weights of SWR are kept, and so are the records that name them
    bench = ImageNetBench("timm/test_resnet", tmp_path / "w.pth", folder, setup)
    reproduce(["table13"], {"any": bench}, tmp_path / "records")
    assert read_records([tmp_path / "records"]) == records


def test_the_papers_numbers_are_beside_ours():
    assert paper.error("single", "imagenet-c", "ttn", "none", 64) == 72.21
    assert paper.error("single", "imagenet-c", "ttn", "none", 200) is None


def test_post_training_is_shared_by_two_processes(folder):
    line = "post-train mine:network source two.ttn.safetensors --dataset imagenet --batch-size 4 "
    ttnorm(folder, f"{line} --epochs 1 --prior-samples 8", processes=2)
    alpha, metadata = artefact.read(folder / "two.ttn.safetensors")
    assert metadata["config"]["augmentation"].startswith("domain_shift(")  # for so few images
    assert all(a.isfinite().all() for a in alpha.values())
