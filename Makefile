# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= store

.PHONY: quickstart test test-all lint bench screenshots install

# The whole study at small scale on this machine's own documentation; run again, it trains nothing again.
quickstart: $(VENV)/.installed
	$(BIN)/mlmclm study examples/quickstart.yaml --store $(STORE)

# Two files of tests at once: half of a test's time on real Ray is waiting for processes to start.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check mlmclm tests benchmarks
	$(BIN)/ruff format --check mlmclm tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each writes its section of benchmarks/RESULTS.md; half an hour on two cores.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.isolation
	$(BIN)/python -m benchmarks.pretraining
	$(BIN)/python -m benchmarks.memory

# The pictures in docs/screenshots, of the quickstart that is in the store; needs Chromium (Debian: apt-get install chromium).
screenshots: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e ".[screenshots]"
	$(BIN)/python scripts/screenshots.py $(STORE)

install: $(VENV)/.installed

# torch comes first: the CPU build where there is no NVIDIA GPU (several GB less), the default build elsewhere.
$(VENV)/.installed: pyproject.toml constraints.txt scripts/install.sh
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) dev
	touch $@
