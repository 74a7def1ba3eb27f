"""Reads what each part of training costs: from the laps of processes, and by repeated updates.

Left out: what is measured, and for how long (`calibration.py`, `tools/profile/probe.py`).
"""

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan
from headrace.cost_model.costs import LinearCost, TimeDistribution
from headrace.learner.learner import Learner
from headrace.meter import SPANS, Laps
from headrace.spec import Array

_MIN_IDLE = 0.1  # a smaller share of idle time is noise
_LONG_STEP_S = 1e-3
ALLREDUCE_S = 50e-6  # of a small network through shared memory, waiting included
_STEP, _RESET, _INFER, *_OTHER_WORK = map(
    SPANS.index, ("env_step", "env_reset", "infer", "rollout", "publish")
)


@dataclass
class Timings:
    """Timings of workers that step vectors.

    Attributes:
        steps: seconds of each vector step.
        vector_s: mean seconds of the other work of a vector step.
        inference: share of `vector_s` that is inference.
        cpu_share: CPU time / time in environments.
    """

    steps: np.ndarray
    resets: np.ndarray
    vector_s: float
    inference: float
    cpu_share: float


def read_laps(laps: list[Laps]) -> Timings:
    """Return the timings of workers, one `Laps` of each."""
    arrays = [lap_arrays(worker) for worker in [Laps(0.0), *laps]]
    spans = np.concatenate([span for span, _ in arrays])
    durations = np.concatenate([np.diff(knots) for _, knots in arrays])
    cpu_s = sum(worker.cpu_s for worker in laps)
    queued_s = sum(worker.queued_s for worker in laps)
    step, reset = durations[spans == _STEP], durations[spans == _RESET]
    infer_s = float(durations[spans == _INFER].sum())
    env_s = float(step.sum() + reset.sum())
    vector_s = infer_s + float(durations[np.isin(spans, _OTHER_WORK)].sum())
    inference = infer_s / max(1e-12, vector_s)
    idle_s = max(0.0, env_s + vector_s - cpu_s - queued_s)
    computed = cpu_s / (cpu_s + queued_s) if env_s else 1.0  # the rest: waiting for a core
    if idle_s < _MIN_IDLE * (env_s + vector_s) or not env_s:
        # Each worker has a core, but others may use it: that time is not the environments'.
        step, reset, vector_s = step * computed, reset * computed, vector_s * computed
        cpu_share = 1.0
    else:
        env_cpu_s = max(0.0, cpu_s - computed * vector_s)
        cpu_share = env_cpu_s / (env_cpu_s + idle_s)
    return Timings(step, reset, vector_s / max(1, len(step)), inference, cpu_share)


def lap_arrays(laps: Laps) -> tuple[Array, Array]:
    """Return `[n]` index of each lap's span, and `[n + 1]` begin of the first lap and all ends."""
    spans = np.frombuffer(bytes(laps.spans), np.uint8)
    return spans, np.concatenate([[laps.begin], np.array(laps.ends)])


class Learning:
    """Repeated updates on the same batches: rows, learner, and the fragments that it learns from.

    They are spread over the whole measurement, because the speed of a shared machine varies.
    """

    def __init__(self, sizes: list[tuple[int, Learner, list[Fragment]]]) -> None:
        self._sizes = sizes
        self._durations: dict[int, list[float]] = {rows: [] for rows, *_ in sizes}
        self.learner_steps = 0  # optimizer steps of one update

    def learn(self, seconds: float) -> None:
        """Repeat updates for some time."""
        deadline = time.perf_counter() + seconds
        for number in itertools.count():
            for rows, learner, fragments in self._sizes:
                steps, began = learner.learner_steps, time.perf_counter()
                learner.update(learner.assemble(fragments), 0)
                if number:  # the first update has cold caches
                    self._durations[rows].append(time.perf_counter() - began)
                self.learner_steps = learner.learner_steps - steps
            if number and time.perf_counter() > deadline:
                return

    def cost(self, slowdown: float = 1.0) -> LinearCost:
        """Return the seconds of an update by rows, multiplied by `slowdown`."""
        means = {rows: slowdown * float(np.mean(s)) for rows, s in self._durations.items()}
        return LinearCost.fit(*means.items())


def repeat_steps(few: dict[str, Tensor], plan: SamplingPlan) -> Fragment:
    """Build a batch that repeats a few steps of one environment."""
    fragment = batch.allocate(plan.layout)
    for name, array in batch.named_tensors(fragment).items():
        if not name.startswith(("final_", "num_final", "env_id")):
            rows = torch.arange(array.shape[0]) % few[name].shape[0]
            array.copy_(few[name][rows].expand_as(array))
    fragment.env_id.copy_(torch.arange(plan.num_envs))
    return fragment


def native_costs(timings: Timings, n: int) -> tuple[TimeDistribution, LinearCost]:
    """Divide a step of a native vector among its n environments: step and other work."""
    step = TimeDistribution.from_samples(timings.steps / n)
    return step, LinearCost(0.0, timings.vector_s / n)


def single_costs(single: Timings, wide: Timings, n: int) -> tuple[TimeDistribution, LinearCost]:
    """Return the cost of one environment's step, and of a vector step's other work by envs.

    `single` is of vectors of one environment, `wide` of vectors of n.
    """
    vector = LinearCost.fit((1, single.vector_s), (n, wide.vector_s))
    step = TimeDistribution.from_samples(single.steps)
    one, many = float(single.steps.mean()), float(wide.steps.mean())
    if one > _LONG_STEP_S:  # the vector's part is negligible, and rare stalls would hide it
        return step, vector
    base, each = LinearCost.fit((1, one), (n, many))
    return step.scaled(each / one), LinearCost(vector.base + base, vector.slope)
