# On a fresh machine, `make quickstart` and `make test` do everything, installation included.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= store
# Empty: the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
export PYTHON CONSTRAINTS

.PHONY: quickstart replicate test test-all lint docs wheel bench screenshots install lock

# The whole study at small scale, on this machine's own documentation. A second run trains nothing again.
quickstart: $(VENV)/.installed
	$(BIN)/mlmclm study examples/quickstart.yaml --store $(STORE)

# A paper's claims, tested by the smallest study that has all its kinds of models, in minutes.
replicate: $(VENV)/.installed
	$(BIN)/mlmclm replicate study --scale tiny --store $(STORE)

# Three test files at once: tests on real Ray spend half of their time waiting for processes to start.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check mlmclm tests benchmarks
	$(BIN)/ruff format --check mlmclm tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site in build/site; a link that leads nowhere fails.
docs: $(VENV)/.installed
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[docs]"
	$(BIN)/python scripts/docs.py

# The source distribution and the wheel, in dist/.
wheel: $(VENV)/.installed-dev
	mkdir -p dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"

# Each module writes its section of benchmarks/RESULTS.md. Takes half an hour on two cores.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.isolation
	$(BIN)/python -m benchmarks.pretraining
	$(BIN)/python -m benchmarks.memory

# Draws the pictures in docs/screenshots from the quickstart in the store. Needs Chromium (Debian: apt-get install chromium).
screenshots: $(VENV)/.installed
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[screenshots]"
	$(BIN)/python scripts/screenshots.py $(STORE)

install: $(VENV)/.installed

# The hashes of all packages, with the CPU build of torch: pip install --require-hashes -r lock.txt && pip install --no-deps .
lock: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --dry-run --ignore-installed --no-deps --report - -r <(sed '/^torch==/s/$$/+cpu/' constraints.txt) \
		| $(BIN)/python scripts/lock.py > lock.txt

# Installs torch first: the CPU build where there is no NVIDIA GPU (it is several GB smaller), the default build elsewhere.
$(VENV)/.installed: pyproject.toml constraints.txt scripts/install.sh
	bash scripts/install.sh $(VENV)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	bash scripts/install.sh $(VENV) dev
	touch $@
