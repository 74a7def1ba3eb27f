"""The rules of the Tag games in NumPy, for all environments at once: the reference of the kernels.

Written from the rules, not from the kernels. Arrays have a row per environment, and a column per
agent.
"""

from dataclasses import dataclass

import numpy as np

from headrace.seeding import derive, philox

F = np.float32
LOW32 = np.uint64(0xFFFFFFFF)


def uniform(seed, env_id, episode, num_draws):
    """Return the random numbers of a reset, `[n, num_draws]`."""
    draw = np.arange(num_draws)
    key = (np.uint64(derive(seed, "env")), env_id.astype(np.uint64)[:, None])
    episode = np.asarray(episode, np.uint64).reshape(-1, 1)
    counter = ((draw // 4).astype(np.uint64), np.uint64(0), episode & LOW32, episode >> 32)
    words = np.stack(np.broadcast_arrays(*philox(key, counter)))
    return (words[draw % 4, :, draw].T >> 8).astype(F) * F(2**-24)


class Grid:
    """The rules of `TagGridWorld`."""

    def __init__(self, env):
        self.env, self.N = env, env.num_taggers
        self.type = np.arange(self.N + 1) == self.N

    def start(self, seed, env_id, episode):
        """Return the initial cells, `[n, agents, 2]`."""
        L, n = self.env.length, len(env_id)
        at = np.zeros((n, self.N + 1, 2), int)
        if self.env.fixed_start:
            at[:, :-1] = L // 2
        else:
            u = uniform(seed, env_id, episode, 2 * self.N).reshape(n, self.N, 2)
            at[:, :-1] = 1 + np.floor(u * F(L - 1)).astype(int)
        return at

    def step(self, at, action):
        """Return the new cells, the rewards `[n, agents]`, and `[n]`: the runner was tagged."""
        env = self.env
        moves = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
        wanted = at + moves[action]
        at = np.clip(wanted, 0, env.length)
        hit = (wanted != at).any(-1)
        tagged = (at[:, :-1] == at[:, -1:]).all(-1).any(-1)
        caught = np.where(self.type, -F(env.tag_penalty), F(env.tag_reward))
        free = np.where(self.type, F(env.step_cost), -F(env.step_cost))
        reward = np.where(tagged[:, None], caught, free) - F(env.wall_hit_penalty) * hit
        return at, reward.astype(F), tagged

    def observe(self, at, t):
        """Return the observations `[n, agents, features]` at times `[n]`."""
        n, agents, _ = at.shape
        position = at.astype(F) / F(self.env.length)
        time = np.broadcast_to(
            (t / F(self.env.max_episode_steps)).astype(F)[:, None, None], (n, agents, 1)
        )
        if self.env.full_observation:
            x, y = (np.repeat(position[:, None, :, c], agents, 1) for c in range(2))
            types = np.broadcast_to(self.type.astype(F), x.shape)
            is_self = np.broadcast_to(np.eye(agents, dtype=F), x.shape)
            return np.concatenate([x, y, types, is_self, time], -1)
        far = ((at[:, :-1] - at[:, -1:]) ** 2).sum(-1)
        other = np.full((n, agents), self.N)
        other[:, -1] = far.argmin(-1)  # the first of equals
        types = np.broadcast_to(self.type.astype(F)[:, None], (n, agents, 1))
        seen = np.take_along_axis(position, other[..., None], 1)
        return np.concatenate([position, seen, types, time], -1)

    def play(self, seed, env_id, actions):
        """Whole episodes, of actions `[T, n, agents]`: obs (one row more), reward, and ends.

        `last` is the observation before another episode began, if one did.
        """
        episode, t = np.zeros(len(env_id), int), np.zeros(len(env_id), int)
        at = self.start(seed, env_id, episode)
        rows = {"obs": [self.observe(at, t)], "last": []}
        rows |= {"reward": [], "terminated": [], "truncated": []}
        for action in actions:
            t = t + 1
            at, reward, tagged = self.step(at, action)
            rows["last"].append(self.observe(at, t))
            late = ~tagged & (t == self.env.max_episode_steps)
            episode = episode + (tagged | late)
            again = (tagged | late)[:, None, None]
            at = np.where(again, self.start(seed, env_id, episode), at)
            t = np.where(tagged | late, 0, t)
            ends = {"terminated": tagged, "truncated": late}
            for name, row in {"obs": self.observe(at, t), "reward": reward, **ends}.items():
                rows[name].append(row)
        return {name: np.stack(row) for name, row in rows.items()}


FEATURES = ("x", "y", "speed", "acceleration", "heading")


@dataclass
class Step:
    """The result of a step of `Continuous`; `unsure_...`: decided by less than 1e-5."""

    state: dict  # name -> [n, agents]
    reward: np.ndarray
    tagged: np.ndarray
    terminated: np.ndarray  # [n]
    obs: np.ndarray  # [n, agents, features]
    neighbours: np.ndarray  # [n, agents, seen]: ids, -1 for none
    unsure_edge: np.ndarray  # [n, agents]
    unsure_order: np.ndarray  # [n, agents]
    unsure_tag: np.ndarray  # [n]


class Continuous:
    """The rules of `TagContinuous`."""

    def __init__(self, env):
        self.env, self.tagger = env, env.is_tagger
        self.size = F(env.length)
        self.add = {
            name: np.append(0.0, np.linspace(least, most, levels)).astype(F)
            for name, least, most, levels in (
                ("acceleration", env.min_acceleration, env.max_acceleration,
                 env.num_acceleration_levels),
                ("turn", env.min_turn, env.max_turn, env.num_turn_levels),
            )
        }  # fmt: skip
        skill = np.where(self.tagger, env.tagger_skill, env.runner_skill)
        self.top = (env.max_speed * skill).astype(F)

    def start(self, seed, env_id, episode):
        """Return the random state at the beginning of an episode."""
        agents = len(self.tagger)
        u = uniform(seed, env_id, episode, 3 * agents).reshape(-1, agents, 3)
        quarter = np.floor(u[..., 2] * 4)
        state = {"x": u[..., 0] * self.size, "y": u[..., 1] * self.size}
        state["heading"] = (quarter * np.pi / 2).astype(F)
        state["speed"] = state["acceleration"] = np.zeros_like(state["x"])
        return state | {"alive": np.ones(state["x"].shape, bool)}

    def step(self, before, action, t):
        """Step from a state by actions `[n, agents, 2]`; `t` is the step, `[n]`."""
        env, alive = self.env, before["alive"]
        state, edge, unsure_edge = self.move(before, action)
        far = self.distances(state)
        obs, neighbours, unsure_order = self.observe(state, t)
        reward = np.where(self.tagger, F(env.step_penalty), F(env.step_reward))
        reward = reward + F(env.edge_hit_penalty) * edge
        taggers = np.flatnonzero(self.tagger)
        to_taggers = far[:, :, taggers]
        reach = F((env.tagging_distance * env.length) ** 2)
        tagged = alive & ~self.tagger & (to_taggers.min(-1) < reach)
        by = taggers[to_taggers.argmin(-1)]
        count = ((by[:, :, None] == np.arange(len(self.tagger))) & tagged[:, :, None]).sum(1)
        reward = reward + F(env.tag_penalty) * tagged + F(env.tag_reward) * count
        if env.runner_exits_game_after_tagged:
            state["alive"] = alive & ~tagged
            for name in ("speed", "acceleration", "heading"):
                state[name] = np.where(tagged, F(0), state[name])
        left = state["alive"] & ~self.tagger
        last = (t == env.max_episode_steps)[:, None]
        reward = reward + F(env.end_of_game_reward) * (left & last)
        unsure_tag = self.unsure_tag(to_taggers, alive & ~self.tagger)
        return Step(
            state, np.where(alive, reward, F(0)).astype(F), tagged, ~left.any(-1), obs, neighbours,
            unsure_edge, unsure_order, unsure_tag,
        )  # fmt: skip

    def move(self, s, action):
        """Return the state, the agents that hit an edge, and those for which that is unsure."""
        a = s["acceleration"] + self.add["acceleration"][action[..., 0]]
        heading = np.mod(s["heading"] + self.add["turn"][action[..., 1]], F(2 * np.pi))
        v = np.clip(s["speed"] + a, F(0), self.top)
        a = np.where((v <= 0) | (v >= self.top), F(0), a)
        to = np.stack([s["x"] + v * np.cos(heading), s["y"] + v * np.sin(heading)])
        x, y = np.clip(to, F(0), self.size)
        new = {"x": x, "y": y, "speed": v, "acceleration": a, "heading": heading}
        state = {name: np.where(s["alive"], item, s[name]).astype(F) for name, item in new.items()}
        edge = ((to < 0) | (to > self.size)).any(0)
        unsure = ((abs(to) < 1e-5) | (abs(to - self.size) < 1e-5)).any(0)
        return state | {"alive": s["alive"]}, edge, unsure & s["alive"]

    def distances(self, state):
        """Return the squared distances, `[n, agents, agents]`."""
        x, y = (state[name][:, None, :] - state[name][:, :, None] for name in "xy")
        return x * x + y * y

    def unsure_tag(self, to_taggers, might):
        """Return `[n]`: a tag is decided by less than 1e-5."""
        far = np.sort(np.sqrt(to_taggers.astype(float)), -1)
        reach = self.env.tagging_distance * self.env.length
        unsure = abs(far[..., 0] - reach) < 1e-5
        if far.shape[-1] > 1:
            unsure |= (far[..., 1] - far[..., 0] < 1e-5) & (far[..., 0] < reach + 1e-5)
        return (unsure & might).any(-1)

    def observe(self, state, t):
        """Return the observations, the observed agents, and where these are unsure."""
        n, agents = state["x"].shape
        alive = state["alive"]
        if self.env.full_observation:
            seen = np.array([[j for j in range(agents) if j != i] for i in range(agents)])
            seen, unsure = np.broadcast_to(seen, (n, *seen.shape)), np.zeros((n, agents), bool)
        else:
            seen, unsure = self.nearest(state)
        obs = self.blocks(state, seen)
        time = (t / F(self.env.max_episode_steps)).astype(F)[:, None] * alive
        if not self.env.full_observation:
            obs[~alive] = 0
        obs[:, :, : len(FEATURES)] *= alive[:, :, None, None]
        return np.concatenate([obs.reshape(n, agents, -1), time[..., None]], -1), seen, unsure

    def nearest(self, state):
        """Return the nearest other agents in the game, by (distance, index)."""
        k, (n, agents) = self.env.num_other_agents_observed, state["x"].shape
        far = self.distances(state)
        far[:, np.arange(agents), np.arange(agents)] = np.inf
        far = np.where(state["alive"][:, None, :], far, np.inf)
        ids = np.argsort(far, -1, kind="stable")
        far = np.take_along_axis(far, ids, -1)
        ids = np.where(np.isfinite(far) & state["alive"][:, :, None], ids, -1)
        root = np.sqrt(far[..., : k + 1].astype(float))
        both = np.isfinite(root[..., 1:])
        gap = np.where(both, root[..., 1:], 1) - np.where(both, root[..., :-1], 0)
        missing = np.full((n, agents, max(k - agents, 0)), -1)
        return np.concatenate([ids[..., :k], missing], -1), (gap < 1e-5).any(-1) & state["alive"]

    def blocks(self, state, seen):
        """Return `[n, agents, 7, seen]`: a block for each feature, with zeros for no agent."""
        env = self.env
        per = dict.fromkeys(("x", "y"), np.sqrt(2) * env.length) | {"heading": 2 * np.pi}
        per |= dict.fromkeys(("speed", "acceleration"), env.max_speed + 1e-10)
        row = np.arange(len(seen))[:, None, None]
        blocks = [
            (state[name][row, seen] - state[name][:, :, None]) / F(per[name]) for name in FEATURES
        ]
        blocks += [self.tagger[seen].astype(F), state["alive"][row, seen].astype(F)]
        return np.where((seen >= 0)[:, :, None], np.stack(blocks, 2), F(0))
