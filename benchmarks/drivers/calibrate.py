"""Measures once what Headrace chooses a topology by, as the first run of a command does.

    python -m benchmarks.drivers.calibrate --work cartpole

Prints the seconds without and with its cache, and the choice, as `RESULT {json}`. The cache is a
folder of this process's own.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.topology import GOAL, settings_of
from headrace.training.calibration import calibrated
from headrace.training.job import RunRequest, inspect_request

CHOSEN = ("num_workers", "envs_per_vector", "num_learners", "learner_threads")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True)
    work = settings_of(parser.parse_args().work)
    given = {
        name: getattr(work, name)
        for name in ("env", "num_envs", "num_steps", "num_epochs", "num_minibatches", "lr")
    }
    request = inspect_request(RunRequest({**given, "total_env_steps": GOAL}))
    with tempfile.TemporaryDirectory() as home:
        Path.home = lambda: Path(home)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            found = calibrated(request)
            seconds.append(time.perf_counter() - began)
    run = found.derived().run
    result = {
        "seconds": seconds[0],
        "cached_s": seconds[1],
        "choice": {name: getattr(run, name) for name in CHOSEN},
        "step_us": found.costs and 1e6 * found.costs.env_s,
    }
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
