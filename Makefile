# Everything happens in a virtual environment beside this file; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NOW := $(shell date +%Y%m%d-%H%M%S)
RUN ?= runs/demo-$(NOW)

.PHONY: demo test test-all test-faults gpu bench-cartpole bench-atari bench-learners clean

# The installed extras are remembered by a file each, and installed again when the pins change.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

## Train an agent, evaluate it, draw its learning curve, film it.
demo: $(VENV)/.demo
	$(BIN)/headrace train CartPole-v1 --seed 1 --run-dir $(RUN)
	$(BIN)/headrace plot $(RUN)
	$(BIN)/headrace eval $(RUN) --episodes 20 --video $(RUN)/agent.mp4

## Lint, types, tests: what CI does.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not faults and not gpu"

## All of it, with the minutes-long learning tests.
test-all: $(VENV)/.dev
	$(BIN)/pytest -m "not faults and not gpu"

## Fault tests of both levels, and the table of what they measured.
test-faults: $(VENV)/.dev
	$(BIN)/pytest -m "fault_a or faults" --fault-table docs/faults.md

## What only a CUDA device shows; needs an environment that has torch with CUDA.
gpu:
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m benchmarks.gpu

## Training on CartPole-v1 beside other trainers, which get virtual environments of their own.
bench-cartpole: $(VENV)/.classic-control
	$(BIN)/python benchmarks/peers/install.py
	$(BIN)/python -m benchmarks.cartpole

## Stepping and training on Breakout beside ale-py and other trainers.
bench-atari: $(VENV)/.atari
	$(BIN)/python benchmarks/peers/install.py base sb3
	$(BIN)/python -m benchmarks.atari

## One, two and four learners on the same work.
bench-learners: $(VENV)/.classic-control
	$(BIN)/python -m benchmarks.learners

clean:
	rm -rf $(VENV) benchmarks/.venvs dist build .mypy_cache .pytest_cache .ruff_cache
