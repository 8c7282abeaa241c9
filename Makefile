# `make train` runs the main job, `make test` the tests. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without its dependencies: the checkers of verifyif need the copy of nltk's punkt_tab inside, nothing else.
NLTK_DATA := llama-index-core==0.14.25
INSTALLED := $(VENV)/.installed
# vLLM has an environment of its own, with a torch and a Python of its own: Python 3.11.
VLLM_PYTHON ?= python3.11
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

.PHONY: train test test-adapters lint vllm test-vllm clean

train: $(INSTALLED)
	$(BIN)/poise train arithmetic_tiny

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff format --check src tests benchmarks plugins
	$(BIN)/ruff check src tests benchmarks plugins
	$(BIN)/mypy

# Environments of other projects, each with its own idea of common dependencies: apart from .venv, and on top of it.
ADAPTERS := .venv-adapters
# verifiers wants another mcp than poise's, and plays its environments in processes of its own anyway.
VERIFIERS := .venv-verifiers
test-adapters: $(INSTALLED) $(ADAPTERS)/.installed $(VERIFIERS)/.installed
	PYTHONPATH=src $(ADAPTERS)/bin/python -m pytest tests/envs/test_real_partners.py
	$(BIN)/python -m pytest tests/envs/test_verifiers.py tests/envs/test_verifiers_endpoint.py

$(ADAPTERS)/.installed: $(INSTALLED) Makefile
	$(BIN)/python -m venv --clear $(ADAPTERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(ADAPTERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		gem-llm==0.1.0 openenv-core==0.3.0 msgspec==0.23.0 nltk==3.10.4
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		fastmcp==4.2.3 fastapi==0.165.0 uvicorn==0.54.0
	touch $@

$(VERIFIERS)/.installed: Makefile
	$(PYTHON) -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 renderers==0.1.12 uv
	touch $@

# vLLM for CPUs and poise's plugin for it, in $(VLLM_VENV).
vllm: $(VLLM_INSTALLED)

test-vllm: $(INSTALLED) $(VLLM_INSTALLED)
	$(BIN)/python -m pytest tests/vllm_server

$(VLLM_INSTALLED): plugins/vllm/requirements.txt plugins/vllm/pyproject.toml
	$(VLLM_PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement plugins/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable plugins/vllm
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "poise needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NLTK_DATA)
	touch $@

clean:
	rm -rf $(VENV) $(ADAPTERS) $(VERIFIERS) $(VLLM_VENV)
