# `make demo` shows it, `make test` proves it. Both make the environment in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: env demo test check format clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

demo: env
	python -m demo.run

check: env
	ruff check .
	ruff format --check .
	mypy

# With Chromium (apt-get install chromium chromium-driver) the page is tested too; without, those tests are skipped.
test: check
	pytest

format: env
	ruff check --fix .
	ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .ruff_cache .mypy_cache .pytest_cache .hypothesis
