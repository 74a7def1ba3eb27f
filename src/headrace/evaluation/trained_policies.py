"""A trained policy on its own: load it, call it. Left out: playing with it (`evaluate.py`)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config.algorithms import ALGORITHMS, AlgorithmLike
from headrace.config.user_code import code
from headrace.errors import ConfigError
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import ActionCodec, Agents, EnvSpec
from headrace.storage import checkpoint


class TrainedPolicy:
    """A policy to act with: `policy(obs) -> action`, normalizers included, on the CPU.

    With a recurrent core it remembers, from call to call: call `reset` when an episode begins. It
    serves one environment, or a batch of always as many, then; each user loads one of its own.

    Attributes:
        spec: what it was trained on.
        module: the network.
        network: its shape.
    """

    def __init__(self, spec: EnvSpec, module: Policy, network: Network) -> None:
        self.spec, self.module, self.network = spec, module, network
        self._codec = ActionCodec(spec.action)
        self._memory: Tensor | None = None  # [n, S], once called

    def reset(self, begun: Any = None) -> None:
        """New episodes begin with the next call; nothing to do without a recurrent core.

        Args:
            begun: `[n]` bool: in which environments of a batch; default: in all, and from here on
                there may be another number of them.

        Raises:
            ValueError: `begun` is not of the batch's length.
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
    def __call__(self, obs: Any, action_mask: Any = None) -> Any:
        """The likeliest action, as the environment expects it.

        Args:
            obs: one observation, or a batch of them with one more leading dimension (of a Dict
                space: a dict of arrays; keys that the policy does not see may be there).
            action_mask: which actions are allowed, for a policy whose mask came from `info`.

        Returns:
            One action or a batch of them: integers, or arrays of the action space's shape.

        Raises:
            ValueError: the shape is neither one observation's nor a batch's, or a key is missing;
                or the batch is not of the length that is remembered.
        """
        parts = dict(obs) if self.spec.observation.kind == "dict" and _is_dict(obs) else {"": obs}
        if self.spec.mask_in_info:
            if action_mask is None:
                raise ValueError(
                    "This policy was trained with action masks from info: call it as "
                    'policy(obs, action_mask=info["action_mask"]).'
                )
            parts[self.spec.mask_key] = action_mask
        rows, single = {}, False
        for key, space in self.spec.observation.leaves:
            if key not in parts:
                raise ValueError(f"The observation has no {key!r}; it has {sorted(parts)}.")
            array = np.asarray(parts[key], dtype=space.dtype)
            single = array.shape == space.shape
            if not single and array.shape[1:] != space.shape:
                own_mask = self.spec.mask_in_info and key == self.spec.mask_key
                what = "action_mask" if own_mask else f"an observation{f' {key!r}' if key else ''}"
                raise ValueError(
                    f"Got {what} of shape {array.shape}; "
                    f"expected {space.shape}, or a batch (n, *{space.shape})."
                )
            rows[key] = torch.from_numpy(array[None] if single else array)
        batched = rows if self.spec.observation.kind == "dict" else rows[""]
        out = self.module.act_greedily(batched, *self._remembered(len(rows[key])))
        self._memory = out.get("state")
        action = self._codec.to_env(out["action"].numpy())
        if not single:
            return action
        return int(action[0]) if self.spec.action.kind == "discrete" else action[0]

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


def _is_dict(obs: Any) -> bool:
    return hasattr(obs, "keys")


def load_policy(
    directory: str | Path,
    model: str | ModelFactory | None = None,
    policy: str | None = None,
    algo: AlgorithmLike | None = None,
) -> TrainedPolicy:
    """Load the newest whole checkpoint's policy from a run directory (or from that checkpoint).

    Needs neither the environment nor a GPU, and unpickles nothing. A policy with a recurrent core
    remembers from call to call, until its `reset`.

    Args:
        directory: of a run, its `best`, or a checkpoint.
        model: what made the network (or its name, `module:callable`), where it was one of your
            own: a file can not name code.
        policy: which, of a run with several.
        algo: what learned it (or its name, `module:Name`), where it was one of your own.

    Raises:
        CheckpointError: there is no usable checkpoint, or it is of another network, or there are
            several policies, and none of this name.
        ConfigError: it was a network of your own, and `model` is not given (or the other way), or
            an algorithm of your own, and `algo` is not given.
    """
    own = code((), model, algo)
    model = own.model
    saved = checkpoint.newest(Path(directory))
    with checkpoint.as_written(saved.path):
        name = checkpoint.policy_name(saved, policy)
        described = saved.manifest["policies"][name]
        is_own, learned_by = bool(described["model"]), described["algo"]
    if is_own != (model is not None):
        raise ConfigError(
            f"{directory} was trained with "
            + (
                f"a network of its own ({described['model']}).\nName what makes it: --model "
                "module:callable, or load_policy(directory, model=...)."
                if described["model"]
                else "Headrace's network: it takes no model."
            )
        )
    with checkpoint.as_written(saved.path):
        if isinstance(learned_by, str) and ":" in learned_by and own.algorithm is None:
            raise ConfigError(
                f"{directory} was trained with an algorithm of its own ({learned_by}).\nName it "
                "again: --algo module:Name, or load_policy(directory, algo=...)."
            )
        algorithm = ALGORITHMS.get(learned_by) or own.algorithm or ALGORITHMS["ppo"]
        config = algorithm.Config(**described.get("algo_settings", {}))
        spec = EnvSpec.from_json(described["spec"])
        sizes = tuple(described["network"]["hidden_sizes"])
        network = Network(**described["network"] | {"hidden_sizes": sizes})
        if model is None:  # without memory, before any of it is allocated
            with torch.device("meta"):
                checkpoint.check_shapes(algorithm.build_policy(spec, network, config), saved, name)
    module = algorithm.build_policy(spec, network, config, model)
    checkpoint.load_into(module, saved, name)
    return TrainedPolicy(spec, module.eval(), network)


def load_policies(
    directory: str | Path,
    model: str | ModelFactory | None = None,
    algo: AlgorithmLike | None = None,
) -> tuple[dict[str, TrainedPolicy], dict[str, Agents]]:
    """All policies of a run, by name, and the agents of each; see `load_policy`."""
    saved = checkpoint.newest(Path(directory))
    shares = {name: agents for name, (_, agents) in checkpoint.policies(saved).items()}
    return {name: load_policy(saved.path, model, name, algo) for name in shares}, shares
