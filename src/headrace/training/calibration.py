"""Measures, for about a second before a run, what its topology is chosen by; and remembers it.

A few environments are stepped in this process, and a few updates are made. Left out: the choice
(`config/topology.py`), and the longer measurement of `headrace profile`.
"""

import contextlib
import copy
import hashlib
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace import batch
from headrace.algos.ppo import PPO
from headrace.batch import Fragment
from headrace.collectors.inline import InlineCollector
from headrace.config.batches import minibatch_sizes
from headrace.config.derive import cpu_cores, needs_calibration
from headrace.cost_model.costs import Costs, LinearCost, TimeDistribution
from headrace.distributed.channel import pickled
from headrace.distributed.ranks import device_of, visible_gpus
from headrace.errors import EnvError, UsageError
from headrace.meter import Meter
from headrace.training.job import Job, RunRequest
from headrace.training.measuring import (
    ALLREDUCE_S,
    Learning,
    Timings,
    read_laps,
    repeat_steps,
    single_costs,
)
from headrace.training.process import math_threads
from headrace.training.rank import build_learner, sampling_plan

_STEPPING_S, _LEARNING_S = 0.2, 0.1  # of each of two measurements
_NUM_STEPS = 16  # of a fragment
_MANY = 8  # environments of the second measurement
_SLOW_S = 0.25  # to make and step one environment: then there is no second measurement
_HAND_OVER_S, _LATENCY_S = 1e-4, 5e-5  # of a worker process on the same machine


def calibrated(request: RunRequest) -> RunRequest:
    """Return the request with what its topology is chosen by, where that must be measured.

    The same command on the same machine is measured once; its figures are kept in the user's cache
    directory.
    """
    assert request.spec is not None
    settings = request.underived()
    if not needs_calibration(settings, request.spec.interface):
        return request
    path = None if _has_unnamed_code(request) else _folder() / f"{_key(settings.flat())}.json"
    measured = None if path is None else _read(path)
    if measured is None:
        measured = _measure(request)
        if path is not None and measured is not None:
            _write(path, measured)
    return replace(request, costs=measured)


def _has_unnamed_code(request: RunRequest) -> bool:
    """Return whether some code has no name, so that it could differ the next time."""
    named_wrappers = all(isinstance(wrapper, str) for wrapper in request.wrappers)
    return callable(request.env) or request.model is not None or not named_wrappers


def _measure(request: RunRequest) -> Costs | None:
    """Measure in this process; None: there can be no workers, or the run will say what failed."""
    one = {"num_workers": 0, "num_learners": 1, "envs_per_vector": 0}
    try:
        job = request.change(**one, timeline=False, lag=0).job(Path())
        return _Calibrator(job).measure()
    except (EnvError, UsageError):
        return None


class _Calibrator:
    """Measures the costs of a job that has one process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._device = device_of(job.settings.run.device, 0)

    def measure(self) -> Costs:
        with math_threads(1):
            single, wide, num_wide, few = self._stepping()
        with math_threads(self._job.settings.run.learner_threads):
            learn = self._learn(few)
        step, vector = single_costs(single, wide, num_wide)
        return Costs(
            step=step,
            reset=TimeDistribution.from_samples(single.resets if len(single.resets) else [0.0]),
            resets_per_step=max(0, len(single.resets) - 1) / len(single.steps),  # the first begins
            cpu_share=single.cpu_share,
            vector=vector,
            inference=wide.inference,
            hand_over=_HAND_OVER_S,
            latency=_LATENCY_S,
            learn=learn,
            allreduce=LinearCost(ALLREDUCE_S, 0.0),
            device=self._device.type,
        )

    def _stepping(self) -> tuple[Timings, Timings, int, Fragment]:
        """Step one environment, and several: timings, how many these are, and one real step."""
        began = time.perf_counter()
        single, few = self._step(1, 1)
        if time.perf_counter() - began > _SLOW_S:
            return single, single, 1, few
        single, _ = self._step(1, _NUM_STEPS)
        many = min(_MANY, self._job.settings.run.num_envs)
        wide = single if many == 1 else self._step(many, _NUM_STEPS)[0]
        return single, wide, many, few

    def _step(self, num_envs: int, num_steps: int) -> tuple[Timings, Fragment]:
        """Step one vector for a while, and at least once: timings, and the first fragment."""
        meter, deadline = Meter(), float("inf")
        job = self._job_with(num_envs, num_steps)
        learner = build_learner(job, self._device, meter)
        plan = sampling_plan(job, learner, self._device)
        pickled(plan, "worker processes")  # UsageError: there can be none
        collector = InlineCollector(plan, meter, lambda: time.perf_counter() > deadline)
        with contextlib.closing(collector):
            collector.publish(learner.policies, 0)
            if num_steps == 1:
                meter.keep_laps()
            first = collector.collect()
            assert first is not None  # there was no deadline yet
            fragment = copy.deepcopy(first.fragments[0])
            if num_steps > 1:  # its caches were cold
                meter.keep_laps()
                deadline = time.perf_counter() + _STEPPING_S
                while collector.collect() is not None:
                    meter.lap("other")
            laps = meter.take_laps()
        assert laps is not None
        return read_laps([laps]), fragment

    def _learn(self, few: Fragment) -> LinearCost:
        """Measure updates of the run's size and of half of it, with one epoch each."""
        run, algo = self._job.settings.run, self._job.settings.algo
        sizes = []
        for num_envs in sorted({max(1, run.num_envs // 2), run.num_envs}):
            job = self._job_with(num_envs, run.num_steps)
            learner = build_learner(job, self._device, Meter())
            plan = sampling_plan(job, learner, self._device)
            fragments = [repeat_steps(batch.named_tensors(few), plan)]
            sizes.append((num_envs * run.num_steps, learner, fragments))
        learning = Learning(sizes)
        learning.learn(_LEARNING_S)
        base, slope = learning.cost()
        epochs = algo.num_epochs if isinstance(algo, PPO) else 1
        return LinearCost(epochs * base, epochs * slope)

    def _job_with(self, num_envs: int, num_steps: int) -> Job:
        """Return the job with other sizes, and one epoch."""
        settings, algo = self._job.settings, self._job.settings.algo
        run = replace(
            settings.run, num_envs=num_envs, num_steps=num_steps, envs_per_vector=num_envs
        )
        if isinstance(algo, PPO):
            sizes = minibatch_sizes(run, settings.network, 1, algo.minibatch_size)
            algo = replace(algo, num_epochs=1, **sizes)
        return replace(self._job, settings=replace(settings, run=run, algo=algo))


def _key(settings: dict[str, Any]) -> str:
    """Return what tells this command on this machine from others."""
    names = ("seed", "stop_after_s", "stop_at_return", "checkpoint_every_s", "keep", "timeline")
    of = {name: value for name, value in settings.items() if name not in names}
    of |= {
        "headrace": headrace.__version__,
        "torch": torch.__version__,
        "machine": [platform.node(), platform.processor(), cpu_cores(), visible_gpus("auto")],
    }
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]


def _folder() -> Path:
    return Path.home() / ".cache" / "headrace" / "calibrations"


def _read(path: Path) -> Costs | None:
    """Return what is kept; None if there is nothing, or it cannot be read."""
    try:
        return Costs.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, measured: Costs) -> None:
    """Keep what was measured; a cache that cannot be written is done without."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(measured.to_json()))
        new.replace(path)
