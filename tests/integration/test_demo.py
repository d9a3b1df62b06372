"""The demo, shortened: it post-trains, scores, and writes a page that shows what it says."""

import dataclasses
import re

import pytest
from rich.console import Console

from ttnorm import artefact
from ttnorm.demo import cifar

CORRUPTIONS = ("fog", "contrast")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        config = dataclasses.replace(cifar.CONFIG, epochs=1, steps_per_epoch=1, prior_samples=16)
        patch.setattr(cifar, "CONFIG", config)
        patch.setattr(cifar, "CORRUPTIONS", CORRUPTIONS)
        console = Console(record=True, width=100)
        records = cifar.run(console, folder, images=40)
    return folder, records, console.export_text()


def test_it_scores_every_norm_at_every_batch_size(demo):
    _, records, _ = demo
    cells = {(r["norm"], r["batch_size"], r["domain"]) for r in records}
    assert cells == {(n, b, d) for n in cifar.NORMS for b in cifar.BATCH_SIZES for d in CORRUPTIONS}


def test_it_leaves_an_alpha_file_that_was_fitted_here(demo):
    folder, _, _ = demo
    assert artefact.read(folder / "demo.ttn.safetensors").metadata["config"]["epochs"] == 1


def test_the_page_needs_no_other_file_and_shows_the_errors_of_the_records(demo):
    folder, records, shown = demo
    page = (folder / "index.html").read_text()
    assert page.count("<img") == len(CORRUPTIONS) * 8
    assert page.count("<svg") == 3
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    cells = [r for r in records if (r["norm"], r["batch_size"]) == ("ttn", 1)]
    errors = [100 * r["wrong"] / r["n"] for r in cells]
    error = sum(errors) / len(errors)
    assert f"{error:.2f}" in page
    assert f"{error:.2f}" in shown


def test_the_page_says_of_every_answer_whether_it_is_right(demo):
    folder, _, _ = demo
    page = (folder / "index.html").read_text()
    answers = len(CORRUPTIONS) * 8 * 3  # pictures, of each of which three norms say what they see
    assert page.count("✓") + page.count("✗") == answers
