"""Networks of the user's own: made, and tried before anything depends on them.

Left out: our own network, and what a policy is (`policy.py`).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.errors import UsageError
from headrace.models.distributions import head_for
from headrace.spec import PLAIN, EnvSpec

ModelFactory = Callable[[EnvSpec], nn.Module]
"""Makes a network of the user's own: a module whose `forward(obs)` gives `(params, value)`, see
`ActorCritic.forward`. It gets `spec.seen` observations, and must make as many params as
`num_params(spec)` says."""


def num_params(spec: EnvSpec) -> int:
    """How many numbers the distribution over actions takes: logits, or means."""
    return head_for(spec.action).num_params


def made(factory: ModelFactory, spec: EnvSpec) -> nn.Module:
    """Make one, and try it on two observations; UsageError if it is not as `ModelFactory` says."""
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(
            f"model={name}: expected what makes a torch.nn.Module from the environment's spec, "
            "such as its class; not the module itself."
        )
    try:
        inspect.signature(factory).bind(spec)
    except TypeError as error:
        raise UsageError(
            f"The model {name} cannot be made: {error}.\nExpected a class or function that takes "
            "the environment's spec, as in examples/own_network.py."
        ) from None
    except ValueError:
        pass  # built-ins do not tell their signature
    return _checked(factory(spec), spec)


@torch.no_grad()
def _checked(model: Any, spec: EnvSpec) -> nn.Module:
    """Try a model of the user's own on two observations."""
    expected = (
        f"expected that forward(obs) gives (params, value) of shapes [n, {num_params(spec)}] and "
        f"[n], for {spec.seen.describe()} observations"
    )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is a {type(model).__name__}: expected that calling it with the "
            "environment's spec makes a torch.nn.Module."
        )
    tried = {
        # Choices may be few; of numbers, not 0, which would hide what a layer does
        key: torch.full((2, *part.shape), int(part.kind == "box"), dtype=getattr(torch, part.dtype))
        for key, part in spec.seen.leaves
    }
    obs = tried if spec.seen.kind == "dict" else tried[PLAIN]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        given, again = model(obs), model(obs)
        shapes = [tuple(part.shape) for part in given]
    except Exception as error:
        raise UsageError(
            f"The model {type(model).__name__} failed: {type(error).__name__}: {error}\n{expected}."
        ) from error
    if shapes != [(2, num_params(spec)), (2,)]:
        raise UsageError(
            f"The model {type(model).__name__} gave shapes {shapes} for n=2: {expected}."
        )
    pairs = [*zip(given, again, strict=True), *zip(before, model.buffers(), strict=True)]
    if not all(torch.equal(first, second) for first, second in pairs):
        raise UsageError(
            f"The model {type(model).__name__} gave other values for the same observations, or "
            "changed itself when it was called: what acted would not be what is learned from.\n"
            "Leave out such layers (Dropout, BatchNorm); LayerNorm is a substitute."
        )
    return model
