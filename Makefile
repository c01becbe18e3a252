# flatmtl: `make demo` shows the main job, `make test` checks everything. Both set themselves up.
#   PYTHON=python3.12 make demo     chooses the interpreter (Python 3.11 or newer)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One thread for each of two processes; a file is run by one of them, so that what its tests share is made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# "3.11" if $(PYTHON) is new enough, "old" if not, empty if there is none.
VERSION := $(shell $(PYTHON) -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2] if v >= (3, 11) else "old")' 2>/dev/null)
STAMP   := $(VENV)/.installed-$(VERSION)

.PHONY: help setup demo test test-all lint docs bench clean
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## make .venv and install everything, again only when pyproject.toml changes
$(STAMP): pyproject.toml
ifeq ($(VERSION),)
	@echo "error: no Python found as '$(PYTHON)'. Name one: PYTHON=python3.12 make setup" >&2; exit 1
else ifeq ($(VERSION),old)
	@echo "error: flatmtl needs Python 3.11 or newer, but '$(PYTHON)' is older. Name another: PYTHON=python3.12 make setup" >&2; exit 1
else
	@test -e $(STAMP) || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): several GB with PyTorch, a few minutes, once"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)
endif

demo: setup  ## train CAGrad and its flat form on real digits (3 to 6 minutes on 2 cores)
	$(BIN)/flatmtl demo $(ARGS)

lint: setup  ## format, style, types, layers, dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/basedpyright --project src/flatmtl_bench
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry src

test: lint  ## lint, types, layers, tests, doctests (under 15 minutes on 2 cores)
	$(PYTEST) -m "not slow"

test-all: lint  ## the long tests too
	$(PYTEST)

docs: setup  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: setup  ## run every benchmark, writing benchmarks/results/*.json
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:  ## remove what make made: the environment, caches, built pages; runs stay
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
