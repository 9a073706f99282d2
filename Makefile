# One command each. The environment is made once, in .venv, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint types pytest mutants bench clean

demo: $(VENV)/.demo-ready  ## train a private classifier on MNIST: a few minutes, a new folder under runs/
	$(RUN) -m sparsedp train mnist --run-dir "runs/demo-$$(date +%Y%m%d-%H%M%S)"

test: lint types pytest  ## what continuous integration runs

lint: $(VENV)/.test-ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.test-ready
	$(RUN) -m mypy

pytest: $(VENV)/.test-ready
	$(RUN) -m pytest -n 2

mutants: $(VENV)/.test-ready  ## every wrong version of the code, each of which some test must catch; rewrites docs/mutants.md
	$(RUN) -m tests.mutants --write docs/mutants.md

bench: $(VENV)/.test-ready  ## speed and memory beside plain SGD and the peers; rewrites docs/performance.md, on an idle machine
	$(RUN) -m bench

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "sparsedp needs Python 3.11 or later; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[images,plots]'
	touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.demo-ready
