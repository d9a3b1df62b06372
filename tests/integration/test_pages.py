"""The generated pages of docs are what the records, and the docstrings, say now."""

import importlib.util
from pathlib import Path

import ttnorm
from ttnorm.bench.records import read_records
from ttnorm.bench.report import write_report
from ttnorm.models import zoo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _assert_same(made, page):
    assert made == (DOCS / page).read_text(), f"docs/{page} is out of date: run make pages"


def test_the_results_are_what_the_records_say(tmp_path):
    alphas = [zoo.alpha_files(name)["ttn"] for name in ("wrn40_2-cifar10", "wrn40_2-cifar100")]
    written = write_report(read_records([ROOT / "results"]), tmp_path, alphas)
    _assert_same((tmp_path / "results.md").read_text(), "results.md")
    for path in written:
        if path.suffix in (".csv", ".tex"):
            _assert_same(path.read_text(), path.relative_to(tmp_path))


def test_the_performance_is_what_was_measured(tmp_path):
    _script(ROOT / "benchmarks" / "page.py").write(tmp_path)
    _assert_same((tmp_path / "performance.md").read_text(), "performance.md")


def test_the_choices_are_what_was_weighed():
    _assert_same(_script(ROOT / "benchmarks" / "choices.py").page(), "choices.md")


def test_the_api_is_what_the_docstrings_say():
    _assert_same(_script(DOCS / "make_api.py").page(), "api.md")


def test_every_public_name_is_in_the_api():
    page = (DOCS / "api.md").read_text()
    for name in set(ttnorm.__all__) - {"__version__", "functional"}:
        assert f"\n### `{name}`\n" in page
    for name in ("batch_moments", "mix_moments", "normalise", "test_time_norm"):
        assert f"\n### `functional.{name}`\n" in page
