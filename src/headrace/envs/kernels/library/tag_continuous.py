"""Taggers chase runners over a square: all of them steer by turning and by accelerating.

A game with which training on a GPU was first measured (WarpDrive, 2021), after its rules; written
anew. Left out: the game on a grid (`tag_gridworld.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.arguments import above_zero, flags, numbers, whole
from headrace.envs.kernels.library.picture import colors, of_agents
from headrace.spec import Array

_ZERO = np.float32(0)
_ONE = np.float32(1)
_FOUR = np.float32(4)
_RIGHT_ANGLE = np.float32(math.pi / 2)
_FAR = np.float32(np.inf)
_MOST = np.finfo(np.float32).max
_FULL_TURN = np.float32(2 * math.pi)
_PER_TURN = np.float32(1 / (2 * math.pi))
_EPSILON = 1e-10  # of the rules: `max_speed` may be 0


@dataclass(eq=False)
class TagContinuous(KernelEnv):
    """A tagger tags each runner within its reach that it is the nearest tagger to.

    Action: `(a, b)`, entries of two tables: entry 0 of each changes nothing, the others lie evenly
    between the bounds. `a` changes the acceleration, by which the speed changes at each step; `b`
    turns. Speeds are 0 to `max_speed` times one's skill; at either end the acceleration is lost.

    Observation, of each other that is seen: x and y, relative to one's own, in diagonals of the
    square; speed and acceleration, relative, in `max_speed`; heading, relative, in full turns; type
    (0 runner, 1 tagger), and whether it is in the game. First the first of these of all others,
    then the second, ...; last the share of the time that has passed. Seen are all others in order
    of their ids, or the nearest that are in the game in order of distance (of equals, the lower id
    first), then zeros. Whoever has left the game sees zeros (if it sees all: but for types, and for
    who is in the game).

    Args:
        num_taggers, num_runners: how many.
        length: of a side of the square.
        max_episode_steps: time.
        min_acceleration, max_acceleration, num_acceleration_levels: the table of accelerations.
        min_turn, max_turn, num_turn_levels: the table of turns, in radians.
        max_speed, tagger_skill, runner_skill: how fast one can be.
        full_observation: whether everybody sees everybody.
        num_other_agents_observed: how many are seen otherwise.
        tagging_distance: how far a tagger reaches, in sides of the square.
        tag_reward, tag_penalty: for the tagger and for the runner (0 or less), at each tag.
        end_of_game_reward: for runners that are in the game when time is up.
        step_penalty, step_reward: at each step for taggers (0 or less) and for runners.
        edge_hit_penalty: at each step on which one runs into an edge (0 or less).
        runner_exits_game_after_tagged: whether a runner that was tagged leaves the game. Otherwise
            it pays at each step within reach.
        fixed_roles: whether agents 0, 1, ... are the taggers. Otherwise it is drawn who they are,
            once, and all agents are of one role, `agent`.
        fixed_start: whether all episodes begin with the same positions and headings, drawn once.
        layout_seed: of what is drawn once. It does not depend on the run's seed, so that an
            evaluation plays the game that was trained for.

    Attributes:
        is_tagger: `[agents]` bool, by id.

    Raises:
        UsageError: an argument is not what it can be.
    """

    resets: ClassVar[tuple[str, ...]] = ("place",)
    phases: ClassVar[tuple[str, ...]] = ("move", "observe", "reach", "pay", "end")

    num_taggers: int = 1
    num_runners: int = 10
    length: float = 10.0
    max_episode_steps: int = 100
    _: KW_ONLY
    min_acceleration: float = -1.0
    max_acceleration: float = 1.0
    num_acceleration_levels: int = 10
    min_turn: float = -math.pi / 2
    max_turn: float = math.pi / 2
    num_turn_levels: int = 10
    max_speed: float = 1.0
    tagger_skill: float = 1.0
    runner_skill: float = 1.0
    full_observation: bool = True
    num_other_agents_observed: int = 2
    tagging_distance: float = 0.01
    tag_reward: float = 1.0
    tag_penalty: float = -1.0
    end_of_game_reward: float = 1.0
    step_penalty: float = 0.0
    step_reward: float = 0.0
    edge_hit_penalty: float = 0.0
    runner_exits_game_after_tagged: bool = True
    fixed_roles: bool = True
    fixed_start: bool = False
    layout_seed: int = 0

    def __post_init__(self) -> None:
        self._check()
        num_agents, seen = self.num_taggers + self.num_runners, self.num_other_agents_observed
        once = np.random.default_rng(self.layout_seed)
        self.agents = {"tagger": self.num_taggers, "runner": self.num_runners}
        taggers = np.arange(self.num_taggers)
        if not self.fixed_roles:
            self.agents = {"agent": num_agents}
            taggers = np.sort(once.choice(num_agents, self.num_taggers, replace=False))
        self.is_tagger: Array = np.isin(np.arange(num_agents), taggers)
        self.agent_state = {
            **dict.fromkeys(("x", "y", "speed", "acceleration", "heading"), np.float32),
            "tagged_by": np.int64,
            # In a partial observation: squared distances to all, the least of them, and whose
            "distance": (np.float32, (1 if self.full_observation else num_agents,)),
            "near": (np.float32, (seen,)),
            "nearest": (np.int64, (seen,)),
        }
        self.scratch = ("tagged_by", "distance", "near", "nearest")
        tables = {
            "top_speed": self._by_role(self.tagger_skill, self.runner_skill) * self.max_speed,
            "step_reward": self._by_role(self.step_penalty, self.step_reward),
            "accelerations": _table(
                self.min_acceleration, self.max_acceleration, self.num_acceleration_levels
            ),
            "turns": np.fmod(
                _table(self.min_turn, self.max_turn, self.num_turn_levels), 2 * math.pi
            ),
            "start": once.random((num_agents, 3), np.float32),
        }
        self.constants = {
            **self._numbers(),
            **{name: table.astype(np.float32) for name, table in tables.items()},
            "is_tagger": self.is_tagger,
            "taggers": taggers,
        }
        size = 7 * (num_agents - 1 if self.full_observation else seen) + 1
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete(
            [self.num_acceleration_levels + 1, self.num_turn_levels + 1]
        )

    def _check(self) -> None:
        """UsageError unless all arguments are what they can be."""
        whole(self, "num_taggers", "num_runners", "max_episode_steps", least=1)
        whole(self, "num_acceleration_levels", "num_turn_levels", least=1)
        whole(self, "num_other_agents_observed", least=1)
        whole(self, "layout_seed", least=0)
        above_zero(self, "length")
        numbers(self, "max_speed", "tagger_skill", "runner_skill", least=0)
        numbers(self, "tagging_distance", "tag_reward", "end_of_game_reward", least=0)
        numbers(self, "step_reward", least=0)
        numbers(self, "tag_penalty", "step_penalty", "edge_hit_penalty", most=0)
        for name in ("acceleration", "turn"):
            numbers(self, f"min_{name}")
            numbers(self, f"max_{name}", least=getattr(self, f"min_{name}"))
        flags(self, "full_observation", "runner_exits_game_after_tagged")
        flags(self, "fixed_roles", "fixed_start")

    def _numbers(self) -> dict[str, np.generic]:
        """Constants that are the same for all agents."""
        return {
            "num_agents": np.int64(self.num_taggers + self.num_runners),
            "num_taggers": np.int64(self.num_taggers),
            "num_seen": np.int64(self.num_other_agents_observed),
            "limit": np.int32(self.max_episode_steps),
            "time": np.float32(self.max_episode_steps),
            "length": np.float32(self.length),
            "tag_reward": np.float32(self.tag_reward),
            "tag_penalty": np.float32(self.tag_penalty),
            "end_of_game_reward": np.float32(self.end_of_game_reward),
            "edge_hit_penalty": np.float32(self.edge_hit_penalty),
            "reach": np.float32((self.tagging_distance * self.length) ** 2),
            "per_diagonal": np.float32(1 / (math.sqrt(2) * self.length)),
            "per_speed": np.float32(1 / (self.max_speed + _EPSILON)),
            "full": np.bool_(self.full_observation),
            "exits": np.bool_(self.runner_exits_game_after_tagged),
            "fixed_start": np.bool_(self.fixed_start),
        }

    def _by_role(self, tagger: float, runner: float) -> Array:
        """`[agents]`: a number for each."""
        return np.where(self.is_tagger, tagger, runner)

    def draw(self, world: Mapping[str, Array]) -> Array:
        """See `KernelEnv`."""
        shades = colors(self.is_tagger, world["alive"])
        return of_agents(world["x"], world["y"], shades, self.length)

    @staticmethod
    def place(w: Any, e: int, i: int) -> None:
        """Anywhere, along an axis, at rest."""
        if w.fixed_start:
            x, y, heading = w.start[i, 0], w.start[i, 1], w.start[i, 2]
        else:
            x, y = uniform(w, e, 3 * i), uniform(w, e, 3 * i + 1)
            heading = uniform(w, e, 3 * i + 2)
        w.x[e, i] = x * w.length
        w.y[e, i] = y * w.length
        w.heading[e, i] = np.float32(int(heading * _FOUR)) * _RIGHT_ANGLE
        w.speed[e, i] = _ZERO
        w.acceleration[e, i] = _ZERO

    @staticmethod
    def move(w: Any, e: int, i: int) -> None:
        """Accelerate, turn, then go."""
        if not w.alive[e, i]:
            return
        top = w.top_speed[i]
        acceleration = w.acceleration[e, i] + w.accelerations[w.action[e, i, 0]]
        heading = _turned(w.heading[e, i], w.turns[w.action[e, i, 1]])
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
        """All others, or the nearest; before anybody is tagged."""
        if w.full:
            _see_all(w, e, i, out)
        else:
            _see_nearest(w, e, i, out)

    @staticmethod
    def reach(w: Any, e: int, i: int) -> None:
        """Which tagger a runner is tagged by: the nearest one, if it is near enough."""
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
        """Who was tagged pays and leaves; a tagger has its reward for each."""
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
                _leave(w, e, i)
        if w.step[e] == w.limit and w.alive[e, i]:
            w.reward[e, i] += w.end_of_game_reward

    @staticmethod
    def end(w: Any, e: int) -> None:
        """Whether there is nobody left to be tagged."""
        left = 0
        for i in range(w.num_agents):
            left += w.alive[e, i] and not w.is_tagger[i]
        w.terminated[e] = left == 0


def _table(least: float, most: float, levels: int) -> Array:
    """What actions add: 0, then evenly spaced."""
    return np.concatenate([[0.0], np.linspace(least, most, levels)])


def _turned(heading: Any, by: Any) -> Any:
    """A heading in [0, 2 pi) again, after less than a full turn."""
    heading += by
    if heading < _ZERO:
        heading += _FULL_TURN
    return heading - _FULL_TURN if heading >= _FULL_TURN else heading


def _leave(w: Any, e: int, i: int) -> None:
    w.alive[e, i] = False
    w.speed[e, i] = _ZERO
    w.acceleration[e, i] = _ZERO
    w.heading[e, i] = _ZERO


def _distance(w: Any, e: int, i: int, j: int) -> Any:
    """Squared: nobody needs the root."""
    x, y = w.x[e, j] - w.x[e, i], w.y[e, j] - w.y[e, i]
    return x * x + y * y


def _see(w: Any, e: int, i: int, j: int, out: Any, at: int, num_seen: int) -> None:
    """Agent j, as i sees it, at one place of each block of features."""
    out[at] = (w.x[e, j] - w.x[e, i]) * w.per_diagonal
    out[num_seen + at] = (w.y[e, j] - w.y[e, i]) * w.per_diagonal
    out[2 * num_seen + at] = (w.speed[e, j] - w.speed[e, i]) * w.per_speed
    out[3 * num_seen + at] = (w.acceleration[e, j] - w.acceleration[e, i]) * w.per_speed
    out[4 * num_seen + at] = (w.heading[e, j] - w.heading[e, i]) * _PER_TURN
    out[5 * num_seen + at] = _ONE if w.is_tagger[j] else _ZERO
    out[6 * num_seen + at] = _ONE if w.alive[e, j] else _ZERO


def _see_all(w: Any, e: int, i: int, out: Any) -> None:
    others = w.num_agents - 1
    for at in range(others):
        j = at if at < i else at + 1
        _see(w, e, i, j, out, at, others)
    out[7 * others] = np.float32(w.step[e]) / w.time
    if not w.alive[e, i]:
        for f in range(5 * others):
            out[f] = _ZERO
        out[7 * others] = _ZERO


def _see_nearest(w: Any, e: int, i: int, out: Any) -> None:
    found = 0
    time = _ZERO
    if w.alive[e, i]:
        found = _find_nearest(w, e, i)
        time = np.float32(w.step[e]) / w.time
    for at in range(found):
        _see(w, e, i, w.nearest[e, i, at], out, at, w.num_seen)
    for f in range(7):
        for at in range(found, w.num_seen):
            out[f * w.num_seen + at] = _ZERO
    out[7 * w.num_seen] = time


def _find_nearest(w: Any, e: int, i: int) -> Any:
    """Into `w.nearest`, in order; how many there are.

    Begun with whoever is there, mostly from the step before: hardly anybody else is nearer.
    """
    for j in range(w.num_agents):
        distance = _distance(w, e, i, j)
        w.distance[e, i, j] = distance if w.alive[e, j] else _FAR
    w.distance[e, i, i] = _FAR
    found = 0
    for at in range(w.num_seen):
        found = _take(w, e, i, w.nearest[e, i, at], found)
    bound = _bound(w, e, i, found)
    for j in range(w.num_agents):
        if w.distance[e, i, j] <= bound:
            found = _take(w, e, i, j, found)
            bound = _bound(w, e, i, found)
    return found


def _bound(w: Any, e: int, i: int, found: int) -> Any:
    """How near one must be to be taken."""
    return w.near[e, i, found - 1] if found == w.num_seen else _MOST


def _take(w: Any, e: int, i: int, j: int, found: int) -> Any:
    """Put j in its place among the nearest that were found; how many there are now."""
    distance = w.distance[e, i, j]
    if distance == _FAR:  # taken already, or out of the game
        return found
    w.distance[e, i, j] = _FAR
    at = found
    if found == w.num_seen:
        at = found - 1
        if not _is_before(w, e, i, distance, j, at):
            return found
    while at > 0 and _is_before(w, e, i, distance, j, at - 1):
        w.near[e, i, at] = w.near[e, i, at - 1]
        w.nearest[e, i, at] = w.nearest[e, i, at - 1]
        at -= 1
    w.near[e, i, at] = distance
    w.nearest[e, i, at] = j
    return min(found + 1, w.num_seen)


def _is_before(w: Any, e: int, i: int, distance: Any, j: int, at: int) -> Any:
    """Whether j comes before the one that is at this place."""
    near = w.near[e, i, at]
    return distance < near or (distance == near and j < w.nearest[e, i, at])
