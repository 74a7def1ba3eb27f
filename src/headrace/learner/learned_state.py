"""What a policy's learner has learned beside the policy, as named tensors.

Checkpoints hold it, and a rank that takes the place of a lost one gets it from another. Left out:
the policy itself, and rows of a replay (`storage/row_log.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import Modules
from headrace.batch import select
from headrace.distributed.of_envs import OfEnvs
from headrace.distributed.ranks import Ranks
from headrace.errors import CheckpointError
from headrace.learner.optimizer import GradientSteps


class LearnedState:
    """The state of optimizers, and of all modules but the policy.

    Args:
        optimizers: by the name of their loss.
    """

    def __init__(
        self, modules: Modules, optimizers: Mapping[str, GradientSteps], ranks: Ranks
    ) -> None:
        self._modules, self._optimizers, self._ranks = modules, optimizers, ranks

    @property
    def rows(self) -> OfEnvs | None:
        """The module whose rows checkpoints hold, if there is one."""
        of_envs = list(self._of_envs().values())
        assert len(of_envs) <= 1, "the rows of one module are saved"
        return of_envs[0] if of_envs and not of_envs[0].unsaved else None

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it, of all ranks together. Called on all of them at once."""
        state = self._alike_and_saved()
        for key, tensor in self._beside_policy().items():
            if (axis := self._env_axis(key)) is not None:
                state[key] = torch.cat(tuple(self._ranks.gather(tensor)), axis)
        return state

    def alike(self) -> dict[str, Tensor]:
        """Return what is the same on all ranks."""
        return self._alike_and_saved() | {
            f"modules.{name}.{key}": tensor
            for name, module in self._of_envs().items()
            for key, tensor in module.shared().items()
        }

    def _of_envs(self) -> dict[str, OfEnvs]:
        return {name: m for name, m in self._modules.items() if isinstance(m, OfEnvs)}

    def _alike_and_saved(self) -> dict[str, Tensor]:
        state = {
            _prefix(loss) + key: tensor
            for loss, optimizer in self._optimizers.items()
            for key, tensor in optimizer.state().items()
        }
        state |= self._of_rewards()
        beside = self._beside_policy()
        return state | {key: t for key, t in beside.items() if self._env_axis(key) is None}

    def load_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `alike` has returned on another rank."""
        for key, tensor in self.alike().items():
            tensor.copy_(tensors[key])
        for module in self._of_envs().values():
            module.taken_over()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` has returned; CheckpointError if it does not fit."""
        for loss, optimizer in self._optimizers.items():
            optimizer.load_state(select(tensors, _prefix(loss)))
        for key, tensor in self._of_rewards().items():
            if key in tensors:  # old checkpoints lack it
                tensor.copy_(tensors[key])
        for key, tensor in self._beside_policy().items():
            found = tensors.get(key)
            if found is not None and (axis := self._env_axis(key)) is not None:
                found = found.tensor_split(self._ranks.size, axis)[self._ranks.rank]
            if found is None or found.shape != tensor.shape:
                saved: Any = "missing" if found is None else tuple(found.shape)
                raise CheckpointError(
                    f"{key} of the algorithm is {tuple(tensor.shape)} now, and {saved} in the "
                    "checkpoint.\nResume with the code and settings that the run was trained with."
                )
            tensor.copy_(found)
        for of_envs in self._of_envs().values():
            if of_envs.unsaved:
                of_envs.begin_again()

    def _of_rewards(self) -> dict[str, Tensor]:
        normalizer = getattr(self._modules.get("policy"), "normalize_reward", None)
        return {} if normalizer is None else {"reward_drift": normalizer.drift}

    def _beside_policy(self) -> dict[str, Tensor]:
        """Return the state of all modules but the policy, by name."""
        return {
            f"modules.{name}.{key}": tensor
            for name, module in self._modules.items()
            if name != "policy"
            for key, tensor in module.state_dict().items()
            if not (isinstance(module, OfEnvs) and key in module.columns | module.unsaved)
        }

    def _env_axis(self, key: str) -> int | None:
        """Return the axis of a tensor of `_beside_policy` along which the ranks share it out."""
        _, name, of_module = key.split(".", 2)
        module = self._modules[name]
        if self._ranks.size == 1 or not isinstance(module, OfEnvs):
            return None
        return module.env_axis(of_module)


def _prefix(loss: str) -> str:
    """Return the prefix of a loss's optimizer in the file: "" for an actor-critic's only loss."""
    return "" if loss == "policy" else f"{loss}."
