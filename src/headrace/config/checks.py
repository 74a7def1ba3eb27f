"""Refuses unknown settings, and those that contradict each other.

A message has both values, the calculation, and what to do.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headrace.algos.action_values.dqn import DQN
from headrace.algos.base import ActorCriticConfig, Algorithm
from headrace.algos.critics import crossq
from headrace.algos.critics.sac import SAC
from headrace.algos.critics.td3 import TD3
from headrace.algos.off_policy import ReplayConfig
from headrace.algos.offline import bc
from headrace.algos.schedules import schedules_of
from headrace.algos.sequences import SequenceConfig
from headrace.config.algorithms import ALGORITHMS, algorithms_with, name_of_config
from headrace.config.run_config import RunConfig
from headrace.configclass import PEER_NAMES, check_values
from headrace.errors import ConfigError, did_you_mean, flag
from headrace.models.policy import Network


def part_of(group: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config class's fields."""
    return {f.name: values[f.name] for f in fields(group) if f.name in values}


def checked_values(
    values: Mapping[str, Any], groups: tuple[type[Any], ...], source: str
) -> dict[str, Any]:
    """Return values as the fields of config classes have them; ConfigError for an unknown name."""
    known = [f.name for group in groups for f in fields(group)]
    for name in values:
        if name not in known:
            hint = did_you_mean(PEER_NAMES.get(name, name), known)
            if (owners := algorithms_with(name)) and name not in PEER_NAMES:
                hint = f" It is a setting of {', '.join(owners)}."
            if isinstance(values[name], dict):
                hint = f"\nSettings are flat: leave the section [{name}] out."
            raise ConfigError(f"Unknown setting {name!r} ({source}).{hint}")
    checked: dict[str, Any] = {}
    for group in groups:
        checked |= check_values(group, part_of(group, values), source)
    return checked


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is no larger than `at_most`."""
    return next((d for d in range(min(at_most, number), 0, -1) if number % d == 0), 1)


def check_divisibility(run: Any, network: Any, algo: Any, algorithm: Algorithm[Any]) -> None:
    """Refuse numbers that do not divide or, with a recurrent core, cannot be divided."""
    _check_learners(run)
    _check_vectors(run)
    rows = algorithm.minibatch_rows(run, algo)
    if network.core != "none":
        _check_recurrent(run, network, algorithm)
    of_one = algorithm.data == "replay" and not algorithm.several_learners
    if of_one and run.num_learners > 1:
        raise ConfigError(
            f"num_learners={run.num_learners}, but {run.algo} learns from replay, which one "
            "learner holds.\nUse --num-learners 1."
        )
    if rows < 2 and isinstance(algo, ActorCriticConfig) and algo.normalize_advantage:
        raise ConfigError(
            f"num_envs * num_steps = {run.num_envs} * {run.num_steps} rows leave {rows} for a "
            "minibatch: expected 2 or more, since advantages are normalized against each other.\n"
            "Use fewer minibatches, or --no-normalize-advantage."
        )
    for whole, number, by, parts, reason in algorithm.divides(run, network, algo):
        if number % parts:
            raise ConfigError(
                f"{whole}={number} does not divide into {by}={parts}: {reason}, and {number} / "
                f"{parts} = {number / parts:.2f}.\n"
                f"Use {flag(by)} {largest_divisor(number, parts)}, for example."
            )
    if run.num_accumulation_steps > 1 and isinstance(algo, crossq.CROSSQ):
        raise ConfigError(
            f"num_accumulation_steps={run.num_accumulation_steps}, but crossq normalizes by the "
            "moments of whole minibatches.\nLeave --num-accumulation-steps out, or use --algo sac."
        )
    rows //= run.num_learners
    if rows % run.num_accumulation_steps:
        raise ConfigError(
            f"The {rows} rows of a minibatch (of one learner) do not divide into "
            f"num_accumulation_steps={run.num_accumulation_steps} parts.\n"
            f"Use --num-accumulation-steps {largest_divisor(rows, run.num_accumulation_steps)}."
        )


def _check_learners(run: Any) -> None:
    learners, envs, workers = run.num_learners, run.num_envs, run.num_workers
    if envs % learners:
        near = max(1, round(envs / learners)) * learners
        raise ConfigError(
            f"num_envs={envs} does not divide among num_learners={learners}: {envs} = {learners} x "
            f"{envs // learners} + {envs % learners}, and all learners have equally many.\n"
            f"Use --num-envs {near}, for example, or another number of learners."
        )
    if 0 < workers < learners:
        raise ConfigError(
            f"num_workers={workers}, but num_learners={learners}: expected at least one worker for "
            f"each learner, or none.\nUse --num-workers {learners} or more, or 0."
        )


def _check_vectors(run: Any) -> None:
    share, size = run.num_envs // run.num_learners, run.envs_per_vector
    workers = math.ceil(run.num_workers / run.num_learners)
    if share % size:
        envs = "num_envs" if run.num_learners == 1 else "num_envs / num_learners"
        raise ConfigError(
            f"{envs}={share} does not divide into vectors of envs_per_vector={size}: {share} = "
            f"{share // size} x {size} + {share % size}.\n"
            f"Use --envs-per-vector {largest_divisor(share, size)}, or leave it out."
        )
    if workers > share // size:
        each = "" if run.num_learners == 1 else " of each learner"
        are = "is only 1 vector" if share == size else f"are only {share // size} vectors"
        more = f"Use --num-envs {run.num_learners * workers * size} or more"
        remedy = "Leave --envs-per-vector out" if workers <= share else more
        raise ConfigError(
            f"num_workers={run.num_workers}, but there {are} to share out{each}: {share} "
            f"environments in vectors of envs_per_vector={size}.\n"
            f"{remedy}, or use --num-workers {run.num_vectors} or fewer."
        )


def _check_recurrent(run: Any, network: Any, algorithm: Algorithm[Any]) -> None:
    if not algorithm.recurrent:
        raise ConfigError(
            f"core={network.core!r}, but {run.algo} does not learn with a recurrent core.\n"
            + (
                "Leave out --core."
                if run.algo in ALGORITHMS
                else "Leave out --core, or set `recurrent` of the algorithm if it passes states on."
            )
        )
    if run.model:
        raise ConfigError(
            f"core={network.core!r}, but the network is one of your own ({run.model}), which "
            "receives each observation alone.\nLeave out --core, or train Headrace's network."
        )
    if run.num_accumulation_steps > 1:
        raise ConfigError(
            f"num_accumulation_steps={run.num_accumulation_steps}, but with a recurrent core a "
            "minibatch is whole runs of envs, which are not cut into parts.\n"
            "Use more minibatches (--num-minibatches), or --core none."
        )


_OF_SEVERAL = ("worker_resources", "learner_resources")  # of clusters with several machines
OF_CLUSTER = ("gpus_per_learner", "cpus_per_worker", *_OF_SEVERAL)
"""Settings of a run whose learners and workers are on a cluster."""
_DEFAULTS = RunConfig()


def without_cluster(cluster: str | None) -> dict[str, Any]:
    """Return the settings that a run loses when it leaves its cluster ("", or "local")."""
    names = OF_CLUSTER if cluster == "" else _OF_SEVERAL if cluster == "local" else ()
    return {name: getattr(_DEFAULTS, name) for name in names}


def check_cluster(run: RunConfig) -> None:
    """Refuse a cluster's settings without a cluster, and settings that a cluster cannot have."""
    if not run.cluster:
        for name in OF_CLUSTER:
            if getattr(run, name) != getattr(_DEFAULTS, name):
                raise ConfigError(
                    f"{name}={getattr(run, name)}, but this run is not on a cluster.\n"
                    "Use --cluster (local, auto, or an address), or leave it out."
                )
        return
    for name in _OF_SEVERAL:
        if run.cluster == "local" and getattr(run, name):
            raise ConfigError(
                f"{name}={getattr(run, name)}, but cluster='local' is this machine alone.\n"
                f"Leave {flag(name)} out, or use --cluster auto."
            )
    if run.inference == "learner":
        raise ConfigError(
            "inference='learner' needs memory that workers share with the learner, and those of a "
            "cluster may be on other machines.\nUse --inference worker."
        )
    if run.backend == "mpi":
        raise ConfigError("backend='mpi' is started by mpirun; on a cluster use --backend auto.")
    if run.device == "cpu" and run.gpus_per_learner > 0:
        raise ConfigError(
            f"device='cpu' and gpus_per_learner={run.gpus_per_learner}: expected one of the two.\n"
            "Leave one out."
        )


def check_data(run: RunConfig, algorithm: Algorithm[Any]) -> None:
    """Refuse recorded steps for what cannot learn from them, and workers, which would be idle."""
    if not run.data:
        if algorithm.name == "bc":
            raise ConfigError(
                "algo='bc' learns to take the actions of recorded steps: expected --data, the "
                "directory of a run or the id of a Minari data set.\n"
                "To learn in the environment: --algo sac, for example."
            )
        return
    if algorithm.data != "replay":
        able = ", ".join(name for name, other in ALGORITHMS.items() if other.data == "replay")
        raise ConfigError(
            f"data={run.data!r}, but {run.algo} learns from its own newest steps alone: expected "
            f"one of {able}.\nUse --algo iql, for example."
        )
    if run.num_workers > 0:
        raise ConfigError(
            f"data={run.data!r} and num_workers={run.num_workers}: no environment is stepped.\n"
            "Leave --num-workers out."
        )


def check_critic(settings: Any) -> None:
    """Refuse a shared critic for what has no value of the policy, or no trunk of its own for it."""
    run, why = settings.run, ""
    if run.critic == "own":
        return
    has_value = isinstance(settings.algo, ActorCriticConfig) or not settings.algorithm.name
    if settings.algorithm.data == "replay" or not has_value:
        why = f"{run.algo} does not learn a value of the policy.\nUse --algo ppo, or leave --critic"
    elif run.model:
        why = f"the network is one of your own ({run.model}).\nLeave --model out, or --critic"
    elif settings.network.shared_trunk:
        why = (
            "shared_trunk=True: the actor would see the state of the game too.\nUse "
            "--no-shared-trunk, or leave --critic"
        )
    if why:
        raise ConfigError(f"critic={run.critic!r}, but {why} out.")


def check_replay(run: RunConfig, algo: Any, sources: Mapping[str, str]) -> None:
    """Refuse sizes of a replay with which nothing would be learned, or rows would be lost."""
    if not isinstance(algo, ReplayConfig):
        return
    batch = run.num_envs * run.num_steps
    if algo.learning_starts >= run.total_env_steps:
        raise ConfigError(
            f"learning_starts={algo.learning_starts} and total_env_steps={run.total_env_steps}: "
            "nothing would be learned.\nUse --learning-starts "
            f"{min(1_000, run.total_env_steps // 10)}, for example."
        )
    # A preset's ratio may give none in a run that only tries something out.
    if _was_given("replay_ratio", sources) and not algo.learner_steps_after(run.total_env_steps):
        raise ConfigError(
            f"replay_ratio={algo.replay_ratio:g}: not one gradient step would follow from "
            f"total_env_steps={run.total_env_steps} env steps: nothing would be learned.\n"
            "Use --replay-ratio 0.25, for example."
        )
    if algo.replay_size < (least := max(algo.learning_starts, 2 * batch)):
        raise ConfigError(
            f"replay_size={algo.replay_size}: expected {least} or more, the larger of "
            f"learning_starts={algo.learning_starts} and two batches of num_envs * num_steps = "
            f"{run.num_envs} * {run.num_steps} rows.\nUse --replay-size {least}, for example."
        )


def _was_given(name: str, sources: Mapping[str, str]) -> bool:
    return sources.get(name, "").startswith(("given", "config "))


def check_effects(algo: Any, network: Network, sources: Mapping[str, str]) -> None:
    """Refuse settings of a replay's algorithms that were asked for, and have no effect."""
    if not isinstance(algo, ReplayConfig):
        return
    needs = {"priority_beta": ("priority_alpha", "0.5", algo.priority_alpha > 0)}
    if isinstance(algo, DQN):
        is_c51 = algo.distribution == "c51"
        needs |= {
            "v_min": ("distribution", "c51", is_c51),
            "v_max": ("distribution", "c51", is_c51),
            "num_atoms": ("distribution", "qr", algo.distribution != "none"),
        }
    if isinstance(algo, SAC):
        is_learned = not algo.ent_coef
        needs |= {
            "initial_ent_coef": ("ent_coef", "0", is_learned),
            "target_entropy": ("ent_coef", "0", is_learned),
            "target_entropy_share": ("ent_coef", "0", is_learned),
            "dropped_quantiles": ("num_quantiles", "25", algo.num_quantiles > 1),
            "critics_in_target": ("num_quantiles", "1", algo.num_quantiles == 1),
        }
    if isinstance(algo, bc.BC):
        needs |= dict.fromkeys(bc.WITHOUT_EFFECT, ("algo", "td3bc", False))
    if isinstance(algo, crossq.CROSSQ):
        needs |= dict.fromkeys(crossq.WITHOUT_EFFECT, ("algo", "sac", False))
    if isinstance(algo, SequenceConfig):
        of_core = "core", "lstm", network.core != "none"
        needs |= {"sequence_length": of_core, "burn_in": of_core}
    if isinstance(algo, TD3):
        needs |= {"target_noise_clip": ("target_noise", "0.2", algo.target_noise > 0)}
    defaults = type(algo)()
    for name, (other, value, has_effect) in needs.items():
        is_other = getattr(algo, name) != getattr(defaults, name)  # a default may be repeated
        if _was_given(name, sources) and is_other and not has_effect:
            beside = {"core": network.core, "algo": name_of_config(algo)}
            has = beside[other] if other in beside else getattr(algo, other)
            raise ConfigError(
                f"{name}={getattr(algo, name)} has no effect with {other}={has!r}.\n"
                f"Use {flag(other)} {value}, or leave {flag(name)} out."
            )


def check_schedules(settings: Any) -> None:
    """Refuse points of a schedule that the setting cannot have, or beside another value for it."""
    algo, source = settings.algo, settings.source
    for name, schedule in schedules_of(algo).items():
        points = getattr(algo, schedule)
        if isinstance(points, str):
            continue
        for _, value in points:
            check_values(type(algo), {name: value}, schedule)
        if name == "lr" and settings.run.lr_scale != "none":
            raise ConfigError(
                f"lr_scale={settings.run.lr_scale!r} multiplies lr, and {schedule} has points.\n"
                "Multiply the points yourself, and leave --lr-scale out."
            )
        if _was_given(name, source):
            raise ConfigError(
                f"{name}={getattr(algo, name)} and {schedule} with points: the points are all the "
                f"values that {name} has.\nLeave {flag(name)} out, or use {flag(schedule)} "
                "constant."
            )
    gammas = getattr(algo, "gamma_schedule", "constant")
    is_ramp = not isinstance(gammas, str) and any(
        a[0] < b[0] and a[1] != b[1] for a, b in itertools.pairwise(gammas)
    )
    if is_ramp and settings.network.normalize_reward:
        raise ConfigError(
            f"gamma_schedule={gammas} changes gamma with each update, and normalize_reward begins "
            "its running returns anew whenever gamma changes.\nUse steps, which are two points of "
            "the same env steps, or --no-normalize-reward."
        )


def check_guards(run: RunConfig) -> None:
    """Refuse settings of guards that are switched off, or that native vectors cannot have."""
    if run.vectorization == "native" and run.on_env_error == "restart":
        raise ConfigError(
            "on_env_error='restart', but one environment of a native vector cannot be made anew.\n"
            "Leave it out; or, where there is a Python form, use --vectorization python."
        )
    if run.env_timeout_s and not run.guards:
        raise ConfigError(
            f"env_timeout_s={run.env_timeout_s}, but with --no-guards nothing detects hangs."
            "\nLeave one of the two out."
        )


def check_workers(run: RunConfig, algorithm: Algorithm[Any]) -> None:
    """Raise ConfigError if an algorithm cannot have this lag, or workers are needed and missing."""
    if run.lag > 1 and not algorithm.accepts_any_lag:
        able = " or ".join(name for name, other in ALGORITHMS.items() if other.accepts_any_lag)
        raise ConfigError(
            f"lag={run.lag}, but {run.algo} does not correct for what older weights did: expected "
            f"0 or 1.\nUse --lag 1, or --algo {able}."
        )
    if algorithm.is_asynchronous(run.lag) and not run.num_workers:
        raise ConfigError(
            f"lag={run.lag} with algo={run.algo} lets workers sample while the learner learns, and "
            "there are none: num_workers=0.\nUse --num-workers -1 (one for each CPU core), or "
            "--lag 0."
        )
    if run.inference == "learner" and not run.num_workers:
        raise ConfigError(
            "inference='learner' lets workers ask the learner's process for actions, and there are "
            "none: num_workers=0.\nUse --num-workers -1 (one for each CPU core), or --inference "
            "worker."
        )
