"""What the author of a kernel environment writes: a class of typed state and scalar functions.

The functions are plain Python in the subset that Numba compiles. The same ones run interpreted, to
debug them and as a reference, compiled on the CPU, and compiled on a GPU (`compiler.py`), for
thousands of environments at a time. Each gets the world `w`, whose arrays have one row per
environment, the row `e` of its environment, and, where it is called for each agent, the agent `i`.

Left out: the loop that calls them (`codegen.py`), compilers (`compiler.py`), memory
(`vector.py`).
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
"""A dtype, or (dtype, shape) of what there is of it in each environment, or of each agent."""

OWN_FIELDS = ("seed", "env_id", "episode", "step", "terminated", "action", "reward", "alive")
"""What every world has; see `KernelEnv`."""


class KernelEnv:
    """An environment, or a game of several agents, that is compiled.

    A subclass names its spaces, its state and its functions. The functions are static methods: of
    `(w, e)`, called once for each environment, or of `(w, e, i)`, called for each of its agents (on
    a GPU at the same time: within one function an agent must not read what another one writes).
    All calls of one function are done before those of the next begin. `w` has as attributes:

    - each name of `state`: `[n, *shape]`; of `agent_state`: `[n, agents, *shape]`;
    - each name of `constants`: a number, or an array that nobody writes to;
    - `action`: `[n]`, or `[n, parts]` unless the space is Discrete; as the space has it;
    - `reward`: `[n]` float32, 0 when a step begins;
    - `terminated`: `[n]` bool, False when a step begins: set it where the episode ends for good;
    - `step`: `[n]`, steps taken in this episode, the one under way included (0 in a reset);
    - `episode`: `[n]`, `env_id`: `[n]`, `seed`: what random numbers depend on (`uniform`).

    With `agents`, `action` and `reward` are `[n, agents, ...]`, and there is `alive`, `[n, agents]`
    bool, True when an episode begins: clear it where an agent leaves the game (its episode is
    terminated; nothing is learned from it until the next one begins).

    Time limits are not the functions' business: after `max_episode_steps` the episode is truncated.

    A float32 times a Python float, or any integer, is a float64 to a compiler. Write constants as
    `np.float32(9.8)`, use `math`'s functions, and let `headrace check-env` tell what is wider.

    Attributes:
        observation_space: a Box of one dimension, of one agent's observation.
        action_space: Discrete, MultiDiscrete or a Box of one dimension, of one agent.
        max_episode_steps: after so many the episode is truncated; 0: never.
        agents: role -> how many agents play it; ids go from the first role's on. {}: one agent,
            and functions of `(w, e)` only.
        state, agent_state: name -> `Field`.
        scratch: names among these whose values no step needs of an earlier one: they are not kept
            in checkpoints.
        constants: name -> number with a NumPy dtype (`np.float32(0.1)`), or a table of them
            (`np.array([0.1, 0.2], np.float32)`), the same for all environments.
        resets: names of the functions that begin an episode, in order.
        phases: names of the functions that make a step, in order. One of them is `observe`, of
            `(w, e, out)` or `(w, e, i, out)`: it writes an observation to `out`, and is called
            after a reset as well: where one came in the same step, `reward`, `action` and
            `terminated` are still those of the step before it.
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
        """A picture of one environment, for films: `[height, width, 3]` uint8.

        To be written by the author; here it is refused.

        Args:
            world: its arrays by name, each without the axis of environments.
        """
        raise UsageError(
            f"{type(self).__name__} does not draw itself, which a film needs.\n"
            "Give it a method draw(self, world), which makes a picture of one environment's arrays."
        )

    @property
    def num_agents(self) -> int:
        """Of one environment."""
        return sum(self.agents.values()) if self.agents else 1

    def function(self, name: str) -> Callable[..., None]:
        """One of the author's functions.

        Raises:
            UsageError: there is none, or it does not take what it is called with.
        """
        function = inspect.getattr_static(type(self), name, None)
        if not isinstance(function, staticmethod):
            found = "has none" if function is None else "it is not one"
            raise UsageError(
                f"{type(self).__name__}.{name}: expected a static method, and {found}.\n"
                f"Write @staticmethod def {name}(w, e): ..."
            )
        return function.__func__

    def per_agent(self, name: str) -> bool:
        """Whether a function is called for each agent; UsageError if its parameters are others."""
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
    """A random float32 in [0, 1), the same on every machine, whoever computes it.

    It depends on the run's seed, the environment, its episode and step, and on `draw`: number the
    draws of a step (over all functions and agents) from 0 on. Nothing is remembered: the same
    number comes again for the same draw.

    Args:
        w: the world.
        e: the environment.
        draw: index of the draw, 0 or more.
    """
    number, episode = np.uint64(draw), np.uint64(w.episode[e])
    key = (w.seed, np.uint64(w.env_id[e]))
    counter = (number // _FOUR, np.uint64(w.step[e]), episode & _LOW32, episode >> _32)
    words = philox(key, counter)
    return np.float32(words[number % _FOUR] >> _EIGHT) * _SCALE
