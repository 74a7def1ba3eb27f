"""The losses of DQN with a recurrent core, and the sequences that they are of.

R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX), without its scaling of
values. Left out: settings and algorithm (`dqn.py`).
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algos.action_values.q_learning import loss_of_outputs, of_action
from headrace.algos.base import Metrics, UpdateContext
from headrace.algos.off_policy import Draws, due, replay_of
from headrace.batch import Minibatch, Obs, each
from headrace.configclass import NonNegativeInt, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.errors import ConfigError
from headrace.models.action_values.q_policy import QPolicy
from headrace.replay.sequences import SequenceBuffer
from headrace.spec import EnvSpec


@configclass
class SequenceConfig:
    """More settings, of algorithms that learn from sequences where the policy has a core."""

    sequence_length: PositiveInt = 32
    """Env steps of a drawn sequence that are learned from, with a recurrent core."""
    burn_in: NonNegativeInt = 16
    """Env steps before these, which only renew the stored recurrent state."""


def sequence_buffer(
    spec: EnvSpec, config: Any, num_envs: int, ranks: Ranks, state_size: int
) -> SequenceBuffer:
    """Build the buffer of an algorithm whose policy has a recurrent core.

    Raises:
        ConfigError: settings that single transitions alone can have.
    """
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
        state_size=state_size,
        burn_in=config.burn_in,
        length=config.sequence_length,
        n_step=config.n_step,
        directory=config.replay_dir,
        is_saved=config.save_replay,
        refill=config.learning_starts,
    )  # fmt: skip


def due_sequences(ctx: UpdateContext[Any]) -> Draws:
    """Yield the gradient steps that are due, and the sequences that they learn from.

    A gradient step learns from `batch_size` transitions, in sequences.
    """
    cfg, replay = ctx.config, replay_of(ctx)
    assert isinstance(replay, SequenceBuffer)
    count = num_sequences(cfg)
    for step in due(ctx):
        ctx.lap("learn")
        first, _ = replay.draw(ctx.seed, step, 1, count)
        minibatch = replay.sequences(first, cfg.gamma, ctx.policy.scaled)
        is_step = minibatch.pop("is_step").flatten()
        minibatch["weight"] = is_step / (count * cfg.sequence_length)
        ctx.lap("replay")
        yield step, first, minibatch


def num_sequences(config: Any) -> int:
    """Return the sequences of a gradient step: at least one."""
    return max(1, int(config.batch_size) // int(config.sequence_length))


def loss(policy: QPolicy, minibatch: Minibatch, cfg: Any) -> tuple[Tensor, Metrics]:
    """Return the loss of sequences, and its metrics, as `dqn.loss`.

    Args:
        minibatch: of `SequenceBuffer.sequences`, and `targets`, of their rows.
    """
    outputs = policy.outputs_of_sequence(*_sequence(minibatch), cfg.burn_in)
    learned = outputs[: cfg.sequence_length].flatten(0, 1)
    return loss_of_outputs(
        policy.returns, of_action(learned, minibatch["action"].flatten()), minibatch
    )


@torch.no_grad()
def targets(policy: QPolicy, target: QPolicy, rows: Minibatch, cfg: Any) -> Minibatch:
    """Return the targets of the rows of sequences, as `dqn.targets`, `[length * B, ...]`."""
    sequence = _sequence(rows)
    outputs = target.outputs_of_sequence(*sequence, cfg.burn_in)
    own = policy.outputs_of_sequence(*sequence, cfg.burn_in) if cfg.double_q else outputs
    obs = each(lambda o: o[cfg.burn_in :], rows["obs"])
    after = of_action(outputs.flatten(0, 1), policy.best(own, obs).flatten())
    column = torch.arange(len(rows["state"]), device=outputs.device)
    after = after.view(*outputs.shape[:2], -1)[rows["next_row"], column].flatten(0, 1)
    reward, discount = rows["reward"].flatten(), rows["discount"].flatten()
    return target.returns.target(after, reward, discount)


def _sequence(minibatch: Minibatch) -> tuple[Obs, Tensor, Tensor]:
    return minibatch["obs"], minibatch["state"], minibatch["reset"]
