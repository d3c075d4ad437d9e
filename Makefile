# One place for every command. `make` or `make help` lists them.
PYTHON ?= python3.11
VENV   ?= .venv
BIN     = $(VENV)/bin
PY      = $(BIN)/python
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup lint types fast check test cubins nightly gpu needs-gpu bench figures docs clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make the virtual environment with everything for development (VENV=DIR to place it)

$(VENV)/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints-dev.txt -e '.[dev]'
	@touch $@

lint: setup ## style: ruff
	$(BIN)/ruff check .

types: setup ## types: mypy
	$(BIN)/mypy

fast: setup ## the fast tests only
	$(PY) -m pytest -q -n $(JOBS) -m "not slow and not nightly and not gpu"

check: lint types fast ## before every commit: style, types and the fast tests, under a minute on two idle cores

test: setup ## every test that needs no GPU, about ten minutes on two cores; CI runs the same
	$(PY) -m pytest -n $(JOBS)

cubins: setup ## compile every spec with every offered configuration to sm_90a and inspect the machine code (no GPU)
	$(PY) -m pytest -n $(JOBS) -m "nightly or not nightly" tests/test_cubins.py

nightly: setup ## every test that needs no GPU, the exhaustive ones too
	$(PY) -m pytest -n $(JOBS) -m "nightly or not nightly"

gpu: needs-gpu ## everything that needs a Hopper GPU: tests, scalar functions, every spec at every size, against float64
	$(PY) -m pytest -m gpu
	$(PY) bench/gpu_functions.py --build build/functions && $(PY) bench/gpu_functions.py --run build/functions
	$(PY) bench/gpu_specs.py --build build/specs && $(PY) bench/gpu_specs.py --run build/specs
	$(PY) bench/gpu_training.py --run build/training --parts gradients uses configs
	$(PY) bench/gpu_models.py --out build/models --limit 1200

bench: needs-gpu ## speed of the mainloop against cuBLAS, on a Hopper GPU; tables go to bench/results/
	$(PY) bench/gpu_mainloop.py build build/mainloop && $(PY) bench/gpu_mainloop.py run build/mainloop build/mainloop.jsonl
	$(PY) bench/gpu_training.py --run build/training --parts speed
	$(PY) bench/gpu_layers.py --out build/layers.jsonl --limit 900
	$(PY) bench/gpu_rivals.py --out build/rivals.jsonl --limit 1800
	$(PY) bench/host_time.py

needs-gpu: setup
	@$(PY) -m bench.need_gpu

figures: setup ## tables and plots of docs/performance.md again, from bench/results
	$(PY) -m bench.performance
	$(PY) bench/plots.py

docs: setup ## run every example in README.md and docs/
	$(PY) -m pytest -q tests/test_docs.py

clean: ## remove what the commands above left (not the virtual environment)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
