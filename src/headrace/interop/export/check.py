"""Compares an exported policy with the policy itself, row by row.

Actions that are choices must be equal, but for ties: choices between which rounding decides.
Actions that are numbers, and all other outputs, must be equal within rounding. Left out: what the
policy observes (`observations.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Obs
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.interop.export.arrays import (
    NEXT_STATE,
    NOISE,
    PARAMS,
    STATE,
    VALUE,
    ActionPart,
    action_parts,
)
from headrace.interop.export.module import has_value, in_fp32
from headrace.interop.export.observations import inputs_of, noise_for, states_for
from headrace.spec import ActionCodec, Array, getter

_TOLERANCE = 1e-4  # of rounding, as a part of an output's largest number, if that is above 1;
# of an action's component, of its own largest number or half its range
_NOISE_ROUNDING = 1e-5
_ROWS_ALONE = 3  # are computed one by one, as a batch of another size
_IDENTICAL, _ROUNDED, _TIE, _DIFFERENT = range(4)

Session = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Computes an exported file's outputs from its inputs, arrays by name."""


@dataclass(frozen=True)
class Comparison:
    """What a file gave for some observations, and what the policy did.

    Attributes:
        of: the observations, for people.
        rows: how many.
        identical: actions that are equal to the bit.
        within_rounding: further actions, of numbers, that are equal within rounding.
        ties: further actions, of choices, between which rounding decides.
        different: all others.
        largest_difference: output -> the largest |difference| of its numbers.
        beyond_rounding: outputs beside actions that differ by more than rounding.
        example: of a difference, for people; "": there is none.
    """

    of: str
    rows: int
    identical: int
    within_rounding: int
    ties: int
    different: int
    largest_difference: dict[str, float]
    beyond_rounding: tuple[str, ...]
    example: str

    @property
    def ok(self) -> bool:
        """Whether the file does what the policy does."""
        return not self.different and not self.beyond_rounding

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "ok": self.ok}

    def describe(self) -> str:
        """Return one line, and one more for each difference."""
        equal = self.identical + self.within_rounding
        said = f"{self.of}: {equal:,} of {self.rows:,} actions equal"
        if self.within_rounding:
            said += f" ({self.within_rounding:,} of them within rounding)"
        if self.ties:
            said += f", {self.ties:,} are ties that rounding decides"
        if self.different:
            said += f", {self.different:,} DIFFER"
        largest = ", ".join(f"{name} {of:.1e}" for name, of in self.largest_difference.items())
        said += f"; largest |difference|: {largest}"
        for name in self.beyond_rounding:
            said += f"\n    {name} DIFFERS by more than rounding"
        return said + (f"\n    {self.example}" if self.example else "")


class Comparer:
    """Compares files with one policy, in fp32.

    Args:
        stochastic: the files draw actions from noise.
    """

    def __init__(self, policy: TrainedPolicy, *, stochastic: bool) -> None:
        self._policy, self._stochastic = policy, stochastic
        self._module = in_fp32(policy.module)
        self._codec, self._parts = ActionCodec(policy.spec.action), action_parts(policy.spec.action)

    def example(self, obs: Obs, num_rows: int) -> dict[str, Tensor]:
        """Return all inputs for stored observations `[num_rows, ...]`, by name."""
        inputs = inputs_of(self._policy.spec, obs)
        if self._module.state_size:
            inputs[STATE] = states_for(self._module, obs, num_rows)
        if self._stochastic:
            inputs[NOISE] = noise_for(self._module, num_rows, seed=0)
        return inputs

    def compare(self, session: Session, obs: Obs, num_rows: int, of: str) -> Comparison:
        """Compare a file with the policy on stored observations `[num_rows, ...]`."""
        inputs = self.example(obs, num_rows)
        given = _in_two_sizes(session, {name: each.numpy() for name, each in inputs.items()})
        own = self._own(self._module, obs, inputs)
        maybe = self._candidates(own[PARAMS], given[PARAMS], inputs)
        status = np.full(num_rows, _IDENTICAL)
        for part in self._parts:
            may_be = [each[part.name] for each in maybe]
            status = np.maximum(status, _status(part, given[part.name], own[part.name], may_be))
        others = [name for name in (PARAMS, VALUE, NEXT_STATE) if name in given and name in own]
        compared = [part.name for part in self._parts if part.space.kind == "box"] + others
        identical, rounded, ties, different = np.bincount(status, minlength=4).tolist()
        return Comparison(
            of,
            num_rows,
            identical,
            rounded,
            ties,
            different,
            {name: float(_differences(given[name], own[name]).max()) for name in compared},
            tuple(name for name in others if not _within_rounding(given[name], own[name]).all()),
            self._example_of(status, given, own),
        )

    def same_in_bf16(self, obs: Obs, num_rows: int) -> int:
        """Return how many actions are the same, to the bit, as those of the policy in bf16."""
        inputs = self.example(obs, num_rows)
        pair = [self._own(module, obs, inputs) for module in (self._module, self._policy.module)]
        same = np.ones(num_rows, bool)
        for part in self._parts:
            of_part = np.equal(*(outputs[part.name] for outputs in pair))
            same &= of_part.reshape(num_rows, -1).all(-1)
        return int(same.sum())

    @torch.no_grad()
    def _own(self, module: Any, obs: Obs, inputs: Mapping[str, Tensor]) -> dict[str, Array]:
        """Return what the policy itself gives."""
        memory = [inputs[STATE]] if STATE in inputs else []
        params, value, after = module.one_row(obs, *memory)
        if self._stochastic:
            action = module.act(obs, inputs[NOISE], *memory)["action"]
        else:
            action = module.act_greedily(obs, *memory)["action"]
        outputs = self._parts_of(action) | {PARAMS: params.numpy()}
        if has_value(self._policy):
            outputs[VALUE] = value.numpy()
        return outputs | ({NEXT_STATE: after["state"].numpy()} if after else {})

    def _parts_of(self, action: Tensor) -> dict[str, Array]:
        batch = self._codec.batched(self._codec.to_env(action.numpy()))
        return {
            part.name: np.asarray(getter(part.path)(batch) if part.path else batch)
            for part in self._parts
        }

    @torch.no_grad()
    def _candidates(
        self, own: Array, given: Array, inputs: Mapping[str, Tensor]
    ) -> list[dict[str, Array]]:
        """Return the action that the head makes of the policy's parameters, and others.

        They follow from the file's parameters, and from noise that is rounded otherwise.
        """
        head, params = self._module.head, [torch.from_numpy(each) for each in (own, given)]
        if not self._stochastic:
            return [self._parts_of(head.mode(each)) for each in params]
        noise = inputs[NOISE]
        return [
            self._parts_of(head.sample(each, (noise + rounding).clamp(2**-24, 1 - 2**-24))[0])
            for each in params
            for rounding in (0.0, -_NOISE_ROUNDING, _NOISE_ROUNDING)
        ]

    def _example_of(
        self, status: Array, given: Mapping[str, Array], own: Mapping[str, Array]
    ) -> str:
        worst = int(status.argmax())
        if status[worst] != _DIFFERENT:
            return ""
        pairs = [
            (part.name, given[part.name][worst], own[part.name][worst]) for part in self._parts
        ]
        return f"Row {worst}: " + "; ".join(
            f"{name} is {a.tolist()}, and the policy's {b.tolist()}" for name, a, b in pairs
        )


def _in_two_sizes(session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of all rows: of the first ones one by one, and of the rest at once."""
    count = len(next(iter(inputs.values())))
    alone = min(_ROWS_ALONE, count - 1)
    cuts = [slice(i, i + 1) for i in range(alone)] + [slice(alone, None)]
    pieces = [session({name: array[cut] for name, array in inputs.items()}) for cut in cuts]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _status(part: ActionPart, given: Array, own: Array, may_be: Sequence[Array]) -> Array:
    """Return how equal each row of a part of the actions is, `[n]`.

    Args:
        may_be: from `_candidates`. Where the policy does not take the first one, it is no policy
            that acts by its head, and nothing is explained by rounding.
    """
    if given.dtype != own.dtype or given.shape != own.shape:
        return np.full(len(own), _DIFFERENT)
    if part.space.kind == "box":
        # A wide range of actions widens what rounding makes of the parameters as well.
        # Each component by its own range: a wide one must not hide what a narrow one does.
        usual = ActionCodec(part.space).scale.reshape(part.space.shape)
        largest = np.maximum(usual, np.abs(own).max(0, initial=0.0))
        less = np.any([_differences(given, a) <= _TOLERANCE * largest for a in may_be], axis=0)
        less &= _differences(may_be[0], own) <= _TOLERANCE * largest
        status = np.where(given == own, _IDENTICAL, np.where(less, _ROUNDED, _DIFFERENT))
    else:
        tie = np.any([given == each for each in may_be], axis=0) & (may_be[0] == own)
        status = np.where(given == own, _IDENTICAL, np.where(tie, _TIE, _DIFFERENT))
    rows: Array = status.reshape(len(own), -1).max(-1, initial=_IDENTICAL)
    return rows


def _differences(given: Array, own: Array) -> Array:
    """Return |differences|: 0 of what is equal, infinite numbers and NaN included."""
    same = (given == own) | (np.isnan(given) & np.isnan(own))
    with np.errstate(invalid="ignore", over="ignore"):
        found: Array = np.where(same, 0.0, np.abs(given.astype(np.float64) - own))
    return np.where(np.isnan(found), np.inf, found)


def _within_rounding(given: Array, own: Array) -> Array:
    # The least number stands for what a mask forbids
    usual = np.abs(own[np.abs(own) < 1e30])
    largest = usual.max(initial=1.0)
    within: Array = _differences(given, own) <= _TOLERANCE * largest
    return within
