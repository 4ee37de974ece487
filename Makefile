# make setup   a virtual environment in .venv with pinned versions and torch's CPU build (done once)
# make demo    serve the model inside the package, stream answers and call a tool
# make check   before a commit: format, lint, types, architecture, fast tests; about two minutes
# make test    every test but those marked full: of each matrix of settings a cover of all pairs; about 20 minutes
# make full    the tests marked full, properties on random examples, stale numbers of pages, `make fuzz`, `make clients`, then `make soak`; hours
# make clients other people's clients and coding agents, from PyPI and npm into ~/.cache/moesaic/clients, against a server; needs node
# make fuzz    100,000 right and wrong requests to a real server with low limits; no 5xx
# make soak    200 rounds of real clusters whose processes are killed and frozen, 200 of states that last, then a server under attack
# make wheel   a wheel that needs no compiler where it is installed, checked, in dist/
# make gpu     what a GPU gives: answers beside transformers', kernels, tokens/s, tests, in build/gpu.json; less than ten minutes
# make sanitize   the tests of the native code under AddressSanitizer and UndefinedBehaviorSanitizer

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done

.PHONY: setup demo lint check test full fuzz clients soak wheel gpu sanitize
unexport PYTHONDONTWRITEBYTECODE  # tests that start processes would compile everything each time

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup CMakeLists.txt $(wildcard src/moesaic/kernels/native/csrc/* src/moesaic/transport/csrc/*)
	PYTHON="$(PYTHON)" scripts/setup
	@touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m scripts.names --check

check: lint
	$(BIN)/pytest -m "not slow and not full" -n 2 --dist worksteal

test: $(STAMP)  # with --dist loadfile, xdist 3.8 may wait for good after a process that died, so none is replaced
	$(BIN)/pytest -m "not full" -n 3 --dist loadfile --max-worker-restart 0

full: $(STAMP)
	$(BIN)/pytest -m full -n 2 --dist loadfile --max-worker-restart 0
	$(BIN)/pytest -m hypothesis --hypothesis-profile=random
	$(BIN)/pytest --hypothesis-profile=random $$(find tests -name 'test_*_machine.py')
	$(BIN)/python -m scripts.stale_numbers
	$(MAKE) fuzz
	$(MAKE) clients
	$(MAKE) soak

fuzz: $(STAMP)
	$(BIN)/python -m scripts.fuzz_api --calls 100000 $(FUZZ)

clients: $(STAMP)
	PYTHON="$(PYTHON)" scripts/try_clients

soak: $(STAMP)
	$(BIN)/python -m scripts.soak $(SOAK)
	$(BIN)/python -m scripts.soak.lasting
	$(BIN)/python -m scripts.soak.intruders

wheel: $(STAMP)
	$(BIN)/python scripts/wheels.py

gpu: $(STAMP)
	scripts/cuda_torch
	$(BIN)/python -m scripts.gpu $(GPU)

SANITIZED := build/sanitize

sanitize: $(STAMP)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DMOESAIC_SANITIZE=ON -DMOESAIC_EMULATE_AMX=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SANITIZED)
	cp scripts/sanitized.py $(SANITIZED)/sitecustomize.py
	PYTHONPATH=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so):$$(gcc -print-file-name=libubsan.so)" \
		$(BIN)/pytest -p no:cacheprovider -m "not slow and not full" -n 2 --dist loadfile --max-worker-restart 0 tests/kernels tests/models/test_native.py \
		tests/test_llm_bits.py tests/test_llm_integers.py tests/test_llm_states.py tests/experts tests/transport
