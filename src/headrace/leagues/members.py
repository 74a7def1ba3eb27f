"""The members of a league: snapshots of the run, policies of other runs, or a random player.

Left out: who of them is drawn (`league.py`), and how they act (`envs/games/opponents.py`).
"""

import io
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config.algorithms import ALGORITHMS, AlgorithmLike
from headrace.config.policies import RANDOM
from headrace.envs.games.opponents import MemberPolicy
from headrace.envs.games.seats import Pool
from headrace.errors import CheckpointError
from headrace.evaluation.trained_policies import TrainedPolicy, load_policies
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network
from headrace.spec import Agents, EnvSpec
from headrace.storage import checkpoint


@dataclass(frozen=True)
class MemberLoader:
    """Loads members, in any process: a `LoadMember`.

    Attributes:
        sides: the agents of each side, and what they observe and take.
        model, algorithm: the run's own, if it has some; those of other runs must be the same.
    """

    sides: Mapping[str, tuple[Agents, EnvSpec]]
    model: ModelFactory | None = None
    algorithm: AlgorithmLike | None = None

    def __call__(self, pool: Pool, member: int) -> dict[str, MemberPolicy]:
        """Load a member's policy for each side.

        Raises:
            CheckpointError: there is none, or it is of another game.
        """
        source = pool.sources[member]
        if (data := pool.data.get(member)) is None:
            return self.load(source)
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(folder, filter="data")
            return self.load(folder)

    def load(self, source: str) -> dict[str, MemberPolicy]:
        """Load the policies of a directory, or `random`."""
        if source == RANDOM:
            return {name: random_policy(spec) for name, (_, spec) in self.sides.items()}
        policies, shares = load_policies(source, self.model, self.algorithm)
        count = sum(agents.size for agents in shares.values())
        if count != (here := sum(agents.size for agents, _ in self.sides.values())):
            raise CheckpointError(
                f"The policies of {source} act for {count} agents, and this game has {here}.\n"
                "A member of a league must be of the same game."
            )
        return {
            name: _member(_policy_of(agents, policies, shares, source), spec, source)
            for name, (agents, spec) in self.sides.items()
        }


def random_policy(spec: EnvSpec) -> MemberPolicy:
    """Build a policy that acts at random: uniformly among choices, else by a Gaussian."""
    algorithm, network = ALGORITHMS["ppo"], Network(hidden_sizes=(1,))
    policy = algorithm.build_policy(spec, network, algorithm.Config())
    policy.act_at_random()
    return MemberPolicy(spec, network, policy.eval().requires_grad_(False))


def _policy_of(
    agents: Agents,
    policies: Mapping[str, TrainedPolicy],
    shares: Mapping[str, Agents],
    source: str,
) -> TrainedPolicy:
    """Return the policy that plays these agents there."""
    for name, (first, size) in shares.items():
        if first <= agents.first and agents.first + agents.size <= first + size:
            return policies[name]
    last = agents.first + agents.size
    raise CheckpointError(
        f"{source} has no policy for all agents {agents.first}:{last} together.\nA member of a "
        "league must be of the same game, with the same policies."
    )


def _member(policy: TrainedPolicy, spec: EnvSpec, source: str) -> MemberPolicy:
    checkpoint.check_fits(policy.spec, spec, Path(source))
    if policy.module.state_size:
        raise CheckpointError(
            f"{source} has a recurrent core, and members of a league have no memory.\n"
            "Name a run that was trained without --core."
        )
    return MemberPolicy(policy.spec, policy.network, policy.module.requires_grad_(False))


def with_policies(pool: Pool, members: Iterable[int]) -> Pool:
    """Return the pool with the policies of these members as data, too."""
    missing = [i for i in members if i not in pool.data and pool.sources[i] != RANDOM]
    data = {i: packed(Path(pool.sources[i])) for i in missing}
    return replace(pool, data=pool.data | data)


def packed(directory: Path) -> bytes:
    """Return a member's directory as bytes, for machines that cannot read it."""
    buffer = io.BytesIO()
    saved = checkpoint.newest(directory).path
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(saved, arcname=".")
    return buffer.getvalue()
