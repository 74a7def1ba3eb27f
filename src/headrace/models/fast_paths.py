"""Fast paths: functions that compute what another one defines, in less time, within a tolerance.

Each is declared with its reference. `choose` is the only place that decides which one runs. Left
out: gradients of algorithms (`config/algorithms.py` lists them).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.models import numpy_inference
from headrace.models.policy import Actor, Network, Policy, PolicyActor
from headrace.spec import EnvSpec


@dataclass(frozen=True)
class FastPath:
    """One fast path.

    Attributes:
        name: as the start of a run shows it.
        reference: the function that it replaces.
        unsupported: returns why it cannot replace the reference here; "" if it can.
        make: makes the replacement, from the arguments of `unsupported`.
        tolerance: how far results may be from the reference's, by the dtype of the weights.
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
    )
]


def choose(
    paths: Sequence[FastPath], reference: Callable[..., Any], *arguments: Any
) -> tuple[FastPath | None, str]:
    """Return the first path that can replace `reference`; else None, and why the last cannot."""
    reason = ""
    for path in paths:
        if path.reference is reference:
            reason = path.unsupported(*arguments)
            if not reason:
                return path, ""
    return None, reason


def describe_choice(path: FastPath | None, reference: str, reason: str) -> str:
    """Return what runs, in words: a path's name, or the reference and why no path replaces it."""
    return path.name if path else reference + (f" ({reason})" if reason else "")


def actor_for(policy: Policy, spec: EnvSpec, network: Network) -> Actor:
    """Return what acts with the policy's weights as they are now; it may miss later changes."""
    path, _ = choose(ACTING, Policy.act, policy, spec, network)
    return PolicyActor(policy.act) if path is None else path.make(policy, spec, network)
