"""A policy as one function of arrays, from the environment's observations to its own actions.

Left out: how the function becomes a file (`programs.py`, `to_onnx.py`).
"""

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.interop.export.arrays import (
    NEXT_STATE,
    NOISE,
    PARAMS,
    STATE,
    VALUE,
    ActionPart,
    ArrayInfo,
    action_parts,
    noise_array,
    observed_arrays,
    state_array,
)
from headrace.models.critics.actor import ActorPolicy
from headrace.models.policy import Policy
from headrace.spec import ActionCodec

_LEAST_NOISE = 2.0**-24  # of the grid that noise is drawn from (`seeding.action_noise`)


def in_fp32(policy: Policy) -> Policy:
    """Return a copy of a policy that computes in fp32, and leaves the original as it is."""
    policy = copy.deepcopy(policy).eval().requires_grad_(False)
    policy.use_fp32()
    return policy


def has_value(policy: TrainedPolicy) -> bool:
    """Return whether a policy gives values, from what it acts by."""
    return not isinstance(policy.module, ActorPolicy) and not policy.spec.state_key


class ExportedPolicy(nn.Module):
    """Maps named arrays `[n, ...]` to named arrays `[n, ...]`.

    Normalizers and the bounds of actions are constants in it. It has no state: that of a recurrent
    core comes in and goes out.

    Args:
        stochastic: draw actions from noise that comes in; or take the likeliest.
        value: give the value of the observation, too.

    Attributes:
        inputs, outputs: its arrays.
    """

    def __init__(self, policy: TrainedPolicy, *, stochastic: bool, value: bool) -> None:
        super().__init__()
        self.policy, spec = _with_constants(policy.module), policy.spec
        self._spec, self._stochastic, self._value = spec, stochastic, value
        self._observed = list(observed_arrays(spec))
        self._parts = [_PartToEnv(part) for part in action_parts(spec.action)]
        self.parts = nn.ModuleList(self._parts)
        self.inputs = [array for _, array in self._observed]
        self.outputs = [part.of.array for part in self._parts]
        self.outputs.append(
            ArrayInfo(PARAMS, "float32", (self.policy.head.num_params,), _meaning(self.policy))
        )
        if value:
            self.outputs.append(ArrayInfo(VALUE, "float32", (), "the value of the observation"))
        if size := self.policy.state_size:
            self.inputs.append(state_array(STATE, size, "before this step: 0 in a new episode"))
            self.outputs.append(state_array(NEXT_STATE, size, "after this step"))
        if stochastic:
            self.inputs.append(noise_array(self.policy.num_draws))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        memory = [inputs[STATE]] if self.policy.state_size else []
        params, value, after = self.policy.one_row(self._observation(inputs), *memory)
        head = self.policy.head
        if self._stochastic:
            # Below and above, inverse distributions would be infinite, or take what is forbidden.
            noise = inputs[NOISE].clamp(_LEAST_NOISE, 1 - _LEAST_NOISE)
            action, _ = head.sample(params, noise)
        else:
            action = head.mode(params)
        outputs = {part.of.name: part(action) for part in self._parts} | {PARAMS: params}
        if self._value:
            outputs[VALUE] = value
        if after:
            outputs[NEXT_STATE] = after["state"]
        return outputs

    def _observation(self, inputs: Mapping[str, Tensor]) -> Obs:
        """Return the observation as it is stored, with zeros for the state of a game."""
        stored = {key: inputs[array.name] for key, array in self._observed}
        if self._spec.observation.kind != "dict":
            [only] = stored.values()
            return only
        if key := self._spec.state_key:
            space = dict(self._spec.observation.parts)[key]
            n = next(iter(stored.values())).shape[0]
            stored[key] = torch.zeros((n, *space.shape), dtype=getattr(torch, space.dtype))
        return stored


class _PartToEnv(nn.Module):
    """Gives a part of a policy's action the environment's form: `spec.ActionCodec` in torch."""

    scale: Tensor
    shift: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, part: ActionPart) -> None:
        super().__init__()
        self.of, codec = part, ActionCodec(part.space)
        for name in ("scale", "shift", "low", "high"):
            # A constant in the file
            self.register_buffer(name, torch.from_numpy(getattr(codec, name)), persistent=False)

    def forward(self, action: Tensor) -> Tensor:
        space = self.of.space
        dtype = getattr(torch, space.dtype)
        if self.of.path:
            action = action[:, self.of.columns]
        if space.kind == "box":
            scaled = action.to(dtype) * self.scale + self.shift
            clipped = torch.minimum(torch.maximum(scaled, self.low), self.high)
            return clipped.reshape(-1, *space.shape)
        choices = action.to(torch.int64).reshape(-1, *space.shape)
        return (choices + self.shift.reshape(space.shape)).to(dtype)


class _Scaling(nn.Module):
    """Takes the place of `RunningMoments`: what to subtract and to multiply by, as constants."""

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def scaling(self) -> tuple[Tensor, Tensor]:
        """Return both, as `RunningMoments.scaling`."""
        return cast(Tensor, self.mean), cast(Tensor, self.scale)


def _with_constants(policy: Policy) -> Policy:
    """Return a copy in fp32 whose normalizer has constants in place of running moments."""
    policy = in_fp32(policy)
    policy.normalize_reward = None
    if policy.normalize_obs is not None:
        moments = policy.normalize_obs.moments
        for i, of in enumerate(moments):
            moments[i] = _Scaling(*of.scaling())  # type: ignore[operator]
    return policy


def _meaning(policy: Policy) -> str:
    return f"the parameters of the action's distribution, {type(policy.head).__name__}"
