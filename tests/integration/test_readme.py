"""The README does what it says: its snippets run, its options and commands exist."""

import dataclasses
import re
import statistics
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import ttnorm
from ttnorm import cli
from ttnorm.bench.experiments import EXPERIMENTS
from ttnorm.bench.records import read_records
from ttnorm.bench.scenarios import SCENARIOS
from ttnorm.bench.tables import is_of_its_norm
from ttnorm.methods import METHODS
from ttnorm.norms import NORMS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCORING = (ROOT / "docs" / "benchmark.md").read_text()


def test_the_snippets_run_one_after_the_other(tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", README + SCORING, re.DOTALL)
    assert len(snippets) == 8
    (tmp_path / "pasted.py").write_text("\n".join(snippets))
    result = subprocess.run(
        [sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "resnet18.onnx").exists()


def test_every_option_of_post_training_is_explained_with_its_default():
    options = README.partition("## What the options mean")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", options, re.MULTILINE)
    explained = {}
    for names, defaults in rows:
        values = re.split(r", (?![^(]*\))", defaults)
        explained |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    fields = {f.name: f.default for f in dataclasses.fields(ttnorm.PostTrainConfig)}
    assert explained.keys() == fields.keys()
    for name, default in fields.items():
        assert eval(explained[name]) == default


def test_its_commands_and_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for command in re.findall(r"^ttnorm ([\w-]+)", README + SCORING, re.MULTILINE):
        assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0


def test_every_name_on_the_command_line_is_explained():
    for name in (*NORMS, *METHODS, *SCENARIOS):
        short = re.sub(r"^alternating(?=-[52])", "", name)  # after alternating-10
        assert f"`{short}`" in SCORING, name
    for name in EXPERIMENTS:
        assert re.search(rf"\b{re.sub('^table.*', 'table14', name)}\b", SCORING), name


def test_its_errors_are_those_of_the_records():
    """The table of "Does it help?", cell by cell."""
    table = README.partition("## Does it help?")[2].partition("WRN-40-2")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines() if "|" in line]
    columns = [("cifar10-c", "wrn40_2-cifar10", b) for b in (200, 16, 1)]
    columns += [("cifar100-c", "wrn40_2-cifar100", b) for b in (200, 16, 1)]
    columns += [("imagenet-c", "mobilenet_v2", b) for b in (64, 16, 1)]
    norms = ("source", "tbn", "alpha-bn", "adaptive-bn", "ttn", "ttn-counted", "ttn-stream")
    records = [r for r in read_records([ROOT / "results"]) if r["scenario"] == "single"]
    records = [r for r in records if r["method"] == "none" and is_of_its_norm(r)]
    for norm, cells in zip(norms, rows[2:], strict=True):
        for (dataset, model, size), cell in zip(columns, cells, strict=True):
            key = (norm, dataset, model, size)
            errors = [
                100 * r["wrong"] / r["n"]
                for r in records
                if (r["norm"], r["dataset"], r["model"]["name"], r["batch_size"]) == key
            ]
            assert cell == (f"{statistics.mean(errors):.1f}" if errors else "–"), key
