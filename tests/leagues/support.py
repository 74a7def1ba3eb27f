"""Small games, members that need no files, and the plan of a league with them."""

from dataclasses import dataclass, replace
from functools import partial

import gymnasium as gym
import numpy as np
import torch

from headrace.collectors.api import LeaguePlan, PolicyPlan
from headrace.config.algorithms import ALGORITHMS
from headrace.config.policies import assign_agents, sides_of
from headrace.envs.games.opponents import MemberPolicy
from headrace.envs.games.seats import Pool
from headrace.models.policy import Network, torch_seed
from tests.support import build_policy, plan_for

RPS, GRID = "headrace/RockPaperScissors-v0", "headrace/TagGridWorld-v0"
SMALL_GRID = {"num_taggers": 2, "length": 3, "max_episode_steps": 5}
POOL = Pool((3, 5, 8), (1.0, 2.0, 1.0), 0.25, sources=("",) * 9)


class Trio:
    """Three players choose a number at once; who chose the greatest alone is paid by the others.

    Episodes have 2 to 6 steps, by the seed. They observe the time and what they chose last.
    """

    possible_agents = ["p_0", "p_1", "p_2"]  # noqa: RUF012

    def observation_space(self, agent):
        return gym.spaces.Box(-10, 10, (5,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.length, self.t = int(self.random.integers(2, 7)), 0
        self.chose = dict.fromkeys(self.possible_agents, -1)
        self.agents = list(self.possible_agents)
        return self._obs(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t, self.chose = self.t + 1, dict(actions)
        best = max(actions.values())
        winners = [agent for agent in self.agents if actions[agent] == best]
        alone = len(winners) == 1
        reward = {a: (2.0 if a in winners else -1.0) if alone else 0.0 for a in self.agents}
        ends, infos = ({a: of for a in self.agents} for of in (False, {}))
        cut, obs = dict.fromkeys(self.agents, self.t == self.length), self._obs()
        if self.t == self.length:
            self.agents = []
        return obs, reward, ends, cut, infos

    def close(self):
        pass

    def _obs(self):
        seen = np.float32([self.t, *self.chose.values(), 0])[:5]
        return dict.fromkeys(self.possible_agents, seen)


class Pack(Trio):
    """The same, of two kinds of players."""

    possible_agents = ["hunter_0", "hunter_1", "prey_0"]  # noqa: RUF012


class LargePack(Trio):
    """One more of the first kind, who observe numbers of the same shape."""

    possible_agents = ["hunter_0", "hunter_1", "hunter_2", "prey_0"]  # noqa: RUF012


class Takes:
    """A game in turns: two players take 1 to 3 of a heap; who takes the last one wins.

    The heap has 3 to 12, by the seed. A mask says what may be taken.
    """

    possible_agents = ["p_0", "p_1"]  # noqa: RUF012

    def observation_space(self, agent):
        return gym.spaces.Dict(
            {
                "observation": gym.spaces.Box(0, 12, (2,), np.float32),
                "action_mask": gym.spaces.Box(0, 1, (3,), np.int8),
            }
        )

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.heap = int(np.random.default_rng(seed).integers(3, 13))
        self.agent_selection, self.over = "p_0", False
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.infos = {agent: {} for agent in self.agents}

    def last(self):
        me = self.agent_selection
        mask = np.array([k < self.heap for k in range(3)], np.int8)
        obs = np.float32([self.heap, self.possible_agents.index(me)])
        seen = {"observation": obs, "action_mask": mask}
        return seen, self.rewards[me], self.over, False, {}

    def step(self, action):
        me = self.agent_selection
        other = "p_1" if me == "p_0" else "p_0"
        self.rewards[me] = 0.0
        if self.over:
            self.agents = [agent for agent in self.agents if agent != me]
            self.agent_selection = other
            return
        assert action < self.heap, (action, self.heap)
        self.heap -= int(action) + 1
        if not self.heap:
            self.over, self.rewards = True, {me: 1.0, other: -1.0}
        self.agent_selection = other

    def close(self):
        pass


@dataclass(frozen=True)
class Strangers:
    """A `LoadMember`: the policies of member k have weights by the seed 100 + k.

    Attributes:
        specs: of each side.
    """

    specs: tuple
    network: Network

    def __call__(self, pool, member):
        return {name: self.of(i, member) for i, (name, _) in enumerate(self.specs)}

    def of(self, i, member):
        _, spec = self.specs[i]
        module = build_policy(spec, self.network, seed=100 * i + member)
        with torch_seed(member):  # an untrained policy acts nearly at random, whoever it is
            for parameter in module.parameters():
                parameter.data += torch.randn_like(parameter) * 0.5
        return MemberPolicy(spec, self.network, module.requires_grad_(False))


def league_plan(env, pool=POOL, policies=None, network=None, league_size=4, load=None, **more):
    """The plan of a league, with members that need no files; `pool=None`: no league."""
    network = network or Network(hidden_sizes=(8,))
    plan = plan_for(env, network=network, native=isinstance(env, str), **more)
    shares = assign_agents(policies or {}, plan.spec)
    ppo = ALGORITHMS["ppo"]
    sides, plans = sides_of(shares, league=pool is not None), {}
    for side, (name, agents) in sides.items():
        spec = plan.spec.for_agents(agents)
        plans[side] = PolicyPlan(
            agents, spec, network, ppo.stored_outputs,
            partial(ppo.build_policy, spec, network, ppo.Config()), name, shares[name],
        )  # fmt: skip
    if pool is None:
        return replace(plan, policies=plans)
    specs = tuple((side, of.spec) for side, of in plans.items())
    load = load or Strangers(specs, network)
    return replace(plan, policies=plans, league=LeaguePlan(league_size, load, pool))


def seats_before_steps(vector):
    """Who plays in each step, written down before the vector takes it: (members, sides)."""
    noted, step = [], vector.step

    def noting(t):
        noted.append((vector.seats.member.clone(), vector.seats.side.clone()))
        step(t)

    vector.step = noting
    return noted


def copied(fragment):
    """A copy that later batches do not overwrite."""
    return type(fragment)(**torch.utils._pytree.tree_map(torch.clone, vars(fragment)))
