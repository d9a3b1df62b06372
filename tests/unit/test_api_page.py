"""docs/api.md has every public name, as its docstring has it now."""

import importlib.util
from pathlib import Path

import ttnorm

DOCS = Path(__file__).parents[2] / "docs"


def _made() -> str:
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_is_what_the_docstrings_say():
    assert (DOCS / "api.md").read_text() == _made(), "run make pages"


def test_every_public_name_is_on_it():
    page = (DOCS / "api.md").read_text()
    for name in set(ttnorm.__all__) - {"__version__", "functional"}:
        assert f"\n### `{name}`\n" in page
    for name in ("batch_moments", "mix_moments", "normalise", "test_time_norm"):
        assert f"\n### `functional.{name}`\n" in page
