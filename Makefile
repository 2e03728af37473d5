# Every target makes its own .venv first; choose the interpreter with PYTHON=python3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAGE := $(BIN)/python -m ssd_research

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types format clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Only pyproject.toml decides what is installed: the package itself is installed in place.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
		|| { echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## Decode with the shipped tiny model, AR and SSD, and write a report with the images
	$(STAGE).distill model=tiny name=demo distill.limit=256 distill.holdout=16
	$(STAGE).train model=tiny name=demo
	$(STAGE).generate model=tiny name=demo decoder=ar
	$(STAGE).generate -m model=tiny name=demo decoder=ssd decoder.r=0,1,2,3,4
	$(STAGE).evaluate model=tiny name=demo
	$(STAGE).report model=tiny name=demo

test: $(INSTALLED)  ## Run the fast tests
	$(BIN)/python -m pytest

test-all: $(INSTALLED)  ## Run every test, the slow ones too
	$(BIN)/python -m pytest -m ''

lint: $(INSTALLED)  ## Check style, formatting and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(INSTALLED)  ## Check types
	$(BIN)/mypy

format: $(INSTALLED)  ## Fix style and formatting in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the environment, builds and caches; outputs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
