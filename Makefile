# Every target sets itself up: the first call builds .venv, later ones reuse it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The second Triton that the kernels are tested under (the one that torch 2.11 ships with).
TRITON_ALSO := 3.6.0
# Left out there, to stay under 15 minutes: minutes of interpreting what test_powersgd_plan.py goes through once.
LONGEST := test_powersgd_step.py test_powersgd_orthonormalise.py

# Tests at a time. Most of their time they wait, for other ranks or for programs that they start.
WORKERS ?= 2
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo accuracy test lint format bench gpu-check clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(VENV)/ready      ## train a small GPT with every hook on 2 ranks; draw loss against bytes sent
	$(BIN)/python -m benchmarks.demo $(ARGS)

accuracy: $(VENV)/ready  ## train two models to the end with every hook, from several seeds; compare validation losses
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

test: $(VENV)/ready $(VENV)/triton-$(TRITON_ALSO)   ## every test; then the kernels' tests under the second Triton
	$(PYTEST) $(ARGS)
	PYTHONPATH=$(VENV)/triton-$(TRITON_ALSO) $(PYTEST) tests/kernels $(LONGEST:%=--ignore=tests/kernels/%) $(ARGS)

lint: $(VENV)/ready      ## check style and types; edits nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready    ## sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready     ## time our operations and hooks beside torch's on this machine's device
	$(BIN)/python -m benchmarks $(ARGS)

gpu-check:       ## tests and benchmarks on CUDA, from a bare checkout (no venv, no network)
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

clean:           ## remove the environment and everything built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# torch comes first: a CUDA build of it brings the Triton it was built with, and that one stays.
$(VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch setuptools
	@if $(BIN)/python -c 'import triton' 2>/dev/null; then sed -i '/^triton/d' $(VENV)/constraints.txt; fi
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/triton-%: | $(VENV)/ready
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target $@ triton==$*
