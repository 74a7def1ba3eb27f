"""An environment that says when its process was up, and how much memory that has.

It does nothing else, and writes a file into the folder that `$BENCH_REPORTS` names: `made_at` and
`at`, the times when it was made and of its first step (seconds, `time.time`), when all others have
been made; `cpu_s`, what its process had computed until then; and at its 100th step `pss_mib` and
`uss_mib`, the memory of its process, with a share of what it shares with others, or without that
(Linux's `smaps_rollup`).
"""

import json
import os
import re
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

MEASURED_AT_STEP = 100


def memory_mib():
    """Of this process: (PSS, USS)."""
    fields = dict(
        re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.M)
    )
    private = int(fields["Private_Clean"]) + int(fields["Private_Dirty"])
    return int(fields["Pss"]) / 1024, private / 1024


class Reporting(gym.Env):
    """Zeros, two actions; an episode has 1,000 steps."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self._steps, self._report = 0, {"made_at": time.time()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 1:
            self._report |= {"at": time.time(), "cpu_s": time.process_time()}
        if self._steps == MEASURED_AT_STEP:
            pss, uss = memory_mib()
            report = self._report | {"pss_mib": pss, "uss_mib": uss}
            written = Path(os.environ["BENCH_REPORTS"], f"{os.getpid()}-{id(self)}.json")
            written.write_text(json.dumps(report))
        return np.zeros(4, np.float32), 0.0, False, self._steps % 1000 == 0, {}
