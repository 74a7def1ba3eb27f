"""Measures what each part of training costs, apart from the others: `Costs`.

Environments are stepped by real workers, as many as there are cores (more, where environments
sleep: that takes no core, and rare stalls take many samples to see). Learning is measured on a
batch that repeats a few real steps. Left out: what follows from costs (`model.py`).
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment
from headrace.collectors.api import Collector, SamplingPlan
from headrace.collectors.device import DeviceCollector
from headrace.collectors.inline import InlineCollector
from headrace.collectors.synchronous import SynchronousCollector
from headrace.config.resolve import cpu_cores
from headrace.cost_model.costs import Costs, LinearCost, TimeDistribution
from headrace.distributed.ranks import device_of
from headrace.errors import EnvError
from headrace.learner.learner import Learns
from headrace.meter import SPANS, Laps, Meter
from headrace.models import policy as policies
from headrace.tools.profile.timeline_plots import arrays
from headrace.training.job import Job
from headrace.training.process import math_threads
from headrace.training.rank import acting_policies, build_learner, is_on_device, sampling_plan

_SLEEPS = 0.5  # share of CPU time below which an environment is taken for one that sleeps
_NEVER_ASLEEP = 0.1  # share of the time asleep, below which it is noise
_MOST_ASLEEP = 32  # workers
_ROOM = 0.7  # of the cores, that these compute on: with more they would wait for each other
_FEW_STEPS = 2  # that a batch to learn from repeats
_MOST_CROWDED = 1.5  # times as long beside others on other cores; more than that is noise
_ROUNDS_S = 0.5
_LONG_STEP_S = 1e-3
_ALLREDUCE_S = 50e-6  # of a small network, through shared memory, and waiting for each other
_STEP, _RESET = SPANS.index("env_step"), SPANS.index("env_reset")
_BESIDES = {SPANS.index(span): span for span in ("infer", "rollout", "publish")}


@dataclass
class _Seen:
    """Of workers that stepped vectors of n environments.

    Attributes:
        steps: seconds of each vector step.
        resets: of each time that environments of a vector were reset.
        besides: seconds of all of them by span, for `len(steps)` vector steps.
        cpu_share: of the time in environments, the share in which they compute.
    """

    steps: np.ndarray
    resets: np.ndarray
    besides: dict[str, float]
    cpu_share: float

    @property
    def vector_s(self) -> float:
        """Of a vector step, besides the environments."""
        return sum(self.besides.values()) / len(self.steps)

    @property
    def inference(self) -> float:
        """Its share of that."""
        return self.besides["infer"] / max(1e-12, sum(self.besides.values()))


def _seen(laps: list[Laps]) -> _Seen:
    steps: list[np.ndarray] = []
    resets: list[np.ndarray] = []
    besides = dict.fromkeys(_BESIDES.values(), 0.0)
    for of_one in laps:
        span, took = arrays(of_one)
        steps.append(took[span == _STEP])
        resets.append(took[span == _RESET])
        for i, name in _BESIDES.items():
            besides[name] += float(took[span == i].sum())
    cpu_s, queued_s = sum(of.cpu_s for of in laps), sum(of.queued_s for of in laps)
    step, reset = np.concatenate([*steps, []]), np.concatenate([*resets, []])
    in_envs, in_besides = float(step.sum() + reset.sum()), sum(besides.values())
    if not in_envs:
        return _Seen(step, reset, besides, 1.0)
    asleep = max(0.0, in_envs + in_besides - cpu_s - queued_s)
    computed = cpu_s / (cpu_s + queued_s)  # the rest of it: waiting for a core
    if asleep < _NEVER_ASLEEP * (in_envs + in_besides):
        # There is a core for each worker, but others may use them: not these environments' time.
        besides = {name: s * computed for name, s in besides.items()}
        return _Seen(step * computed, reset * computed, besides, 1.0)
    cpu_of_envs = max(0.0, cpu_s - computed * in_besides)
    return _Seen(step, reset, besides, cpu_of_envs / (cpu_of_envs + asleep))


class Probe:
    """Measures the costs of a task.

    Args:
        task: what would be run.
        seconds: that measuring may take, without starting processes.
        say: told what is measured.
    """

    def __init__(self, task: Job, seconds: float, say: Callable[[str], None]) -> None:
        self._task, self._seconds, self._say = task, seconds, say
        run = task.settings.run
        self._device = device_of(run.device, 0)
        alone = replace(run, num_envs=run.num_envs // run.num_learners, num_learners=1)
        self._alone = replace(task, settings=replace(task.settings, run=alone))

    def costs(self) -> Costs:
        """Measure all of them.

        Raises:
            EnvError: an environment failed, or gave no step within the time.
        """
        with math_threads(self._task.settings.run.learner_threads):
            if is_on_device(self._task):
                return self._one_vector()
            return self._single_envs()

    def _single_envs(self) -> Costs:
        run, cores = self._task.settings.run, cpu_cores()
        n, whole = run.envs_per_vector, self._task.maker.native
        one = n if whole else 1  # a vector of its own is no sum of single environments
        learning = self._learning()
        self._say(f"Stepping environments with {cores} workers; learning")
        learning.go_on(self._seconds / 16)
        seen = self._workers(cores, one, self._seconds / 4)
        learning.go_on(self._seconds / 16)
        if seen.cpu_share < _SLEEPS:
            room = int(_ROOM * cores / (seen.cpu_share + seen.vector_s / seen.steps.mean()))
            many = max(cores, min(_MOST_ASLEEP, run.num_envs, room))
            self._say(f"They sleep: stepping with {many} workers")
            seen = self._workers(many, one, self._seconds / 4)
        other = n if whole else max(n, 2)
        wider = seen if whole else self._workers(cores, other, self._seconds / 4)
        learning.go_on(self._seconds / 16)
        crowded = 1.0
        if run.num_learners > 1:  # all cores are busy then: what that costs, inference shows
            alone = self._workers(1, other, self._seconds / 8)
            crowded = min(_MOST_CROWDED, max(1.0, wider.vector_s / alone.vector_s))
        step, vector = _of_whole(seen, n) if whole else _of_single(seen, wider, other)
        self._say("Handing orders over")
        hand_over, latency = self._handed_over()
        learning.go_on(self._seconds / 16)
        return Costs(
            step=step,
            reset=TimeDistribution.from_samples(seen.resets if len(seen.resets) else [0.0]),
            resets_per_step=len(seen.resets) / (len(seen.steps) * one),
            cpu_share=seen.cpu_share,
            vector=vector,
            inference=wider.inference,
            hand_over=hand_over,
            latency=latency,
            learn=learning.line(crowded),
            allreduce=LinearCost(_ALLREDUCE_S * learning.learner_steps, 0.0),
            device=_name(self._device),
        )

    def _one_vector(self) -> Costs:
        """All environments are stepped at once, beside the learner."""
        self._say("Stepping environments")
        run = self._alone.settings.run
        meter, learner = self._learner(run.num_envs, run.num_steps)
        batches: list[float] = []
        with contextlib.closing(self._collector(learner, meter)) as collector:
            collector.publish(learner.policy, 0)
            collector.collect()
            meter.keep_laps()
            ends = time.perf_counter() + self._seconds / 2
            while time.perf_counter() < ends:
                began = time.perf_counter()
                # It asks the device for what it has done, and so waits for it.
                collected = collector.collect()
                batches.append(time.perf_counter() - began)
                meter.lap("other")
            laps = meter.take_laps()
            assert collected is not None and laps is not None
            self._say("Learning")
            rows = run.num_envs * run.num_steps
            learning = _Learning([(rows, learner, collected.fragments)])
            learning.go_on(self._seconds / 4)
        if self._device.type == "cuda":  # what the host did when says nothing of the device
            step, vector, inference = (
                TimeDistribution.from_samples(np.array(batches) / rows),
                LinearCost(0.0, 0.0),
                0.0,
            )
        else:
            seen = _seen([laps])
            step, vector = _of_whole(seen, run.num_envs)
            inference = seen.inference
        return Costs(
            step=step,
            reset=TimeDistribution.from_samples([0.0]),
            resets_per_step=0.0,
            cpu_share=1.0,
            vector=vector,
            inference=inference,
            hand_over=0.0,
            latency=0.0,
            learn=learning.line(),
            allreduce=LinearCost(_ALLREDUCE_S * learning.learner_steps, 0.0),
            device=_name(self._device),
        )

    @cached_property
    def _plan_of_run(self) -> SamplingPlan:
        _, learner = self._learner(1, self._task.settings.run.num_steps)
        return sampling_plan(self._alone, learner, self._device)

    def _plan(self, num_envs: int, n: int, num_steps: int = 0) -> SamplingPlan:
        """For workers that act themselves, batch by batch; T as it is, unless it is given."""
        plan = self._plan_of_run
        return replace(
            plan, num_envs=num_envs, envs_per_vector=n, num_steps=num_steps or plan.num_steps,
            lag=0, first_ready=False, inference_device=None, timeline=True,
        )  # fmt: skip

    def _learner(self, num_envs: int, num_steps: int) -> tuple[Meter, Learns]:
        settings = self._alone.settings
        run = replace(settings.run, num_envs=num_envs, num_steps=num_steps, lag=0)
        task = replace(self._alone, settings=replace(settings, run=run))
        meter = Meter()
        return meter, build_learner(task, self._device, meter)

    def _collector(self, learner: Learns, meter: Meter) -> Collector:
        plan = sampling_plan(self._alone, learner, self._device)
        acting = acting_policies(self._alone, learner)
        return DeviceCollector(plan, acting, self._device, meter, lambda: False, {})

    def _workers(self, count: int, n: int, seconds: float) -> _Seen:
        """Step vectors of n environments in so many workers."""
        ends = float("inf")  # once all are up
        plan = self._plan(count * n, n)
        with _workers(plan, count, lambda: time.perf_counter() > ends) as collector:
            ends = time.perf_counter() + seconds
            while collector.collect() is not None:
                pass
            collector.halt()
            seen = _seen(list(collector.laps().values()))
        if not len(seen.steps):
            raise EnvError(
                f"{self._task.spec.id}: no step ended within {seconds:.1f} s, and so there is "
                "nothing to measure. Give it more time."
            )
        return seen

    def _handed_over(self) -> tuple[float, float]:
        """Seconds of the learner for an order and its answer; and that nobody computes in it."""
        plan = self._plan(1, 1, num_steps=1)
        with _workers(plan, 1, lambda: False) as collector:
            collector.collect()
            busy_before = sum(_busy(collector).values())
            began, cpu_before, rounds = time.perf_counter(), time.process_time(), 0
            while rounds < 3 or time.perf_counter() - began < _ROUNDS_S:
                collector.collect()
                rounds += 1
            took = (time.perf_counter() - began) / rounds
            hand_over = (time.process_time() - cpu_before) / rounds
            busy = (sum(_busy(collector).values()) - busy_before) / rounds
        return hand_over, max(0.0, took - busy - hand_over)

    def _learning(self) -> "_Learning":
        """Of batches of the size that is learned from, and of half of it."""
        run = self._alone.settings.run
        few, sizes = self._few_steps(), []
        for num_envs in sorted({max(1, run.num_envs // 2), run.num_envs}):
            _, learner = self._learner(num_envs, run.num_steps)
            plan = self._plan(num_envs, num_envs, run.num_steps)
            sizes.append((num_envs * run.num_steps, learner, [_repeated(few, plan)]))
        return _Learning(sizes)

    def _few_steps(self) -> dict[str, Tensor]:
        """Of one environment, acted in by a policy that has not learned: `batch.named`."""
        _, learner = self._learner(1, _FEW_STEPS)
        collector = InlineCollector(self._plan(1, 1, num_steps=_FEW_STEPS), Meter(), lambda: False)
        with contextlib.closing(collector):
            collector.publish(learner.policy, 0)
            collected = collector.collect()
            assert collected is not None
            return batch.named(collected.fragments[0])


class _Learning:
    """Updates on the same batches, over and over, whenever there is time.

    Not all at once: a machine that others use as well is faster now, and slower then.

    Args:
        sizes: rows, learner, and what it is to learn from.
    """

    def __init__(self, sizes: list[tuple[int, Learns, list[Fragment]]]) -> None:
        self._sizes = sizes
        self._took: dict[int, list[float]] = {rows: [] for rows, *_ in sizes}
        self.learner_steps = 0
        """Of one update."""

    def go_on(self, seconds: float) -> None:
        """Learn for a while."""
        ends = time.perf_counter() + seconds
        for number in itertools.count():
            for rows, learner, fragments in self._sizes:
                steps, began = learner.learner_steps, time.perf_counter()
                learner.update(learner.take(fragments), 0.0)
                if number:  # the first one finds nothing in the caches
                    self._took[rows].append(time.perf_counter() - began)
                self.learner_steps = learner.learner_steps - steps
            if number and time.perf_counter() > ends:
                return

    def line(self, longer: float = 1.0) -> LinearCost:
        """Seconds of an update, by rows, and longer by this factor."""
        return LinearCost.fit(
            *((rows, longer * float(np.mean(took))) for rows, took in self._took.items())
        )


@contextlib.contextmanager
def _workers(
    plan: SamplingPlan, count: int, stop: Callable[[], bool]
) -> Iterator[SynchronousCollector]:
    """Meanwhile these are up, and act with weights as they are at first."""
    with contextlib.closing(SynchronousCollector(plan, count, stop)) as collector:
        collector.publish(policies.build(plan.spec, plan.network, plan.seed, plan.model), 0)
        yield collector


def _busy(collector: Collector) -> dict[str, float]:
    """Seconds that the only worker did something, by span."""
    [seconds] = collector.meters().values()
    return {span: s for span, s in seconds.items() if span not in ("wait", "start", "other")}


def _repeated(few: dict[str, Tensor], plan: SamplingPlan) -> Fragment:
    """A few steps of one environment, over and over: a batch of the size that is learned from."""
    whole = batch.allocate(plan.layout)
    for name, many in batch.named(whole).items():
        if not name.startswith(("final_", "num_final", "env_id")):
            rows = torch.arange(many.shape[0]) % few[name].shape[0]
            many.copy_(few[name][rows].expand_as(many))
    whole.env_id.copy_(torch.arange(plan.num_envs))
    return whole


def _of_whole(seen: _Seen, n: int) -> tuple[TimeDistribution, LinearCost]:
    """What each of n environments takes of a step of their own vector, and of what is besides."""
    return TimeDistribution.from_samples(seen.steps / n), LinearCost(0.0, seen.vector_s / n)


def _of_single(seen: _Seen, wider: _Seen, n: int) -> tuple[TimeDistribution, LinearCost]:
    """What one environment's step takes, and what a vector step does besides, by envs.

    Args:
        seen: of vectors of one environment.
        wider: of vectors of n.
        n: their environments.
    """
    besides = LinearCost.fit((1, seen.vector_s), (n, wider.vector_s))
    one, many = float(seen.steps.mean()), float(wider.steps.mean())
    if one > _LONG_STEP_S:  # that of a vector is none beside it, and rare stalls would hide it
        return TimeDistribution.from_samples(seen.steps), besides
    of_vector, each = LinearCost.fit((1, one), (n, many))
    step = TimeDistribution.from_samples(seen.steps).scaled(each / one)
    return step, LinearCost(besides.base + of_vector, besides.slope)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
