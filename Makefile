# Every target makes .venv and installs what it needs when that is missing or out of date.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --constraint constraints.txt
EDITABLE := --no-build-isolation --config-settings editable_mode=strict --editable
PACKAGE_FILES := find framework strategies plugins loggers templates -type f \
	-not -path '*/__pycache__/*' | LC_ALL=C sort

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check bench install

demo: install
	@$(BIN)/python examples/gpt.py

test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: install
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python docs/generate.py --check

bench: install
	@$(BIN)/python benchmarks/overhead.py

# A strict editable install links file by file, so that a new file is seen only after another one.
install: .venv/installed
	@$(PACKAGE_FILES) | cmp --quiet - .venv/files || { \
		echo "Linking the package again: its list of files has changed"; \
		$(PIP) --no-deps $(EDITABLE) .; \
		$(PACKAGE_FILES) > .venv/files; \
	}

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leyden needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@echo "Installing into .venv: torch and the tools for development, some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch==2.13.0 setuptools
	@$(PIP) $(EDITABLE) '.[dev]'
	@$(PACKAGE_FILES) > .venv/files
	@touch $@
