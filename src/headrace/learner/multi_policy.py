"""The learner of a run with several policies. Each learns from its agents, or is frozen."""

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
    """A learner of several policies, some of them frozen.

    Args:
        shares: the agents of each policy.
        model: builds the user's network; None: Headrace's own.
        saved: the checkpoint of a resumed run.

    Attributes:
        policies: by name, in the order of their agents' ids.
        networks: network settings of each policy.
        learners: of the policies that are not frozen.

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
        self._steps_before = 0  # before a resume
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
        """All acting policies."""
        return self.policies

    @property
    def gradient(self) -> str:
        """Name of what computes gradients, for messages."""
        return next(iter(self.learners.values())).gradient

    @property
    def version(self) -> int:
        """Updates made so far."""
        return next(iter(self.learners.values())).version

    @property
    def learner_steps(self) -> int:
        """Optimizer steps of all policies so far."""
        now = sum(learner.learner_steps for learner in self.learners.values())
        return self._steps_before + now

    def assemble(self, fragments: list[Fragment]) -> dict[str, Fragment]:
        """Build the learners' batches from one fragment of each policy."""
        of = dict(zip(self.policies, fragments, strict=True))
        return {name: learner.assemble([of[name]]) for name, learner in self.learners.items()}

    def update(self, batch: dict[str, Fragment], env_steps: int) -> dict[str, float]:
        """Update each learner. Return metrics, with names as `POLICY/NAME`."""
        metrics: dict[str, float] = {"nonfinite": 0.0}
        for name, learner in self.learners.items():
            found = learner.update(batch[name], env_steps)
            metrics["nonfinite"] += found.pop("nonfinite")
            metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
        return metrics

    def check_equal(self) -> None:
        """Raise RankError if the ranks' parameters differ."""
        for learner in self.learners.values():
            learner.check_equal()

    def sections(self) -> list[Section]:
        """Return the sections of all policies, frozen ones included."""
        frozen = [
            module_section(f"policy_{name}", policy)
            for name, policy in self.policies.items()
            if name not in self.learners
        ]
        learned = (learner.policy_sections() for learner in self.learners.values())
        return [*frozen, *chain.from_iterable(learned), counts_section(self)]

    def set_counts(self, version: int, learner_steps: int) -> None:
        """Set the counts after a resume."""
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
    """Load policies that play in place of a run's own.

    Args:
        frozen: policy name -> another run's directory, or `random`, as in the setting.
        shares: the agents of each policy.

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
    """Raise ConfigError if a policy does not exist, or cannot act at random."""
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
    """Load a frozen policy; for a resumed run, the copy in its checkpoint."""
    if source == RANDOM:
        policy = first_policy(settings, spec, model, name)
        assert isinstance(policy.model, ActorCritic), "refused in check_frozen"
        # Actions no longer depend on observations: they are uniform, or Gaussian.
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
