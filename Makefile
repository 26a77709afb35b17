# Everything a developer or CI needs. `make demo` and `make test` do all the set-up by themselves
# on a Debian 12 machine with git and make (root for missing system packages; package registries only).

.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TOOLS := build/tools
MPS := build/mps
# Two at a time: the tests of real processes mostly wait. A file stays together.
PYTEST ?= -n 2 --dist loadfile
export PATH := $(CURDIR)/$(TOOLS):$(PATH)

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.PHONY: setup
setup: $(READY) $(TOOLS)/.ready $(MPS)/.ready ## the virtual environment, .venv/bin/gpuagent and the tools the tests use

$(READY): packaging/lock/dev.txt pyproject.toml .ci/setup
	.ci/setup venv "$(PYTHON)" "$(VENV)" packaging/lock/dev.txt
	touch $@

$(TOOLS)/.ready: .ci/setup
	.ci/setup tools "$(TOOLS)"
	touch $@

$(MPS)/.ready: .ci/setup
	.ci/setup mps "$(MPS)"
	touch $@

.PHONY: demo
demo: $(READY) ## the agent on a simulated host beside the same host without it: a live table for one minute
	$(VENV)/bin/gpuagent demo $(DEMO)

.PHONY: demo-host
demo-host: $(READY) ## the real daemon on a fake driver and plain control files: growth, heat, kill -9, all put back
	$(PY) -m tests.demo $(DEMO)

.PHONY: evaluate
evaluate: $(READY) ## the agent against other policies on the simulated host; report and plots in build/evaluate
	$(VENV)/bin/gpuagent evaluate --out build/evaluate $(EVALUATE)

.PHONY: test
test: setup lint types ## lint, types and all fast tests; under 10 minutes on two cores
	$(PY) -m pytest $(PYTEST)

.PHONY: e2e
e2e: $(READY) ## the shipped unit on a real host: a virtual machine with systemd; says so where it cannot be
	$(PY) -m tests.e2e $(E2E)

.PHONY: lint
lint: $(READY) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.PHONY: types
types: $(READY) ## mypy, strict
	$(PY) -m mypy

.PHONY: bench
bench: setup ## measure what DESIGN 8 budgets; prints a table, writes build/bench.json
	$(PY) -m tests.bench $(BENCH)

.PHONY: wheel
wheel: $(READY) ## dist/*.whl
	$(PY) -m build --wheel --no-isolation --outdir dist .

.PHONY: lock
lock: ## pin and hash every dependency anew
	.ci/setup lock "$(PYTHON)"

.PHONY: clean
clean: ## all that was built
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
