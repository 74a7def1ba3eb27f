"""Tournaments: each pair of players plays, and all are ranked by how often they won.

Left out: loading the players of runs (`tools/tournament.py`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.collectors.api import ShouldStop
from headrace.config.policies import RANDOM
from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import Evaluation, Plays, evaluate
from headrace.leagues.players import Player, sides_of
from headrace.leagues.ratings import interval, rate
from headrace.seeding import check_seed, derive
from headrace.spec import Agents, Array, EnvSpec

EPISODES = 200
_ROUND = 32  # episodes of a pair with the same seats; a stop loses one that is under way
_NUM_STEPS = 16  # at a time: many games are short
_MOST_SIDES = 3  # of which all ways to give them are played
_ALIKE = 1e-9  # of returns: they differ by rounding alone

Seating = tuple[int, ...]
"""Which of the two players plays each side: 0 or 1."""


@dataclass(frozen=True)
class Games:
    """The games of a pair of players: `i` and `j` are their indices.

    Attributes:
        wins, draws, losses: of the first one.
        mean_returns: of each: the mean over its agents.
    """

    i: int
    j: int
    wins: int = 0
    draws: int = 0
    losses: int = 0
    mean_returns: tuple[float, float] = (0.0, 0.0)

    @property
    def count(self) -> int:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """The first one's points: 1 for a win, 0.5 for a draw."""
        return self.wins + self.draws / 2

    def add(self, returns: Array) -> "Games":
        """Return these games and others, whose returns are `[n, 2]`."""
        first, second = returns.T
        alike = np.abs(first - second) <= _ALIKE * np.maximum(1.0, np.abs(returns).max(1))
        wins, draws = int((~alike & (first > second)).sum()), int(alike.sum())
        total = np.array(self.mean_returns) * self.count + returns.sum(0)
        means = (total / (self.count + len(returns))).tolist()
        return Games(
            self.i, self.j, self.wins + wins, self.draws + draws,
            self.losses + len(returns) - wins - draws, (means[0], means[1]),
        )  # fmt: skip


@dataclass(frozen=True)
class Tournament:
    """The result of a tournament.

    Attributes:
        players: their names.
        games: of each pair, in the order of players.
        was_stopped: before all games were played.
    """

    env: str
    players: tuple[str, ...]
    games: tuple[Games, ...]
    episodes: int
    stochastic: bool
    seed: int
    was_stopped: bool = False

    @property
    def points(self) -> Array:
        """`[n, n]`: what each player scored against each other."""
        points = np.zeros((len(self.players), len(self.players)))
        for of in self.games:
            points[of.i, of.j], points[of.j, of.i] = of.points, of.count - of.points
        return points

    @property
    def ratings(self) -> Array:
        """`[n]`: by Bradley and Terry's model on Elo's scale; the random player has 0."""
        anchor = self.players.index(RANDOM) if RANDOM in self.players else None
        return rate(self.points, anchor)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `headrace tournament --json`."""
        points, ratings = self.points, self.ratings
        counts = points.sum(1) + points.sum(0)
        return {
            "env": self.env,
            "episodes": self.episodes,
            "stochastic": self.stochastic,
            "seed": self.seed,
            "was_stopped": self.was_stopped,
            "players": [
                {
                    "name": name,
                    "rating": float(rating),
                    "games": int(count),
                    "score": float(scored / count) if count else None,
                }
                for name, rating, count, scored in zip(
                    self.players, ratings, counts, points.sum(1), strict=True
                )
            ],
            "pairs": [
                {
                    "players": [self.players[of.i], self.players[of.j]],
                    "games": of.count,
                    "score": of.points / of.count,
                    "interval": list(interval(of.points, of.count)),
                    "wins": of.wins,
                    "draws": of.draws,
                    "losses": of.losses,
                    "mean_returns": list(of.mean_returns),
                }
                for of in self.games
                if of.count
            ],
        }

    def describe(self) -> str:
        """Return two tables: ratings, and the games of each pair."""
        found = self.to_json()
        zero = RANDOM if RANDOM in self.players else "the mean"
        manner = "actions are sampled" if self.stochastic else "the likeliest actions"
        lines = [f"Ratings in {self.env}: {zero} is 0, 400 points are odds of 10 to 1; {manner}"]
        lines += [f"{'rating':>7}{'score':>7}{'games':>7}  player"]
        for player in sorted(found["players"], key=lambda each: -each["rating"]):
            score = "-" if player["score"] is None else f"{player['score']:.2f}"
            lines.append(
                f"{round(player['rating']):>+7}{score:>7}{player['games']:>7}  {player['name']}"
            )
        lines += ["", "Games: the first one's score (a win is 1, a draw 0.5), its 95 % interval"]
        lines += [
            f"{'games':>7}{'score':>7}{'interval':>14}{'wins':>7}{'draws':>7}{'losses':>8}"
            f"{'mean returns':>18}  players"
        ]
        for of in found["pairs"]:
            low, high = of["interval"]
            one, other = of["mean_returns"]
            lines.append(
                f"{of['games']:>7}{of['score']:>7.2f}{f'{low:.2f} - {high:.2f}':>14}"
                f"{of['wins']:>7}{of['draws']:>7}{of['losses']:>8}{f'{one:.4g} {other:.4g}':>18}"
                f"  {' : '.join(of['players'])}"
            )
        if self.was_stopped:
            lines += ["", "Stopped before all games were played: these are those of whole rounds."]
        return "\n".join(lines)


def seatings(num_sides: int) -> list[Seating]:
    """Return the ways to give a game's sides to two players, in which both have one.

    Of more than three sides, the first half and the others, and the reverse.
    """
    if num_sides > _MOST_SIDES:
        halves = tuple(int(side >= num_sides // 2) for side in range(num_sides))
        return [halves, tuple(1 - who for who in halves)]
    return [ways for ways in itertools.product((0, 1), repeat=num_sides) if len(set(ways)) == 2]


def play_tournament(
    players: Sequence[Player],
    maker: EnvMaker,
    spec: EnvSpec | None = None,
    *,
    episodes: int = EPISODES,
    stochastic: bool = True,
    seed: int = 0,
    stop: ShouldStop = lambda: False,
    say: Callable[[str], None] = lambda progress: None,
) -> Tournament:
    """Let each pair of players play, in all seats equally often.

    The episodes of all pairs and seats have the same seeds.

    Args:
        spec: of the environment; default: it is read.
        episodes: of each pair, rounded up to as many with each seating.
        stochastic: players sample their actions; or choose the likeliest.
        stop: asked between steps whether to stop, and return the whole rounds so far.

    Raises:
        ConfigError: fewer than two players, two of the same name, or a game of one agent.
        PlayerError: a script failed.
        EnvError: the environment failed, or its episodes do not end.
    """
    _check(players, episodes)
    check_seed(seed)
    spec = spec or env_spec(maker)
    sides = sides_of(spec)
    ways = seatings(len(sides))
    pairs = list(itertools.combinations(range(len(players)), 2))
    games = {pair: Games(*pair) for pair in pairs}
    rounds = _rounds(-(-episodes // len(ways)))
    was_stopped = False
    for (number, size), (i, j) in itertools.product(enumerate(rounds), pairs):
        two, found = (players[i], players[j]), list[Array]()
        say(f"Round {number + 1} of {len(rounds)}: {two[0].name} : {two[1].name}")
        for way in ways:
            played = _play(
                two, sides, way, maker, spec,
                episodes=size, stochastic=stochastic, seed=derive(seed, "league", number),
                stop=stop, say=say,
            )  # fmt: skip
            if was_stopped := played is None:
                break
            found.append(played)
        if was_stopped:
            break
        games[i, j] = games[i, j].add(np.concatenate(found))
    names_of = tuple(player.name for player in players)
    return Tournament(
        spec.id, names_of, tuple(games.values()), episodes, stochastic, seed, was_stopped
    )


def _check(players: Sequence[Player], episodes: int) -> None:
    names = [player.name for player in players]
    if len(names) < 2:
        raise ConfigError(f"A tournament of {names}: expected two players or more.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"The player {twice[0]} is there twice: expected others.")
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: expected at least 1.")


def _rounds(episodes: int) -> list[int]:
    """Return how many episodes each round has."""
    count = -(-episodes // _ROUND)
    return [episodes // count + (i < episodes % count) for i in range(count)]


def _play(
    two: tuple[Player, Player],
    sides: Sequence[Agents],
    way: Seating,
    maker: EnvMaker,
    spec: EnvSpec,
    **more: Any,
) -> Array | None:
    """Play episodes with a seating. Return both players' returns, `[episodes, 2]`; None: stopped.

    Args:
        more: arguments of `evaluate`.
    """
    policies: dict[str, Plays] = {}
    shares: dict[str, Agents] = {}
    whose = list[int]()
    for side, who in zip(sides, way, strict=True):
        for part, policy in two[who].parts(side):
            name = f"{part.first}:{part.first + part.size}"
            policies[name], shares[name] = policy, part
            whose.append(who)
    played = evaluate(policies, maker, spec=spec, shares=shares, num_steps=_NUM_STEPS, **more)
    return None if played is None else _returns(played, shares, np.array(whose))


def _returns(played: Evaluation, shares: Mapping[str, Agents], whose: Array) -> Array:
    """Return `[episodes, 2]`: means over each player's agents."""
    by_part = np.array([played.by_policy[name] for name in shares])
    sizes = np.array([part.size for part in shares.values()])
    means = [
        np.average(by_part[whose == who], axis=0, weights=sizes[whose == who]) for who in (0, 1)
    ]
    return np.stack(means, 1)
