# One recipe a habit. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench

help: ## list the recipes
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the pinned versions of constraints.txt (again when they change)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "goodviews needs Python 3.11 or newer, and there is no $(PYTHON). Install it, or name one: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "goodviews needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) -V); this takes some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,demo,dev]'
	@touch $(STAMP)

demo: $(STAMP) ## the main job end to end on the built-in toy world
	$(BIN)/goodviews demo

TEST_PROCESSES ?= 2
test check: export OMP_NUM_THREADS = 1
test check: export HF_HUB_OFFLINE = 1

test: $(STAMP) ## all tests (those on real data skip where it is absent)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

check: $(STAMP) ## format, lint, types, import contracts, contract tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/contracts

bench: $(STAMP) ## every claim of speed beside its peer, in one run, as a ratio
	@for script in ingest stream step sigreg knn embed; do \
		echo "== bench_$$script"; $(BIN)/python tests/bench/bench_$$script.py || exit 1; done
