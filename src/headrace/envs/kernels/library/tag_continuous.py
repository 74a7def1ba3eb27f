"""Taggers chase runners over a square, by the rules of WarpDrive's game (2021)."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np

from headrace.configclass import (
    Between,
    Expected,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    check_values,
)
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.picture import agent_colors, draw_agents
from headrace.errors import ConfigError
from headrace.spec import Array

_Finite = Annotated[float, Between(-math.inf), Expected("a finite number")]
_NonPositive = Annotated[float, Between(-math.inf, 0), Expected("a finite number, 0 or less")]

_ZERO = np.float32(0)
_ONE = np.float32(1)
_FOUR = np.float32(4)
_RIGHT_ANGLE = np.float32(math.pi / 2)
_FAR = np.float32(np.inf)
_MOST = np.finfo(np.float32).max
_FULL_TURN = np.float32(2 * math.pi)
_PER_TURN = np.float32(1 / (2 * math.pi))
_EPSILON = 1e-10  # as in WarpDrive, since `max_speed` may be 0


@dataclass(eq=False)
class TagContinuous(KernelEnv):
    """A runner is tagged by its nearest tagger, if that one is within the tagging distance.

    An action is `(a, b)`, indices into two tables. Entry 0 of each table is 0; the others are
    evenly spaced. `a` adds to the acceleration, which is added to the speed at each step; `b` adds
    to the heading. Speeds are between 0 and `max_speed` times the role's skill. At either bound the
    acceleration becomes 0.

    An observation has 7 features of each observed agent: x and y, relative, in diagonals of the
    square; speed and acceleration, relative, in `max_speed`; heading, relative, in full turns; role
    (0 runner, 1 tagger); and whether it is in the game. It has the first feature of all observed
    agents, then the second, ..., and last the fraction of the time limit that has passed. A full
    observation has all other agents by index. A partial one has the nearest agents in the game by
    distance (of equals, the lower index first), then zeros. An agent that has left the game
    observes zeros, except for roles and presence in a full observation.

    Args:
        min_acceleration, max_acceleration, num_acceleration_levels: the table of accelerations.
        min_turn, max_turn, num_turn_levels: the table of turns, in radians.
        num_other_agents_observed: agents of a partial observation.
        tagging_distance: in sides of the square.
        tag_reward, tag_penalty: of the tagger and the runner (0 or less) at each tag.
        end_of_game_reward: of runners that are in the game at the time limit.
        step_penalty, step_reward: of taggers (0 or less) and of runners at each step.
        edge_hit_penalty: of an agent that moves into an edge (0 or less).
        runner_exits_game_after_tagged: whether a tagged runner leaves the game. Otherwise it is
            tagged again at each step within the distance.
        fixed_roles: whether agents 0, 1, ... are the taggers. Otherwise the taggers are drawn once,
            and all agents have one role, `agent`.
        fixed_start: whether all episodes have the same random initial positions and headings.
        layout_seed: seed of the constructor's draws. It is independent of the run's seed, so that
            training and evaluation play the same game.

    Attributes:
        is_tagger: `[agents]` bool, by index.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    resets: ClassVar[tuple[str, ...]] = ("place",)
    phases: ClassVar[tuple[str, ...]] = ("move", "observe", "reach", "pay", "end")

    num_taggers: PositiveInt = 1
    num_runners: PositiveInt = 10
    length: Annotated[float, Between(1e-6)] = 10.0
    max_episode_steps: PositiveInt = 100
    _: KW_ONLY
    min_acceleration: _Finite = -1.0
    max_acceleration: _Finite = 1.0
    num_acceleration_levels: PositiveInt = 10
    min_turn: _Finite = -math.pi / 2
    max_turn: _Finite = math.pi / 2
    num_turn_levels: PositiveInt = 10
    max_speed: NonNegative = 1.0
    tagger_skill: NonNegative = 1.0
    runner_skill: NonNegative = 1.0
    full_observation: bool = True
    num_other_agents_observed: PositiveInt = 2
    tagging_distance: NonNegative = 0.01
    tag_reward: NonNegative = 1.0
    tag_penalty: _NonPositive = -1.0
    end_of_game_reward: NonNegative = 1.0
    step_penalty: _NonPositive = 0.0
    step_reward: NonNegative = 0.0
    edge_hit_penalty: _NonPositive = 0.0
    runner_exits_game_after_tagged: bool = True
    fixed_roles: bool = True
    fixed_start: bool = False
    layout_seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        self._check_arguments()
        num_agents, seen = self.num_taggers + self.num_runners, self.num_other_agents_observed
        rng = np.random.default_rng(self.layout_seed)
        self.agents = {"tagger": self.num_taggers, "runner": self.num_runners}
        taggers = np.arange(self.num_taggers)
        if not self.fixed_roles:
            self.agents = {"agent": num_agents}
            taggers = np.sort(rng.choice(num_agents, self.num_taggers, replace=False))
        self.is_tagger: Array = np.isin(np.arange(num_agents), taggers)
        self.agent_state = {
            **dict.fromkeys(("x", "y", "speed", "acceleration", "heading"), np.float32),
            "tagged_by": np.int64,
            # For partial observations: all squared distances, the nearest ones, and their agents
            "distance": (np.float32, (1 if self.full_observation else num_agents,)),
            "near": (np.float32, (seen,)),
            "nearest": (np.int64, (seen,)),
        }
        self.scratch = ("tagged_by", "distance", "near", "nearest")
        names = ("length", "tag_reward", "tag_penalty", "end_of_game_reward", "edge_hit_penalty")
        numbers = {name: getattr(self, name) for name in names} | {
            "time": self.max_episode_steps,
            "reach": (self.tagging_distance * self.length) ** 2,
            "per_diagonal": 1 / (math.sqrt(2) * self.length),
            "per_speed": 1 / (self.max_speed + _EPSILON),
        }
        tables = {
            "top_speed": self._by_role(self.tagger_skill, self.runner_skill) * self.max_speed,
            "step_reward": self._by_role(self.step_penalty, self.step_reward),
            "accelerations": _action_table(
                self.min_acceleration, self.max_acceleration, self.num_acceleration_levels
            ),
            "turns": np.fmod(
                _action_table(self.min_turn, self.max_turn, self.num_turn_levels), 2 * math.pi
            ),
            "start": rng.random((num_agents, 3), np.float32),
        }
        self.constants = {
            **{name: np.float32(number) for name, number in numbers.items()},
            **{name: table.astype(np.float32) for name, table in tables.items()},
            "num_agents": np.int64(num_agents),
            "num_taggers": np.int64(self.num_taggers),
            "num_seen": np.int64(seen),
            "limit": np.int32(self.max_episode_steps),
            "full": np.bool_(self.full_observation),
            "exits": np.bool_(self.runner_exits_game_after_tagged),
            "fixed_start": np.bool_(self.fixed_start),
            "is_tagger": self.is_tagger,
            "taggers": taggers,
        }
        size = 7 * (num_agents - 1 if self.full_observation else seen) + 1
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete(
            [self.num_acceleration_levels + 1, self.num_turn_levels + 1]
        )

    def _check_arguments(self) -> None:
        check_values(type(self), vars(self))
        for name in ("acceleration", "turn"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if high < low:
                given = f"max_{name}={high} ({type(self).__name__})"
                raise ConfigError(f"{given}: expected at least min_{name}={low}.")

    def _by_role(self, tagger: float, runner: float) -> Array:
        return np.where(self.is_tagger, tagger, runner)

    def draw(self, world: Mapping[str, Array]) -> Array:
        """Draw the picture of an observation's state; see `KernelEnv`."""
        colors = agent_colors(self.is_tagger, world["alive"])
        return draw_agents(world["x"], world["y"], colors, self.length)

    @staticmethod
    def place(w: Any, e: int, i: int) -> None:
        """Begin at a random position, heading along an axis, at rest."""
        if w.fixed_start:
            x, y, heading = w.start[i, 0], w.start[i, 1], w.start[i, 2]
        else:
            x, y = uniform(w, e, 3 * i), uniform(w, e, 3 * i + 1)
            heading = uniform(w, e, 3 * i + 2)
        w.x[e, i] = x * w.length
        w.y[e, i] = y * w.length
        w.heading[e, i] = np.float32(int(heading * _FOUR)) * _RIGHT_ANGLE
        w.speed[e, i] = w.acceleration[e, i] = _ZERO

    @staticmethod
    def move(w: Any, e: int, i: int) -> None:
        """Accelerate, turn, then move."""
        if not w.alive[e, i]:
            return
        top = w.top_speed[i]
        acceleration = w.acceleration[e, i] + w.accelerations[w.action[e, i, 0]]
        heading = _turn(w.heading[e, i], w.turns[w.action[e, i, 1]])
        speed = min(max(w.speed[e, i] + acceleration, _ZERO), top)
        if speed <= _ZERO or speed >= top:
            acceleration = _ZERO
        x = w.x[e, i] + speed * np.float32(math.cos(heading))
        y = w.y[e, i] + speed * np.float32(math.sin(heading))
        w.x[e, i] = min(max(x, _ZERO), w.length)
        w.y[e, i] = min(max(y, _ZERO), w.length)
        w.speed[e, i] = speed
        w.acceleration[e, i] = acceleration
        w.heading[e, i] = heading
        if w.x[e, i] != x or w.y[e, i] != y:
            w.reward[e, i] = w.edge_hit_penalty

    @staticmethod
    def observe(w: Any, e: int, i: int, out: Any) -> None:
        """Write all others, or the nearest; tags of this step come later."""
        if w.full:
            _observe_all(w, e, i, out)
        else:
            _observe_nearest(w, e, i, out)

    @staticmethod
    def reach(w: Any, e: int, i: int) -> None:
        """Find the tagger that tags a runner: the nearest, if it is within the tagging distance."""
        w.tagged_by[e, i] = -1
        if w.is_tagger[i] or not w.alive[e, i]:
            return
        least = w.reach
        for t in range(w.num_taggers):
            j = w.taggers[t]
            distance = _distance(w, e, i, j)
            if distance < least:
                least = distance
                w.tagged_by[e, i] = j

    @staticmethod
    def pay(w: Any, e: int, i: int) -> None:
        """Reward a tagger for each tag; penalize a tagged runner, which may leave the game."""
        if not w.alive[e, i]:
            return
        w.reward[e, i] += w.step_reward[i]
        if w.is_tagger[i]:
            tags = 0
            for j in range(w.num_agents):
                tags += w.tagged_by[e, j] == i
            w.reward[e, i] += np.float32(tags) * w.tag_reward
            return
        if w.tagged_by[e, i] >= 0:
            w.reward[e, i] += w.tag_penalty
            if w.exits:
                w.alive[e, i] = False
                w.speed[e, i] = w.acceleration[e, i] = w.heading[e, i] = _ZERO
        if w.step[e] == w.limit and w.alive[e, i]:
            w.reward[e, i] += w.end_of_game_reward

    @staticmethod
    def end(w: Any, e: int) -> None:
        """End the episode when no runner is left."""
        left = 0
        for i in range(w.num_agents):
            left += w.alive[e, i] and not w.is_tagger[i]
        w.terminated[e] = left == 0


def _action_table(least: float, most: float, levels: int) -> Array:
    return np.concatenate([[0.0], np.linspace(least, most, levels)])


def _turn(heading: Any, by: Any) -> Any:
    """Add less than a full turn to a heading; the result is in [0, 2 pi)."""
    heading += by
    if heading < _ZERO:
        heading += _FULL_TURN
    return heading - _FULL_TURN if heading >= _FULL_TURN else heading


def _distance(w: Any, e: int, i: int, j: int) -> Any:
    """Return the squared distance."""
    x, y = w.x[e, j] - w.x[e, i], w.y[e, j] - w.y[e, i]
    return x * x + y * y


def _write_features(w: Any, e: int, i: int, j: int, out: Any, at: int, num_seen: int) -> None:
    """Write the features of agent j, relative to i, at index `at` of each block of features."""
    out[at] = (w.x[e, j] - w.x[e, i]) * w.per_diagonal
    out[num_seen + at] = (w.y[e, j] - w.y[e, i]) * w.per_diagonal
    out[2 * num_seen + at] = (w.speed[e, j] - w.speed[e, i]) * w.per_speed
    out[3 * num_seen + at] = (w.acceleration[e, j] - w.acceleration[e, i]) * w.per_speed
    out[4 * num_seen + at] = (w.heading[e, j] - w.heading[e, i]) * _PER_TURN
    out[5 * num_seen + at] = _ONE if w.is_tagger[j] else _ZERO
    out[6 * num_seen + at] = _ONE if w.alive[e, j] else _ZERO


def _observe_all(w: Any, e: int, i: int, out: Any) -> None:
    others = w.num_agents - 1
    for at in range(others):
        j = at if at < i else at + 1
        _write_features(w, e, i, j, out, at, others)
    out[7 * others] = np.float32(w.step[e]) / w.time
    if not w.alive[e, i]:
        for f in range(5 * others):
            out[f] = _ZERO
        out[7 * others] = _ZERO


def _observe_nearest(w: Any, e: int, i: int, out: Any) -> None:
    count = 0
    time = _ZERO
    if w.alive[e, i]:
        count = _find_nearest(w, e, i)
        time = np.float32(w.step[e]) / w.time
    for at in range(count):
        _write_features(w, e, i, w.nearest[e, i, at], out, at, w.num_seen)
    for f in range(7):
        for at in range(count, w.num_seen):
            out[f * w.num_seen + at] = _ZERO
    out[7 * w.num_seen] = time


def _find_nearest(w: Any, e: int, i: int) -> Any:
    """Write the nearest agents in the game to `w.nearest`, in order, and return their number.

    The search starts with the nearest of the step before: few others are nearer.
    """
    for j in range(w.num_agents):
        distance = _distance(w, e, i, j)
        w.distance[e, i, j] = distance if w.alive[e, j] else _FAR
    w.distance[e, i, i] = _FAR
    count = 0
    for at in range(w.num_seen):
        count = _insert(w, e, i, w.nearest[e, i, at], count)
    bound = _distance_bound(w, e, i, count)
    for j in range(w.num_agents):
        if w.distance[e, i, j] <= bound:
            count = _insert(w, e, i, j, count)
            bound = _distance_bound(w, e, i, count)
    return count


def _distance_bound(w: Any, e: int, i: int, count: int) -> Any:
    """Return the greatest distance that still enters the list."""
    return w.near[e, i, count - 1] if count == w.num_seen else _MOST


def _insert(w: Any, e: int, i: int, j: int, count: int) -> Any:
    """Insert j into the sorted list of the nearest, and return the list's new length."""
    distance = w.distance[e, i, j]
    if distance == _FAR:  # in the list already, or out of the game
        return count
    w.distance[e, i, j] = _FAR
    at = count
    if count == w.num_seen:
        at = count - 1
        if not _precedes(w, e, i, distance, j, at):
            return count
    while at > 0 and _precedes(w, e, i, distance, j, at - 1):
        w.near[e, i, at] = w.near[e, i, at - 1]
        w.nearest[e, i, at] = w.nearest[e, i, at - 1]
        at -= 1
    w.near[e, i, at] = distance
    w.nearest[e, i, at] = j
    return min(count + 1, w.num_seen)


def _precedes(w: Any, e: int, i: int, distance: Any, j: int, at: int) -> Any:
    near = w.near[e, i, at]
    return distance < near or (distance == near and j < w.nearest[e, i, at])
