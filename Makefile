# Everything a newcomer, a developer and CI need. Targets may be repeated: what is done already is skipped.
#
#   make serve          install, fetch the small default model, serve it on http://127.0.0.1:8000
#   make mooncake       what L3 in Mooncake needs: the package, and on Debian its shared libraries if run as root
#   make test           unit, numeric and end-to-end tests that are not slow
#   make test-slow      the slow ones
#   make test-faults    a thousand seeded fault schedules over a simulated fleet
#   make lint           ruff, mypy, import-linter
#   make bench          the offline benchmarks on the default model
#   make bench-peers    kLLM beside vLLM, OpenVINO, llama.cpp, transformers and CTranslate2, which it installs (~1 h)
#
# Variables: MODEL, ARGS (further flags of `kllm serve` or pytest), PYTHON, PIP_OPTIONS (for example an extra index
# that has torch built for the CPU only).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
ORACLE_VENV := .venv-oracle
BIN := $(VENV)/bin
MODEL ?= smollm2
ARGS ?=
PIP_OPTIONS ?=

# The first interpreter that starts and is new enough; a name on the PATH may be a shim of something not installed.
CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell \
	$(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
INSTALLED := $(VENV)/.installed
DEVELOP := $(VENV)/.develop
ORACLE := $(ORACLE_VENV)/.installed
MOONCAKE := $(VENV)/.mooncake

# $(call make_venv,FOLDER): a virtual environment with torch in it, which goes first and alone: the constraint then
# holds that very build, whatever the index offers to the packages that follow.
define make_venv
	@test -n "$(PYTHON)" || { echo "kLLM needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $@" >&2; exit 1; }
	test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
	$(1)/bin/pip install $(PIP_OPTIONS) torch==$(TORCH)
endef
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: help install develop oracle mooncake serve test test-slow test-faults lint format bench bench-peers clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)
develop: $(DEVELOP)
oracle: $(ORACLE)
mooncake: $(MOONCAKE)

$(INSTALLED): $(SOURCES)
	$(call make_venv,$(VENV))
	$(BIN)/pip install $(PIP_OPTIONS) --constraint constraints.txt --editable .
	@touch $@

# Does what the rule above does as well, so that the native operators are not built twice.
$(DEVELOP): $(SOURCES)
	$(call make_venv,$(VENV))
	$(BIN)/pip install $(PIP_OPTIONS) --constraint constraints.txt --editable '.[dev,plot]'
	@touch $(INSTALLED) $@

$(ORACLE): tests/oracles/requirements.txt constraints.txt
	$(call make_venv,$(ORACLE_VENV))
	$(ORACLE_VENV)/bin/pip install $(PIP_OPTIONS) --requirement tests/oracles/requirements.txt
	@touch $@

MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1 libcurl4
print_extra = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])

# Not as '.[mooncake]', which would build the native operators again. The last line is the check: the library loads.
$(MOONCAKE): pyproject.toml | $(INSTALLED)
	$(BIN)/python -c '$(call print_extra,mooncake)' | xargs $(BIN)/pip install $(PIP_OPTIONS) --constraint constraints.txt
	if ! $(BIN)/python -c 'import mooncake.store' 2>/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update && apt-get install --yes --no-install-recommends $(MOONCAKE_LIBRARIES); \
	  else \
	    echo "Mooncake lacks shared libraries; on Debian: sudo apt-get install $(MOONCAKE_LIBRARIES)" >&2; \
	  fi; \
	fi
	$(BIN)/python -c 'import mooncake.store'
	@touch $@

serve: $(INSTALLED)
	$(BIN)/kllm pull $(MODEL)
	exec $(BIN)/kllm serve $(MODEL) $(ARGS)

test: $(DEVELOP) $(ORACLE)
	$(BIN)/pytest -m "not slow" --durations=15 $(ARGS)

test-slow: $(DEVELOP) $(ORACLE)
	$(BIN)/pytest -m slow --durations=0 $(ARGS)

SEEDS ?= 0-999
test-faults: $(DEVELOP)
	KLLM_FAULT_SEEDS=$(SEEDS) $(BIN)/pytest tests/simulation/test_nothing_is_lost.py -q -m "not slow" $(ARGS)

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEVELOP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/kllm bench latency $(MODEL) --dtype bf16 --input-len 512 --output-len 128
	$(BIN)/kllm bench throughput $(MODEL) --dtype bf16 --num-prompts 32 --input-len 512 --output-len 128
	$(BIN)/python benchmarks/prefix_tree.py
	$(BIN)/python benchmarks/start_time.py

bench-peers: $(DEVELOP)
	$(BIN)/kllm pull $(MODEL)
	$(BIN)/python -m benchmarks.peers --model $(MODEL) --pip-options "$(PIP_OPTIONS)" $(ARGS)

clean:
	rm -rf $(VENV) $(ORACLE_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
