# Each target does its own set-up from a fresh clone; all it needs is Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: test demo lint types format bench pages clean

test: $(VENV)/installed  ## the whole suite
	$(BIN)/python -m pytest -q

demo: $(VENV)/installed  ## the main job, shown on a small example
	$(BIN)/ttnorm demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed  ## speed and memory; writes benchmarks/results, then the pages
	$(BIN)/python benchmarks/layer_cost.py
	$(BIN)/python benchmarks/network_cost.py
	$(BIN)/python benchmarks/prior_cost.py
	$(BIN)/python benchmarks/posttrain_cost.py
	$(BIN)/python benchmarks/evaluate_cost.py
	$(BIN)/python benchmarks/fold_cost.py
	$(BIN)/python benchmarks/stream_cost.py
	$(MAKE) pages

pages: $(VENV)/installed  ## docs/results.md, performance.md and choices.md from their records, api.md from docstrings
	$(BIN)/ttnorm report results --output docs $(patsubst %,--alpha %,$(wildcard src/ttnorm/models/assets/*[0-9].ttn.safetensors))
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/choices.py
	$(BIN)/python docs/make_api.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ttnorm needs Python >= 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
