# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types bench record guard fuzz clean

demo: $(VENV)/.demo
	$(BIN)/jagcodec demo

test: lint types
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# ARGS="--quick --only fused,rows --shapes 512x1536,gsm8k:512": see benchmarks/bench.py.
bench: $(VENV)-bench/.bench
	$(VENV)-bench/bin/python -m benchmarks.bench \
		--json benchmarks/results/bench.json --charts benchmarks/results $(ARGS)

# The same into docs/measured/, and from there into the tables of README.md and docs/.
record: $(VENV)-bench/.bench
	$(VENV)-bench/bin/python -m benchmarks.bench \
		--json docs/measured/bench.json --charts docs/measured $(ARGS)
	$(VENV)-bench/bin/python -m benchmarks.report

# Not part of `make test`: it looks at the clock. ARGS=--write stores what it finds.
guard: $(VENV)-bench/.bench
	$(VENV)-bench/bin/python -m benchmarks.guard $(ARGS)

# Inputs to try. The search begins at fuzz/corpus/; what it finds is kept in fuzz/found/.
RUNS ?= 1000000

fuzz: $(VENV)/.fuzz
	mkdir -p fuzz/found/corpus
	$(BIN)/python fuzz/fuzz_wire.py fuzz/found/corpus fuzz/corpus -runs=$(RUNS) -dict=fuzz/wire.dict \
		-max_len=128 -timeout=5 -rss_limit_mb=2560 -artifact_prefix=fuzz/found/

# A stamp per set of extras: reinstalled when the project's requirements change.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[zmq]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/.fuzz: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[fuzz]'
	touch $@

$(VENV)-bench/.bench: pyproject.toml constraints.txt
	test -x $(VENV)-bench/bin/python || $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis fuzz/found src/*.egg-info
