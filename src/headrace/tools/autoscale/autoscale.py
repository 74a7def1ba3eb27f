"""Finds by measurement how many workers, environments and learners train fastest on this machine.

What the user has fixed stays as it is, and what was found is kept for the next time. Left out: the
measuring (`measure.py`), the verb (`tool_commands.py`).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.config.resolve import Settings
from headrace.distributed.ranks import visible_gpus
from headrace.envs.factory import EnvLike, WrapperLike
from headrace.envs.vectors import is_one_vector
from headrace.errors import ConfigError
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network
from headrace.tools.autoscale import resources, result
from headrace.tools.autoscale.measure import Measuring, Say
from headrace.tools.autoscale.result import Found
from headrace.tools.autoscale.sizes import FREE, Sizes, Space, fixed
from headrace.tools.autoscale.trial import Limits, Trained
from headrace.training import launch
from headrace.training.api import request_by
from headrace.training.job import RunRequest, inspect_request

BUDGET_S = 80.0
"""For a whole search, unless the user gives another."""

_GIB = 1 << 30

_NOT_FOR_SPEED = {
    "seed", "total_env_steps", "schedule_env_steps", "stop_at_return", "stop_after_s",
    "eval_every", "eval_episodes", "checkpoint_every_s", "keep", "init_from", "rank_timeout_s",
}  # fmt: skip
"""What was measured with other values of these holds for them, too."""


def autoscale(
    env: EnvLike,
    *,
    algo: Any = None,
    network: Network | None = None,
    model: str | ModelFactory | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    config: str | os.PathLike[str] | None = None,
    budget_s: float = BUDGET_S,
    memory_gib: float | None = None,
    batch_size: int | None = None,
    again: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Found:
    """Find sizes that train fast on this machine: `headrace.train(env, **found.settings)`.

    Args:
        env: as `headrace.train` takes it, and so are algo, network, model, wrapper and config.
        algo: see there.
        network: see there.
        model: see there.
        wrapper: see there.
        config: see there.
        budget_s: the search takes about so long (s), at most.
        memory_gib: that a training may take; of the GPU where the environments are on one. Default:
            80 % of what is available.
        batch_size: env steps of an update. Default: those of settings or preset; or whatever is
            fast, where all environments are one vector beside the learner.
        again: measure even if there is a result of the same machine and settings.
        quiet: show nothing.
        **settings: what is fixed, by its name.

    Raises:
        ConfigError: settings cannot be, or no trial fits the memory.
        EnvError: the environment raised.
        KeyboardInterrupt: nothing is left of the trials.
    """
    return find(
        request_by(env, settings, algo, network, model, wrapper, config),
        budget_s=budget_s,
        memory_gib=memory_gib,
        batch_size=batch_size,
        again=again,
        say=(lambda _: None) if quiet else print,
    )


def find(
    request: RunRequest,
    *,
    budget_s: float = BUDGET_S,
    memory_gib: float | None = None,
    batch_size: int | None = None,
    again: bool = False,
    say: Say = print,
) -> Found:
    """Find sizes for a request; the other arguments are those of `autoscale`."""
    began = time.perf_counter()
    for name, value in (("budget_s", budget_s), ("memory_gib", memory_gib)):
        if value is not None and not value > 0.0:
            raise ConfigError(f"{name}={value}: expected more than 0.")
    launch.check_alone()
    want = inspect_request(request)
    if cluster := want.settings.run.cluster:
        raise ConfigError(
            f"cluster={cluster!r}, but sizes are measured on this machine alone.\n"
            "Leave --cluster out."
        )
    task = want.job(Path())
    run, gpus = task.settings.run, visible_gpus(task.settings.run.device)
    one_vector = not run.num_workers and is_one_vector(task.maker, task.spec)
    space = _space(task.settings, one_vector=one_vector, batch_size=batch_size)
    key = {
        "machine": result.fingerprint(),
        "settings": {k: v for k, v in task.settings.flat().items() if k not in _NOT_FOR_SPEED},
        "free": sorted(space.free),
        "batch": space.batch,
        "memory_gib": memory_gib,
    }
    has_name = not _has_own_code(request)
    kept = None if again or not has_name else result.kept(key)
    # What time has ended may be worse than what there is time for now.
    if kept is not None and (kept["finished"] or kept["budget_s"] >= budget_s):
        found = Found(**kept, path=result.kept_at(key), reused=True)
        say(f"Measured before on this machine ({found.path}; --again measures anew).")
        return found
    trained = Trained(
        request, run.schedule_env_steps,
        compiles=task.spec.kind == "kernel" or run.compile or gpus > 0,
        on_gpu=one_vector and gpus > 0,
    )  # fmt: skip
    most = None if memory_gib is None else int(memory_gib * _GIB)
    limits = Limits(gpu_bytes=most) if trained.on_gpu else Limits(memory_bytes=most)
    with resources.interruptible():
        found = Measuring(trained, want, space, limits, began + budget_s, say, gpus).run()
    found = replace(found, budget_s=budget_s)
    return _kept(found, key, say) if has_name else found


def _kept(found: Found, key: dict[str, Any], say: Say) -> Found:
    what = {n: v for n, v in vars(found).items() if n not in ("path", "reused")}
    try:
        return replace(found, path=result.keep(key, what))
    except OSError as error:
        say(f"This cannot be kept for the next time: {error}")
        return found


def _has_own_code(request: RunRequest) -> bool:
    """Whether something was given that has no name, so that it could be another the next time."""
    code, wrappers = request.code, request.code.wrappers
    wrappers_have_names = all(isinstance(wrapper, str) for wrapper in wrappers)
    return callable(request.env) or code.model is not None or not wrappers_have_names


def _space(settings: Settings, *, one_vector: bool, batch_size: int | None) -> Space:
    """What there is to search, by what the user has fixed; ConfigError: it contradicts itself."""
    run = settings.run
    base = Sizes(*(getattr(run, name) for name in FREE))
    free = frozenset(FREE) - fixed(settings.source)
    if run.num_envs_per_learner:
        free -= {"num_envs"}
    if one_vector:
        free -= {"num_workers", "envs_per_vector"}
    batch = batch_size
    if batch is None and not one_vector and not run.num_envs_per_learner:
        batch = base.batch
    if batch_size is not None:
        base = _with_batch(base, free, batch_size)
    each = 2 if run.inference == "learner" else 1
    return Space(base, free, batch, one_vector, run.num_envs_per_learner, each)


def _with_batch(base: Sizes, free: frozenset[str], batch: int) -> Sizes:
    """The same with another batch: of more steps, or else of more environments."""
    for name, other in (("num_steps", "num_envs"), ("num_envs", "num_steps")):
        beside = getattr(base, other)
        if batch == base.batch or (name in free and batch >= beside and batch % beside == 0):
            return base if batch == base.batch else Sizes(**asdict(base) | {name: batch // beside})
    raise ConfigError(
        f"batch_size={batch} cannot be made of num_envs={base.num_envs} and "
        f"num_steps={base.num_steps}, of which "
        + (" and ".join(sorted(free & {"num_envs", "num_steps"})) or "neither")
        + " may be another: expected num_envs * num_steps."
    )
