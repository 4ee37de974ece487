# make setup   a virtual environment in .venv with pinned versions and torch's CPU build (done once)
# make demo    serve the checkpoint inside the package and stream an answer from it
# make check   what to run before a commit: format, lint, types, architecture, fast tests
# make test    every test

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done

.PHONY: setup demo lint check test sanitize

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup CMakeLists.txt $(wildcard src/moesaic/kernels/native/csrc/*)
	PYTHON="$(PYTHON)" scripts/setup
	@touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile

test: $(STAMP)
	$(BIN)/pytest
