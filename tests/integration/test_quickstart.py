"""docs/quickstart.md runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
NUMBER = r"\d+\.?\d*"


def test_its_blocks_are_a_script_that_prints_what_stands_below_them(tmp_path):
    (tmp_path / "pasted.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)))
    result = subprocess.run(
        [sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    printed = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.S))
    assert re.sub(NUMBER, "", result.stdout) == re.sub(NUMBER, "", printed)
    found, expected = (map(float, re.findall(NUMBER, text)) for text in (result.stdout, printed))
    for ours, theirs in zip(found, expected, strict=True):
        # another processor rounds otherwise: an image of 400 is 0.25 %
        assert ours == pytest.approx(theirs, abs=1.0 if theirs > 1 else 0.01)
