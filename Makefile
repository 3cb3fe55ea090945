# `make demo` and `make test` do all the set-up on a fresh machine: Python 3.12 or newer, with or without uv.
.PHONY: demo test test-slow lint clean gpu-compile test-gpu-compile gpu-check

# The first that starts and is new enough (a version manager's shims may exist without a Python behind them).
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14; do \
	$$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

demo: $(VENV)/installed
	$(BIN)/jaxserve generate --config configs/demo.yaml

# Two processes, a file's tests in one of them: most of the time goes into compiling small programs on one core.
PYTEST := -m pytest -n 2 --dist loadfile

test: $(VENV)/installed
	$(BIN)/python $(PYTEST)

test-slow: $(VENV)/installed
	$(BIN)/python $(PYTEST) -m slow

# What can be known of the GPU kernels without a GPU: the programs compiled for an H200, in an environment of its own.
GPU_VENV := .venv-gpu-compile

gpu-compile: $(GPU_VENV)/installed
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m jaxserve.bench.gpu_compile

test-gpu-compile: $(GPU_VENV)/installed
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest -n 2 -m gpu_compile tests/test_gpu_compile.py

# On a machine with a Hopper GPU, Python, JAX, Flax, NumPy and jaxtyping; needs no network.
gpu-check:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PYTHON) -m jaxserve.bench.gpu_check --json gpu-check.json

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml .python-version
	@if command -v uv >/dev/null; then uv venv --quiet --seed --allow-existing $(VENV); \
	elif [ -n "$(PYTHON)" ] && $(PYTHON) -c '$(NEW_ENOUGH)'; then $(PYTHON) -m venv $(VENV); \
	else echo "jaxserve needs Python 3.12 or newer, and none was found ($(or $(PYTHON),python3): $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)):" \
	  "install one, or uv, or name one with make PYTHON=path" >&2; exit 1; fi
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(GPU_VENV)/installed: $(VENV)/installed
	$(BIN)/python -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --editable '.[test-base,gpu-compile]'
	@touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) build *.egg-info
