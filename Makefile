# One recipe a habit. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo needs is a part of what the tests need, and is installed in half of the time.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench
.PHONY: types others # parts of check

help: ## list the recipes
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV) ## make .venv with the pinned versions of constraints.txt (again when they change)

$(RUN): EXTRAS := cpu,demo
$(DEV): EXTRAS := cpu,demo,dev
$(RUN) $(DEV): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "goodviews needs Python 3.11 or newer, and there is no $(PYTHON). Install it, or name one: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "goodviews needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@echo "Installing goodviews[$(EXTRAS)] into $(VENV) with $$($(PYTHON) -V); this takes one to three minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Python compiles a module when it is first imported; compiling all of torch takes longer than the demo's imports.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(RUN) ## the main job end to end on the built-in toy world
	$(BIN)/goodviews demo

TEST_PROCESSES ?= 2
test check: export OMP_NUM_THREADS = 1
test check: export HF_HUB_OFFLINE = 1

test: $(DEV) ## all tests (those on real data skip where it is absent)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

check: $(DEV) ## format, lint, types, import contracts, contract tests
	@# The types take half of the time on one CPU, the rest the other half.
	@$(MAKE) --no-print-directory --keep-going -j 2 types others

types:
	$(BIN)/mypy

others:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/contracts

bench: $(DEV) ## every claim of speed beside its peer, in one run, as a ratio
	@for script in ingest stream step sigreg knn embed; do \
		echo "== bench_$$script"; $(BIN)/python tests/bench/bench_$$script.py || exit 1; done
