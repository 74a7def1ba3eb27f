"""A game in PettingZoo's AEC form, which needs no PettingZoo; a plain loop; reading of moves."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np

from headrace.batch import each
from headrace.seeding import derive
from headrace.spec import PLAIN, ActionCodec
from tests.envs.games.support import GameError


class Table:
    """Players and a bank move in an order that is drawn; each is paid for what others do as well.

    By the seed: who sits down later, after how many moves each leaves, and how (terminated,
    truncated, or both). Who is still there after `length` moves is cut off. Players have their mask
    in the observation, the bank has it in `info`.
    """

    possible_agents = ["player_0", "player_1", "player_2", "bank_0"]  # noqa: RUF012
    metadata = {"render_modes": [], "name": "table_v0"}  # noqa: RUF012
    late = "player_2"

    def __init__(self, length=17):
        self.length, self.resets, self.random = length, [], np.random.default_rng(0)
        box, spaces = gym.spaces.Box(-100, 100, (3,), np.float64), gym.spaces
        mask = spaces.Box(0, 1, (4,), np.int8)
        player = spaces.Dict({"observation": box, "action_mask": mask}), spaces.Discrete(4)
        bank = spaces.Box(-100, 100, (2,), np.float32), spaces.MultiDiscrete([3, 2])
        self.spaces = {a: bank if a == "bank_0" else player for a in self.possible_agents}

    def observation_space(self, agent):
        return self.spaces[agent][0]

    def action_space(self, agent):
        return self.spaces[agent][1]

    def reset(self, seed=None, options=None):
        self.resets.append(seed)
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.moves, self.last_mover = 0, None
        draw = self.random.integers
        self.sits_down_after = int(draw(0, 4))
        self.agents = [a for a in self.possible_agents if a != self.late or draw(2)]
        self.leaves_after = {agent: int(draw(1, 9)) for agent in self.possible_agents}
        self.how = {agent: int(draw(1, 4)) for agent in self.possible_agents}
        self.own_moves = dict.fromkeys(self.possible_agents, 0)
        self.terminations, self.truncations, self.infos = {}, {}, {}
        self.rewards, self._cumulative_rewards = {}, {}
        for agent in self.agents:
            self._enter(agent)
        self._next()

    def _enter(self, agent):
        self.terminations[agent] = self.truncations[agent] = False
        self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}
        self._new_mask(agent)

    def _new_mask(self, agent):
        sizes = (3, 2) if agent == "bank_0" else (4,)
        bits = [self.random.integers(0, 2, size).astype(np.int8) for size in sizes]
        for part in bits:
            part[self.random.integers(len(part))] = 1
        if agent == "bank_0":
            self.infos[agent] = {"action_mask": tuple(bits)}
        else:
            self.infos[agent] = {"mask of it": bits[0]}

    def _next(self):
        dead = [a for a in self.agents if self.terminations[a] or self.truncations[a]]
        choices = dead or self.agents
        if choices:
            self.agent_selection = choices[int(self.random.integers(len(choices)))]

    def observe(self, agent):
        seen = np.array([self.moves, self.own_moves[agent], len(self.agents)])
        if agent == "bank_0":
            return seen[:2].astype(np.float32)
        is_on = agent == self.agent_selection and not self._is_dead(agent)
        mask = self.infos[agent]["mask of it"] if is_on else np.zeros(4, np.int8)
        return {"observation": seen.astype(np.float64), "action_mask": mask}

    def _is_dead(self, agent):
        return self.terminations[agent] or self.truncations[agent]

    def last(self, observe=True):
        agent = self.agent_selection
        return (
            self.observe(agent) if observe else None, self._cumulative_rewards[agent],
            self.terminations[agent], self.truncations[agent], self.infos[agent],
        )  # fmt: skip

    def agent_iter(self, max_iter=2**63):
        while self.agents and max_iter:
            yield self.agent_selection
            max_iter -= 1

    def step(self, action):
        mover = self.agent_selection
        if self._is_dead(mover):
            assert action is None
            self.agents.remove(mover)
            for of in (
                self.terminations, self.truncations, self.rewards, self._cumulative_rewards,
                self.infos,
            ):  # fmt: skip
                del of[mover]
            self.rewards = dict.fromkeys(self.rewards, 0.0)
            self._next()
            return
        self._check(mover, action)
        self._cumulative_rewards[mover] = 0.0
        self.moves += 1
        self.own_moves[mover] += 1
        self._pay(mover, float(np.sum(action)))
        self.last_mover = mover
        is_away = self.late not in self.agents and not self.own_moves[self.late]
        if is_away and self.moves == self.sits_down_after:
            self.agents.append(self.late)
            self._enter(self.late)
        if self.own_moves[mover] == self.leaves_after[mover]:
            self.terminations[mover] = bool(self.how[mover] & 1)
            self.truncations[mover] = bool(self.how[mover] & 2)
            if mover == "bank_0":
                self.infos[mover] = {}  # there may be no mask at the end
        if self.moves == self.length:
            for agent in self.agents:
                self.truncations[agent] = self.truncations[agent] or not self.terminations[agent]
        for agent in self.agents:
            if not self._is_dead(agent):
                self._new_mask(agent)
        self._next()

    def _check(self, mover, action):
        assert self.spaces[mover][1].contains(action), (mover, action)
        if mover == "bank_0":
            mask = self.infos[mover]["action_mask"]
            assert all(bits[of] for bits, of in zip(mask, action, strict=True)), (mask, action)
        else:
            mask = self.infos[mover]["mask of it"]
            assert mask[action], (mask, action)

    def _pay(self, mover, size):
        self.rewards = dict.fromkeys(self.rewards, 0.0)
        self.rewards[mover] += 1.0 + size
        if self.last_mover in self.rewards:
            self.rewards[self.last_mover] -= 0.5
        other = self.possible_agents[int(self.random.integers(4))]
        if other in self.rewards:
            self.rewards[other] += 0.25 * size
        for agent, paid in self.rewards.items():
            self._cumulative_rewards[agent] += paid

    def close(self):
        pass


def choose(vector, fragments, parts, t, rng):
    """Fill row t of the actions: at random among those that the masks allow."""
    for fragment, part in zip(fragments, parts, strict=True):
        spec = vector.spec.for_agents(part)
        rows = fragment.num_envs
        bits = np.ones((rows, sum(spec.action.nvec)), bool)
        if spec.mask_key:
            bits = fragment.obs[spec.mask_key][t].numpy().reshape(rows, -1) != 0
        noise, first, chosen = rng.random(bits.shape), 0, []
        for count in spec.action.nvec:
            choices = slice(first, first + count)
            chosen.append(np.where(bits[:, choices], noise[:, choices], -1).argmax(1))
            first += count
        action = chosen[0] if spec.action.kind == "discrete" else np.stack(chosen, 1)
        fragment.action[t] = fragment.action.new_tensor(action)


def played_plainly(make, spec, parts, actions, seed, num_steps, env_id):
    """Play games in turns as PettingZoo's documentation does: the moves of each column, in order.

    Args:
        make: makes a game.
        spec: of it.
        parts: agents of each policy.
        actions: `[T, n * size, ...]` of each part, as a policy emits them.
        seed: of the run.
        num_steps: T, moves of each game.
        env_id: of each game.

    Returns:
        For each part, the transitions of each column; and the episodes. Where a game raises
        `GameError`, the moves that wait, and the one before the failed one, are none; and another
        game is made.
    """
    columns = [[[] for _ in range(len(env_id) * part.size)] for part in parts]
    place = [(p, i) for p, part in enumerate(parts) for i in range(part.size)]
    episodes = []
    for e, env in enumerate(env_id):
        game = make()
        where = {
            agent: (p, e * parts[p].size + i)
            for agent, (p, i) in zip(game.possible_agents, place, strict=True)
        }
        t, episode = 0, -1
        while t < num_steps:
            episode, began, waits = episode + 1, t, {}
            game.reset(seed=derive(seed, "env", int(env), episode))
            total = dict.fromkeys(where, 0.0)
            for agent in game.agent_iter():
                obs, reward, terminated, truncated, info = game.last()
                p, column = where[agent]
                own = spec.for_agents(parts[p])
                seen = stored(own, obs, info)
                total[agent] += np.float32(reward)
                if has_moved := (move := waits.pop(agent, None)) is not None:
                    columns[p][column].append(
                        move | {
                            "reward": float(np.float32(reward)), "terminated": terminated,
                            "truncated": truncated, "next_obs": None if terminated else seen,
                        }
                    )  # fmt: skip
                if terminated or truncated:
                    game.step(None)
                    continue
                if t == num_steps:
                    break
                action = actions[p][t, column]
                waits[agent] = {"obs": seen, "action": action.tolist()}
                t += 1
                try:
                    game.step(ActionCodec(own.action).to_env(action[None])[0])
                except GameError:
                    del columns[p][column][len(columns[p][column]) - has_moved :]
                    game = make()
                    break
            else:
                returns = np.array(list(total.values()))
                means = [returns[part.first : part.first + part.size].mean() for part in parts]
                episodes.append((t - 1, int(env), t - began, means))
        game.close()
    return columns, sorted(episodes)


def stored(spec, obs, info):
    """An observation as it is in memory, as plain numbers."""
    if spec.mask_in_info:
        mask = info.get("action_mask")
        bits = np.ones(sum(spec.action.nvec)) if mask is None else np.concatenate(mask)
        obs = {PLAIN: obs, spec.mask_key: bits}
    dtypes = {key: part.dtype for key, part in spec.observation.leaves}
    return {key: np.asarray(of, dtypes[key]).tolist() for key, of in leaves(obs).items()}


def leaves(obs):
    return obs if isinstance(obs, dict) else {PLAIN: obs}


def plain(obs):
    """One observation as plain numbers, which can be compared."""
    return {key: np.asarray(array).tolist() for key, array in leaves(obs).items()}


def at(obs, t, c):
    return plain(each(lambda o: o[t, c], obs))


def columns_of(fragment):
    """A fragment's columns, copied, and its final observations as (step, column, observation)."""
    columns = {
        name: each(lambda o: o.numpy().copy(), array)
        for name, array in vars(fragment).items()
        if not name.startswith(("final_", "num_final"))
    }
    final_obs, step, row = fragment.finals()
    finals = [
        (t, c, each(lambda o, k=k: o[k].numpy(), final_obs))
        for k, (t, c) in enumerate(zip(step.tolist(), row.tolist(), strict=True))
    ]
    return SimpleNamespace(**columns), finals


class Moves:
    """The transitions of packed fragments: of each column, in order.

    Attributes:
        columns: for each, its transitions; `is_cut`: the fragment ends there for this column.
        cut: how many there are.
    """

    def __init__(self, num_columns):
        self.columns = [[] for _ in range(num_columns)]
        self.cut = 0
        self._waits = {}  # column -> its last transition, whose next observation comes

    def read(self, rows, finals):
        """Append a packed fragment, as a learner reads one."""
        num_steps, num_columns = rows.valid.shape
        found = {(j, c): plain(obs) for j, c, obs in finals}
        assert len(found) == len(finals), "each place once"
        for c in range(num_columns):
            if (waits := self._waits.pop(c, None)) is not None:
                assert waits["next_obs"] == at(rows.obs, 0, c), "it goes on there"
            for j in np.flatnonzero(rows.valid[:, c]).tolist():
                is_followed = j == num_steps - 1 or bool(rows.valid[j + 1, c])
                move = {
                    "obs": at(rows.obs, j, c),
                    "action": rows.action[j, c].tolist(),
                    "policy_version": int(rows.policy_version[j, c]),
                    "outputs": {name: x[j, c].tolist() for name, x in rows.stored_outputs.items()},
                    "reward": float(rows.reward[j, c]),
                    "terminated": bool(rows.terminated[j, c]),
                    "truncated": bool(rows.truncated[j, c]),
                    "next_obs": at(rows.obs, j + 1, c),
                    "is_cut": False,
                }
                if move["terminated"]:
                    move["next_obs"] = None
                elif move["truncated"]:
                    move |= {"next_obs": found.pop((j, c)), "is_cut": not is_followed}
                    self.cut += not is_followed
                else:
                    assert is_followed, "what follows a transition is one"
                    if j == num_steps - 1:
                        self._waits[c] = move
                self.columns[c].append(move)
            none = ~rows.valid[:, c]
            for name in ("reward", "terminated"):
                assert not getattr(rows, name)[none, c].any(), name
        assert not found, "final observations of truncated transitions only"

    def assert_equal(self, expected):
        """All moves but the last ones, each once; where a column is cut off, it is truncated."""
        for moves, wanted in zip(self.columns, expected, strict=True):
            for move, of in zip(moves, wanted, strict=False):
                is_cut = move["is_cut"] and not of["truncated"]
                assert {key: move[key] for key in of} == of | (
                    {"truncated": True} if is_cut else {}
                )
            assert 0 <= len(wanted) - len(moves) <= 1  # one that found no room waits
