"""Measures, for about a second before a run, the costs from which its processes are chosen.

The costs of a command are kept, and read when it is given again. A few environments are stepped in
this process, and a few updates are made. What reads these timings serves `headrace profile` as
well, which measures for longer (`tools/profile/probe.py`). Left out: the choice
(`config/derive.py`, `cost_model/fastest.py`).
"""

import contextlib
import copy
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace
from headrace import batch
from headrace.algos.base import AlgorithmConfig, EpochsConfig
from headrace.algos.off_policy import ReplayConfig
from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan
from headrace.collectors.device import DeviceCollector
from headrace.collectors.inline import InlineCollector
from headrace.config.batches import minibatch_sizes
from headrace.config.derive import needs_calibration
from headrace.cost_model.costs import START_S, Costs, LinearCost, TimeDistribution
from headrace.distributed.channel import pickled
from headrace.distributed.process import freed_memory_kept, math_threads
from headrace.distributed.ranks import device_of, visible_gpus
from headrace.errors import EnvError, UsageError
from headrace.learner.learner import Learner
from headrace.machine.limits import cpu_cores
from headrace.meter import SPANS, Laps, Meter
from headrace.spec import Agents, Array
from headrace.training.job import Job, RunRequest
from headrace.training.rank import build_learner, sampling_plan

_MIN_IDLE = 0.1  # a smaller share of idle time is noise
_LONG_STEP_S = 1e-3
ALLREDUCE_S = 150e-6  # of a small network through shared memory, waiting included
_STEP, _RESET, _INFER, *_OTHER_WORK = map(
    SPANS.index, ("env_step", "env_reset", "infer", "rollout", "publish")
)
_STEPPING_S, _LEARNING_S = 0.2, 0.1  # of each of two measurements
_MANY = 8  # environments of the second measurement
_FIRST_S = 0.1  # of a first fragment: it is whole, and warms the caches
_SLOW_S = 0.25  # of a small measurement: then there is no larger one
_PART = 8  # of the steps of a batch are those of its first measurement
_HAND_OVER_S = 1e-4  # of a worker process on the same machine
_LATENCY_S = 1.5e-3  # the worker loads weights, and has slept: its caches are cold
_WORKED_S = 10.0  # a process with more CPU time has done more than import what others will
_START_S = START_S if time.process_time() > _WORKED_S else time.process_time()


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

    Args:
        algo: settings of the algorithm. With a replay, env steps count from `learning_starts`, so
            that each update makes the gradient steps of its rows.
    """

    def __init__(
        self, sizes: list[tuple[int, Learner, list[Fragment]]], algo: AlgorithmConfig
    ) -> None:
        self._sizes = sizes
        first = algo.learning_starts if isinstance(algo, ReplayConfig) else 0
        self._env_steps = {rows: first for rows, *_ in sizes}
        self._durations: dict[int, list[float]] = {rows: [] for rows, *_ in sizes}
        self.learner_steps = 0  # optimizer steps of one update
        # The first update has cold caches, after each pause; on a GPU the second one records graphs
        self._num_cold = 2

    def learn(self, seconds: float) -> None:
        """Repeat updates for some time."""
        deadline = time.perf_counter() + seconds
        for number in itertools.count():
            for rows, learner, fragments in self._sizes:
                steps, began = learner.learner_steps, time.perf_counter()
                learner.update(learner.assemble(fragments), self._env_steps[rows], rows)
                self._env_steps[rows] += rows
                if number >= self._num_cold:
                    self._durations[rows].append(time.perf_counter() - began)
                self.learner_steps = learner.learner_steps - steps
            if number >= self._num_cold and time.perf_counter() > deadline:
                self._num_cold = 1
                return

    def cost(self, slowdown: float = 1.0) -> LinearCost:
        """Return the seconds of an update by rows, multiplied by `slowdown`."""
        means = {rows: slowdown * float(np.mean(s)) for rows, s in self._durations.items()}
        return LinearCost.fit(*means.items())


def repeat_steps(few: Sequence[Fragment], plan: SamplingPlan) -> list[Fragment]:
    """Build a batch, of each policy, that repeats a few steps, of one environment or more."""
    fragments = batch.allocate_all(plan.layouts)
    for fragment, source, part in zip(fragments, few, plan.parts, strict=True):
        those = batch.named_tensors(source)
        for name, array in batch.named_tensors(fragment).items():
            if not name.startswith(("final_", "num_final", "env_id")):
                rows = torch.arange(array.shape[0]) % those[name].shape[0]
                columns = torch.arange(array.shape[1]) % those[name].shape[1]
                array.copy_(those[name][rows][:, columns])
        ids = Agents(0, part.size).ids(np.arange(plan.num_envs), part.size)
        fragment.env_id.copy_(torch.from_numpy(ids))
        if plan.spec.interface == "turns":  # of few steps, no move may be complete
            share = -(-plan.num_steps // plan.spec.num_agents)
            fragment.valid.copy_(torch.arange(plan.num_steps).unsqueeze(1) < share)
    return list(fragments)


def step_one_vector(
    collector: DeviceCollector, meter: Meter, seconds: float
) -> tuple[list[float], Laps, list[Fragment]]:
    """Collect batches for some time: seconds of each, laps, and the last one's fragments."""
    collector.collect()  # its caches were cold
    meter.keep_laps()
    batches: list[float] = []
    deadline = time.perf_counter() + seconds
    while not batches or time.perf_counter() < deadline:
        began = time.perf_counter()
        # The collector reads results of the device, and so waits for it.
        collected = collector.collect()
        batches.append(time.perf_counter() - began)
        meter.lap("other")
    laps = meter.take_laps()
    assert collected is not None and laps is not None
    return batches, laps, collected.fragments


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


def learner_to_measure(job: Job, device: torch.device, meter: Meter) -> Learner:
    """Build the learner of a job. A replay buffer is in memory, and as small as it may be."""
    run, algo = job.settings.run, job.settings.algo
    if isinstance(algo, ReplayConfig):
        least = max(algo.learning_starts, 2 * run.num_envs * run.num_steps)
        algo = replace(algo, replay_size=min(algo.replay_size, least), replay_dir="")
        job = replace(job, settings=replace(job.settings, algo=algo))
    return build_learner(job, device, meter)


def calibrated(request: RunRequest) -> RunRequest:
    """Return the request with the costs from which its processes are chosen, if need be.

    The same command on the same machine is measured once; its figures are kept in the user's cache
    directory.
    """
    assert request.spec is not None
    settings = request.underived()
    # What is impossible is refused before anything is measured.
    run = request.derived().run
    for rank in range(run.num_learners):
        device_of(run.device, rank)
    if not needs_calibration(settings, request.spec.interface):
        return request
    path = None if request.has_unnamed_code else _folder() / f"{_key(settings.flat())}.json"
    measured = None if path is None else _read(path)
    if measured is None:
        measured = _measure(request, run.num_envs // run.num_learners)
        if path is not None and measured is not None:
            _write(path, measured)
    return replace(request, costs=measured)


def _measure(request: RunRequest, share: int) -> Costs | None:
    """Measure in this process; None: there can be no others, or the run will say what failed.

    Args:
        share: environments of each learner of the run.
    """
    one = {"num_workers": 0, "num_learners": 1, "envs_per_vector": 0, "compile": False}
    try:
        job = request.change(**one, timeline=False, lag=0).job(Path())
        # As they will be read, so that the first run chooses what the next ones do.
        return Costs.from_json(_Calibrator(job, share).measure().to_json())
    except (EnvError, UsageError, MemoryError, torch.OutOfMemoryError):
        return None


class _Calibrator:
    """Measures the costs of a job that has one process; of updates, those of a learner's share.

    Args:
        share: environments of each learner.
    """

    def __init__(self, job: Job, share: int) -> None:
        self._job, self._share = job, share
        self._device = device_of(job.settings.run.device, 0)

    def measure(self) -> Costs:
        """Measure all costs; UsageError if other processes cannot have the job."""
        pickled(self._job, "workers or learners")
        if self._job.is_on_device:
            return self._measure_one_vector()
        with math_threads(1):
            single, wide, num_wide, few = self._stepping()
        step, vector = single_costs(single, wide, num_wide)
        return self._costs(
            few, vector, wide.inference,
            step=step,
            reset=TimeDistribution.from_samples(single.resets if len(single.resets) else [0.0]),
            resets_per_step=max(0, len(single.resets) - 1) / len(single.steps),  # the first begins
            cpu_share=single.cpu_share,
        )  # fmt: skip

    def _measure_one_vector(self) -> Costs:
        """Measure environments that are one vector in the learner's process, on the CPU."""
        meter = Meter()
        with math_threads(1):
            learner = learner_to_measure(self._job, self._device, meter)
            plan = sampling_plan(self._job, learner, self._device)
            collector = DeviceCollector(plan, self._device, meter, lambda: False)
            with contextlib.closing(collector):
                collector.publish(learner.policies, 0)
                _, laps, fragments = step_one_vector(collector, meter, _STEPPING_S)
                few = copy.deepcopy(fragments)
        timings, nothing = read_laps([laps]), TimeDistribution.from_samples([0.0])
        # Its threads use all cores: with several learners, a step takes as long as with one.
        vector = LinearCost(float(timings.steps.mean()) + timings.vector_s, 0.0)
        return self._costs(
            few, vector, timings.inference,
            step=nothing, reset=nothing, resets_per_step=0.0, cpu_share=1.0,
        )  # fmt: skip

    def _costs(
        self, few: list[Fragment], vector: LinearCost, inference: float, **of_envs: Any
    ) -> Costs:
        """Add what updates cost, and what messages between processes are taken to cost."""
        learn = self._learn(few)
        allreduce = LinearCost(ALLREDUCE_S * self._epochs * self._minibatches, 0.0)
        return Costs(
            **of_envs, vector=vector, inference=inference, learn=learn, allreduce=allreduce,
            hand_over=_HAND_OVER_S, latency=_LATENCY_S, device=self._device.type,
            start=_START_S,
        )  # fmt: skip

    def _stepping(self) -> tuple[Timings, Timings, int, list[Fragment]]:
        """Step one environment, and several: timings, how many these are, and one real step."""
        began = time.perf_counter()
        single, few = self._step(1, 1)
        if time.perf_counter() - began > _SLOW_S:
            return single, single, 1, few
        single, _ = self._step(1, self._steps_of(1, single))
        many = min(_MANY, self._job.settings.run.num_envs, int(_FIRST_S / _mean_step(single)) or 1)
        wide = single if many == 1 else self._step(many, self._steps_of(many, single))[0]
        return single, wide, many, few

    def _steps_of(self, num_envs: int, single: Timings) -> int:
        """Return the steps of a fragment: as many as the run's, or as fit into `_FIRST_S`.

        There are two or more, since the first is slow. A fragment has a fixed cost, so its length
        matters.
        """
        fast = int(_FIRST_S / (num_envs * _mean_step(single) + single.vector_s))
        return max(2, min(self._job.settings.run.num_steps, fast))

    def _step(self, num_envs: int, num_steps: int) -> tuple[Timings, list[Fragment]]:
        """Step one vector for a while, and at least once: timings, and the first fragments."""
        meter, deadline = Meter(), float("inf")
        job = self._job_with(num_envs, num_steps)
        learner = learner_to_measure(job, self._device, meter)
        plan = sampling_plan(job, learner, self._device)
        collector = InlineCollector(plan, meter, lambda: time.perf_counter() > deadline)
        with contextlib.closing(collector):
            collector.publish(learner.policies, 0)
            if num_steps == 1:
                meter.keep_laps()
            first = collector.collect()
            assert first is not None  # there was no deadline yet
            fragments = copy.deepcopy(first.fragments)
            if num_steps > 1:  # its caches were cold
                meter.keep_laps()
                deadline = time.perf_counter() + _STEPPING_S
                while collector.collect() is not None:
                    meter.lap("other")
            laps = meter.take_laps()
        assert laps is not None
        return read_laps([laps]), fragments

    def _learn(self, few: list[Fragment]) -> LinearCost:
        """Measure updates of a part of a batch or, if these are fast, of all of it.

        The larger measurement has as many of the run's epochs as fit into `_LEARNING_S`, since part
        of an update's time does not depend on them.
        """
        run, minibatches, epochs = self._job.settings.run, self._minibatches, 1
        num_envs = self._share
        part = max(1, run.num_steps // _PART), max(1, minibatches // _PART)
        with math_threads(run.learner_threads), freed_memory_kept():
            began = time.perf_counter()
            cost = self._update_cost(few, [(num_envs, *part)], epochs)
            if time.perf_counter() - began < _SLOW_S:
                fast = int(_LEARNING_S / cost.at(num_envs * run.num_steps))
                epochs = max(1, min(self._epochs, fast))
                # As many minibatches for half of the rows: what each of two learners does.
                counts = sorted({max(1, num_envs // 2), num_envs})
                wanted = [(count, run.num_steps, minibatches) for count in counts]
                cost = self._update_cost(few, wanted, epochs)
        more = self._epochs / epochs
        return LinearCost(more * cost.base, more * cost.slope)

    @property
    def _epochs(self) -> int:
        algo = self._job.settings.algo
        return algo.num_epochs if isinstance(algo, EpochsConfig) else 1

    @property
    def _minibatches(self) -> int:
        algo = self._job.settings.algo
        return algo.num_minibatches if isinstance(algo, EpochsConfig) else 1

    def _update_cost(
        self, few: list[Fragment], wanted: list[tuple[int, int, int]], num_epochs: int
    ) -> LinearCost:
        """Measure updates with these numbers of environments, steps and minibatches."""
        sizes = []
        for num_envs, num_steps, num_minibatches in wanted:
            job = self._job_with(num_envs, num_steps, num_minibatches, num_epochs)
            learner = learner_to_measure(job, self._device, Meter())
            plan = sampling_plan(job, learner, self._device)
            sizes.append((num_envs * num_steps, learner, repeat_steps(few, plan)))
        learning = Learning(sizes, self._job.settings.algo)
        learning.learn(_LEARNING_S)
        return learning.cost()

    def _job_with(
        self, num_envs: int, num_steps: int, num_minibatches: int = 1, num_epochs: int = 1
    ) -> Job:
        """Return the job with other sizes."""
        settings, algo = self._job.settings, self._job.settings.algo
        run = replace(
            settings.run, num_envs=num_envs, num_steps=num_steps, envs_per_vector=num_envs
        )
        if isinstance(algo, EpochsConfig):
            sizes = minibatch_sizes(run, settings.network, num_minibatches, 0)
            count, size = sizes["num_minibatches"], sizes["minibatch_size"]
            algo = replace(algo, num_epochs=num_epochs, num_minibatches=count, minibatch_size=size)
        return replace(self._job, settings=replace(settings, run=run, algo=algo))


def _mean_step(of: Timings) -> float:
    return max(1e-9, float(of.steps.mean()))


def _key(settings: dict[str, Any]) -> str:
    """Return what tells this command on this machine from others."""
    names = ("seed", "stop_after_s", "stop_at_return", "checkpoint_every_s", "keep", "timeline")
    of = {name: value for name, value in settings.items() if name not in names}
    of |= {
        "headrace": headrace.__version__,
        "torch": torch.__version__,
        "machine": [platform.node(), platform.processor(), cpu_cores(), visible_gpus("auto")],
        "measured_by": Path(__file__).stat().st_mtime,
        "code": [
            _modified(name) for name in (settings["env"], settings["algo"], *settings["wrapper"])
        ],
    }
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]


def _modified(name: str) -> float:
    """Return when the file of `module:name` was changed; 0 for what is registered."""
    module = name.partition(":")[0] if ":" in name else ""
    if module == "__main__":
        return 0.0
    try:
        found = importlib.util.find_spec(module) if module else None
        return Path(found.origin).stat().st_mtime if found and found.origin else 0.0
    except (ImportError, ValueError, OSError):  # in an archive
        return 0.0


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
