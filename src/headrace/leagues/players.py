"""Players of a tournament: the policies of a run, a random player, or a script."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.config.policies import RANDOM
from headrace.envs.api import close_all
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import Plays
from headrace.evaluation.scripted import Script, ScriptedPolicy
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.leagues.league import FOLDER
from headrace.leagues.members import random_policy
from headrace.spec import GAMES, Agents, EnvSpec


@dataclass(frozen=True)
class Player:
    """A player, who can play each agent of a game.

    Attributes:
        name: in tables.
        policies: by name; no agents of one have different spaces.
        shares: the agents of each policy: together, all agents of the game.
    """

    name: str
    policies: Mapping[str, Plays]
    shares: Mapping[str, Agents]

    def parts(self, agents: Agents) -> Iterator[tuple[Agents, Plays]]:
        """Yield who plays these agents: a policy, and its part of them, in their order."""
        end = agents.first + agents.size
        for name, (first, size) in sorted(self.shares.items(), key=lambda item: item[1].first):
            begin, until = max(first, agents.first), min(first + size, end)
            if begin < until:
                yield Agents(begin, until - begin), self.policies[name]


def sides_of(spec: EnvSpec) -> list[Agents]:
    """Return the sides of a game: its roles or, with one role, each agent by itself.

    Raises:
        ConfigError: there is nobody to play against.
    """
    sizes = [size for _, size in spec.roles]
    if len(sizes) == 1:
        sizes = [1] * sizes[0]
    if len(sizes) < 2:
        raise ConfigError(
            f"{spec.id} has one agent: expected a game of two or more.\n"
            "To compare runs in it: headrace compare RUN RUN."
        )
    return [Agents(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def agent_names(maker: EnvMaker, spec: EnvSpec) -> list[str]:
    """Return the names of a game's agents, as PettingZoo's form of it has them."""
    if spec.interface not in GAMES:
        return [f"{role}_{i}" for role, size in spec.roles for i in range(size)]
    env = maker()
    close_all([env], lambda _: f"{maker.name}, which was made for the names of its agents")
    return [str(agent) for agent in env.possible_agents]


def random_player(spec: EnvSpec) -> Player:
    """Return the player that acts at random: uniformly among the choices that it has."""
    policies: dict[str, Plays] = {}
    for name, agents in _alike(spec).items():
        made = random_policy(spec.for_agents(agents))
        policies[name] = TrainedPolicy(made.spec, made.module, made.network, is_random=True)
    return Player(RANDOM, policies, _alike(spec))


def scripted_player(script: Script, name: str, spec: EnvSpec, agents: list[str]) -> Player:
    """Return the player that a script makes.

    Args:
        agents: the names of all agents.

    Raises:
        ConfigError: the script cannot be called as a player.
    """
    shares = _alike(spec)
    policies = {
        share: ScriptedPolicy(script, name, spec.for_agents(part), agents)
        for share, part in shares.items()
    }
    return Player(name, policies, shares)


def first_snapshot(run_dir: Path) -> Path | None:
    """Return the first snapshot of a run's league; None: it has none."""
    return min((run_dir / FOLDER).glob("step_*"), default=None)


def _alike(spec: EnvSpec) -> dict[str, Agents]:
    """Return the agents whose spaces are the same, one after the other."""
    shares: dict[str, Agents] = {}
    firsts = [
        i
        for i in range(spec.num_agents)
        if not i or (spec.agent_spaces and spec.agent_spaces[i] != spec.agent_spaces[i - 1])
    ]
    for first, end in zip(firsts, [*firsts[1:], spec.num_agents], strict=True):
        shares[f"{first}:{end}"] = Agents(first, end - first)
    return shares
