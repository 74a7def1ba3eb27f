"""An environment whose steps take a time that is given: asleep, or computing.

    headrace train benchmarks.timed:Timed --env-kwargs times=stalls mean_ms=4 computes=True

The time is the workload here, and waits for nothing. Left out: writing down how long it was
(`peers/uneven.py` does).
"""

import random
import time

import gymnasium as gym
import numpy as np

from benchmarks.peers.step_times import LOGNORMAL_SIGMA

STALL_S, SHORT_S = 0.1, 0.003


def stall_probability(mean_s):
    """How often a step takes 100 ms in place of 3 ms, for this mean."""
    return (mean_s - SHORT_S) / (STALL_S - SHORT_S)


TIMES = {
    "constant": lambda rng, mean: mean,
    "exponential": lambda rng, mean: rng.expovariate(1 / mean),
    "lognormal": lambda rng, mean: (
        mean * rng.lognormvariate(-(LOGNORMAL_SIGMA**2) / 2, LOGNORMAL_SIGMA)
    ),
    "stalls": lambda rng, mean: STALL_S if rng.random() < stall_probability(mean) else SHORT_S,
}
"""Name -> seconds of a step, from a generator and their mean."""


class Timed(gym.Env):
    """Four random numbers, two actions, no reward; episodes of 1,000 steps.

    Args:
        times: a name in `TIMES`, or milliseconds of each step, in turns ("3 3 100").
        mean_ms: of a step, where `times` is a name.
        more_ms: added to each step.
        computes: compute for so long (of CPU time), in place of sleeping.
        render_mode: as Gymnasium has it; nothing is to be seen.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, times="constant", mean_ms=1.0, more_ms=0.0, computes=False, render_mode=None
    ):
        self.render_mode = render_mode
        self._random, self._steps, self._more_s = random.Random(), 0, more_ms / 1e3
        self._spend = _compute if computes else time.sleep
        if times in TIMES:
            draw, mean = TIMES[times], mean_ms / 1e3
            self._next = lambda: draw(self._random, mean)
        else:
            in_turns = [float(ms) / 1e3 for ms in str(times).split()]
            self._next = lambda: in_turns[self._steps % len(in_turns)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._spend(self._next() + self._more_s)
        self._steps += 1
        obs = np.full(4, self._random.random(), np.float32)
        return obs, 0.0, False, self._steps >= 1000, {}


def _compute(seconds):
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
