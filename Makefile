# make demo | test | lint | clean | autotune-cache.    VENV=none uses the environment at hand instead of .venv.
# The same as two pip lines:  pip install -c constraints.txt -e '.[test]'   then   kvgen tune ...   or   pytest

VENV ?= .venv
SPEC ?= examples/llama3-8b-int8.toml
TARGET ?= cpu
PYTEST_ARGS ?=
.DEFAULT_GOAL := help

# A candidate must run and be new enough: a pyenv shim exists for versions that are not selected.
IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14 python,\
            $(if $(shell $(p) -c '$(IS_NEW)' >/dev/null 2>&1 && echo yes),$(p))))

ifeq ($(VENV),none)
PY := $(PYTHON)
READY := check-python
KVGEN = $(PY) -c 'from kvgen.cli import main; main()'
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
KVGEN = $(VENV)/bin/kvgen
endif

# For .ci/run, so that both pick the same interpreter.
.PHONY: print-python
print-python: check-python
	@echo $(PYTHON)

.PHONY: help demo test lint clean autotune-cache check-python check-compiler check-deps check-pytest

help:
	@sed -n '1,2s/^# //p' Makefile

# Decode of one spec: its schedules, then the kernel beside the loop that one would write in torch.
demo: $(READY) check-deps check-compiler
	@echo "1 of 2: tune decode of $(SPEC): generate, compile, prove and race candidates (a minute)"
	$(KVGEN) tune $(SPEC) --target $(TARGET) --op decode
	@echo
	@echo "2 of 2: its kernel beside torch, which gathers the pages and then calls its own attention (half a minute)"
	$(KVGEN) bench $(SPEC) --target $(TARGET) --case decode-1x512 --case decode-8x4096 --peers gather+sdpa --seconds 4

test: $(READY) check-deps check-pytest check-compiler
	$(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

# The records of autotune_cache/: this CPU's measured, the GPUs' predicted. Fresh ones are not made again. A
# quarter of an hour on two idle cores: a minute for each CPU example, half a one for each GPU and example.
TUNED_CPU ?= bf16 f16 f32 int8 int8-fast int4-fast
TUNED_GPU ?= bf16 int8 e4m3 int4
TUNED_GPUS ?= sm_80 sm_90 sm_100 gfx942
autotune-cache: $(READY) check-deps check-compiler
	$(KVGEN) tune $(TUNED_CPU:%=examples/llama3-8b-%.toml) --commit
	@for target in $(TUNED_GPUS); do \
	  $(KVGEN) tune $(TUNED_GPU:%=examples/llama3-8b-%.toml) --target $$target --op decode,prefill --commit || exit 1; done

clean:
	rm -rf .venv .venv-triton36 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

check-python:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(IS_NEW)'; then \
	  echo "kvgen needs Python 3.11 or newer; found: $$(python3 --version 2>&1). Install one, or say make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; fi

# A stamp, so that a second call starts at once; a changed pyproject, setup or constraint installs again.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt | check-python
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment with pip (on Debian: apt-get install python3-venv). Or use make VENV=none" >&2; exit 1; }
	@echo "Setting up $(VENV), once: pip fetches torch, Triton and the test tools (about 0.6 GB with PyTorch's CPU build,"
	@echo "some GB more with CUDA's) and unpacks 2 to 3 GB. Minutes, by the network; it says below what it does."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# The places where kvgen looks; whether the compiler works is kvgen's own check, with its own message.
check-compiler:
	@for c in $$KVGEN_CXX $$CXX g++ clang++ c++; do command -v "$$c" >/dev/null 2>&1 && exit 0; done; \
	echo "No C++ compiler found: CPU kernels need g++ or clang++ with OpenMP (on Debian: apt-get install g++), or KVGEN_CXX" >&2; exit 1

check-deps: $(READY)
	@$(PY) -c 'import importlib.util as u, sys; \
	  gone = [m for m in ("jinja2", "numpy", "rich", "sympy", "torch", "typer") if not u.find_spec(m)]; \
	  sys.exit(f"Missing in {sys.executable}: {gone}. Try: pip install -c constraints.txt -e ." if gone else 0)'

check-pytest: $(READY)
	@$(PY) -c 'import pytest, xdist, hypothesis' || { \
	  echo "The tests need pytest, pytest-xdist and hypothesis: pip install -c constraints.txt -e '.[test]'" >&2; exit 1; }
