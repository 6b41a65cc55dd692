# `make demo` and `make test` do all set-up themselves; both can be run again at any time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
# Versions of torch at the ends of what is supported; OLDEST is also the bound in pyproject.toml.
OLDEST := 2.7.1
NEWEST := 2.15.0
# Which of them `make test-versions` takes: VERSIONS=oldest is the first alone. Python 3.11 to 3.13 has builds of both.
VERSIONS := oldest newest
# Images of containers often set this; every process of the tests would then compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo reproduce docs check test test-integrations test-versions lint dist clean

help:
	@echo "make demo               set up .venv and train the paper's zebra-stripe classifier with SGD, Adam and PSGD"
	@echo "make check              the inner loop, under 90 seconds: style, types, and the tests that catch most"
	@echo "make test               set up .venv, check style and types, run the tests"
	@echo "make test-integrations  tests for Lightning, Transformers, Accelerate and torch.compile, which it installs"
	@echo "make test-versions      the tests with torch $(OLDEST) and $(NEWEST), the oldest and the newest, in .venv-oldest and .venv-newest"
	@echo "make reproduce          set up .venv and run the paper's experiments: figures and verdicts in results/"
	@echo "make docs               set up .venv and build the documentation in site/"
	@echo "make lint               the checks of make test that are not tests"
	@echo "make dist               build the sdist and the wheel in dist/, and try them in an empty environment"
	@echo "make clean              remove .venv, .venv-oldest, .venv-newest and caches"

# The stamp is written last, so an interrupted installation is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (once; again when pyproject.toml or constraints.txt change)"
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "psgd needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(INSTALLED)

$(DOCS_INSTALLED): $(INSTALLED)
	@echo "== setting up $(VENV) for the documentation (once; again when pyproject.toml or constraints.txt change)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $(DOCS_INSTALLED)

demo: $(INSTALLED)
	@echo "== psgd demo"
	$(BIN)/psgd demo

reproduce: $(INSTALLED)
	@echo "== psgd reproduce all"
	$(BIN)/psgd reproduce all

# Warnings are errors: links that lead nowhere, and public names that are not documented.
docs: $(DOCS_INSTALLED)
	@echo "== mkdocs build --strict"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is the documentation"

lint: $(INSTALLED)
	@if git rev-parse --git-dir >/dev/null 2>&1; then \
		echo "== pre-commit: ruff, mypy, and linters of workflows"; PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files; \
	else \
		echo "== ruff and mypy"; $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy; \
	fi

# Everything that starts no process, trains no model for long and draws no picture.
QUICK := tests/laws tests/ops tests/engine tests/groups tests/probes tests/state tests/ranks/test_assign.py \
	tests/test_blocks.py tests/test_closed_form.py tests/test_criteria.py tests/test_layers.py tests/test_optimizer.py \
	tests/test_mutants.py tests/test_normalize.py tests/test_tangent.py

check: lint
	@echo "== pytest: what catches most"
	$(BIN)/python -m pytest -n auto --dist loadgroup -q -m "not slow" $(QUICK)

test: lint
	@echo "== pytest"
	$(BIN)/python -m pytest -n auto --dist loadgroup --durations=10

# With PSGD_INTEGRATIONS=1 a package that is missing is a failure, not a skipped test.
test-integrations: $(INSTALLED)
	@echo "== installing what psgd is used with"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,integrations]'
	@echo "== pytest tests/integrations"
	PSGD_INTEGRATIONS=1 $(BIN)/python -m pytest tests/integrations

.venv-oldest/.installed: TORCH := $(OLDEST)
.venv-newest/.installed: TORCH := $(NEWEST)

# Everything but torch is as in .venv. The Makefile is named because it has the versions.
.venv-%/.installed: pyproject.toml constraints.txt Makefile
	@echo "== setting up .venv-$* with torch $(TORCH) (once; again when pyproject.toml, constraints.txt or Makefile change)"
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-$*/constraints.txt --editable '.[dev]'
	@touch $@

# The tests run with both, even if the first fails. Types are checked by `make lint` only: those of torch itself differ.
test-versions: $(VERSIONS:%=.venv-%/.installed)
	@failed=; for version in $(VERSIONS); do \
		echo "== pytest with the $$version torch"; \
		.venv-$$version/bin/python -m pytest -n auto --dist loadgroup || failed="$$failed $$version"; \
	done; \
	test -z "$$failed" || { echo "the tests failed with the torch that is$$failed"; exit 1; }

dist: $(INSTALLED)
	@echo "== sdist and wheel"
	$(BIN)/python tools/check_dist.py

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
