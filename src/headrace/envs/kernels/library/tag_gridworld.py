"""Several taggers chase one runner over a grid of cells, by the rules of WarpDrive's game (2021).

The state is of whole numbers, so that results are equal to the bit on every device.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np

from headrace.configclass import Between, NonNegative, PositiveInt, check_values
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.picture import agent_colors, draw_agents
from headrace.spec import Array

_ZERO = np.float32(0)
_ONE = np.float32(1)
_REWARDS = ("wall_hit_penalty", "tag_reward", "tag_penalty", "step_cost")


@dataclass(eq=False)
class TagGridWorld(KernelEnv):
    """Taggers win when one of them reaches the runner's cell; the runner wins at the time limit.

    Action 0 stays; 1 to 4 move to a neighbouring cell: x+1, x-1, y+1, y-1. An agent that would
    leave the grid stays, and pays a penalty. After all agents have moved, a tagger on the runner's
    cell ends the episode. Swapping cells is no tag.

    A full observation has `4 * (num_taggers + 1) + 1` numbers: x / length of all agents, y / length
    of all, the role of all (0 tagger, 1 runner), 1 for the observer among all, and the fraction of
    the time limit that has passed. A partial observation has 6: the observer's x and y, another
    agent's x and y, the observer's role, and the time. A tagger observes the runner. The runner
    observes the nearest tagger (of equals, the first).

    Args:
        num_taggers: agents 0, 1, ... are taggers. The last agent is the runner.
        length: cells have coordinates from 0 to `length`, inclusive.
        wall_hit_penalty: subtracted from the reward of an agent that moves into a wall.
        tag_penalty: subtracted from the runner's reward when it is tagged.
        step_cost: at each step without a tag, every tagger loses it and the runner gains it.
        fixed_start: taggers begin in the middle. Otherwise at random, but not at a wall. The
            runner always begins at (0, 0).

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    action_space = gymnasium.spaces.Discrete(5)
    resets: ClassVar[tuple[str, ...]] = ("place",)
    phases: ClassVar[tuple[str, ...]] = ("move", "tag", "pay", "observe")

    num_taggers: PositiveInt = 10
    length: Annotated[int, Between(2)] = 10
    max_episode_steps: PositiveInt = 100
    _: KW_ONLY
    wall_hit_penalty: NonNegative = 0.1
    tag_reward: NonNegative = 10.0
    tag_penalty: NonNegative = 2.0
    step_cost: NonNegative = 0.01
    full_observation: bool = True
    fixed_start: bool = False

    def __post_init__(self) -> None:
        check_values(type(self), vars(self))
        self.agents = {"tagger": self.num_taggers, "runner": 1}
        self.agent_state = {"x": np.int32, "y": np.int32}
        self.constants = {
            "num_taggers": np.int32(self.num_taggers),
            "length": np.int32(self.length),
            "size": np.float32(self.length),
            "inside": np.float32(self.length - 1),  # cells between two walls
            "time": np.float32(self.max_episode_steps),
            "full": np.bool_(self.full_observation),
            "fixed_start": np.bool_(self.fixed_start),
        } | {name: np.float32(getattr(self, name)) for name in _REWARDS}
        size = 4 * (self.num_taggers + 1) + 1 if self.full_observation else 6
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,), np.float32)

    def draw(self, world: Mapping[str, Array]) -> Array:
        """Draw the runner above the taggers, grey once it is tagged; see `KernelEnv`."""
        is_tagger = np.arange(self.num_agents) < self.num_taggers
        colors = agent_colors(is_tagger, is_tagger | ~world["terminated"])
        return draw_agents(world["x"], world["y"], colors, self.length)

    @staticmethod
    def place(w: Any, e: int, i: int) -> None:
        """Place taggers away from the walls, and the runner in the corner."""
        if i == w.num_taggers:
            w.x[e, i] = 0
            w.y[e, i] = 0
        elif w.fixed_start:
            w.x[e, i] = w.length // 2
            w.y[e, i] = w.length // 2
        else:
            w.x[e, i] = 1 + int(uniform(w, e, 2 * i) * w.inside)
            w.y[e, i] = 1 + int(uniform(w, e, 2 * i + 1) * w.inside)

    @staticmethod
    def move(w: Any, e: int, i: int) -> None:
        """Move to the neighbouring cell, unless there is a wall."""
        action = w.action[e, i]
        x = w.x[e, i] + (action == 1) - (action == 2)
        y = w.y[e, i] + (action == 3) - (action == 4)
        w.x[e, i] = min(max(x, 0), w.length)
        w.y[e, i] = min(max(y, 0), w.length)
        if w.x[e, i] != x or w.y[e, i] != y:
            w.reward[e, i] = -w.wall_hit_penalty

    @staticmethod
    def tag(w: Any, e: int) -> None:
        """End the episode if a tagger is on the runner's cell."""
        runner = w.num_taggers
        for i in range(w.num_taggers):
            if w.x[e, i] == w.x[e, runner] and w.y[e, i] == w.y[e, runner]:
                w.terminated[e] = True

    @staticmethod
    def pay(w: Any, e: int, i: int) -> None:
        """Reward one role and charge the other; all taggers get the same."""
        is_tagger = i < w.num_taggers
        if w.terminated[e]:
            w.reward[e, i] += w.tag_reward if is_tagger else -w.tag_penalty
        else:
            w.reward[e, i] += -w.step_cost if is_tagger else w.step_cost

    @staticmethod
    def observe(w: Any, e: int, i: int, out: Any) -> None:
        """Write all agents, or the observer and another one."""
        if w.full:
            _observe_all(w, e, i, out)
        else:
            _observe_one(w, e, i, out)


def _observe_all(w: Any, e: int, i: int, out: Any) -> None:
    num_agents = w.num_taggers + 1
    for j in range(num_agents):
        out[j] = np.float32(w.x[e, j]) / w.size
        out[num_agents + j] = np.float32(w.y[e, j]) / w.size
        out[2 * num_agents + j] = _ONE if j == w.num_taggers else _ZERO
        out[3 * num_agents + j] = _ONE if j == i else _ZERO
    out[4 * num_agents] = np.float32(w.step[e]) / w.time


def _observe_one(w: Any, e: int, i: int, out: Any) -> None:
    other = w.num_taggers
    if i == w.num_taggers:
        other = _nearest_tagger(w, e, i)
    out[0] = np.float32(w.x[e, i]) / w.size
    out[1] = np.float32(w.y[e, i]) / w.size
    out[2] = np.float32(w.x[e, other]) / w.size
    out[3] = np.float32(w.y[e, other]) / w.size
    out[4] = _ONE if i == w.num_taggers else _ZERO
    out[5] = np.float32(w.step[e]) / w.time


def _nearest_tagger(w: Any, e: int, i: int) -> int:
    """Return the nearest tagger; of equals, the first."""
    nearest = 0
    least = 0
    for j in range(w.num_taggers):
        x, y = w.x[e, j] - w.x[e, i], w.y[e, j] - w.y[e, i]
        distance = x * x + y * y
        if j == 0 or distance < least:
            nearest, least = j, distance
    return nearest
