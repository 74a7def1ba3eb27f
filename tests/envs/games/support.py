"""A game in PettingZoo's parallel form, which needs no PettingZoo; a plain loop over such games."""

import gymnasium as gym
import numpy as np

from headrace.seeding import derive
from headrace.spec import ActionCodec


class GameError(RuntimeError):
    """Error of a game that fails on command."""


class Camp:
    """Guests come and go, of two kinds that see and do different things.

    By the seed: when each comes, and when it goes (terminated, truncated, or both). Who is still
    there after `length` steps is cut off.
    """

    possible_agents = ["guest_0", "guest_1", "guest_2", "cook_0"]  # noqa: RUF012
    lingers = False  # do those who left stay in `agents`?

    def __init__(self, length=7):
        self.length, self.resets = length, []

    def observation_space(self, agent):
        if agent == "cook_0":
            return gym.spaces.Discrete(20, start=2)
        return gym.spaces.Box(-100, 100, (3,), np.float64)

    def action_space(self, agent):
        if agent == "cook_0":
            return gym.spaces.MultiDiscrete([3, 2])
        return gym.spaces.Box(np.float32([-1, 0]), np.float32([2, 0.5]))

    def reset(self, seed=None, options=None):
        self.resets.append(seed)
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t, self.ate = 0, 0.0
        self.comes = {agent: int(self.random.integers(0, 2)) * 2 for agent in self.possible_agents}
        self.comes["guest_0"] = 0
        self.goes = {agent: int(self.random.integers(2, 12)) for agent in self.possible_agents}
        self.how = {agent: int(self.random.integers(1, 4)) for agent in self.possible_agents}
        self.agents = [agent for agent in self.possible_agents if not self.comes[agent]]
        return self._all(self._obs), self._all(lambda agent: {})

    def step(self, actions):
        assert list(actions) == self.agents
        self.t += 1
        self.ate = float(sum(np.sum(action) for action in actions.values()))
        is_last = self.t == self.length
        obs, reward, infos = (
            self._all(of) for of in (self._obs, lambda a: self.ate + self.t / 8, lambda a: {})
        )
        ends, cut = (
            self._all(lambda a, bit=bit: self.t == self.goes[a] and bool(self.how[a] & bit))
            for bit in (1, 2)
        )
        cut = {agent: of or (is_last and not ends[agent]) for agent, of in cut.items()}
        if not self.lingers or all(ends[a] or cut[a] or self._has_left(a) for a in self.agents):
            self.agents = [a for a in self.agents if not ends[a] and not cut[a]]
        come = [a for a in self.possible_agents if self.comes[a] == self.t and not is_last]
        if self.agents:
            self.agents = self.agents + come
            obs |= {agent: self._obs(agent) for agent in come}
            for of, value in ((reward, 0.0), (ends, False), (cut, False), (infos, {})):
                of |= dict.fromkeys(come, value)
        return obs, reward, ends, cut, infos

    def close(self):
        pass

    def _has_left(self, agent):
        return self.t > self.goes[agent]

    def _all(self, of):
        return {agent: of(agent) for agent in self.agents}

    def _obs(self, agent):
        if agent == "cook_0":
            return np.int64(2 + self.t)
        return np.array([self.t, self.ate, self.possible_agents.index(agent)])


def played_plainly(make, spec, parts, actions, seed, num_steps, env_id):
    """Step games as PettingZoo's documentation does: rows of each part, and of each its finals.

    Where a game raises `GameError`, the step is none, its agents' rows before are truncated, and
    another game is made.

    Args:
        make: makes a game.
        spec: of it.
        parts: agents of each policy.
        actions: `[T, n * size, ...]` of each part, as a policy emits them.
        seed: of the run.
        num_steps: T.
        env_id: of each.
    """
    rows = [
        {
            name: np.zeros((num_steps, len(env_id) * part.size), dtype)
            for name, dtype in (
                ("reward", np.float32), ("terminated", bool), ("truncated", bool), ("valid", bool)
            )
        } | {"obs": {}, "finals": {}}
        for part in parts
    ]  # fmt: skip
    episodes = []
    place = [(p, i) for p, part in enumerate(parts) for i in range(part.size)]
    for e, env in enumerate(env_id):
        game, episode = make(), 0
        obs, _ = game.reset(seed=derive(seed, "env", int(env), episode))
        total, began = np.zeros(len(place)), 0
        where = {
            agent: (p, e * parts[p].size + i)
            for agent, (p, i) in zip(game.possible_agents, place, strict=True)
        }
        gone = set()
        for t in range(num_steps):
            playing, given = [a for a in game.agents if a not in gone], {}
            for agent in game.agents:
                p, row = where[agent]
                codec = ActionCodec(spec.for_agents(parts[p]).action)
                given[agent] = codec.to_env(actions[p][t][row : row + 1])[0]
            for agent in playing:
                p, row = where[agent]
                rows[p]["obs"][t, row] = obs[agent]
                rows[p]["valid"][t, row] = True
            before = obs
            try:
                obs, reward, terminated, truncated, _ = game.step(given)
            except GameError:
                drop(rows, t, where, {agent: before[agent] for agent in playing})
                game, episode, began = make(), episode + 1, t + 1
                total, gone = np.zeros(len(place)), set()
                obs, _ = game.reset(seed=derive(seed, "env", int(env), episode))
                continue
            for agent in playing:
                p, row = where[agent]
                rows[p]["reward"][t, row] = reward[agent]
                rows[p]["terminated"][t, row] = terminated[agent]
                rows[p]["truncated"][t, row] = truncated[agent]
                total[list(where).index(agent)] += np.float32(reward[agent])
                if truncated[agent] and not terminated[agent]:
                    rows[p]["finals"][t, row] = obs[agent]
                if terminated[agent] or truncated[agent]:
                    gone.add(agent)
            if all(agent in gone for agent in game.agents):
                means = [total[part.first : part.first + part.size].mean() for part in parts]
                episodes.append((t, int(env), t + 1 - began, means))
                episode, began, total, gone = episode + 1, t + 1, np.zeros(len(place)), set()
                obs, _ = game.reset(seed=derive(seed, "env", int(env), episode))
        for agent in [a for a in game.agents if a not in gone]:
            p, row = where[agent]
            rows[p]["obs"][num_steps, row] = obs[agent]
    return rows, sorted(episodes)


def drop(rows, t, where, playing):
    """Take out step t of a game, and truncate the rows before of those who played."""
    for agent, (p, row) in where.items():
        of = rows[p]
        of["valid"][t, row], of["truncated"][t, row] = False, True
        has_ended = of["terminated"][t - 1, row] or of["truncated"][t - 1, row]
        if agent in playing and t and of["valid"][t - 1, row] and not has_ended:
            of["truncated"][t - 1, row] = True
            of["finals"][t - 1, row] = playing[agent]
