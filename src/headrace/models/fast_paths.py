"""Fast paths: faster replacements of a reference function, equal within a tolerance.

Only `choose` decides which one runs. `config/algorithms.py` lists those of gradients and targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.models import numpy_inference
from headrace.models.action_values import numpy_q_inference
from headrace.models.action_values.q_policy import QPolicy
from headrace.models.policy import Actor, Network, Policy, PolicyActor
from headrace.spec import EnvSpec


@dataclass(frozen=True)
class FastPath:
    """A fast path and its reference.

    Attributes:
        unsupported: returns the reason why it cannot replace the reference, or "".
        make: builds the replacement from the arguments of `unsupported`.
        tolerance: largest difference from the reference's results, by dtype of the weights.
    """

    name: str
    reference: Callable[..., Any]
    unsupported: Callable[..., str]
    make: Callable[..., Any]
    tolerance: dict[torch.dtype, float]


ACTING = [
    FastPath(
        "numpy",
        Policy.act,
        numpy_inference.unsupported,
        numpy_inference.NumpyActor,
        {torch.float32: 4e-6},
    ),
    FastPath(
        "numpy",
        QPolicy.act,
        numpy_q_inference.unsupported,
        numpy_q_inference.NumpyQActor,
        {torch.float32: 4e-6},
    ),
]


def choose(
    paths: Sequence[FastPath], reference: Callable[..., Any], *arguments: Any
) -> tuple[FastPath | None, str]:
    """Return the first path that can replace `reference`; else None and the last one's reason.

    If the reference is a `partial`, the path has its keywords as well.
    """
    reason, named = "", {}
    if isinstance(reference, partial):
        named = reference.keywords
        reference = reference.func
    for path in paths:
        if path.reference is reference:
            reason = path.unsupported(*arguments, **named)
            if not reason:
                return replace(path, make=partial(path.make, **named)), ""
    return None, reason


def replacement(
    paths: Sequence[FastPath], reference: Callable[..., Any], *arguments: Any
) -> Callable[..., Any]:
    """Return what replaces `reference`, or itself where no path can."""
    path, _ = choose(paths, reference, *arguments)
    return path.make(*arguments) if path else reference


def describe_choice(path: FastPath | None, reference: str, reason: str) -> str:
    """Return a path's name; without a path, the reference and the reason."""
    return path.name if path else reference + (f" ({reason})" if reason else "")


def act_for(policy: Policy, spec: EnvSpec, network: Network) -> Callable[[Any, Tensor], Tensor]:
    """Return a function from observations and noise of some rows to their actions.

    It has the policy's current weights, and may miss later changes.
    """
    actor = actor_for(policy, spec, network)
    if isinstance(actor, numpy_inference.NumpyActor):
        return actor.act_on

    @torch.no_grad()
    def act(obs: Any, noise: Tensor) -> Tensor:
        return policy.act(obs, noise)["action"]

    return act


def actor_for(policy: Policy, spec: EnvSpec, network: Network) -> Actor:
    """Build an actor with the policy's current weights. It may miss later changes."""
    path, _ = choose(ACTING, type(policy).act, policy, spec, network)
    return PolicyActor(policy.act) if path is None else path.make(policy, spec, network)
