# Every target sets itself up: the first call builds .venv with what this target needs, later ones reuse and extend it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Other Tritons than the pinned torch's that the kernels are tested under: those that torch 2.11 and 2.15 require.
OTHER_TRITONS := 3.6.0 3.9.0

# The Pythons that check-dist installs with: names or paths.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13

# Tests at a time. More than cores would be slower: simulated ranks hand over between threads thousands of times.
WORKERS ?= 2
# On a terminal pip shows its progress.
QUIET    = $(if $(MAKE_TERMOUT),,-q)
# One thread per process for torch: ranks share the cores already.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Tests that take long, because they run whole programs, train sharded models, search for planted bugs or compile for
# GPUs, or that need more than pytest.
PROGRAMS := tests/test_bench.py tests/benchmarks tests/docs tests/frameworks tests/fsdp tests/kernels/test_compiled.py \
	tests/house/test_project_files.py tests/house/test_wheel.py tests/plan/test_plan_command.py \
	tests/testing/test_mutants.py tests/testing/test_wrong_hooks.py

.PHONY: demo accuracy test test-programs test-other-tritons lint format docs bench bench-network tables gpu-check dist check-dist clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 16

demo: $(VENV)/demo-ready ## train a small GPT with five hooks and without, over an emulated link
	$(BIN)/python -m benchmarks.demo $(ARGS)

accuracy: $(VENV)/accuracy-ready  ## train a GPT to the end with every hook, from several seeds; compare validation losses
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

test: $(VENV)/test-ready ## the library's tests
	$(PYTEST) $(PROGRAMS:%=--ignore=%) $(ARGS)

test-programs: $(VENV)/dev-ready  ## the tests of commands, benchmarks, FSDP2, frameworks, the documentation and compiled kernels
	$(PYTEST) $(PROGRAMS) $(ARGS)

test-other-tritons: $(OTHER_TRITONS:%=$(VENV)/triton-%)  ## the kernels on their smallest shapes, under other Tritons than torch's
	for triton in $^; do PYTHONPATH=$$triton $(PYTEST) tests/kernels -m smallest $(ARGS) || exit; done

lint: $(VENV)/dev-ready  ## check style and types; edits nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --project pyproject.toml

format: $(VENV)/dev-ready ## sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs-ready ## build the documentation site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet $(ARGS)

bench: $(VENV)/demo-ready ## time our operations and hooks beside torch's on this machine's device
	$(BIN)/python -m benchmarks $(ARGS)

bench-network: $(VENV)/accuracy-ready  ## time hooks over throttled links between network namespaces (Linux)
	$(BIN)/python -m benchmarks.network $(ARGS)

tables: $(VENV)/accuracy-ready  ## renew the tables and numbers of README and pages from benchmarks/results
	$(BIN)/python -m benchmarks.tables

gpu-check:       ## tests and benchmarks on a GPU in under 8 minutes, from a bare checkout (no venv, no network)
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

dist: $(VENV)/dev-ready  ## build the sdist, and from it the wheel, into build/dist
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist $(ARGS)

check-dist: $(VENV)/dev-ready  ## install what dist has built with every Python of PYTHONS that there is
	$(BIN)/python .ci/check_dist.py build/dist $(PYTHONS)

clean:           ## remove the environment and everything built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# .venv with gradcomp, editable, and the packages of one extra of pyproject.toml.
$(VENV)/%-ready: constraints.txt pyproject.toml
	@echo "pip sets up $(VENV); torch with CUDA is a download of 1.8 GB, about a minute (README.md names the CPU build: PIP_EXTRA_INDEX_URL)"
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUIET) --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/pip install $(QUIET) --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@

$(VENV)/triton-%: | $(VENV)/test-ready
	$(BIN)/pip install $(QUIET) --disable-pip-version-check --no-deps --target $@ triton==$*
