"""A fresh Python that imports what a worker does, and says what that took (`start.py`)."""

import torch  # noqa: F401

from benchmarks.peers.reporting import MEASURED_AT_STEP, Reporting

env = Reporting()
env.reset()
for _ in range(MEASURED_AT_STEP):
    env.step(0)
