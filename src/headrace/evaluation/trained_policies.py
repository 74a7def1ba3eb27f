"""Trained policies: loaded from a run directory, and called with observations."""

from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config.algorithms import ALGORITHMS, AlgorithmLike, load_algorithm
from headrace.envs.spaces.masks import mask_array
from headrace.errors import ConfigError
from headrace.models.custom import ModelFactory, load_model
from headrace.models.policy import Network, Policy
from headrace.spec import ActionCodec, Agents, EnvSpec, KeyPath, getter
from headrace.storage import checkpoint


class TrainedPolicy:
    """A policy to act with: `policy(obs) -> action`, normalizers included, on the CPU.

    A policy with a recurrent core keeps its state between calls: call `reset` when an episode
    begins. It then serves one environment, or a batch of constant size.

    Args:
        is_random: it is frozen as one that acts at random: evaluations sample its actions always.
        build: builds such a policy, whose weights are then overwritten; None: as the run's own.
        learned_by: `algo`, `algo_settings` and `model` in the manifest of its run.
    """

    def __init__(
        self,
        spec: EnvSpec,
        module: Policy,
        network: Network,
        *,
        is_random: bool = False,
        build: Callable[[], Policy] | None = None,
        learned_by: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec, self.module, self.network = spec, module, network
        self.is_random, self.build, self.learned_by = is_random, build, learned_by
        self._codec = ActionCodec(spec.action)
        self._memory: Tensor | None = None  # [n, S] after the first call

    @property
    def state_size(self) -> int:
        """Size of the recurrent state of an env, or 0."""
        return self.module.state_size

    @property
    def num_draws(self) -> int:
        """Uniform random numbers per action."""
        return self.module.num_draws

    def reset(self, begun: Any = None) -> None:
        """Begin new episodes with the next call. Without a recurrent core, this does nothing.

        Args:
            begun: `[n]` bool: in which environments of a batch (or ValueError); default: in all.
        """
        if begun is None or self._memory is None:
            self._memory = None
            return
        ended = torch.from_numpy(np.asarray(begun, dtype=bool))
        if ended.shape != self._memory.shape[:1]:
            raise ValueError(
                f"reset got {tuple(ended.shape)} flags; the batch has {len(self._memory)} rows."
            )
        self._memory[ended] = 0.0

    @torch.no_grad()
    def __call__(self, obs: Any, action_mask: Any = None, agent: Any = None) -> Any:
        """Return the most likely action, as the environment expects it.

        Args:
            obs: one observation, or a batch with one more leading dimension. A Dict's or Tuple's
                is nested as the environment's own; keys that the policy does not need are ignored.
                A policy whose critic sees the state of the game does not need that to act.
            action_mask: which actions are allowed, for a policy whose mask came from `info`.
            agent: its index among all agents, or `[n]` of them, for a policy with `agent_ids`.

        Returns:
            One action or a batch: integers, arrays of the action space's shape, or a dict or tuple
            of these.

        Raises:
            ValueError: a wrong shape, a missing key, or another batch size than before.
        """
        is_dict = self.spec.observation.kind == "dict"
        if self.spec.mask_in_info and action_mask is None:
            raise ValueError(
                "This policy was trained with action masks from info: call it as "
                'policy(obs, action_mask=info["action_mask"]).'
            )
        if self.spec.id_key and agent is None:
            raise ValueError(
                "This policy was trained with agent_ids: call it as policy(obs, agent=0), with the "
                "agent's index among all agents of the game."
            )
        rows, single = {}, False
        whole = self.spec.observation
        added = self.spec.state_key, self.spec.id_key
        for (key, space), path in zip(whole.leaves, whole.key_paths, strict=True):
            if key and key in added:
                continue
            array = np.asarray(self._part(key, path, obs, action_mask), dtype=space.dtype)
            single = array.shape == space.shape
            if not single and array.shape[1:] != space.shape:
                is_mask = self.spec.mask_in_info and key == self.spec.mask_key
                what = "action_mask" if is_mask else f"an observation{f' {key!r}' if key else ''}"
                raise ValueError(
                    f"Got {what} of shape {array.shape}; "
                    f"expected {space.shape}, or a batch (n, *{space.shape})."
                )
            rows[key] = torch.from_numpy(array[None] if single else array)
        n = len(next(iter(rows.values())))
        rows |= self._added(n, agent)
        batched = rows if is_dict else rows[""]
        out = self.module.act_greedily(batched, *self._remembered(n))
        self._memory = out.get("state")
        values = self._codec.to_env(out["action"].numpy())
        if not single:
            return self._codec.batched(values)
        action = self._codec.elements(values)[0]
        return int(action) if self.spec.action.kind == "discrete" else action

    def _part(self, key: str, path: KeyPath, obs: Any, action_mask: Any) -> Any:
        """Return the part of an observation, or of a batch of them, that is stored as `key`."""
        is_mask = key == self.spec.mask_key and bool(key)
        try:
            part = action_mask if is_mask and self.spec.mask_in_info else getter(path)(obs)
        except (KeyError, IndexError, TypeError):
            has = sorted(obs) if hasattr(obs, "keys") else f"a {type(obs).__name__}"
            raise ValueError(f"The observation has no {key!r}; it has {has}.") from None
        is_nested = is_mask and isinstance(part, Mapping | tuple)
        return mask_array(part, self.spec.action) if is_nested else part

    def _added(self, n: int, agent: Any) -> dict[str, Tensor]:
        """Return n rows of what training added to the environment's own observation."""
        spaces, added = dict(self.spec.observation.parts), dict[str, Tensor]()
        if key := self.spec.state_key:  # no action depends on it
            added[key] = torch.zeros(n, *spaces[key].shape, dtype=getattr(torch, spaces[key].dtype))
        if key := self.spec.id_key:
            index, (count,) = np.asarray(agent), spaces[key].nvec
            if index.shape not in ((), (n,)) or not np.isin(index, range(count)).all():
                raise ValueError(
                    f"Got agent={agent}; expected one of 0 to {count - 1}, or [{n}] of these."
                )
            added[key] = torch.from_numpy(np.broadcast_to(index, n).astype(np.int64))
        return added

    def _remembered(self, n: int) -> list[Tensor]:
        if not self.module.state_size:
            return []
        if self._memory is None:
            self._memory = torch.zeros(n, self.module.state_size)
        if len(self._memory) != n:
            raise ValueError(
                f"Got {n} observations; the policy remembers {len(self._memory)} of the call "
                "before.\nCall its reset() first, or load one policy for each batch."
            )
        return [self._memory]


def folder_of(run_dir: Path, *, best: bool) -> Path:
    """Return the directory of a run's newest or best policies; ConfigError if no best were kept."""
    if not best:
        return run_dir
    folder = run_dir / "best"
    if run_dir.is_dir() and not folder.is_dir():
        raise ConfigError(
            f"{run_dir} has no best policy: it was trained without --eval-every N, or ended before "
            "the first evaluation.\nLeave out --best to have the newest one."
        )
    return folder


def load_policy(
    directory: str | Path,
    model: str | ModelFactory | None = None,
    policy: str | None = None,
    algo: AlgorithmLike | None = None,
) -> TrainedPolicy:
    """Load a policy from the newest usable checkpoint of a run.

    This needs neither the environment nor a GPU, and unpickles nothing.

    Args:
        directory: of a run, its `best`, or a checkpoint.
        model: maker of your own network (or `module:callable`): a file cannot name code.
        policy: name, in a run with several.
        algo: your own algorithm (or `module:Name`), if it trained the policy.

    Raises:
        CheckpointError: there is no usable checkpoint, it is of another network, or it has
            several policies and none of this name.
        ConfigError: the network or the algorithm is one of your own and is missing here, or
            `model` is given for a network that is not.
    """
    model, own = load_model(model), load_algorithm(algo) if algo else None
    saved = checkpoint.newest(Path(directory))
    with checkpoint.as_written(saved.path):
        name = checkpoint.policy_name(saved, policy)
        described = saved.manifest["policies"][name]
        learned_by = described["algo"]
        if described["model"] and model is None:
            raise ConfigError(
                f"{directory} was trained with a network of its own ({described['model']}).\nName "
                "what makes it: --model module:callable, or load_policy(directory, model=...)."
            )
        if model is not None and not described["model"]:
            raise ConfigError(
                f"{directory} was trained with Headrace's network: it takes no model."
            )
        if isinstance(learned_by, str) and ":" in learned_by and own is None:
            raise ConfigError(
                f"{directory} was trained with an algorithm of its own ({learned_by}).\nName it "
                "again: --algo module:Name, or load_policy(directory, algo=...)."
            )
        algorithm = ALGORITHMS.get(learned_by) or own or ALGORITHMS["ppo"]
        config = algorithm.Config(**described.get("algo_settings", {}))
        spec = EnvSpec.from_json(described["spec"])
        sizes = tuple(described["network"]["hidden_sizes"])
        network = Network(**described["network"] | {"hidden_sizes": sizes})
        if model is None:  # shapes are checked before memory is allocated
            with torch.device("meta"):
                checkpoint.check_shapes(algorithm.build_policy(spec, network, config), saved, name)
    build = partial(algorithm.build_policy, spec, network, config, model)
    module = build()
    checkpoint.load_into(module, saved, name)
    learned = {
        key: described[key] for key in ("algo", "algo_settings", "model") if key in described
    }
    return TrainedPolicy(spec, module.eval(), network, build=build, learned_by=learned)


def load_policies(
    directory: str | Path,
    model: str | ModelFactory | None = None,
    algo: AlgorithmLike | None = None,
    random: Container[str] = (),
) -> tuple[dict[str, TrainedPolicy], dict[str, Agents]]:
    """Load all policies of a run, by name; return them with the agents of each.

    `random` has the names of those that are frozen as random.
    """
    saved = checkpoint.newest(Path(directory))
    shares = {name: agents for name, (_, agents) in checkpoint.policies(saved).items()}
    policies = {name: load_policy(saved.path, model, name, algo) for name in shares}
    for name, policy in policies.items():
        policy.is_random = name in random
    return policies, shares
