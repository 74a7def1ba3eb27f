"""Several taggers chase one runner over a grid of cells.

A game with which training on a GPU was first measured (WarpDrive, 2021), after its rules; written
anew. Everything in it is a whole number, so that it is the same to the bit wherever it runs. Left
out: the game in continuous space (`tag_continuous.py`).
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.arguments import flags, numbers, whole
from headrace.envs.kernels.library.picture import colors, of_agents
from headrace.spec import Array

_ZERO = np.float32(0)
_ONE = np.float32(1)
_PAID = ("wall_hit_penalty", "tag_reward", "tag_penalty", "step_cost")


@dataclass(eq=False)
class TagGridWorld(KernelEnv):
    """Taggers win when one of them stands on the runner's cell; the runner, when time is up.

    An agent stays (action 0) or moves to a cell beside it: x+1, x-1, y+1, y-1 (1 to 4). Where that
    would leave the grid it stays, and pays for it. When all have moved, a tagger on the runner's
    cell ends the episode; to swap places is no tag.

    Observation, full: x / length of all, y / length of all, type of all (0 tagger, 1 runner), which
    of them one is, and the share of the time that has passed: `4 * (num_taggers + 1) + 1` numbers.
    Otherwise one's own x and y, those of the other, one's own type, and the time: 6. The other is
    the runner to a tagger, and the nearest tagger (the first of equals) to the runner.

    Args:
        num_taggers: agents 0, 1, ...; the last agent is the runner.
        length: cells have coordinates 0 to `length`, both inclusive.
        max_episode_steps: time.
        wall_hit_penalty: paid by whoever runs into a wall.
        tag_reward: for every tagger, when the runner is tagged.
        tag_penalty: paid by the runner, when it is tagged.
        step_cost: paid by every tagger, and had by the runner, at each step without a tag.
        full_observation: whether everybody sees everybody.
        fixed_start: taggers begin in the middle, and not anywhere inside; the runner at (0, 0).

    Raises:
        UsageError: an argument is not what it can be.
    """

    action_space = gymnasium.spaces.Discrete(5)
    resets: ClassVar[tuple[str, ...]] = ("place",)
    phases: ClassVar[tuple[str, ...]] = ("move", "tag", "pay", "observe")

    num_taggers: int = 10
    length: int = 10
    max_episode_steps: int = 100
    _: KW_ONLY
    wall_hit_penalty: float = 0.1
    tag_reward: float = 10.0
    tag_penalty: float = 2.0
    step_cost: float = 0.01
    full_observation: bool = True
    fixed_start: bool = False

    def __post_init__(self) -> None:
        whole(self, "num_taggers", "max_episode_steps", least=1)
        whole(self, "length", least=2)
        numbers(self, *_PAID, least=0)
        flags(self, "full_observation", "fixed_start")
        self.agents = {"tagger": self.num_taggers, "runner": 1}
        self.agent_state = {"x": np.int32, "y": np.int32}
        self.constants = {
            "num_taggers": np.int32(self.num_taggers),
            "length": np.int32(self.length),
            "size": np.float32(self.length),
            "inside": np.float32(self.length - 1),  # so many cells between two walls
            "time": np.float32(self.max_episode_steps),
            "full": np.bool_(self.full_observation),
            "fixed_start": np.bool_(self.fixed_start),
        } | {name: np.float32(getattr(self, name)) for name in _PAID}
        size = 4 * (self.num_taggers + 1) + 1 if self.full_observation else 6
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,), np.float32)

    def draw(self, world: Mapping[str, Array]) -> Array:
        """See `KernelEnv`; the runner lies over the taggers, grey once it is tagged."""
        is_tagger = np.arange(self.num_agents) < self.num_taggers
        shades = colors(is_tagger, is_tagger | ~world["terminated"])
        return of_agents(world["x"], world["y"], shades, self.length)

    @staticmethod
    def place(w: Any, e: int, i: int) -> None:
        """Taggers anywhere but at the walls, the runner in the corner."""
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
        """To the cell beside, unless there is a wall."""
        action = w.action[e, i]
        x = w.x[e, i] + (action == 1) - (action == 2)
        y = w.y[e, i] + (action == 3) - (action == 4)
        w.x[e, i] = min(max(x, 0), w.length)
        w.y[e, i] = min(max(y, 0), w.length)
        if w.x[e, i] != x or w.y[e, i] != y:
            w.reward[e, i] = -w.wall_hit_penalty

    @staticmethod
    def tag(w: Any, e: int) -> None:
        """Whether a tagger stands where the runner does."""
        runner = w.num_taggers
        for i in range(w.num_taggers):
            if w.x[e, i] == w.x[e, runner] and w.y[e, i] == w.y[e, runner]:
                w.terminated[e] = True

    @staticmethod
    def pay(w: Any, e: int, i: int) -> None:
        """What one side has the other one pays; all taggers alike."""
        is_tagger = i < w.num_taggers
        if w.terminated[e]:
            w.reward[e, i] += w.tag_reward if is_tagger else -w.tag_penalty
        else:
            w.reward[e, i] += -w.step_cost if is_tagger else w.step_cost

    @staticmethod
    def observe(w: Any, e: int, i: int, out: Any) -> None:
        """Everybody, or one other."""
        if w.full:
            _see_all(w, e, i, out)
        else:
            _see_one(w, e, i, out)


def _see_all(w: Any, e: int, i: int, out: Any) -> None:
    num_agents = w.num_taggers + 1
    for j in range(num_agents):
        out[j] = np.float32(w.x[e, j]) / w.size
        out[num_agents + j] = np.float32(w.y[e, j]) / w.size
        out[2 * num_agents + j] = _ONE if j == w.num_taggers else _ZERO
        out[3 * num_agents + j] = _ONE if j == i else _ZERO
    out[4 * num_agents] = np.float32(w.step[e]) / w.time


def _see_one(w: Any, e: int, i: int, out: Any) -> None:
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
    """The first of the nearest ones."""
    nearest = 0
    least = 0
    for j in range(w.num_taggers):
        x, y = w.x[e, j] - w.x[e, i], w.y[e, j] - w.y[e, i]
        distance = x * x + y * y
        if j == 0 or distance < least:
            nearest, least = j, distance
    return nearest
