"""What environments did with their time, written down by themselves.

Each keeps its sums in a file of its own in the folder that `$BENCH_BUSY` names (without it, for
itself). The file is mapped into memory: a sum costs no system call, and what is in it counts even
if its process is killed. An environment's first reset is not in it: it is of the start, not of the
steady state. Left out: what the sums mean (`measure_busy.py`, `uneven.py`).
"""

import mmap
import os
import tempfile
import time
from pathlib import Path

import gymnasium as gym

FOLDER = "BENCH_BUSY"
SUMS = ("steps", "resets", "step_s", "reset_s", "cpu_s")
"""`step_s` and `reset_s` of wall time; `cpu_s` of the thread that steps and resets."""


class Ledger:
    """The sums of one environment; `with ledger.step():` and `with ledger.reset():` add to them."""

    def __init__(self):
        size, folder = 8 * len(SUMS), os.environ.get(FOLDER)
        if folder:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        else:
            memory = bytearray(size)
        self.sums = memoryview(memory).cast("d")

    def step(self):
        """What runs in it is one env step."""
        return _Timed(self.sums, 0)

    def reset(self):
        """What runs in it is one reset; the first is not counted."""
        return _Timed(self.sums, 1, counts=self.sums[0] > 0)


class _Timed:
    def __init__(self, sums, which, counts=True):
        self._sums, self._which, self._counts = sums, which, counts

    def __enter__(self):
        self._cpu, self._wall = time.thread_time(), time.perf_counter()

    def __exit__(self, *error):
        if self._counts:
            self._sums[2 + self._which] += time.perf_counter() - self._wall
            self._sums[4] += time.thread_time() - self._cpu
            self._sums[self._which] += 1


class Measured(gym.Wrapper):
    """Any environment, measured; what it wraps counts as the environment."""

    def __init__(self, env):
        super().__init__(env)
        self.ledger = Ledger()

    def reset(self, *, seed=None, options=None):
        with self.ledger.reset():
            return self.env.reset(seed=seed, options=options)

    def step(self, action):
        with self.ledger.step():
            return self.env.step(action)


def totals(folder):
    """The sums over all environments that wrote into `folder`, by name."""
    written = [path.read_bytes() for path in Path(folder).iterdir()]
    found = [memoryview(sums).cast("d") for sums in written if sums]  # "": just being made
    return {name: sum(sums[place] for sums in found) for place, name in enumerate(SUMS)}
