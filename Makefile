# Every target makes its own .venv first; choose the interpreter with PYTHON=python3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAGE := $(BIN)/python -m ssd_research
DEMO := model=tiny name=demo
RIVALS := mtp,mtp_strict,sjd,mc_sjd,gsd,lantern,zipar,pjd,ssd_exact
BENCH := prompts=shapes_geneval eval.per_kind=10
RESULTS := model=tiny name=results prompts=shapes_geneval batch_size=16

.DEFAULT_GOAL := help
.PHONY: help demo results decoders exactness test test-all lint types format clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Only pyproject.toml decides what is installed: the package itself is installed in place.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
		|| { echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## Distill, train heads, decode with AR and SSD, score, and write a report with the images
	$(STAGE).distill $(DEMO) distill.limit=1024 distill.holdout=32 batch_size=16
	$(STAGE).train $(DEMO)
	$(STAGE).generate $(DEMO) $(BENCH) decoder=ar
	$(STAGE).generate -m $(DEMO) $(BENCH) decoder=ssd decoder.r=0,1,2,3,4 heads.path=outputs/train/tiny/demo
	$(STAGE).generate -m $(DEMO) $(BENCH) decoder=$(RIVALS) heads.path=outputs/train/tiny/demo
	$(STAGE).evaluate $(DEMO) eval.per_kind=10
	$(STAGE).evaluate $(DEMO) eval=likelihood
	$(STAGE).report $(DEMO)

results: $(INSTALLED)  ## Make the README's tables again from the shipped checkpoint and heads
	$(STAGE).generate $(RESULTS) decoder=ar
	$(STAGE).generate -m $(RESULTS) decoder=ssd decoder.r=0,1,2,3,4
	$(STAGE).generate -m $(RESULTS) decoder=ssd decoder.r=2 decoder.accept=sample,argmax
	$(STAGE).evaluate $(RESULTS)
	$(STAGE).evaluate $(RESULTS) eval=likelihood
	$(STAGE).evaluate $(RESULTS) eval=shapes_fid
	$(STAGE).report $(RESULTS) report.readme=true
	$(STAGE).benchmark model=tiny name=results benchmark.readme=true

decoders: $(INSTALLED)  ## Make the README's table of all decoders again
	$(STAGE).benchmark experiment=decoders benchmark.readme=true

exactness: $(INSTALLED)  ## Make the table of every decoder's exact distance from autoregressive sampling again
	$(BIN)/python tests/exactness_table.py

reproduce-%: $(INSTALLED)  ## Make a table of the paper, as in reproduce-table1; SCALE=tiny or paper
	$(STAGE).reproduce experiment=$* $(if $(SCALE),scale=$(SCALE))

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
