"""The base class of kernel environments: typed state, and scalar functions that Numba can compile.

Each function takes the world `w`, whose arrays have a row for each environment, the row `e`, and
for a function of agents the agent's index `i`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from headrace.errors import UsageError
from headrace.seeding import philox
from headrace.spec import Array

Field = type[np.generic] | tuple[type[np.generic], tuple[int, ...]]
"""A dtype, or (dtype, shape), of what each environment or each agent has."""

BUILTIN_FIELDS = (
    "seed", "env_id", "episode", "step", "terminated", "action", "reward", "alive",
)  # fmt: skip
"""The fields of every world; see `KernelEnv`."""


class KernelEnv:
    """An environment, or a game of several agents, that is compiled: docs/kernels.md explains it.

    A subclass declares spaces, state and functions. The functions are static methods of `(w, e)`,
    called once for each environment, or of `(w, e, i)`, called for each agent of it. On a GPU the
    agents run at the same time: a function of `(w, e, i)` must not read what it writes for another
    agent. All calls of one function end before those of the next begin. The attributes of `w` are:

    - each name of `state`: `[n, *shape]`; of `agent_state`: `[n, agents, *shape]`;
    - each name of `constants`: a number, or a read-only array;
    - `action`: `[n]`, or `[n, parts]` unless the space is Discrete; in the units of the space;
    - `reward`: `[n]` float32, 0 when a step begins;
    - `terminated`: `[n]` bool, False when a step begins. Set it where the episode terminates;
    - `step`: `[n]`, steps of this episode, including the current one (0 in a reset);
    - `episode`: `[n]`, `env_id`: `[n]`, `seed`: what random numbers depend on (`uniform`).

    With `agents`, `action` and `reward` are `[n, agents, ...]`, and `alive` is `[n, agents]` bool,
    True when an episode begins. Clear it where an agent leaves the game: the agent's episode
    terminates, and its rows are not learned from until the next episode.

    To a compiler, a float32 times a Python float or an integer is a float64. Write constants as
    `np.float32(9.8)` and use the functions of `math`.

    Attributes:
        observation_space: a Box of one dimension, one agent's observation.
        action_space: Discrete, MultiDiscrete or a Box of one dimension, one agent's action.
        max_episode_steps: after so many an episode is truncated; 0: never.
        agents: role -> number of agents. Indices start with the first role's. {}: one agent, and
            functions of `(w, e)` only.
        state, agent_state: name -> `Field`.
        scratch: names of fields that no step reads from an earlier step. Checkpoints omit them.
        constants: name -> number with a NumPy dtype (`np.float32(0.1)`), or an array of them
            (`np.array([0.1, 0.2], np.float32)`), the same for all environments.
        resets: names of the functions that begin an episode, in order.
        phases: names of the functions of a step, in order. One of them is `observe`, of
            `(w, e, out)` or `(w, e, i, out)`, which writes an observation to `out`. It also runs
            after a reset; `reward`, `action` and `terminated` then have the last step's values.
    """

    observation_space: gymnasium.spaces.Box
    action_space: gymnasium.Space[Any]
    max_episode_steps: int = 0
    agents: Mapping[str, int] = {}
    state: Mapping[str, Field] = {}
    agent_state: Mapping[str, Field] = {}
    scratch: tuple[str, ...] = ()
    constants: Mapping[str, np.generic | Array] = {}
    resets: ClassVar[tuple[str, ...]] = ("reset_env",)
    phases: ClassVar[tuple[str, ...]] = ("step_env", "observe")

    def draw(self, world: Mapping[str, Array]) -> Array:
        """Draw one environment for a video: `[height, width, 3]` uint8. Subclasses may define it.

        `world` has the environment's arrays by name, without the axis of environments.
        """
        raise UsageError(
            f"{type(self).__name__} does not draw itself, which a video needs.\n"
            "Add draw(self, world), which returns a picture of one environment's arrays."
        )

    @property
    def num_agents(self) -> int:
        """Agents of one environment."""
        return sum(self.agents.values()) if self.agents else 1

    def function(self, name: str) -> Callable[..., None]:
        """Return one of the author's functions; UsageError unless it is a static method."""
        function = inspect.getattr_static(type(self), name, None)
        if not isinstance(function, staticmethod):
            problem = "there is none" if function is None else "it is not one"
            raise UsageError(
                f"{type(self).__name__}.{name}: expected a static method, and {problem}.\n"
                f"Write @staticmethod def {name}(w, e): ..."
            )
        return function.__func__

    def functions(self) -> dict[str, Callable[..., None]]:
        """Return all of the author's functions by name; errors as of `function`."""
        return {name: self.function(name) for name in (*self.resets, *self.phases)}

    def per_agent(self, name: str) -> bool:
        """Return whether a function is called for each agent; UsageError for other parameters."""
        count = len(inspect.signature(self.function(name)).parameters) - (name == "observe")
        if count not in ((2, 3) if self.agents else (2,)):
            out = ", out" if name == "observe" else ""
            each = f" or {name}(w, e, i{out}), called for each agent" if self.agents else ""
            raise UsageError(
                f"{type(self).__name__}.{name}{inspect.signature(self.function(name))}: expected "
                f"{name}(w, e{out}), called for each environment{each}."
            )
        return count == 3


_SCALE = np.float32(2.0**-24)
_EIGHT = np.uint64(8)
_FOUR = np.uint64(4)
_32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)


def uniform(w: Any, e: int, draw: int) -> Any:
    """Return a random float32 in [0, 1), the same on every machine and compiler.

    It is a function of the run's seed, the environment, its episode and step, and `draw`. Number
    the draws of a step 0, 1, ..., over all functions and agents.
    """
    number, episode = np.uint64(draw), np.uint64(w.episode[e])
    key = (w.seed, np.uint64(w.env_id[e]))
    counter = (number // _FOUR, np.uint64(w.step[e]), episode & _LOW32, episode >> _32)
    words = philox(key, counter)
    return np.float32(words[number % _FOUR] >> _EIGHT) * _SCALE
