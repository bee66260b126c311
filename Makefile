# Everything that one does with this repository. `make demo` and `make test` need python3 and make, no more.

PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash -o pipefail

# pip install, with a line for each package: neither silent for a minute nor two hundred lines.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PROGRESS := sed -unE 's/^(Collecting|Processing) (.*\/)?([A-Za-z0-9_.]+(-[A-Za-z_.][A-Za-z0-9_.]*)*).*/  \3/p; s/^Installing collected.*/  unpacking these packages .../p'

# Hundreds of processes are started: none of them shall compile our modules anew because a shell forbids to keep them.
export PYTHONDONTWRITEBYTECODE :=

# PyTorch and JAX as they are tested here. Where pip finds torch for GPUs first, which is gigabytes:
# make test-frameworks FRAMEWORKS='... --extra-index-url https://download.pytorch.org/whl/cpu'
FRAMEWORKS ?= torch==2.13.0 jax==0.10.2 flax==0.12.8 optax==0.2.8 keras==3.15.1 transformers==5.24.0 accelerate==1.15.0
RAY ?= ray==2.60.0
# PyTorch as `make demo-local` installs it: for CPUs, also where pip finds that for GPUs first.
TORCH ?= $(filter torch==%,$(FRAMEWORKS)) --extra-index-url https://download.pytorch.org/whl/cpu

# What PyTorch or JAX gives types to, where it is installed.
NEED_FRAMEWORKS = $(shell grep -lrE '^(import|from) (torch|jax|flax|keras|tensorflow)\b' --include=*.py psclient examples benchmarks)

# What is built has the time of its commit, so that it is the same whenever it is built.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
TOOLS := .venv/tools/bin/python

.PHONY: help demo demo-recommender demo-embeddings demo-local test test-ci test-all test-frameworks test-ray test-chart \
  check check-types check-docs check-style check-generated check-framework-types check-framework-docs \
  check-framework-tests docs docs-reference proto lock dist sbom dist-check bench soak clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*##/\1	/p' Makefile

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old or missing: Python 3.11 or newer is needed; make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no ensurepip: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/demo: .venv/made pyproject.toml
	@echo "installing paramserver and what the examples need into .venv (about a minute):"
	@$(PIP) install -e '.[examples]' | $(PROGRESS)
	@touch $@

# PyTorch in an environment of its own, so that what is in .venv does not depend on whether this was made.
.venv/demo-local/made: .venv/made pyproject.toml
	@echo "installing paramserver and PyTorch for CPUs into .venv/demo-local (one or two minutes):"
	@$(BIN)/python -m venv .venv/demo-local
	@.venv/demo-local/bin/python -m pip --disable-pip-version-check --no-input install -e . $(TORCH) | $(PROGRESS)
	@touch $@

# Python compiles modules when they are imported, and most of these packages' modules never are: --no-compile.
.venv/dev: .venv/made pyproject.toml
	@echo "installing paramserver and its tools for development into .venv (one or two minutes):"
	@$(PIP) install --no-compile -e '.[dev,examples]' | $(PROGRESS)
	@touch $@ .venv/demo

# Six processes would each compile all tests at once.
.venv/tests: .venv/dev
	@$(BIN)/python -m pytest -q --collect-only | tail -n 2
	@touch $@

.venv/frameworks: .venv/dev Makefile
	@echo "installing PyTorch and JAX into .venv:"
	@$(PIP) install --no-compile $(FRAMEWORKS) | $(PROGRESS)
	@touch $@

.venv/docs: .venv/made pyproject.toml
	@echo "installing what makes the site into .venv:"
	@$(PIP) install -e '.[docs]' | $(PROGRESS)
	@touch $@

.venv/dist: .venv/made locks/dist.lock
	@echo "installing what builds releases into .venv/tools ..."
	@$(BIN)/python -m venv .venv/tools
	@$(TOOLS) -m pip --quiet --disable-pip-version-check --no-input install --no-deps --require-hashes -r locks/dist.lock
	@touch $@

demo: .venv/demo  ## trains on a local cluster of two servers, two workers and a chief
	$(BIN)/psworker --standalone --ps 2 --workers 2 examples/digits.py

demo-recommender: .venv/demo  ## trains two towers over embeddings of users and items on such a cluster
	$(BIN)/psworker --standalone --ps 2 --workers 2 examples/recommender.py

demo-embeddings: .venv/demo  ## trains vectors of the names in Python's standard library, and shows neighbours
	$(BIN)/psworker --standalone --ps 2 --workers 2 examples/embeddings.py

demo-local: .venv/demo-local/made  ## trains a character transformer with local steps (DiLoCo); installs PyTorch for CPUs
	.venv/demo-local/bin/psworker --standalone --ps 2 --workers 2 examples/local_steps.py

test: check .venv/tests  ## all checks and all tests that everybody runs
	$(BIN)/python -m pytest -q -n 6 --dist worksteal --durations=10

test-ci: .venv/dev  ## what CI runs as well: tests that are dear, and other examples of all searches
	PS_SEARCH=ci $(BIN)/python -m pytest -q -n 6 --dist worksteal --durations=10 --run ci -m 'ci or hypothesis'

test-all: test test-ci  ## what everybody runs, then what only CI does

test-frameworks: .venv/frameworks  ## installs PyTorch and JAX, for CPUs, and runs what needs them: a test that is skipped fails
	@$(MAKE) --no-print-directory --keep-going --jobs=3 check-framework-types check-framework-docs check-framework-tests

test-ray: .venv/dev  ## installs Ray, and runs what needs it, on a Ray cluster of two nodes on this machine: three minutes where nothing else runs
	@$(PIP) install $(RAY) | $(PROGRESS)
	PS_FRAMEWORKS=1 $(BIN)/python -m pytest -q --durations=5 tests/ray

test-chart: .venv/dev  ## installs Helm's engine (75 MB, so it is no part of dev), and runs what renders the chart
	@$(PIP) install -e '.[helm]'
	$(BIN)/python -m pytest -q -n 3 tests/deploy/test_helm.py tests/deploy/test_kubernetes.py

check: .venv/dev  ## style, types, generated code, snippets of the documents, lists of promises: two at a time, and all of them whatever fails
	@$(MAKE) --no-print-directory --keep-going --jobs=2 check-types check-docs check-style check-generated

check-types: .venv/dev
	$(BIN)/mypy

check-framework-types: .venv/frameworks
	$(BIN)/mypy $(NEED_FRAMEWORKS)

check-framework-docs: .venv/frameworks
	$(BIN)/python tools/check_docs.py --frameworks

check-framework-tests: .venv/frameworks
	PS_FRAMEWORKS=1 $(BIN)/python -m pytest -q -n 4 --dist worksteal --durations=5 tests/frameworks

check-docs: .venv/dev
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/words.py --limit

check-style: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/promises.py check

check-generated: .venv/dev
	$(BIN)/python tools/check_proto.py
	$(BIN)/python tools/check_reference.py
	$(BIN)/python tools/draw.py
	$(BIN)/python tools/make_tables.py

docs: .venv/docs  ## the documents as a site, with the reference of the API, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-reference: .venv/dev  ## writes docs/reference.md anew: flags, environment variables, configuration keys
	$(BIN)/python tools/check_reference.py --write

proto: .venv/dev  ## generates pswire/pb anew
	$(BIN)/python tools/check_proto.py --write

lock: .venv/dist  ## pins anew what images and releases are made of, in locks/; ARGS=--upgrade for the newest releases
	$(TOOLS) tools/make_locks.py $(ARGS)

dist: .venv/dist  ## an sdist, a wheel that is built from it, and bills of materials, in dist/
	rm -rf dist
	$(TOOLS) -m build --no-isolation
	$(TOOLS) -m twine --no-color check --strict dist/*.tar.gz dist/*.whl
	$(MAKE) --no-print-directory sbom

sbom: .venv/dist  ## bills of materials (CycloneDX) of what is installed from locks/, in dist/
	$(TOOLS) tools/make_sbom.py dist

dist-check: dist .venv/dev  ## builds again, and installs the wheel with each Python that is here, in empty environments
	$(BIN)/python -m pytest -q -n 3 --run dist -m dist tests/deploy/test_packages.py

bench: .venv/dev  ## times of rounds, of an update, of checkpoints, of training steps, of other systems' rounds; ARGS=--quick for a first look
	$(BIN)/python benchmarks/round.py $(ARGS)
	$(BIN)/python benchmarks/fanin.py $(ARGS)
	$(BIN)/python benchmarks/idle.py $(ARGS)
	$(BIN)/python benchmarks/growth.py $(ARGS)
	$(BIN)/python benchmarks/staleness.py $(ARGS)
	$(BIN)/python benchmarks/update.py $(ARGS)
	$(BIN)/python benchmarks/rows.py $(ARGS) $(PEERS:%=--python %)
	$(BIN)/python benchmarks/checkpoint.py $(ARGS)
	$(BIN)/python benchmarks/step.py $(ARGS) $(PEERS:%=--python %)
	$(BIN)/python benchmarks/straggler.py $(ARGS)
	$(BIN)/python benchmarks/copies.py $(ARGS)
	$(BIN)/python benchmarks/hosts.py $(ARGS)
	$(BIN)/python benchmarks/predictions.py $(ARGS)
	$(BIN)/python benchmarks/peers/run.py $(ARGS) $(PEERS:%=--python %)
	if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  $(BIN)/python benchmarks/frameworks.py $(ARGS) $(PEERS:%=--python %) && \
	  $(BIN)/python benchmarks/slow_links.py $(ARGS) && \
	  $(BIN)/python benchmarks/recommenders.py $(ARGS) $(PEERS:%=--python %); \
	  else echo "benchmarks of psclient.torch are left out: .venv has no torch, which make .venv/frameworks installs" >&2; fi

soak: .venv/dev  ## the tests that `make test` leaves out, a minute of all faults at once among them; those of faults many times
	$(BIN)/python -m pytest -q --run soak -m soak
	for turn in 1 2 3 4 5 6 7 8 9 10; do PS_TESTS_EXEC=1 $(BIN)/python -m pytest -q -x tests/jobs || exit 1; done

clean:  ## removes what was built
	rm -rf .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
