# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-tensordict test-oldest test-matrix test-integrations lint types sanitize sanitize-threads bench record soak guard fuzz grow weigh clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.grpo_demo

test: lint types
	$(BIN)/python -m pytest -n 2 -m "not cluster"

# The suite but for what is slow on another tensordict, by default the oldest supported: make test-tensordict TENSORDICT=0.12.2
OLDEST     = 0.10.0
NEWEST     = $(shell sed -n 's/^tensordict==//p' constraints.txt)
TENSORDICT ?= $(OLDEST)

test-tensordict: $(VENV)/.tensordict-$(TENSORDICT)
	PYTHONPATH=$(abspath $(VENV))/tensordict-$(TENSORDICT) JAGCODEC_TENSORDICT=$(TENSORDICT) \
		$(BIN)/python -m pytest -n 2 -m "not cluster and not slow"

test-oldest:
	$(MAKE) test-tensordict TENSORDICT=$(OLDEST)

test-matrix:
	for version in $(OLDEST) 0.12.2 $(NEWEST); do \
		$(MAKE) test-tensordict TENSORDICT=$$version || exit 1; \
	done

# All integrations, those that start clusters too: in an environment of its own, in one process.
test-integrations: $(VENV)-integrations/.integrations
	$(VENV)-integrations/bin/python -m pytest tests/integrations $(ARGS)

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
	$(VENV)-bench/bin/python -m benchmarks.scaling --page

# Many producers, one consumer: every batch accounted for, memory flat. ARGS=--write records it.
SECONDS   ?= 150
PRODUCERS ?= 64

soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks.reliability --seconds $(SECONDS) --producers $(PRODUCERS) $(ARGS)

# Not part of `make test`: it looks at the clock. ARGS=--write stores what it finds.
guard: $(VENV)-bench/.bench
	$(VENV)-bench/bin/python -m benchmarks.guard $(ARGS)

# Both extensions under AddressSanitizer and UBSan, in a copy of the package (Linux).
SANITIZED = build/sanitized
SANITIZE  = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
INCLUDE   = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')

sanitize: $(VENV)/.dev
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -R src/jagcodec $(SANITIZED)
	rm -f $(SANITIZED)/jagcodec/rowcopy/*.so $(SANITIZED)/jagcodec/cells/*.so
	$(CC) -std=c11 -Wall -Wextra -Werror $(SANITIZE) -shared -fPIC -pthread -I$(INCLUDE) \
		src/jagcodec/rowcopy/_kernel.c -o $(SANITIZED)/jagcodec/rowcopy/_kernel.abi3.so
	$(CC) -std=c11 -Wall -Wextra -Werror $(SANITIZE) -shared -fPIC -I$(INCLUDE) \
		src/jagcodec/cells/_cells.c -o $(SANITIZED)/jagcodec/cells/_cells.abi3.so -lm
	ASAN_OPTIONS=detect_leaks=0 JAGCODEC_ROWCOPY=compiled PYTHONPATH=$(SANITIZED) \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest tests/rowcopy tests/cells tests/wire/test_hostile.py

# The same kernel under ThreadSanitizer, with up to 64 threads (Linux). Addresses are not randomized,
# because newer kernels spread them over more than older sanitizers take.
sanitize-threads: $(VENV)/.dev
	mkdir -p $(SANITIZED)-threads
	$(CC) -std=c11 -Wall -Wextra -Werror -fsanitize=thread -fno-omit-frame-pointer -g -O1 -shared -fPIC \
		-pthread -I$(INCLUDE) src/jagcodec/rowcopy/_kernel.c -o $(SANITIZED)-threads/_kernel.abi3.so
	TSAN_OPTIONS="halt_on_error=1 exitcode=66" LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		setarch -R $(BIN)/python fuzz/threads.py $(SANITIZED)-threads/_kernel.abi3.so

# Inputs to try. The search begins at fuzz/corpus/; what it finds is kept in fuzz/found/.
RUNS ?= 1000000

fuzz: $(VENV)/.fuzz
	mkdir -p fuzz/found/corpus
	$(BIN)/python fuzz/fuzz_wire.py fuzz/found/corpus fuzz/corpus -runs=$(RUNS) -dict=fuzz/wire.dict \
		-max_len=160 -timeout=5 -rss_limit_mb=2560 -artifact_prefix=fuzz/found/

# Messages that grow: fails when the time or the memory of a reader grows faster than they do. It looks
# at the clock, so it is no part of `make test`. GROW="--each" begins with every kind by itself.
GROW ?= --seconds 60

grow: $(VENV)/.dev
	$(BIN)/python fuzz/grow.py $(GROW)

# Memory that each byte of a message can cost, into the table of SECURITY.md (Linux).
weigh: $(VENV)/.dev
	$(BIN)/python fuzz/weigh.py

# A stamp per set of extras: reinstalled when the project's requirements or its C code change.
BUILD = pyproject.toml constraints.txt setup.py $(wildcard src/jagcodec/*/*.c)

$(VENV)/.demo: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[zmq]'
	touch $@

$(VENV)/.dev: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

# Without its requirements, which the environment already has, and without the constraints, which
# name one version. It lies beside the environment's own and goes before it on the path.
$(VENV)/.tensordict-%: $(VENV)/.dev
	rm -rf $(VENV)/tensordict-$*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--target $(VENV)/tensordict-$* tensordict==$*
	touch $@

$(VENV)-integrations/.integrations: $(BUILD)
	test -x $(VENV)-integrations/bin/python || $(PYTHON) -m venv $(VENV)-integrations
	$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,ray,transfer-queue,verl]'
	$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps verl
	# Where there is a wheel; where not, or without .ci/system-libraries, its tests skip.
	-$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --only-binary mooncake-transfer-engine-non-cuda --editable '.[mooncake]'
	touch $@

$(VENV)/.fuzz: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[fuzz]'
	touch $@

$(VENV)-bench/.bench: $(BUILD)
	test -x $(VENV)-bench/bin/python || $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-integrations build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis fuzz/found src/*.egg-info src/jagcodec/*/*.so
