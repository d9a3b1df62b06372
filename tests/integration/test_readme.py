"""The README does what it says: its snippets run, its options and commands exist."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import ttnorm
from ttnorm import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_snippets_run_one_after_the_other(tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 5
    (tmp_path / "pasted.py").write_text("\n".join(snippets))
    result = subprocess.run(
        [sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "resnet18.onnx").exists()


def test_every_option_of_post_training_is_explained_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", README, re.MULTILINE)
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
    for command in re.findall(r"^ttnorm ([\w-]+)", README, re.MULTILINE):
        assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0
