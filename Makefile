# `make demo` and `make test` do all the set-up on a fresh machine: Python 3.12 or newer, with or without uv.
.PHONY: demo test test-slow lint clean

PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

demo: $(VENV)/installed
	$(BIN)/jaxserve generate --config configs/demo.yaml

test: $(VENV)/installed
	$(BIN)/python -m pytest

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml .python-version
	@if command -v uv >/dev/null; then uv venv --quiet --seed --allow-existing $(VENV); else \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	    echo "jaxserve needs Python 3.12 or newer, and this is $$("$(PYTHON)" --version 2>&1): install one, or uv, or name one with make PYTHON=..." >&2; exit 1; }; \
	  "$(PYTHON)" -m venv $(VENV); fi
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
