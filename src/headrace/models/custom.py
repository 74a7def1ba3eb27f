"""Custom networks: made, and tried before anything depends on them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.errors import ConfigError, UsageError
from headrace.importing import load_callable
from headrace.models.distributions import head_for
from headrace.spec import PLAIN, EnvSpec, nested

ModelFactory = Callable[[EnvSpec], nn.Module]
"""Makes a custom network: a module whose `forward(obs)` returns `(params, value)` as
`ActorCritic.forward` does, from `spec.seen` observations, with `num_params(spec)` params. Nested
observations come as the environment nests them (`spec.nested`). For DQN and PQN the params are
values of actions; for SAC means, then logarithms of deviations; for TD3 and DDPG means. These five
do not use the value."""


def load_model(model: str | ModelFactory | None) -> ModelFactory | None:
    """Return what makes a custom network, imported if it is `module:callable`; "" is None."""
    if isinstance(model, str):
        return load_callable(model, ConfigError) if model else None
    return model


def num_params(spec: EnvSpec) -> int:
    """Return how many numbers the distribution over actions takes: logits, or means."""
    return head_for(spec.action).num_params


def made(factory: ModelFactory, spec: EnvSpec, params: int) -> nn.Module:
    """Make a custom network and try it; UsageError if it is not as `ModelFactory` says.

    Args:
        params: numbers that its `params` must have.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(
            f"model={name}: expected a callable that makes a torch.nn.Module from the "
            "environment's spec, such as its class; not the module itself."
        )
    try:
        inspect.signature(factory).bind(spec)
    except TypeError as error:
        raise UsageError(
            f"The model {name} cannot be made: {error}.\nExpected a class or function that takes "
            "the environment's spec, as in examples/own_network.py."
        ) from None
    except ValueError:
        pass  # built-ins have no signature
    return _checked(factory(spec), spec, params)


@torch.no_grad()
def _checked(model: Any, spec: EnvSpec, params: int) -> nn.Module:
    """Try a custom network on two observations."""
    expected = (
        f"expected that forward(obs) gives (params, value) of shapes [n, {params}] and "
        f"[n], for {spec.seen.describe()} observations"
    )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is a {type(model).__name__}: expected that calling it with the "
            "environment's spec makes a torch.nn.Module."
        )
    tried = {
        # Numbers of 0 would hide what a layer does
        key: torch.tensor(part.start or int(part.kind == "box"), dtype=getattr(torch, part.dtype))
        .reshape(part.shape if part.start else ())
        .expand(2, *part.shape)
        for key, part in spec.seen.leaves
    }
    obs = nested(spec.seen, tried) if spec.seen.kind == "dict" else tried[PLAIN]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        first, second = model(obs), model(obs)
        shapes = [tuple(part.shape) for part in first]
    except Exception as error:
        raise UsageError(
            f"The model {type(model).__name__} failed: {type(error).__name__}: {error}\n{expected}."
        ) from error
    if shapes != [(2, params), (2,)]:
        raise UsageError(
            f"The model {type(model).__name__} returned shapes {shapes} for n=2: {expected}."
        )
    pairs = [*zip(first, second, strict=True), *zip(before, model.buffers(), strict=True)]
    if not all(torch.equal(*pair) for pair in pairs):
        raise UsageError(
            f"The model {type(model).__name__} returned other values for the same observations, or "
            "changed itself when it was called, so that acting and learning would differ.\n"
            "Leave out such layers (Dropout, BatchNorm); LayerNorm is a substitute."
        )
    return model
