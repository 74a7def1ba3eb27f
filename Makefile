# Everything happens in a virtual environment beside this file; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NOW := $(shell date +%Y%m%d-%H%M%S)
RUN ?= runs/demo-$(NOW)

.PHONY: demo docs docs-links test test-more test-all test-faults test-trackers browser gpu clean bench bench-install bench-kernels bench-tag bench-limits bench-cartpole
.PHONY: bench-cheetah bench-atari bench-uneven bench-start bench-guards bench-learners
.PHONY: presets bench-regression bench-inference bench-lag bench-cluster bench-profile bench-autoscale release-check

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

## The documentation as a site, below docs/_build/html; a warning or a link that leads nowhere is an error.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py

## Do the addresses that the documentation names answer? Needs the network.
docs-links: $(VENV)/.docs
	$(BIN)/python docs/site/build.py --builder linkcheck

# Each file runs in one of three processes: tests wait for others, so two would leave the cores idle.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder

## Lint, types, and each kind of test once: six minutes on two cores.
test: $(VENV)/.dev browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(PYTEST) -m "not more and not slow and not faults and not gpu"

## The repeats that `make test` leaves out; CI runs both.
test-more: $(VENV)/.dev browser
	$(PYTEST) -m "more and not slow and not faults and not gpu"

## A browser for the tests of the report, if this machine has none: into .venv, and nothing is installed.
browser: $(VENV)/.dev
	tests/tools/report/fetch_browser.sh $(VENV)/browser || echo "Without a browser, the tests that need one are skipped."

## All of it, with the minutes-long learning tests.
test-all: $(VENV)/.dev browser
	$(PYTEST) -m "not faults and not gpu"

CLUSTERS := $(wildcard tests/faults/test_cluster*.py) tests/faults/test_network.py
## Fault tests of both levels, and the tables of what they measured.
test-faults: $(VENV)/.dev
	$(BIN)/pytest -m "fault_a or faults" --fault-table=docs/faults.md $(CLUSTERS:%=--ignore=%)
	$(BIN)/pytest -m faults --fault-table=docs/cluster.md $(CLUSTERS)

## Trackers for real: `make test` skips those whose package is not installed, and `dev` asks for none.
test-trackers: $(VENV)/.dev $(VENV)/.trackio $(VENV)/.mlflow $(VENV)/.wandb
	$(BIN)/pytest tests/tools/trackers

## What only a CUDA device shows; needs an environment that has torch with CUDA.
gpu:
	$(PYTHON) -m pytest -m gpu $(shell grep -rl --include=*.py "mark\.gpu" tests)
	$(PYTHON) -m benchmarks.gpu_autoscale
	$(PYTHON) -m benchmarks.gpu_steps
	$(PYTHON) -m benchmarks.gpu

# What the benchmarks need: the environments, and each peer in a virtual environment of its own.
bench-install: $(VENV)/.classic-control $(VENV)/.mujoco $(VENV)/.atari
bench-install: $(VENV)/.highway $(VENV)/.minigrid $(VENV)/.plot $(VENV)/.kernels
	$(BIN)/python benchmarks/peers/install.py

## All of the next six, and the tables of README.md and benchmarks/README.md; TURNS=1 for a look.
bench: bench-install
	$(BIN)/python -m benchmarks.all $(if $(TURNS),--turns $(TURNS))

## Alone: bench-limits bench-cartpole bench-cheetah bench-atari bench-start bench-guards.
bench-limits bench-cartpole bench-cheetah bench-atari bench-start bench-guards: bench-install
	$(BIN)/python -m benchmarks.$(@:bench-%=%) $(if $(TURNS),--turns $(TURNS))

## Step times that differ: seven distributions and two real environments; and their figure.
bench-uneven: bench-install
	$(BIN)/python -m benchmarks.uneven $(if $(TURNS),--turns $(TURNS))
	$(BIN)/python -m benchmarks.table

## Workers as Ray actors: what that costs, who holds how many bytes, how starting goes; and a figure.
bench-cluster: bench-install $(VENV)/.ray
	$(BIN)/python -m benchmarks.cluster $(if $(TURNS),--turns $(TURNS))
	$(BIN)/python -m benchmarks.cluster_bytes
	$(BIN)/python -m benchmarks.table

## What sampling beside learning gives, and what it costs.
bench-lag: $(VENV)/.classic-control $(VENV)/.mujoco $(VENV)/.atari
	$(BIN)/python -m benchmarks.lag $(if $(TURNS),--turns $(TURNS))

## Kernel environments: stepping alone, training, and its limits.
bench-kernels: $(VENV)/.classic-control $(VENV)/.kernels
	$(BIN)/python -m benchmarks.kernels $(if $(TURNS),--turns $(TURNS))

## What both sides of the games of tag learn, against random and frozen others.
bench-tag: $(VENV)/.kernels $(VENV)/.plot $(VENV)/.video
	$(BIN)/python -m benchmarks.tag
	$(BIN)/python -m benchmarks.table

## Presets with their seeds, resumed where they were cut, and docs/presets.md: ENV=CartPole-v1, a family, or a pattern.
presets: $(VENV)/.dev
	$(BIN)/python -m benchmarks.presets $(if $(ENV),--env '$(ENV)') $(if $(DEADLINE_S),--deadline-s $(DEADLINE_S))

## Has anything become slower than benchmarks/regression.toml accepts? Three minutes, before a release.
bench-regression: $(VENV)/.classic-control $(VENV)/.mujoco
	$(BIN)/python -m benchmarks.regression

## One, two and four learners on the same work.
bench-learners: $(VENV)/.classic-control
	$(BIN)/python -m benchmarks.learners $(if $(TURNS),--turns $(TURNS))

## Who acts, workers or the learner's process: networks of several sizes; less than 8 minutes.
bench-inference: $(VENV)/.classic-control
	$(BIN)/python -m benchmarks.inference $(if $(TURNS),--turns $(TURNS))

## What profiles predict beside what runs then do; a published diagnosis, done again.
bench-profile: $(VENV)/.classic-control
	$(BIN)/python -m benchmarks.predict $(if $(TURNS),--turns $(TURNS))
	$(BIN)/python -m benchmarks.diagnosis
	$(BIN)/python -m benchmarks.table

## Sizes found by measurement beside a full grid of them; half an hour.
bench-autoscale: $(VENV)/.classic-control $(VENV)/.mujoco $(VENV)/.kernels
	$(BIN)/python -m benchmarks.autoscale $(if $(TURNS),--turns $(TURNS))

## The wheel and the sdist of HEAD: built, installed on each Python with each extra, used; 20 minutes.
release-check: $(VENV)/.dev
	$(BIN)/python -m release $(if $(CUDA_BUILDS),--cuda-builds)

clean:
	rm -rf $(VENV) benchmarks/.venvs dist build docs/_build .mypy_cache .pytest_cache .ruff_cache
