# Two commands set everything up on a fresh machine: `make train` and `make test`.
# Nothing outside this folder is touched, except that `make test` installs missing Debian packages that tests need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch will do; with one, pip chooses.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,--constraint constraints.txt)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help train test test-full test-quick test-rest test-platform test-lowest test-newest test-returns test-faults test-anywhere test-libraries check pages pythons setup setup-test setup-full system-packages system-packages-full lint lint-tools docs dist bench campaign demo-preemption clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

# A stamp depends on what decides the environment, so a second call costs nothing.
$(VENV)/.train: pyproject.toml constraints.txt
	@echo "== setting up a virtual environment in $(VENV) (your own Python is not touched)"
	$(PYTHON) -m venv $(VENV)
	@# Without wheel the pip of Debian 12 warns of a dependency that has only a setup.py.
	$(PIP) install $(CONSTRAINTS) torch wheel
	$(PIP) install $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "== adding what the tests need"
	$(PIP) install $(CONSTRAINTS) --editable '.[test,dev]'
	@touch $@

$(VENV)/.full: $(VENV)/.test
	@echo "== adding the libraries that tests of \`make test-full\` use"
	$(PIP) install $(CONSTRAINTS) --editable '.[test,dev,bench,loops,track,docs,hf,lora,fp8]'
	@touch $@

# The platform's own Python is what many people have; a package manager's Python may pickle otherwise (3.11.2 does).
PLATFORM_PYTHONS ?= /usr/bin/python3 python3.10 python3.13

# Tests wait for processes more than they compute; one of the workers has all tests of the one cluster.
TEST_WORKERS ?= $(shell expr $$(nproc) + 1)

setup: $(VENV)/.train  ## set up .venv for training
setup-test: $(VENV)/.test  ## set up .venv for tests
setup-full: $(VENV)/.full  ## set up .venv for all tests, with the libraries that have adapters

train: setup  ## set up and run the main job on this machine
	$(BIN)/python -m slurm_train

system-packages:  ## install the Debian packages of Slurm where they are missing (root)
	@sh .ci/system-packages.sh quick

system-packages-full:  ## the same, with a browser and shells
	@sh .ci/system-packages.sh full

lint: setup-test  ## ruff, mypy, shellcheck, no large files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run .ci/*.sh
	@sh .ci/large-files.sh

lint-tools: setup-full
	$(BIN)/mypy --config-file .ci/tools.mypy.ini

# A part that fails keeps no other from running: .ci/parts.sh ends with the verdict of each.
test:  ## set up everything, Slurm included, lint, and pass the quick tests: ten minutes on two cores
	@$(MAKE) --no-print-directory --jobs 2 setup-test system-packages
	@.ci/parts.sh test lint test-quick pythons

test-full:  ## what `make test` leaves out: adapters, layouts, all tests on Slurm, other Pythons, pages
	@$(MAKE) --no-print-directory --jobs 2 setup-full system-packages-full
	@.ci/parts.sh test-full test-rest test-platform lint-tools pages

check: setup-test  ## after an edit: lint, and the quick tests that the changed modules can reach
	@$(BIN)/python .ci/check.py $(if $(BASE),--base $(BASE))

# STRICT=yes fails on a test that was skipped for a reason that tests/skips.py does not list, and on a missing Python.
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) $(if $(STRICT),--listed-skips)

test-quick: setup-test
	$(PYTEST) --home quick --durations=20 --durations-min=8

test-rest: setup-full
	$(PYTEST) --home full --durations=40 --durations-min=8

pythons: setup
	@sh .ci/test-platform.sh --compile $(PLATFORM_PYTHONS)

test-platform: setup  ## checkpoints and the main path on other Pythons (PLATFORM_PYTHONS: /usr/bin/python3 python3.10 python3.13)
	@TEST_WORKERS=$(TEST_WORKERS) STRICT=$(STRICT) sh .ci/test-platform.sh $(PLATFORM_PYTHONS)

test-lowest: setup  ## the same on Python 3.10 with the lowest version of each package that pyproject.toml allows
	@PLATFORM_VERSIONS=lowest sh .ci/test-platform.sh python3.10

test-newest: setup  ## the same on Python 3.13 with the newest packages of the registry
	@PLATFORM_VERSIONS=newest sh .ci/test-platform.sh python3.13

test-returns: setup-full system-packages-full  ## tests that take long, mostly on a real Slurm, in shards of up to 20 minutes (SHARD=...)
	$(BIN)/python -m tests.shards $(SHARD)

test-faults: setup-full system-packages-full  ## cause every fault of nodes and network on a real cluster (about ten minutes)
	$(BIN)/python -m tests.shards faults

test-anywhere: setup-full system-packages-full  ## a short set of tests in other places, as another user, on other machines (ten minutes)
	$(BIN)/python -m tests.anywhere $(ROWS)

test-libraries: setup-full  ## the tests of the adapters with other versions of Lightning and of transformers (LIBRARIES=lightning==2.6.1)
	$(BIN)/python -m tests.library_versions $(LIBRARIES)

pages: setup-full  ## write the pages that are made from the code; fails where one was out of date
	@sh .ci/pages.sh $(BIN)/python

$(VENV)/.docs: $(VENV)/.train
	@echo "== adding what the site needs"
	$(PIP) install $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## build the pages of docs/ as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

dist: setup  ## build the wheel into dist/
	$(PIP) wheel --no-deps --wheel-dir dist .
	@echo "install it with: pip install $$(ls -t dist/*.whl | head -1)"

bench: setup-full system-packages-full  ## print speed ratios, side by side in one run
	$(BIN)/python -m tests.benchmarks

campaign: setup-full system-packages-full  ## put every promise to the test, thousands of kills; rewrites docs/reliability.md
	$(BIN)/python -m slurm_train devcluster up --nodes 4 --gpus 8
	$(BIN)/python -m tests.campaigns --keep

demo-preemption: setup-full system-packages-full  ## a run is interrupted in five ways and ends with the bits of one that was not
	$(BIN)/python -m slurm_train devcluster up --nodes 4 --gpus 8
	$(BIN)/python -m tests.campaigns exactness --trials 5

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .venv-platform .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site
