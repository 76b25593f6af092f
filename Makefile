# Every target sets up its own environment. `make demo` and `make test` are all that a new user needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test fuzz lint bench clean

demo: $(READY)
	$(BIN)/wardround compare examples/demo.toml --methods isolated,fedavg,pafp-alt --seeds 2 --out demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

# The decoders against 10,000 damaged messages of each kind; `make test` tries 500.
fuzz: $(READY)
	WARDROUND_FUZZ=10000 $(BIN)/python -m pytest tests/test_fuzz.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/run.py --all

clean:
	rm -rf .venv demo

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)
