"""Derives the settings that follow from others, and checks that all fit together.

Left out: which settings are asked for (`resolve.py`).
"""

import itertools
import math
import sys
from dataclasses import replace

from headrace.algos.action_values.dqn import DQN
from headrace.algos.base import EpochsConfig
from headrace.algos.off_policy import ReplayConfig
from headrace.config.batches import fitting_steps, minibatch_sizes
from headrace.config.checks import (
    check_cluster,
    check_data,
    check_divisibility,
    check_effects,
    check_guards,
    check_replay,
    check_schedules,
    check_workers,
    largest_divisor,
)
from headrace.config.league import check_league, derive_league
from headrace.config.policies import policy_settings, scale_policies
from headrace.config.run_config import AUTO_THREADS, AUTO_WORKERS
from headrace.config.settings import FREE, SUGGESTED, Settings, lr_factor, rows_factor
from headrace.cost_model.costs import Costs
from headrace.cost_model.fastest import fastest
from headrace.cost_model.model import Topology
from headrace.distributed.ranks import may_start_ranks, visible_gpus
from headrace.errors import ConfigError
from headrace.machine.limits import cpu_cores
from headrace.spec import GAMES, Interface

SHORT_ENV_STEPS = 4_096
"""A run of at most this many env steps has one process, and nothing is measured for it."""

LEAST_GPU_WORK = 2_000_000
"""Where a GPU begins to be faster than a core: rows of a gradient step times weights of hidden
layers. `benchmarks/gpu_steps.py` measures a gradient step on each."""
LEAST_GPU_WORK_UNRECORDED = 15_000_000
"""The same where a gradient step is no CUDA graph, as where learners share it."""

CPU_LEARNERS = (2, 4, 8)
"""The numbers of learners to choose from on a machine without GPUs, besides one."""

_STEPPED_ALONE: tuple[Interface, ...] = ("gym", *GAMES)
"""Interfaces whose environments are stepped one by one: each worker can have a part of them."""


def derive(
    settings: Settings,
    interface: Interface = "gym",
    cores: int | None = None,
    measured: Costs | None = None,
) -> Settings:
    """Return the settings with those that follow from others, or raise ConfigError.

    Args:
        interface: of the environment; it decides whether its own vector form is stepped.
        cores: CPU cores for workers; default: those of this process. On a cluster, at least one
            for each worker that was asked for.
        measured: what numbers that are auto are chosen by; None: by the cores alone.
    """
    asked, cores = _derive_device(settings, interface), cores or cpu_cores()
    settings = _derive_sizes(asked)
    if settings.run.cluster:
        cores = max(cores, settings.run.num_workers)
    best = _fastest(asked, settings, interface, cores, measured)
    if best and best.num_learners != settings.run.num_learners:
        chosen = {"num_learners": best.num_learners, "num_workers": best.num_workers}
        if not asked.run.envs_per_vector:
            chosen["envs_per_vector"] = best.envs_per_vector
        again = asked.follow(_reason(measured, cores), **chosen)
        return derive(again, interface, cores, measured)
    settings = _derive_vectors(settings, interface, cores, measured, best)
    if settings.run.lag == -1:
        lag = settings.run.num_workers and _usual_lag(settings)
        settings = settings.follow("follows algo and num_workers", lag=lag)
    run = settings.run
    check_guards(run)
    check_workers(run, settings.algorithm)
    check_cluster(run)
    check_data(run, settings.algorithm)
    check_league(run, settings.network, settings.algorithm, settings.source)
    for each in (settings, *map(settings.of, policy_settings(run.policies))):
        check_divisibility(run, each.network, each.algo, settings.algorithm)
        check_replay(run, each.algo, each.source)
        check_effects(each.algo, each.network, each.source)
        check_schedules(each)
    return settings


def needs_calibration(settings: Settings, interface: Interface) -> bool:
    """Return whether numbers are auto that only a measurement can choose."""
    settings, cores = _derive_device(settings, interface), cpu_cores()
    sizes = _derive_sizes(settings)
    return _is_open(sizes, interface, cores, _learner_counts(settings, sizes, interface, cores))


def _derive_sizes(settings: Settings) -> Settings:
    """Derive what a batch is, and by how many learners it is shared."""
    if not settings.run.schedule_env_steps:
        total = settings.run.total_env_steps
        settings = settings.follow("follows total_env_steps", schedule_env_steps=total)
    settings = _derive_envs(_derive_threads(_derive_learners(settings)))
    settings = _derive_accumulation(_derive_minibatches(_derive_steps(settings)))
    return derive_league(_derive_exploration(_derive_replay(settings)))


def _derive_device(settings: Settings, interface: Interface) -> Settings:
    """Learn on the CPU, if nothing else is asked for, where gradient steps are too small for a GPU.

    The number of learners is ignored, so that the same run has the same device.
    """
    run, size = settings.run, settings.num_inputs
    is_open = run.device == "auto" and size and not (run.model or run.cluster)
    if not is_open or interface != "gym" or not visible_gpus("auto"):
        return settings
    on_cpu = settings.follow("auto, small gradient steps", device="cpu")
    sizes = _derive_sizes(on_cpu)
    rows = sizes.algorithm.minibatch_rows(sizes.run, sizes.algo)
    weights = sum(a * b for a, b in itertools.pairwise((size, *sizes.network.hidden_sizes)))
    is_shared = settings.algorithm.learners_help and visible_gpus("auto") > 1
    is_recorded = sizes.may_be_recorded and not is_shared
    least = LEAST_GPU_WORK if is_recorded else LEAST_GPU_WORK_UNRECORDED
    in_file = getattr(settings.algo, "replay_dir", "")  # for learners on a CPU
    return on_cpu if rows * weights < least or in_file else settings


def _derive_learners(settings: Settings) -> Settings:
    run = settings.run
    if run.num_learners == -1 and run.cluster and settings.source["num_learners"] == "default":
        settings = settings.follow("follows cluster", num_learners=1)
    elif run.num_learners == -1:
        if run.cluster:
            raise ConfigError(
                "num_learners=-1 (auto) counts the GPUs of this machine, and on a cluster learners "
                f"run on other machines (cluster={run.cluster!r}).\nUse --num-learners N."
            )
        gpus = visible_gpus(run.device)
        source = "default" if gpus <= 1 else f"+, follows {gpus} GPUs"
        settings = settings.follow(source, num_learners=_most_learners(settings, gpus))
    learners = settings.run.num_learners
    if run.num_envs_per_learner:
        if settings.source["num_envs"] in ("given", settings.source["num_envs_per_learner"]):
            raise ConfigError(
                f"num_envs={run.num_envs} and num_envs_per_learner={run.num_envs_per_learner}: "
                "expected one of the two.\nLeave one out."
            )
        source = f"follows num_envs_per_learner, {learners} learners"
        settings = settings.follow(source, num_envs=run.num_envs_per_learner * learners)
    # Scaled once, and kept so in config.json: those of single policies as those of all.
    factor = lr_factor(settings.run)
    factors = {"lr": factor, "minibatch_size": rows_factor(settings.run)}
    scaled = scale_policies(run.policies, factors)
    if scaled != run.policies:
        settings = settings.follow("+, scaled", policies=scaled)
    if factor != 1:
        lr = settings.algo.lr
        source = (
            f"{settings.source['lr']} {lr:g} x {factor:g} ({run.lr_scale}, {learners} learners)"
        )
        algo = replace(settings.algo, lr=lr * factor)
        settings = replace(settings, algo=algo, source=settings.source | {"lr": source})
    return settings


def _most_learners(settings: Settings, gpus: int) -> int:
    """Return how many learners with a GPU each can share what was asked for."""
    run = settings.run
    if not settings.algorithm.learners_help:
        return 1
    if run.num_workers > 0:
        gpus = min(gpus, run.num_workers)
    if run.num_envs_per_learner or settings.source["num_envs"].startswith(SUGGESTED):
        return max(1, gpus)
    return largest_divisor(run.num_envs, max(1, gpus))


def _derive_threads(settings: Settings) -> Settings:
    """Share the cores among the learners of this machine, where that was asked for."""
    run = settings.run
    if run.learner_threads:
        return settings
    if run.lag > 0 and settings.source["learner_threads"].startswith(SUGGESTED):
        return settings.follow("follows lag", learner_threads=1)  # workers sample meanwhile
    threads = max(1, cpu_cores() // (1 if run.cluster else run.num_learners))
    return settings.follow(f"follows {cpu_cores()} cores", learner_threads=threads)


def _derive_envs(settings: Settings) -> Settings:
    """Take as many environments as can be shared out, unless their number was asked for."""
    run = settings.run
    if not settings.source["num_envs"].startswith(SUGGESTED):
        return settings
    of = ("num_learners", "num_workers", "envs_per_vector")
    asked = [name for name in of if not settings.source[name].startswith(FREE)]
    size = max(1, run.envs_per_vector) if "envs_per_vector" in asked else 1
    workers = max(1, run.num_workers) if "num_workers" in asked else 1
    unit, vectors = run.num_learners * size, math.ceil(workers / run.num_learners)
    num_envs = unit * max(vectors, round(run.num_envs / unit))
    if num_envs == run.num_envs:
        return settings
    return settings.follow(f"follows {', '.join(asked or of[:1])}", num_envs=num_envs)


def _derive_steps(settings: Settings) -> Settings:
    """Keep the rows of a batch and of a minibatch where the number of environments is another."""
    run, source, algo = settings.run, settings.source, settings.algo
    envs, is_free = settings.suggested_envs, source["num_steps"].startswith(SUGGESTED)
    if run.num_envs == envs or run.num_envs_per_learner or not is_free:
        return settings
    batch = envs * run.num_steps
    in_minibatch = 1  # env steps of each environment
    if isinstance(algo, EpochsConfig):
        size = algo.minibatch_size or batch // algo.num_minibatches
        if settings.network.core == "none":
            in_minibatch = max(1, round(size / run.num_envs))
        if not algo.minibatch_size and source["num_minibatches"].startswith(SUGGESTED):
            kept = f"follows num_envs, {size} rows as before"
            settings = settings.follow_algo(kept, minibatch_size=size)
    steps = fitting_steps(run.num_envs, batch, run.num_steps, in_minibatch)
    rows = steps * run.num_envs
    words = f"a batch of {rows:,} rows" + ("" if rows == batch else f" in place of {batch:,}")
    return settings.follow(f"follows num_envs, {words}", num_steps=steps)


def _derive_minibatches(settings: Settings) -> Settings:
    """Make number and size of minibatches agree."""
    algo, source = settings.algo, settings.source
    if not isinstance(algo, EpochsConfig):
        return settings
    size = algo.minibatch_size * rows_factor(settings.run)
    values = minibatch_sizes(settings.run, settings.network, algo.num_minibatches, size)
    pair = "num_minibatches", "minibatch_size"
    if algo.minibatch_size and all(not source[name].startswith(FREE) for name in pair):
        if values["num_minibatches"] != algo.num_minibatches:
            raise ConfigError(
                f"num_minibatches={algo.num_minibatches} and minibatch_size={algo.minibatch_size}, "
                f"of {settings.run.num_envs * settings.run.num_steps} rows: expected one of the "
                "two.\nLeave one out."
            )
        return settings.follow_algo("+", minibatch_size=size)
    given, follows = pair[::-1] if algo.minibatch_size else pair
    settings = settings.follow_algo(f"follows {given}", **{follows: values[follows]})
    if values[given] != (wanted := getattr(algo, given)):
        of_core = given == "minibatch_size" and settings.network.core != "none"
        fits = f"whole sequences of {settings.run.num_steps} steps" if of_core else "fit the batch"
        return settings.follow_algo(f"+, {wanted} rounded to {fits}", **{given: values[given]})
    return settings


def _derive_replay(settings: Settings) -> Settings:
    """Let a short run begin to learn in time, and reserve no memory for rows that it never has."""
    algo, total = settings.algo, settings.run.total_env_steps
    if not isinstance(algo, ReplayConfig):
        return settings
    batch = settings.run.num_envs * settings.run.num_steps
    sizes = {
        "learning_starts": min(algo.learning_starts, total // 10),
        "replay_size": min(algo.replay_size, max(total, 2 * batch)),
    }
    free = {
        name: size
        for name, size in sizes.items()
        if settings.source[name].startswith(SUGGESTED) and size != getattr(algo, name)
    }
    return settings.follow_algo("follows total_env_steps", **free) if free else settings


def _derive_exploration(settings: Settings) -> Settings:
    """Leave random actions out where noise in weights explores, unless they were asked for."""
    algo, names = settings.algo, ("exploration_initial_eps", "exploration_final_eps")
    if not isinstance(algo, DQN) or not algo.noisy:
        return settings
    free = {name: 0.0 for name in names if settings.source[name].startswith(SUGGESTED)}
    return settings.follow_algo("follows noisy", **free) if free else settings


def _derive_accumulation(settings: Settings) -> Settings:
    """Cut the rows of a minibatch into at least as many parts as were asked for."""
    run, parts = settings.run, settings.run.num_accumulation_steps
    rows = settings.algorithm.minibatch_rows(run, settings.algo) // run.num_learners
    if rows % parts == 0 or settings.network.core != "none":
        return settings
    more = next((n for n in range(parts, rows) if rows % n == 0), rows)
    return settings.follow(f"+, {parts} rounded to fit {rows} rows", num_accumulation_steps=more)


def _derive_vectors(
    settings: Settings,
    interface: Interface,
    cores: int,
    measured: Costs | None,
    best: Topology | None,
) -> Settings:
    form = "native" if settings.is_native(interface) else "python"
    if form != settings.run.vectorization:
        settings = settings.follow("follows env and wrapper", vectorization=form)
    is_auto = settings.run.num_workers == AUTO_WORKERS
    settings = _choose_topology(settings, interface, cores, measured, best)
    run = settings.run
    # One vector of all environments if the learner alone steps them, if native vectors have threads
    # of their own, or if tensors are stepped at once.
    whole = (
        interface == "tensor"
        or (is_auto and run.num_workers == 0)
        or (form == "native" and not (run.cluster and run.num_workers))
    )
    learners, size = run.num_learners, run.envs_per_vector
    share, of_cores = run.num_envs // learners, max(1, cores // learners)
    workers = math.ceil(run.num_workers / learners) if run.num_workers > 0 else 0
    # Where the learner acts, one vector of a worker is stepped while another one waits.
    each = 2 if run.inference == "learner" else 1
    # As many vectors as cores or, if there are more, as workers. Last bits of results depend on it.
    vectors = each * max(workers, 1 if whole else of_cores)
    is_free = settings.source["envs_per_vector"].startswith(SUGGESTED)
    if not size or (is_free and (share % size or share // size < each * workers)):
        wanted = max(1, share // vectors)
        size = largest_divisor(share, min(size or wanted, wanted))
        source = "follows num_envs" + ("" if whole else f" / {cores} cores")
        if workers and size < share // (1 if whole else of_cores):
            least = "two vectors" if each > 1 else "a vector"
            source = f"follows num_envs, {least} or more for each of {run.num_workers} workers"
        settings = settings.follow(source, envs_per_vector=size)
    if run.num_workers == -1:
        workers = learners * max(1, min(of_cores, share // size))
        settings = settings.follow(f"+, {cores} cores", num_workers=workers)
    return settings


def _is_open(settings: Settings, interface: Interface, cores: int, learners: list[int]) -> bool:
    """Return whether numbers of processes depend on costs, with these numbers of learners."""
    run = settings.run
    if run.deterministic or run.num_workers != AUTO_WORKERS:
        return False
    return len(learners) > 1 or _plain_workers(settings, interface, cores) is None


def _learner_counts(
    asked: Settings, settings: Settings, interface: Interface, cores: int
) -> list[int]:
    """Return the numbers of learners to choose from.

    There is more than one number only on the CPU, if nobody asked for learners, and if neither
    threads nor asynchronous workers are to use the other cores.

    Args:
        asked: before anything is derived.
        settings: with derived sizes.
    """
    run = settings.run
    may_have_more = (
        settings.source["num_learners"] == "default"
        and settings.algorithm.learners_help
        and not (run.cluster or run.deterministic or run.num_envs_per_learner or run.policies)
        and run.lr_scale == "none"
        and run.num_learners == run.num_accumulation_steps == 1
        and max(1, run.learner_threads) == 1
        and run.total_env_steps > SHORT_ENV_STEPS
        and not visible_gpus(run.device)
        and sys.platform.startswith("linux")
        and run.backend in ("auto", "gloo")
        and may_start_ranks()
        and (interface == "kernel" or _plain_workers(settings, interface, cores) is None)
    )
    more = [n for n in CPU_LEARNERS if n <= cores and may_have_more and _can_share(asked, n)]
    return [run.num_learners, *more]


def _can_share(asked: Settings, num_learners: int) -> bool:
    """Return whether so many learners can share environments and minibatches."""
    sizes = {"num_learners": num_learners, "num_workers": 0, "learner_threads": 1}
    if asked.run.num_envs % num_learners:
        return False
    try:
        derive(asked.follow("auto", **sizes))
    except ConfigError:
        return False
    return True


def _fastest(
    asked: Settings,
    settings: Settings,
    interface: Interface,
    cores: int,
    measured: Costs | None,
) -> Topology | None:
    """Return the topology that ends the run soonest; None if none is open, or costs are unknown."""
    if measured is None:
        return None
    run, learners = settings.run, _learner_counts(asked, settings, interface, cores)
    if not _is_open(settings, interface, cores, learners):
        return None
    sizes = Topology(
        run.num_envs, run.num_steps, run.envs_per_vector, lag=max(0, run.lag), cores=cores
    )
    return fastest(
        measured, sizes, run.total_env_steps,
        learners=learners,
        may_have_workers=_plain_workers(settings, interface, cores) is None,
        overlaps=_overlaps(settings),
    )  # fmt: skip


def _overlaps(settings: Settings) -> list[tuple[int, bool]]:
    """Return lags that may be chosen besides 0, and whether workers never stop.

    Only a replay may be filled while the learner learns: what it holds is of older weights anyway.
    """
    algorithm = settings.algorithm
    if algorithm.data != "replay" or settings.run.lag != -1 or not _usual_lag(settings):
        return []
    return [(lag, algorithm.is_asynchronous(lag)) for lag in (1, 2)]


def _usual_lag(settings: Settings) -> int:
    """Return the lag to use beside workers: 0 where a replay's learner is to use all cores."""
    data, threads = settings.algorithm.data, settings.run.learner_threads
    return int(data == "lag_corrected" or (data == "replay" and threads <= 1))


def _choose_topology(
    settings: Settings,
    interface: Interface,
    cores: int,
    measured: Costs | None,
    best: Topology | None,
) -> Settings:
    """Return the settings with numbers where they are auto.

    Args:
        settings: with numbers of learners, environments and steps.
        cores: CPU cores for all processes.
        best: what costs say; None: the numbers follow from the cores alone.
    """
    run = settings.run
    if run.learner_threads == AUTO_THREADS:
        settings = settings.follow("default", learner_threads=1)
    if run.num_workers != AUTO_WORKERS:
        return settings
    if (workers := _plain_workers(settings, interface, cores)) is not None:
        return settings.follow("default", num_workers=workers)
    if best is None:
        if run.deterministic and settings.algorithm.data != "replay":
            return settings.follow("auto", num_workers=-1)  # as many as cores and vectors
        return settings.follow(_reason(None, cores), num_workers=0)
    chosen = {"num_workers": best.num_workers}
    if not run.envs_per_vector:
        chosen["envs_per_vector"] = best.envs_per_vector
    if run.lag == -1 and best.num_workers and settings.algorithm.data == "replay":
        chosen["lag"] = best.lag
    reason = _reason(measured, cores)
    if measured and not best.num_workers and _learns_most_of_the_time(measured, best):
        reason += ", the learner is the limit"
    return settings.follow(reason, **chosen)


def _plain_workers(settings: Settings, interface: Interface, cores: int) -> int | None:
    """Return the number of workers where it does not depend on any cost; else None.

    -1: as many as there are cores (on a cluster: those that are free there), and vectors for them.
    """
    run = settings.run
    if run.data:
        return 0
    if run.cluster:
        return -1 if interface in _STEPPED_ALONE else 0
    if interface not in _STEPPED_ALONE:
        return 0
    if settings.algorithm.is_asynchronous(run.lag) or run.inference == "learner":
        return -1  # both need workers
    if settings.is_native() or not sys.platform.startswith("linux"):
        return 0  # native vectors have threads of their own
    if run.lag > 0:
        return -1
    if run.total_env_steps <= SHORT_ENV_STEPS or cores == 1:
        return 0
    return -1 if settings.algorithm.data == "lag_corrected" else None


def _reason(measured: Costs | None, cores: int) -> str:
    step = f", a step of {1e6 * measured.env_s:,.0f} µs" if measured and measured.env_s else ""
    return f"auto, {cores} cores{step}"


def _learns_most_of_the_time(costs: Costs, topology: Topology) -> bool:
    rows, n = topology.batch / topology.num_learners, topology.envs_per_vector
    sampling = rows * costs.env_s + rows / n * costs.vector.at(n)
    return costs.learn.at(rows) > sampling
