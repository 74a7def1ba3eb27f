"""Finds the numbers of workers, environments and learners that train fastest on this machine.

Sizes that the user has fixed stay. The result is cached for the next time.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.config.settings import Settings
from headrace.distributed import child_process
from headrace.distributed.process import interruptible
from headrace.distributed.ranks import visible_gpus
from headrace.envs.factory import EnvLike
from headrace.envs.vectors import is_one_vector
from headrace.errors import ConfigError, HeadraceError
from headrace.machine.limits import cpu_cores
from headrace.tools.autoscale import result
from headrace.tools.autoscale.result import AutoscaleResult
from headrace.tools.autoscale.search import Search
from headrace.tools.autoscale.sizes import SIZE_NAMES, SearchSpace, Sizes
from headrace.tools.autoscale.trial import Trial, TrialSetup, format_gib, run_trial
from headrace.training.api import request_for
from headrace.training.job import RunRequest, inspect_request
from headrace.training.launch import check_alone

BUDGET_S = 80.0
"""Default duration of a whole search."""

Print = Callable[[str], None]

_TRIAL_S, _FIRST_TRIAL_S = 20.0, 40.0  # the first trial compiles what the others load
_LARGEST_SHARE = 0.3  # share of the time for the largest batch that fits a GPU
_ONE_UPDATE_S = 2.0  # less does not show whether a batch fits
_NOT_FOR_SPEED = {
    "seed", "total_env_steps", "schedule_env_steps", "stop_at_return", "stop_after_s",
    "eval_every", "eval_episodes", "eval_env", "eval_env_kwargs", "checkpoint_every_s", "keep",
    "init_from", "rank_timeout_s",
}  # fmt: skip
"""Settings that do not change the speed: a cached result holds for other values of them."""


def autoscale(
    env: EnvLike,
    *,
    budget_s: float = BUDGET_S,
    memory_gib: float | None = None,
    env_steps_per_update: int | None = None,
    again: bool = False,
    quiet: bool = False,
    **arguments: Any,
) -> AutoscaleResult:
    """Find sizes that train fast on this machine: `headrace.train(env, **result.settings)`.

    Args:
        budget_s: maximum duration of the search (s).
        memory_gib: memory that a training may take, on the GPU if the environments are there.
            Default: 80 % of the available memory.
        env_steps_per_update: num_envs x num_steps. Default: that of settings or preset; open if
            all environments are one vector on the learner's device.
        again: measure even if a result for this machine and these settings is cached.
        **arguments: those of `headrace.train`.

    Raises:
        ConfigError: the settings are invalid, or no trial fits into the memory.
        EnvError: the environment raised.
        KeyboardInterrupt: the search was interrupted; no trial is left.
    """
    return find_sizes(
        request_for(env, **arguments),
        budget_s=budget_s,
        memory_gib=memory_gib,
        env_steps_per_update=env_steps_per_update,
        again=again,
        say=(lambda _: None) if quiet else print,
    )


def find_sizes(
    request: RunRequest,
    *,
    budget_s: float = BUDGET_S,
    memory_gib: float | None = None,
    env_steps_per_update: int | None = None,
    again: bool = False,
    say: Print = print,
) -> AutoscaleResult:
    """Find sizes for a request; the other arguments are those of `autoscale`."""
    began = time.perf_counter()
    for name, value in (("budget_s", budget_s), ("memory_gib", memory_gib)):
        if value is not None and not value > 0.0:
            raise ConfigError(f"{name}={value}: expected more than 0.")
    check_alone("autoscale")
    inspected = inspect_request(request)
    if cluster := inspected.settings.run.cluster:
        raise ConfigError(
            f"cluster={cluster!r}, but sizes are measured on this machine alone.\n"
            "Leave --cluster out."
        )
    job = inspected.job(Path())
    run, gpus = job.settings.run, visible_gpus(job.settings.run.device)
    one_vector = not run.num_workers and is_one_vector(job.maker, job.spec)
    space = _search_space(
        job.settings, one_vector=one_vector, env_steps_per_update=env_steps_per_update
    )
    key = {
        "machine": result.fingerprint(),
        "settings": {k: v for k, v in job.settings.flat().items() if k not in _NOT_FOR_SPEED},
        "free": sorted(space.free),
        "batch": space.batch,
        "memory_gib": memory_gib,
    }
    use_cache = not request.has_unnamed_code
    cached = result.read_cache(key) if use_cache and not again else None
    # With more time than an unfinished search had, measure again.
    if cached is not None and (cached["finished"] or cached["budget_s"] >= budget_s):
        sizes = AutoscaleResult(**cached, path=result.cache_path(key), reused=True)
        say(f"Measured before on this machine ({sizes.path}; --again measures again).")
        return sizes
    setup = TrialSetup(
        request,
        run.schedule_env_steps,
        compiles=job.spec.interface == "kernel" or run.compile or gpus > 0,
        on_gpu=one_vector and gpus > 0,
        max_bytes=None if memory_gib is None else int(memory_gib * (1 << 30)),
    )
    with interruptible():
        sizes = _Measurement(setup, inspected, space, began + budget_s, say, gpus).run()
    sizes = replace(sizes, budget_s=budget_s)
    if not use_cache:
        return sizes
    try:
        return replace(sizes, path=result.write_cache(key, sizes))
    except OSError as error:
        say(f"The result cannot be cached for the next time: {error}")
        return sizes


def _search_space(
    settings: Settings, *, one_vector: bool, env_steps_per_update: int | None
) -> SearchSpace:
    """Build the space of sizes that the user has not fixed; ConfigError if nothing fits."""
    run, source = settings.run, settings.source
    base = Sizes(*(getattr(run, name) for name in SIZE_NAMES))
    free = {name for name in SIZE_NAMES if not source[name].startswith(("given", "config "))}
    if run.num_envs_per_learner:
        free -= {"num_envs"}
    if one_vector:
        free -= {"num_workers", "envs_per_vector"}
    batch = env_steps_per_update
    if batch is None and not one_vector and not run.num_envs_per_learner:
        batch = base.batch
    if env_steps_per_update is not None:
        base = _with_batch(base, free, env_steps_per_update)
    per_worker = 2 if run.inference == "learner" else 1
    return SearchSpace(
        base, frozenset(free), batch, one_vector, run.num_envs_per_learner, per_worker
    )


def _with_batch(base: Sizes, free: set[str], batch: int) -> Sizes:
    """Change the batch by the number of steps, or else by the number of environments."""
    if batch == base.batch:
        return base
    for name, other in (("num_steps", "num_envs"), ("num_envs", "num_steps")):
        if name in free and batch >= (factor := getattr(base, other)) and batch % factor == 0:
            return replace(base, **{name: batch // factor})
    raise ConfigError(
        f"env_steps_per_update={batch} cannot be made of num_envs={base.num_envs} and "
        f"num_steps={base.num_steps}, of which "
        + (" and ".join(sorted(free & {"num_envs", "num_steps"})) or "neither")
        + " may change: expected num_envs * num_steps."
    )


@dataclass
class _Measurement:
    """A search with real trials; `deadline` is on the clock of `time.perf_counter`."""

    setup: TrialSetup
    inspected: RunRequest
    space: SearchSpace
    deadline: float
    say: Print
    gpus: int
    count: int = 0

    def run(self) -> AutoscaleResult:
        left_s, on_gpu = self._time_left(), self.setup.on_gpu
        free = ", ".join(name for name in SIZE_NAMES if name in self.space.free)
        self.say(
            f"Measuring sizes, for {left_s:.0f} s at most"
            + ("" if on_gpu else f", in {format_gib(self.setup.memory_limit())} of memory")
            + f". Open: {free or 'nothing'}."
        )
        child_process.warm_up()
        reserved_s = _LARGEST_SHARE * left_s if on_gpu else 0.0
        search = Search(
            self.space,
            cache(self._is_allowed),
            self._measure,
            lambda: self._time_left() - reserved_s,
            cpu_cores(),
            self.gpus,
        )
        best = search.run()
        if not search.rates:
            raise _no_result_error(search.tried)
        largest = self._largest(search) if on_gpu else None
        return AutoscaleResult(
            self.space.settings(best),
            search.rate(best),
            [
                asdict(sizes) | asdict(trial) | {"rate": search.rate(sizes) or trial.rate}
                for sizes, trial in search.tried.items()
            ],
            None if largest is None else self.space.settings(largest),
            search.finished,
        )

    def _time_left(self) -> float:
        return self.deadline - time.perf_counter()

    def _is_allowed(self, sizes: Sizes) -> bool:
        """Return True if a run would accept these sizes."""
        try:
            self.inspected.change(**self.space.settings(sizes)).job(Path())
        except ConfigError:
            return False
        return True

    def _measure(self, sizes: Sizes, to_beat: float) -> Trial:
        at_most = _TRIAL_S if self.count else _FIRST_TRIAL_S
        seconds = max(1.0, min(at_most, self._time_left()))
        settings = self.space.settings(sizes)
        trial = run_trial(self.setup, settings, sizes.batch, seconds=seconds, to_beat=to_beat)
        self.count += 1
        self.say(f"{self.count:3}. {sizes.describe()}: {trial.describe()}")
        return trial

    def _largest(self, search: Search) -> Sizes | None:
        """Find the largest batch that fits the GPU."""

        def fits(sizes: Sizes) -> bool | None:
            if (trial := search.tried.get(sizes)) is None:
                if self._time_left() < _ONE_UPDATE_S:
                    return None
                # The speed does not matter, so the trial ends after the first update.
                trial = self._measure(sizes, float("inf"))
            return None if trial.outcome == "crashed" else trial.outcome != "memory"

        best = search.tried[search.best]
        guess = best.gpu_budget / best.gpu_bytes if best.gpu_bytes else 1.0
        return search.largest(fits, guess)


def _no_result_error(tried: Mapping[Sizes, Trial]) -> HeadraceError:
    out_of_memory = {s: t for s, t in tried.items() if t.outcome == "memory"}
    if out_of_memory:
        sizes, trial = min(out_of_memory.items(), key=lambda item: item[1].memory_bytes)
        return ConfigError(
            "The memory budget is too small for any training that was tried. The smallest, "
            f"with {sizes.describe()}: {trial.why}.\n"
            "Use a larger --memory-gib, or a smaller batch or network."
        )
    reasons = "\n".join(f"  {s.describe()}: {t.describe()}" for s, t in tried.items())
    return HeadraceError(
        f"No sizes could be measured:\n{reasons}\n"
        "If updates take long: use a longer --budget-s, or a smaller batch."
    )
