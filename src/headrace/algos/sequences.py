"""Sequences of a replay, for algorithms whose policy has a recurrent core.

Settings, the buffer, and which sequences a gradient step learns from. Left out: what is learned
(`action_values/recurrent_dqn.py`, `critics/recurrent_sac.py`).
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import UpdateContext
from headrace.algos.off_policy import Draws, due, due_steps, replay_buffer, replay_of
from headrace.batch import Minibatch, Obs
from headrace.configclass import NonNegativeInt, PositiveInt, configclass
from headrace.device_seeding import batch_noise
from headrace.distributed.ranks import Ranks
from headrace.errors import ConfigError
from headrace.models.policy import Policy
from headrace.replay.buffer import ReplayBuffer
from headrace.replay.sequences import SequenceBuffer
from headrace.spec import EnvSpec


@configclass
class SequenceConfig:
    """More settings, of algorithms that learn from sequences where the policy has a core."""

    sequence_length: PositiveInt = 32
    """Env steps of a drawn sequence that are learned from, with a recurrent core."""
    burn_in: NonNegativeInt = 16
    """Env steps before these, which only renew the stored recurrent state."""


def replay_for(
    policy: Policy, spec: EnvSpec, config: Any, num_envs: int, ranks: Ranks
) -> ReplayBuffer:
    """Build the buffer of an algorithm: with a recurrent core, one of sequences.

    Raises:
        ConfigError: settings that single transitions alone can have; see also `replay_buffer`.
    """
    if not policy.state_size:
        return replay_buffer(spec, config, num_envs, ranks)
    for name in ("priority_alpha", "hindsight"):
        if value := getattr(config, name):
            raise ConfigError(
                f"{name}={value}, but with a recurrent core sequences are drawn, all alike: "
                f"expected 0.\nUse --{name.replace('_', '-')} 0, or --core none."
            )
    if ranks.size > 1:
        raise ConfigError(
            f"num_learners={ranks.size}, but with a recurrent core one learner holds the replay.\n"
            "Use --num-learners 1, or --core none."
        )
    return SequenceBuffer(
        spec, config.replay_size, num_envs, ranks,
        state_size=policy.state_size,
        burn_in=config.burn_in,
        length=config.sequence_length,
        n_step=config.n_step,
        directory=config.replay_dir,
        is_saved=config.save_replay,
        refill=config.learning_starts,
    )  # fmt: skip


def due_draws(ctx: UpdateContext[Any], num_normal: int = 0) -> Draws:
    """Yield the gradient steps that are due, and the transitions or sequences they learn from.

    Args:
        num_normal: normal numbers for each row that is learned from, as `noise`; of sequences, step
            after step.
    """
    replay = replay_of(ctx)
    if isinstance(replay, SequenceBuffer):
        yield from _due_sequences(ctx, replay, num_normal)
    else:
        yield from due_steps(ctx, num_normal)


def _due_sequences(ctx: UpdateContext[Any], replay: SequenceBuffer, num_normal: int) -> Draws:
    cfg = ctx.config
    # So many transitions as a gradient step has without a core
    count = max(1, cfg.batch_size // cfg.sequence_length)
    for step in due(ctx):
        ctx.lap("learn")
        first, _ = replay.draw(ctx.seed, step, 1, count)
        minibatch = replay.sequences(first, cfg.gamma, ctx.policy.scaled)
        is_step = minibatch.pop("is_step").flatten()
        minibatch["weight"] = is_step / (count * cfg.sequence_length)
        if num_normal:
            row = torch.arange(cfg.sequence_length, device=first.slot.device).unsqueeze(1) * count
            slot = (row + first.slot).flatten()
            minibatch["noise"] = batch_noise(ctx.seed, step, slot, num_normal)
        ctx.lap("replay")
        yield step, first, minibatch


def sequence_of(minibatch: Minibatch) -> tuple[Obs, Tensor, Tensor]:
    """Return the arguments of a policy's pass over sequences: observations, state, resets."""
    return minibatch["obs"], minibatch["state"], minibatch["reset"]
