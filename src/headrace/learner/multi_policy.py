"""The policies of a run where there are several: each learns from its own agents, or is frozen.

As a whole it is what the loop needs of a learner. Left out: how one learns (`learner.py`), which
agents are whose (`timeline_plots.py`).
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch

from headrace.batch import Fragment
from headrace.config.resolve import Settings
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.errors import ConfigError, did_you_mean
from headrace.evaluation.trained_policies import TrainedPolicy, load_policy
from headrace.learner.learner import Learner, counts_section, first_policy
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.models.policy import ActorCritic, Network, Policy
from headrace.spec import Agents, EnvSpec
from headrace.storage import checkpoint
from headrace.storage.sections import Section, module_section

RANDOM = "random"
"""In place of a run: act at random, whatever is seen."""


class MultiPolicyLearner:
    """All policies of a run, and the learners of those that learn.

    Args:
        settings: the run's.
        shares: the agents of each policy.
        spec: of the environment.
        model: makes the user's own network, if there is one.
        device: where to compute.
        meter: of this process.
        ranks: of the job.
        saved: what the run goes on from.

    Attributes:
        policies: by name, in the order of their agents' ids.
        networks: the shape of each one's network.
        learners: of those that learn.

    Raises:
        CheckpointError: a frozen policy cannot be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        shares: dict[str, Agents],
        spec: EnvSpec,
        model: ModelFactory | None,
        device: torch.device,
        meter: Meter,
        ranks: Ranks = SINGLE_RANK,
        saved: checkpoint.Checkpoint | None = None,
    ) -> None:
        self.policies: dict[str, Policy] = {}
        self.networks: dict[str, Network] = {}
        self.learners: dict[str, Learner] = {}
        self._steps_before = 0  # as the run was saved
        for name, share in shares.items():
            own, offered = settings.of(name), spec.for_agents(share)
            self.networks[name] = own.network
            if (source := settings.run.frozen.get(name)) is None:
                self.learners[name] = Learner(
                    own, offered, model, device, meter, ranks, name=name, num_agents=share.size
                )
                self.policies[name] = self.learners[name].policy
            else:
                there = _frozen(source, name, own, offered, model, saved)
                self.policies[name] = there.module.to(device)
                self.networks[name] = there.network

    @property
    def policy(self) -> dict[str, Policy]:
        """All that act."""
        return self.policies

    @property
    def gradient(self) -> str:
        """What computes gradients, in words."""
        return next(iter(self.learners.values())).gradient

    @property
    def version(self) -> int:
        """Updates made so far."""
        return next(iter(self.learners.values())).version

    @property
    def learner_steps(self) -> int:
        """Optimizer steps made so far, by all."""
        now = sum(learner.learner_steps for learner in self.learners.values())
        return self._steps_before + now

    def assemble(self, fragments: list[Fragment]) -> dict[str, Fragment]:
        """Batches of those that learn, from one fragment of each policy."""
        of = dict(zip(self.policies, fragments, strict=True))
        return {name: learner.assemble([of[name]]) for name, learner in self.learners.items()}

    def update(self, batch: dict[str, Fragment], env_steps: int) -> dict[str, float]:
        """Learn from one batch each; metrics, as `POLICY/NAME`."""
        metrics: dict[str, float] = {"nonfinite": 0.0}
        for name, learner in self.learners.items():
            found = learner.update(batch[name], env_steps)
            metrics["nonfinite"] += found.pop("nonfinite")
            metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
        return metrics

    def check_equal(self) -> None:
        """See `Learner`."""
        for learner in self.learners.values():
            learner.check_equal()

    def sections(self) -> list[Section]:
        """Return what checkpoints hold of all policies, frozen ones included."""
        frozen = [
            module_section(f"policy_{name}", policy)
            for name, policy in self.policies.items()
            if name not in self.learners
        ]
        learned = (learner.policy_sections() for learner in self.learners.values())
        return [*frozen, *chain.from_iterable(learned), counts_section(self)]

    def set_counts(self, version: int, learner_steps: int) -> None:
        """Go on counting from there."""
        self._steps_before = learner_steps
        for learner in self.learners.values():
            learner.set_counts(version, 0)


def opponents(
    frozen: Mapping[str, str],
    shares: Mapping[str, Agents],
    settings: Settings,
    spec: EnvSpec,
    model: ModelFactory | None,
) -> dict[str, TrainedPolicy]:
    """Policies that are to play in place of a run's own.

    Args:
        frozen: name -> another run, or `random`: the setting of that name.
        shares: the agents of each policy.
        settings: the run's.
        spec: of the environment.
        model: makes the user's own network, if there is one.

    Raises:
        ConfigError: there is no such policy.
        CheckpointError: it cannot be loaded, or is of another environment.
    """
    check_frozen(frozen, shares, settings.run.model)
    return {
        name: _frozen(source, name, settings.of(name), spec.for_agents(shares[name]), model)
        for name, source in frozen.items()
    }


def check_frozen(frozen: Mapping[str, str], shares: Mapping[str, Agents], model: str) -> None:
    """ConfigError if there is no such policy, or it cannot act at random."""
    for name, source in frozen.items():
        if name not in shares:
            raise ConfigError(
                f"frozen: there is no policy {name!r}, but {', '.join(shares)}."
                + did_you_mean(name, list(shares))
            )
        if source == RANDOM and model:
            raise ConfigError(
                f"frozen: {name}=random, but the network is one of your own ({model}): nobody "
                "knows what makes it random.\nFreeze a run's policy: --frozen "
                f"{name}=RUN_DIR"
            )


def _frozen(
    source: str,
    name: str,
    settings: Settings,
    spec: EnvSpec,
    model: ModelFactory | None,
    saved: checkpoint.Checkpoint | None = None,
) -> TrainedPolicy:
    """A policy that does not learn; of a run that goes on, its own copy."""
    if source == RANDOM:
        policy = first_policy(settings, spec, model, name)
        assert isinstance(policy.model, ActorCritic), "refused in check_frozen"
        # The same whatever it sees; what it does is uniform, or Gaussian.
        torch.nn.init.zeros_(policy.model.actor.weight)
        there = TrainedPolicy(spec, policy, settings.network)
    else:
        directory, _, theirs = source.rpartition(":")
        if not directory or Path(source).is_dir():
            directory, theirs = source, name
        there = load_policy(
            saved.path if saved else directory,
            model,
            name if saved else theirs,
            settings.algorithm,
        )
        checkpoint.check_fits(there.spec, spec, Path(directory))
    there.module.requires_grad_(False)
    return there
