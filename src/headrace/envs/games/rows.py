"""The rows of one policy's agents: what each observes now, and their columns of a fragment.

Left out: stepping (`vector.py`), and the moves of a game in turns as transitions (`moves.py`).
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.batch import Fragment, each
from headrace.envs.spaces.obs_reader import ObsReader, leaf
from headrace.spec import PLAIN, ActionCodec, Agents, Array, EnvSpec, Space


def absent(space: Space) -> Array:
    """Return the observation of an agent that is not there; a choice must be within its space."""
    array = np.zeros(space.shape, space.dtype)
    if space.nvec:
        array[...] = np.reshape(space.start, space.shape)
    return array


class AgentRows:
    """The rows of a policy's agents in n games, and the fragment that they are written to.

    Attributes:
        leaves: by key, `[n, size, ...]`: the current observations of `size` agents in each game.
        plain: the space of an observation that is no Dict; None: it is one.
        rows: the bound fragment's columns as arrays, `[T, n * size, ...]`.
    """

    rows: Any

    def __init__(self, spec: EnvSpec, agents: Agents, n: int) -> None:
        self.agents, self.spec, self.reader = agents, spec, ObsReader(spec)
        self._codec = ActionCodec(spec.action)
        self._absent = {key: absent(part) for key, part in spec.observation.leaves}
        if spec.mask_key:  # else the policy of one who waits would have no action to choose
            self._absent[spec.mask_key][...] = 1
        self.leaves = {
            key: np.broadcast_to(array, (n, agents.size, *array.shape)).copy()
            for key, array in self._absent.items()
        }
        if spec.id_key:
            self.leaves[spec.id_key][:] = np.arange(agents.first, agents.first + agents.size)
            del self._absent[spec.id_key]  # it stays
        self.action_size = spec.action.size
        self.plain = dict(spec.observation.leaves).get(PLAIN)
        self._finals: list[tuple[int, int, dict[str, Array]]] = []

    def bind(self, fragment: Fragment) -> None:
        """Write to this fragment, and fill row 0 of its observations."""
        columns = vars(fragment).items()
        self.rows = SimpleNamespace(**{k: each(lambda o: o.numpy(), v) for k, v in columns})
        self._finals = []
        self.write_obs(0)

    def actions(self, t: int) -> Array:
        """Return row t of actions, in the units of the environment: `[n, size, action_size]`."""
        values = self._codec.to_env(self.rows.action[t])
        return values.reshape(-1, self.agents.size, self.action_size)

    def element(self, values: Array) -> Any:
        """Return one action, `[action_size]`, as the environment takes it."""
        space = self.spec.action
        typed = values.astype(space.dtype)
        if space.parts:
            return self._codec.elements(typed[None])[0]
        return typed.reshape(space.shape)[()]

    def put(self, e: int, i: int, obs: Any, info: Any, *, ended: bool = False) -> None:
        """Write what agent i of game e observes; KeyError if a part or the mask is missing."""
        place = e, i - self.agents.first
        self.reader.put(self._current, place, obs, info, ended=ended)

    def put_state(self, e: int, i: int, state: Array) -> None:
        """Write the state of game e, as the critic of agent i sees it."""
        self.leaves[self.spec.state_key][e, i - self.agents.first] = state

    def clear(self, e: int, i: int) -> None:
        """Note that agent i of game e is not there."""
        for key, array in self._absent.items():
            self.leaves[key][e, i - self.agents.first] = array

    def write_obs(self, t: int) -> None:
        """Write row t of observations."""
        for key, array in self.leaves.items():
            row = leaf(self.rows.obs, key)[t]
            row[...] = array.reshape(row.shape)

    def keep_final(self, t: int, e: int, i: int) -> None:
        """Keep what agent i of game e observes: its episode was truncated in step t."""
        j = i - self.agents.first
        now = {key: array[e, j].copy() for key, array in self.leaves.items()}
        self._finals.append((t, e * self.agents.size + j, now))

    def cut_before(self, t: int, e: int) -> None:
        """Truncate the episodes of game e before step t, which is none."""
        rows, size = self.rows, self.agents.size
        if not t:
            return
        for column in range(e * size, (e + 1) * size):
            ended = rows.terminated[t - 1, column] or rows.truncated[t - 1, column]
            if rows.valid[t - 1, column] and not ended:
                rows.truncated[t - 1, column] = True
                before = {key: leaf(rows.obs, key)[t, column].copy() for key in self.leaves}
                self._finals.append((t - 1, column, before))

    def take_finals(self) -> list[tuple[int, int, dict[str, Array]]]:
        """Return (step, column, observation) of what was kept, and forget it."""
        finals, self._finals = self._finals, []
        return sorted(finals, key=lambda final: final[:2])

    def write_finals(self, finals: list[tuple[int, int, dict[str, Array]]]) -> None:
        """Write the final observations of the fragment."""
        rows = self.rows
        rows.num_final[0] = len(finals)
        for k, (step, column, obs) in enumerate(finals):
            rows.final_step[k], rows.final_row[k] = step, column
            for key, array in obs.items():
                leaf(rows.final_obs, key)[k] = array

    def bad_values(self) -> Array:
        """Return `[n, size]` bool: the observation is not finite, or no choice of its space."""
        shape = next(iter(self.leaves.values())).shape[:2]
        bad = np.zeros(shape, bool)
        for array in self.leaves.values():
            if array.dtype.kind == "f":
                bad |= ~np.isfinite(array).reshape(*shape, -1).all(-1)
        no_choice = self.reader.no_choice(self._current, shape)
        return bad if no_choice is None else bad | no_choice

    def without_action(self) -> list[tuple[slice, Array]]:
        """Return choices of an action, and whom the mask forbids them all: `[n, size]` bool."""
        shape = next(iter(self.leaves.values())).shape[:2]
        return self.reader.without_action(self._current, shape)

    def observation(self, e: int, i: int) -> Any:
        """Return what agent i of game e observes, for messages."""
        now = {key: array[e, i - self.agents.first] for key, array in self.leaves.items()}
        return now if self.spec.state_key else now.get(PLAIN, now)

    @property
    def _current(self) -> Any:
        return self.leaves if self.spec.observation.kind == "dict" else self.leaves[PLAIN]
