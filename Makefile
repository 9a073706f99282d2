# One command each. The environment is made once, in .venv, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
TIMM_VENV ?= .venv-timm
RUN := $(VENV)/bin/python

.PHONY: demo test lint types pytest mutants faults fuzz release-check bench timm clean

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

faults: $(VENV)/.test-ready  ## faults injected into whole runs: a few of each kind; FULL=1 for all, rewrites docs/faults.md
	$(RUN) -m tests.faults $(if $(FULL),--full --write docs/faults.md)

fuzz: $(VENV)/.test-ready  ## hostile input, 100,000 for every parser; rewrites docs/fuzzing.md
	$(RUN) -m tests.fuzz --inputs 100000 --write docs/fuzzing.md

release-check: test mutants fuzz  ## before a release, by hand, hours: every check at its full figures
	$(MAKE) faults FULL=1
	$(RUN) -m tests.mutants --repeats 100
	$(RUN) -m pytest -m release

bench: $(VENV)/.test-ready  ## speed and memory beside plain SGD and the peers; rewrites docs/performance.md, on an idle machine
	$(RUN) -m bench

timm: $(TIMM_VENV)/.ready  ## tests with the real timm, in an environment of its own, several GB: the newest timm, torchvision and torch
	$(TIMM_VENV)/bin/python -m pytest -v tests/models/test_timm.py --junitxml=build/timm.xml

clean:
	rm -rf $(VENV) $(TIMM_VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache build

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

$(TIMM_VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "sparsedp needs Python 3.11 or later; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(TIMM_VENV)
	$(TIMM_VENV)/bin/python -m pip install --quiet -e '.[images,timm]' pytest hypothesis
	touch $@
