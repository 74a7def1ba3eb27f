"""A game of three agents whose steps and resets take unequal time (`step_times.py`).

It is in PettingZoo's parallel form, and needs no PettingZoo. A step of the game, with all agents,
sleeps as long as one of `uneven.py`'s environment does, and the game writes that down in the same
way.
"""

from benchmarks.peers.uneven import Uneven

AGENTS = 3


class UnevenGame:
    """What `Uneven` gives its one agent, three agents get; all leave when its episode is cut off.

    Args:
        distribution: a name in `step_times.DISTRIBUTIONS`; ValueError if it is not.
        render_mode: as PettingZoo has it; nothing is to be seen.
    """

    metadata = {"name": "uneven_game", "render_modes": []}  # noqa: RUF012

    def __init__(self, distribution="stalls", render_mode=None):
        self.env, self.render_mode = Uneven(distribution), render_mode
        self.possible_agents = [f"agent_{i}" for i in range(AGENTS)]
        self.agents = []

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents[:]
        obs, _ = self.env.reset(seed=seed, options=options)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions):
        played = self.agents
        obs, reward, terminated, truncated, _ = self.env.step(actions[played[0]])
        given = [dict.fromkeys(played, each) for each in (obs, reward, terminated, truncated)]
        if truncated:
            self.agents = []
        return (*given, {agent: {} for agent in played})

    def close(self):
        self.env.close()
