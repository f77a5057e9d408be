# `make demo` and `make test` need Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo needs less than the tests: each has a stamp of its own in the same environment.
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
PYTEST_ARGS ?=
# Processes that share the tests; 0 runs them in one, as a debugger needs it.
WORKERS ?= 2
# Python writes what it has compiled, also where the environment says otherwise: pytest compiles each assert anew, which
# is a third of the time in which the tests are collected.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check style coverage docs site unit slow gpu gpu-pretended release pairs clean

demo: $(DEMO_STAMP)
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

# The tests build the site, strictly as `make check` does, and look into it.
test: style unit

check: style
	$(BIN)/zensical build --clean --strict

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python scripts/overview.py --full

# The site, into the folder site/.
site: $(STAMP)
	$(BIN)/python scripts/overview.py --full
	$(BIN)/zensical build --clean --strict

# The site, at http://127.0.0.1:8000, built anew when a page changes.
docs: $(STAMP)
	$(BIN)/python scripts/overview.py --full
	$(BIN)/zensical serve

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Branches that the default tests reach, also in the processes that they start: a line for each module that is not
# reached whole, and one of all. Failed tests do not end it. The file's path is absolute, as processes run elsewhere.
COVERAGE := runs/coverage.txt
coverage: export COVERAGE_FILE := $(CURDIR)/runs/coverage.data
coverage: $(STAMP)
	mkdir -p $(dir $(COVERAGE))
	rm -f $(COVERAGE_FILE)*
	-$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report= -q $(PYTEST_ARGS)
	$(BIN)/python -m coverage report --skip-covered > $(COVERAGE)
	grep TOTAL $(COVERAGE)

# The long suites: every kill, every pair, every benchmark case. Nightly and before a release.
slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/data --start-method forkserver $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/data --start-method spawn $(PYTEST_ARGS)

# On a machine with a CUDA device; fails if no test ran.
gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The same on a CPU, on two devices that are pretended: see tests/release/pretended_cuda/run.py. Needs a C++ compiler and ninja.
gpu-pretended: $(STAMP)
	$(BIN)/python tests/release/pretended_cuda/run.py $(PYTEST_ARGS)

# Before a release: wheel and sdist are built, looked at, installed outside the repository, and run there. While the
# address of the repository is empty, nothing links to it.
REPOSITORY ?=
RELEASE_ARGS ?=
release: $(STAMP)
	$(BIN)/python tests/release/package.py --repository '$(REPOSITORY)' $(RELEASE_ARGS)

# Before a release: the tests with the oldest and the newest supported torch and Lightning. 20 GB of disk, much time.
OLDEST_PYTHON ?= python3.10
PAIRS_FOLDER ?= runs/pairs
pairs: $(STAMP)
	$(BIN)/python tests/release/pairs.py oldest --folder $(PAIRS_FOLDER) --interpreter $(OLDEST_PYTHON)
	$(BIN)/python tests/release/pairs.py newest --folder $(PAIRS_FOLDER)

# torch comes first and alone: its exact version decides which build pip takes.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[demo]'
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP) -e '.[compress,dali,demo,dev,docs,optim,pack]'
	touch $@

clean:
	rm -rf $(VENV) build dist site runs *.egg-info .cache .pytest_cache .ruff_cache
