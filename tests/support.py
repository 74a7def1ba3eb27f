"""Shared by the tests: small environments, and short ways to build the parts."""

import contextlib
import os
import select
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from headrace.algos.base import UpdateContext
from headrace.algos.schedules import in_force
from headrace.collectors.api import PolicyPlan, SamplingPlan
from headrace.collectors.inline import InlineCollector
from headrace.collectors.synchronous import SynchronousCollector
from headrace.config.algorithms import ALGORITHMS
from headrace.config.policies import assign_agents
from headrace.distributed.ranks import SINGLE_RANK
from headrace.envs.api import GUARDS
from headrace.envs.factory import EnvMaker, env_spec
from headrace.learner.learner import Learner, loss_of
from headrace.learner.optimizer import Optimizer
from headrace.meter import Meter
from headrace.models.policy import Network, Policy, torch_seed
from headrace.spec import Agents
from headrace.storage import checkpoint
from headrace.storage.row_log import read_rows
from tests import python


class Counting(gym.Env):
    """Says how many steps the episode has; ends where told. Reward 1 per step, action ignored."""

    def __init__(self, terminate_at=10**9, truncate_at=10**9):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.terminate_at, self.truncate_at = terminate_at, truncate_at
        self.t = 0
        self.salt = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.salt = float(self.np_random.random())
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, self.t == self.terminate_at, self.t == self.truncate_at, {}

    def _obs(self):
        return np.array([self.t, self.salt], np.float32)


class Nested(gym.Env):
    """A Tuple observation with a Dict inside, and a Dict of actions; all say where they come from.

    It raises on an action that is not in its space.
    """

    def __init__(self):
        spaces = gym.spaces
        self.observation_space = spaces.Tuple(
            [
                spaces.Box(0, 255, (8, 8, 3), np.uint8),
                spaces.Dict(
                    {
                        "choice": spaces.Discrete(3, start=-1),
                        "pair": spaces.Tuple([spaces.Box(-9, 9, (2,)), spaces.MultiBinary(2)]),
                        "text": spaces.Text(5),
                    }
                ),
            ]
        )
        self.action_space = spaces.Dict(
            {
                "gears": spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiBinary(2)]),
                "steer": spaces.Box(-2, 3, (2,), np.float64),
            }
        )
        self.t, self.last = 0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, np.zeros(2)
        self.goal = self.np_random.uniform(-1, 1, 2)
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        self.last = action["steer"]
        gear, bits = action["gears"]
        paid = float(gear) + bits.sum() - np.square(self.last - self.goal).sum()
        return self._obs(), np.array([paid]), gear == 4 and self.t > 9, self.t == 15, {}

    def _obs(self):
        pair = (self.goal + self.last / 2, np.array([self.t % 2, 1]))
        inside = {"pair": (pair[0].astype(np.float32), pair[1]), "choice": self.t % 3 - 1}
        return np.full((8, 8, 3), self.t, np.uint8), inside | {"text": "hello"}


REPLAY = {
    "env": "short", "algo": "dqn", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4,
    "learning_starts": 64, "replay_ratio": 0.25, "batch_size": 32, "replay_size": 1000,
    "target_update_interval": 5, "hidden_sizes": (32, 32),
}  # fmt: skip
RAINBOW = {
    "distribution": "c51", "v_min": 0.0, "v_max": 50.0, "noisy": True, "priority_alpha": 0.5,
    "n_step": 3, "dueling": True,
}  # fmt: skip


def short_cartpole():
    """CartPole that is cut off after 20 steps: terminations and truncations in every batch."""
    return gym.make("CartPole-v1", max_episode_steps=20)


def plan_for(
    env,
    *,
    num_steps=16,
    num_envs=4,
    first_env=0,
    envs_per_vector=2,
    seed=3,
    network=None,
    reseed=True,
    kwargs=None,
    model=None,
    guards=GUARDS,
    lag=0,
    asynchronous=False,
    inference_device=None,
    settings=None,
    policies=None,
    **of_maker,
):
    """How a rank samples; `policies` as the setting ({}: one for each role); None: one acts."""
    maker = EnvMaker(env, kwargs or {}, **of_maker)
    spec, network = env_spec(maker), network or Network()
    agents = {"default": None} if policies is None else assign_agents(policies, spec)
    return SamplingPlan(
        maker=maker,
        spec=spec,
        policies={
            name: policy_plan(spec, network, share, model=model, of=settings)
            for name, share in agents.items()
        },
        num_steps=num_steps,
        num_envs=num_envs,
        first_env=first_env,
        envs_per_vector=envs_per_vector,
        seed=seed,
        reseed_episodes=reseed,
        replay_limit_s=30.0,
        threads_per_worker=1,
        lag=lag,
        asynchronous=asynchronous,
        inference_device=inference_device,
        guards=guards,
    )


def build_policy(spec, network, seed=0, model=None):
    with torch_seed(seed):
        return Policy(spec, network, model)


def policy_plan(spec, network, agents=None, *, learns=True, model=None, of=None):
    """How a policy acts for all agents, or some: PPO's, or that of a run's settings."""
    algorithm = of.algorithm if of else ALGORITHMS["ppo"]
    network, config = (of.network, of.algo) if of else (network, algorithm.Config())
    agents = agents or Agents(0, spec.num_agents)
    return PolicyPlan(
        agents, spec.for_agents(agents), network, algorithm.stored_outputs if learns else {},
        partial(
            algorithm.build_policy, spec.for_agents(agents), network, config, model
        ),
    )  # fmt: skip


def children():
    """Processes that this one has started, and theirs; without those that only wait for burial."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found, ours = None, {os.getpid()}
    while found != ours:
        found = ours
        ours = found | {pid for pid, parent in parents.items() if parent in found}
    return ours - {os.getpid(), *python.server_pids()}


def leaders(pids):
    """Of these processes, those that began a session of their own: trials."""
    found = []
    for pid in pids:
        try:
            found += [pid] if os.getsid(pid) == pid else []
        except ProcessLookupError:
            continue
    return found


def still_alive(pids, within_s):
    """Wait for processes to end, whoever's children they are; those that have not."""
    deadline = time.monotonic() + within_s
    alive = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # gone, and buried
            fd = os.pidfd_open(pid)
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                alive.append(pid)
            os.close(fd)
    return alive


def never():
    return False


def inline(plan, stop=never, state=None, say=print):
    return InlineCollector(plan, Meter(), stop, state, say)


def workers(plan, num_workers=2, stop=never, state=None, say=print):
    return SynchronousCollector(plan, num_workers, stop, state, say)


def policies_for(plan, seed=1):
    """What collectors act with: untrained policies, by name."""
    with torch_seed(seed):
        return plan.build_policies()


def policy_for(plan, seed=1):
    [policy] = policies_for(plan, seed).values()
    return policy


def learner_for(settings, spec, ranks=SINGLE_RANK, *, device="cpu", dtype=None):
    """The learner of a run with one policy."""
    shares, device = assign_agents({}, spec), torch.device(device)
    return Learner(settings, shares, spec, None, device, Meter(), ranks, dtype=dtype)


def saved_rows(run_dir, name="learner_default"):
    """The rows of a run's replay buffer in its newest checkpoint: column -> rows by env."""
    saved = checkpoint.newest(run_dir)
    found = {}

    class Reader:
        def put_rows(self, rows):
            for i, key in enumerate(
                zip(rows["env"].tolist(), rows["number"].tolist(), strict=True)
            ):
                found[key] = {column: rows[column][i] for column in rows}

    read_rows(saved.path.parent, saved.manifest["rows"][name], Reader())
    tensors = saved.tensors(name)
    end = next(t for key, t in tensors.items() if key.endswith(".end"))
    capacity = len(next(t for key, t in tensors.items() if key.endswith(".truncated")))
    kept = [found[e, n] for e in range(len(end)) for n in range(end[e] + 1)[-capacity:]]
    return {column: torch.stack([row[column] for row in kept]) for column in kept[0]}


def learn_once(algorithm, policy, experience, config, order, *, step=None, progress=0.0):
    """One update as a learner makes it; `step` stands in for the optimizer's."""
    config = in_force(config, round(1000 * progress), 1000)
    modules = {"policy": policy}
    spec = algorithm.losses(modules, config)["policy"]
    step = step or Optimizer(loss_of(spec, config, compiled=False), spec.max_grad_norm).step
    context = UpdateContext(
        policy, modules, config, lambda _, minibatch, lr: step(minibatch, lr), order, SINGLE_RANK,
        progress,
    )  # fmt: skip
    return algorithm.update(experience, context)
