"""Policies as a run begins with them: untrained, or frozen and loaded from another run."""

import zlib
from collections.abc import Mapping
from pathlib import Path

from headrace.config.policies import DEFAULT, RANDOM
from headrace.config.settings import Settings
from headrace.errors import ConfigError, did_you_mean
from headrace.evaluation.trained_policies import TrainedPolicy, load_policy
from headrace.models.custom import ModelFactory
from headrace.models.policy import Policy, torch_seed
from headrace.seeding import derive
from headrace.spec import Agents, EnvSpec
from headrace.storage import checkpoint


def random_names(frozen: Mapping[str, str]) -> set[str]:
    """Return the names of the policies that act at random; `frozen` as in the setting."""
    return {name for name, source in frozen.items() if source == RANDOM}


def untrained_policy(
    settings: Settings, spec: EnvSpec, model: ModelFactory | None, name: str
) -> Policy:
    """Build an untrained policy. Its weights depend on the seed and the name."""
    with torch_seed(seed_of_weights(settings, "model", name)):
        return settings.algorithm.build_policy(spec, settings.network, settings.algo, model)


def seed_of_weights(settings: Settings, role: str, name: str) -> int:
    """Return the seed of the initial weights of a policy, or of the modules that train it.

    Args:
        role: `model` or `modules`.
    """
    path = () if name == DEFAULT else (zlib.crc32(name.encode()),)
    return derive(settings.run.seed, role, *path)


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
        name: load_frozen(source, name, settings.of(name), spec.for_agents(shares[name]), model)
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
                f"frozen: {name}=random, but the network is one of your own ({model}), and "
                "Headrace cannot make that random.\nFreeze a run's policy: --frozen "
                f"{name}=RUN_DIR"
            )


def load_frozen(
    source: str,
    name: str,
    settings: Settings,
    spec: EnvSpec,
    model: ModelFactory | None,
    saved: checkpoint.Checkpoint | None = None,
) -> TrainedPolicy:
    """Load a frozen policy; for a resumed run, the copy in its checkpoint."""
    if source == RANDOM:
        policy = untrained_policy(settings, spec, model, name)
        policy.act_at_random()  # `check_frozen` refuses networks of one's own
        frozen = TrainedPolicy(spec, policy, settings.network, is_random=True)
    else:
        directory, _, saved_name = source.rpartition(":")
        if not directory or Path(source).is_dir():
            directory, saved_name = source, name
        frozen = load_policy(
            saved.path if saved else directory,
            model,
            name if saved else saved_name,
            settings.algorithm,
        )
        checkpoint.check_fits(frozen.spec, spec, Path(directory))
    frozen.module.requires_grad_(False)
    return frozen
