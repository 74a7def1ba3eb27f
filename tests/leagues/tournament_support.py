"""Scripts that play, and small games that show who won and why."""

from functools import cache

import gymnasium as gym
import numpy as np

from headrace.envs.factory import EnvMaker, env_spec
from headrace.leagues.players import agent_names, random_player, scripted_player

LINES = (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)


def has_won(board, who):
    return any(all(board[place] == who for place in line) for line in LINES)


@cache
def best(board):
    """The value of a position for who is to move, marked 1, and the first of the best moves."""
    if has_won(board, -1):
        return -1, None
    free = [place for place in range(9) if not board[place]]
    if not free:
        return 0, None
    moves = [(*board[:place], 1, *board[place + 1 :]) for place in free]
    values = [-best(tuple(-mark for mark in moved))[0] for moved in moves]
    return max(values), free[values.index(max(values))]


def perfect(observation):
    """Tic-tac-toe without a mistake."""
    own, other = np.moveaxis(observation["observation"].astype(int), -1, 0)
    return best(tuple((own - other).ravel().tolist()))[1]


def first_free(observation, agent):
    """Tic-tac-toe without a thought."""
    return int(observation["action_mask"].argmax())


def rock(observation):
    """Rock, whatever is seen."""
    return 0


def idle():
    """No player: it is told nothing."""


class Scored:
    """One step, after which each agent has what `pay` says; the same in the parallel form."""

    num_agents = 2
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self):
        self.possible_agents = [f"p_{i}" for i in range(self.num_agents)]

    def observation_space(self, agent):
        return gym.spaces.Box(-9, 9, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.agents = [*self.possible_agents]
        return self._all(np.array([self.random.random()], np.float32)), self._all({})

    def step(self, actions):
        paid = self.pay([int(actions[agent]) for agent in self.possible_agents])
        rewards = dict(zip(self.possible_agents, map(float, paid), strict=True))
        ended, cut, info = self._all(True), self._all(False), self._all({})
        self.agents = []
        return self._all(np.zeros(1, np.float32)), rewards, ended, cut, info

    def close(self):
        pass

    def _all(self, value):
        return dict.fromkeys(self.possible_agents, value)


class FirstWins(Scored):
    """Whoever has the first seat wins, whatever is done."""

    def pay(self, actions):
        return [1, 0]


class Greatest(Scored):
    """Each is paid what it chose."""

    def pay(self, actions):
        return actions


class Greatest3(Greatest):
    num_agents = 3


class Greatest5(Greatest):
    num_agents = 5


class Roles(Greatest):
    """Three agents of one role, and one of another."""

    num_agents = 4

    def __init__(self):
        self.possible_agents = ["a_0", "a_1", "a_2", "b_0"]


class Thirds(Scored):
    """All get the same, of which sums are rounded."""

    num_agents = 3

    def pay(self, actions):
        return [0.1, 0.1, 0.1]


def always(action, log=None):
    """A script that always does the same, and notes for whom it is asked."""

    def play(observation, agent):
        if log is not None:
            log.append((agent, round(float(observation[0]), 6)))
        return action

    return play


def meet(env, **scripts):
    """Players for `play_tournament`: scripts by name, or "random"; with the maker and the spec."""
    maker = EnvMaker(env)
    spec = env_spec(maker)
    names = agent_names(maker, spec)
    players = [
        random_player(spec) if script == "random" else scripted_player(script, name, spec, names)
        for name, script in scripts.items()
    ]
    return players, maker, spec
