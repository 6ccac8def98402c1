# Every target does its own set-up: a fresh clone needs Python 3.11+, Java 17+ and Maven.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where bytecode is switched off, every process of a test would compile all that it imports.
export PYTHONDONTWRITEBYTECODE =
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
LIGHT := -m 'not heavy and not slow and not proof'
# More workers than cores: they mostly wait for Kafka.
LIGHT_TESTS = $(BIN)/pytest $(LIGHT) -n 6

.PHONY: check setup setup-cpu setup-gpu demo docs lint test test-slow proof bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv -c constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]' -c constraints.txt
	touch $@

# Once, lest all workers of the first run compile the same files at the same time.
$(COMPILED): $(READY)
	$(BIN)/pytest $(LIGHT) --collect-only --quiet > /dev/null
	touch $@

# vLLM on the CPU: its wheel asks for a torch build that only its own index has; the usual one works.
setup-cpu: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[cpu,lora,trackers,peers]' -c constraints.txt --override cpu-overrides.txt

setup-gpu: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[gpu,lora,trackers,peers]' -c constraints.txt

# A small model learns to use a tool, in some minutes; DEMO='--resume' and other options of the command.
demo: setup-$(if $(wildcard /dev/nvidia0),gpu,cpu)
	$(BIN)/steplog demo $(DEMO)

# The reference of settings and metrics, from the code.
docs: setup
	$(BIN)/python -m steplog.reference

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What a contributor runs all the time: it needs neither torch nor vLLM.
check: lint $(COMPILED)
	$(LIGHT_TESTS)

# The tests of `check`, and then those that load torch: two runs, so that few processes load it.
test: setup-cpu $(COMPILED)
	$(LIGHT_TESTS)
	$(BIN)/pytest -m 'heavy and not slow and not proof' -n 2

# Those with the real vLLM run alone: it takes all cores, and the others have deadlines.
test-slow: setup-cpu
	$(BIN)/pytest -m 'slow and not engine' -n 2
	$(BIN)/pytest -m 'slow and engine'

# Over three seeds the reward climbs, and at learning rate 0 it does not; the demo, to its end.
proof: setup-cpu
	$(BIN)/pytest -m proof

bench: setup-cpu
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .steplog build *.egg-info
