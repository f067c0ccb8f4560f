# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes the virtual environment if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo

.PHONY: demo test test-all check format bench pictures clean

demo: $(VENV)/.runtime
	$(BIN)/lamina compare --output $(DEMO) --resume $(ARGS)

test: $(VENV)/.development
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-all: $(VENV)/.development
	$(BIN)/python -m pytest -n 2 -m "" $(ARGS)

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.development
	$(BIN)/python benchmarks/train_step.py --output benchmarks/results/train_step.json
	$(BIN)/python benchmarks/probes.py --output benchmarks/results/probes.json

pictures: $(VENV)/.development
	$(BIN)/lamina placements post_ln,pre_ln,peri_ln,mix_ln,fusenorm,keel --num-layers 4 --svg docs/placements.svg
	$(BIN)/lamina placements --num-layers 4 --svg docs/all-placements.svg
	$(BIN)/python docs/tables.py
	$(BIN)/lamina report $(DEMO) --screenshot docs/report.png

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lamina needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 ... names another)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.development: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.runtime
