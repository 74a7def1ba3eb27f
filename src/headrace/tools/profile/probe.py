"""Measures what each part of training costs, apart from the others: `Costs`.

Real workers step the environments, one for each core. Environments that sleep get more workers:
sleeping takes no core, and rare stalls take many samples to see. Learning is measured on a batch
that repeats a few real steps.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from headrace.collectors.api import Collector, SamplingPlan
from headrace.collectors.device import DeviceCollector
from headrace.collectors.inline import InlineCollector
from headrace.collectors.synchronous import SynchronousCollector
from headrace.cost_model.costs import Costs, LinearCost, TimeDistribution
from headrace.distributed.process import math_threads
from headrace.distributed.ranks import device_of
from headrace.errors import EnvError
from headrace.learner.learner import Learner
from headrace.machine.limits import cpu_cores
from headrace.meter import Meter
from headrace.models.policy import torch_seed
from headrace.training.calibration import (
    ALLREDUCE_S,
    Learning,
    Timings,
    learner_to_measure,
    native_costs,
    read_laps,
    repeat_steps,
    single_costs,
    step_one_vector,
)
from headrace.training.job import Job
from headrace.training.rank import sampling_plan

_SLEEPS = 0.5  # an environment with a smaller share of CPU time sleeps
_MAX_WORKERS = 32  # for environments that sleep
_CORE_LOAD = 0.7  # load of the cores by these workers: with more they would wait for each other
_FEW_STEPS = 2  # real steps that a batch repeats
_MAX_SLOWDOWN = 1.5  # of a process beside others on other cores; more is noise
_ROUNDS_S = 0.5


class Probe:
    """Measures the costs of a job.

    Args:
        seconds: duration of measuring, not counting the start of processes.
    """

    def __init__(self, job: Job, seconds: float, say: Callable[[str], None]) -> None:
        self._job, self._seconds, self._say = job, seconds, say
        run = job.settings.run
        self._device = device_of(run.device, 0)
        single = replace(run, num_envs=run.num_envs // run.num_learners, num_learners=1)
        self._single = replace(job, settings=replace(job.settings, run=single))
        is_gpu = self._device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(self._device) if is_gpu else "cpu"

    def costs(self) -> Costs:
        """Measure all costs; EnvError if an environment failed, or gave no step in the time."""
        with math_threads(self._job.settings.run.learner_threads):
            whole = self._job.is_on_device
            return self._measure_one_vector() if whole else self._measure_workers()

    def _measure_workers(self) -> Costs:
        run, cores = self._job.settings.run, cpu_cores()
        n, whole = run.envs_per_vector, self._job.maker.native
        one = n if whole else 1  # a native vector is no sum of single environments
        learning = self._prepare_learning()
        self._say(f"Stepping environments with {cores} workers; learning")
        learning.learn(self._seconds / 16)
        single = self._step_envs(cores, one, self._seconds / 4)
        learning.learn(self._seconds / 16)
        if single.cpu_share < _SLEEPS:
            load = single.cpu_share + single.vector_s / single.steps.mean()
            count = max(cores, min(_MAX_WORKERS, run.num_envs, int(_CORE_LOAD * cores / load)))
            self._say(f"The environments sleep: stepping with {count} workers")
            single = self._step_envs(count, one, self._seconds / 4)
        size = n if whole else max(n, 2)
        wide = single if whole else self._step_envs(cores, size, self._seconds / 4)
        learning.learn(self._seconds / 16)
        slowdown = 1.0
        if run.num_learners > 1:  # all cores are busy then; inference shows what that costs
            alone = self._step_envs(1, size, self._seconds / 8)
            slowdown = min(_MAX_SLOWDOWN, max(1.0, wide.vector_s / alone.vector_s))
        step, vector = native_costs(single, n) if whole else single_costs(single, wide, size)
        self._say("Handing orders over")
        hand_over, latency = self._measure_hand_over()
        learning.learn(self._seconds / 16)
        return Costs(
            step=step,
            reset=TimeDistribution.from_samples(single.resets if len(single.resets) else [0.0]),
            resets_per_step=len(single.resets) / (len(single.steps) * one),
            cpu_share=single.cpu_share,
            vector=vector,
            inference=wide.inference,
            hand_over=hand_over,
            latency=latency,
            learn=learning.cost(slowdown),
            allreduce=LinearCost(ALLREDUCE_S * learning.learner_steps, 0.0),
            device=self._device_name,
        )

    def _measure_one_vector(self) -> Costs:
        """Measure a run whose environments are one vector on the learner's device."""
        self._say("Stepping environments")
        run = self._single.settings.run
        meter, learner = self._learner(run.num_envs, run.num_steps)
        plan = sampling_plan(self._single, learner, self._device)
        collector = DeviceCollector(plan, self._device, meter, lambda: False, {})
        with contextlib.closing(collector):
            collector.publish(learner.policies, 0)
            batches, laps, fragments = step_one_vector(collector, meter, self._seconds / 2)
            self._say("Learning")
            rows = run.num_envs * run.num_steps
            learning = Learning([(rows, learner, fragments)], self._single.settings.algo)
            learning.learn(self._seconds / 4)
        if self._device.type == "cuda":  # the host's laps say nothing about the device
            step = TimeDistribution.from_samples(np.array(batches) / rows)
            vector, inference = LinearCost(0.0, 0.0), 0.0
        else:
            timings = read_laps([laps])
            step, vector = native_costs(timings, run.num_envs)
            inference = timings.inference
        return Costs(
            step=step,
            reset=TimeDistribution.from_samples([0.0]),
            resets_per_step=0.0,
            cpu_share=1.0,
            vector=vector,
            inference=inference,
            hand_over=0.0,
            latency=0.0,
            learn=learning.cost(),
            allreduce=LinearCost(ALLREDUCE_S * learning.learner_steps, 0.0),
            device=self._device_name,
        )

    @cached_property
    def _run_plan(self) -> SamplingPlan:
        _, learner = self._learner(1, self._job.settings.run.num_steps)
        return sampling_plan(self._single, learner, self._device)

    def _plan(self, num_envs: int, n: int, num_steps: int = 0) -> SamplingPlan:
        """Plan synchronous sampling by workers that act themselves; 0: T of the run."""
        plan = self._run_plan
        return replace(
            plan, num_envs=num_envs, envs_per_vector=n, num_steps=num_steps or plan.num_steps,
            lag=0, asynchronous=False, inference_device=None, timeline=True,
        )  # fmt: skip

    def _learner(self, num_envs: int, num_steps: int) -> tuple[Meter, Learner]:
        settings = self._single.settings
        run = replace(settings.run, num_envs=num_envs, num_steps=num_steps, lag=0)
        job = replace(self._single, settings=replace(settings, run=run))
        meter = Meter()
        return meter, learner_to_measure(job, self._device, meter)

    def _step_envs(self, count: int, n: int, seconds: float) -> Timings:
        """Step vectors of n environments in `count` workers."""
        deadline = float("inf")  # until all workers are up
        plan = self._plan(count * n, n)
        with _workers(plan, count, lambda: time.perf_counter() > deadline) as collector:
            deadline = time.perf_counter() + seconds
            while collector.collect() is not None:
                pass
            collector.halt()
            timings = read_laps([each.laps for each in collector.timings().values() if each.laps])
        if not len(timings.steps):
            raise EnvError(
                f"{self._job.spec.id}: no step ended within {seconds:.1f} s, and so there is "
                "nothing to measure. Give it more time."
            )
        return timings

    def _measure_hand_over(self) -> tuple[float, float]:
        """Return the learner's seconds for an order and its answer, and the idle seconds."""
        plan = self._plan(1, 1, num_steps=1)
        with _workers(plan, 1, lambda: False) as collector:
            collector.collect()
            busy_before = _busy_s(collector)
            began, cpu_before, rounds = time.perf_counter(), time.process_time(), 0
            while rounds < 3 or time.perf_counter() - began < _ROUNDS_S:
                collector.collect()
                rounds += 1
            duration = (time.perf_counter() - began) / rounds
            hand_over = (time.process_time() - cpu_before) / rounds
            busy = (_busy_s(collector) - busy_before) / rounds
        return hand_over, max(0.0, duration - busy - hand_over)

    def _prepare_learning(self) -> Learning:
        """Prepare batches of the run's size and of half of it, by repeating a few real steps."""
        run, sizes = self._single.settings.run, []
        _, learner = self._learner(1, _FEW_STEPS)
        collector = InlineCollector(self._plan(1, 1, num_steps=_FEW_STEPS), Meter(), lambda: False)
        with contextlib.closing(collector):
            collector.publish(learner.policies, 0)
            collected = collector.collect()
            assert collected is not None
            few = collected.fragments
        for num_envs in sorted({max(1, run.num_envs // 2), run.num_envs}):
            _, learner = self._learner(num_envs, run.num_steps)
            plan = self._plan(num_envs, num_envs, run.num_steps)
            sizes.append((num_envs * run.num_steps, learner, repeat_steps(few, plan)))
        return Learning(sizes, self._single.settings.algo)


@contextlib.contextmanager
def _workers(
    plan: SamplingPlan, count: int, stop: Callable[[], bool]
) -> Iterator[SynchronousCollector]:
    """Run workers that act with the initial weights."""
    with contextlib.closing(SynchronousCollector(plan, count, stop)) as collector:
        with torch_seed(plan.seed):
            policies = {name: policy.build() for name, policy in plan.policies.items()}
        collector.publish(policies, 0)
        yield collector


def _busy_s(collector: Collector) -> float:
    """Return the busy seconds of the only worker."""
    [timings] = collector.timings().values()
    return sum(s for span, s in timings.seconds().items() if span not in ("wait", "start", "other"))
