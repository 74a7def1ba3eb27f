"""What algorithms have in common that learn from replay: settings, and how often they learn.

Left out: what is learned (`dqn.py`).
"""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import Share, UpdateContext
from headrace.batch import Fragment, Minibatch, each
from headrace.configclass import NonNegative, NonNegativeInt, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.replay.buffer import ReplayBuffer, Rows
from headrace.spec import EnvSpec

_LEAST_ERROR = 1e-6  # of a priority: else a row with no error is never drawn again
_MOST_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Of observations that are gathered at once, for several gradient steps. On a CPU they are to stay
in its cache; on a GPU each operation costs the same, however small."""
_MOST_DRAWN = 2**16  # rows that are drawn at once, for several gradient steps


@configclass
class ReplayConfig:
    """More settings, of algorithms that learn from replay. See `EpochsConfig` for its base."""

    replay_size: PositiveInt = 1_000_000
    """Rows that are kept, of all environments together; nearly all are transitions."""
    batch_size: PositiveInt = 64
    """Transitions of a gradient step, of all learners together."""
    replay_ratio: NonNegative = 1.0
    """Gradient steps for each env step."""
    learning_starts: NonNegativeInt = 1_000
    """Env steps before the first gradient step."""
    n_step: PositiveInt = 1
    """Env steps whose rewards a target sums, before it looks at a value."""
    priority_alpha: Share = 0.0
    """Draw transitions in proportion to their last error to this power; 0: all alike."""
    priority_beta: Share = 0.4
    """Share of the bias of priorities that weights undo at first; it grows to 1 over
    schedule_env_steps."""
    replay_dir: str = ""
    """Directory, on a disk, of a temporary file that holds the observations, so that they may be
    larger than memory; "": memory holds them. For learners on a CPU."""
    save_replay: bool = True
    """Keep the transitions in checkpoints. Without them, a resumed run collects learning_starts env
    steps before it goes on to learn, and differs from one that was not interrupted."""

    def learner_steps_after(self, env_steps: int) -> int:
        """Return the gradient steps that are due by then, since the start of the run."""
        return int(self.replay_ratio * max(0, env_steps - self.learning_starts))


def replay_buffer(spec: EnvSpec, config: ReplayConfig, num_envs: int, ranks: Ranks) -> ReplayBuffer:
    """Build the buffer of an algorithm, for `num_envs` environments of this rank."""
    return ReplayBuffer(
        spec, config.replay_size, num_envs, ranks,
        prioritized=config.priority_alpha > 0,
        directory=config.replay_dir,
        is_saved=config.save_replay,
        refill=config.learning_starts,
    )  # fmt: skip


def replay_of(ctx: UpdateContext[Any]) -> ReplayBuffer:
    """Return the buffer of an algorithm, which is its module `replay`."""
    replay = ctx.modules["replay"]
    assert isinstance(replay, ReplayBuffer)
    return replay


def store(ctx: UpdateContext[Any], source: Fragment) -> None:
    """Add the newest data to the buffer."""
    replay_of(ctx).insert(source)
    ctx.lap("replay")


def due(ctx: UpdateContext[Any]) -> Iterator[tuple[int, Rows, Minibatch]]:
    """Yield the number of each gradient step that is due, since the start, and what it learns from.

    The numbers follow from counters that are saved, so that the ratio of gradient steps to env
    steps is exact over any interruption.
    """
    cfg, replay = ctx.config, replay_of(ctx)
    # Without any transition yet, the gradient steps are made up for.
    if replay.refills(ctx.env_steps, ctx.new_env_steps) or not len(replay):
        return
    env_steps = ctx.env_steps + ctx.new_env_steps - replay.env_steps_of_refills
    end = cfg.learner_steps_after(env_steps)
    # Operations on many rows take hardly longer than on a few; but priorities change with each step
    of_batch = 2 * replay.obs_bytes * cfg.batch_size
    at_once = max(1, _MOST_BYTES[replay.end.device.type] // of_batch)
    draws = 1 if replay.priorities else max(1, _MOST_DRAWN // cfg.batch_size)
    for first in range(ctx.learner_steps, end, draws):
        ctx.lap("learn")
        drawn, sizes, weight = _draw(ctx, first, min(draws, end - first))
        ctx.lap("replay")
        parts = [sizes[i : i + at_once] for i in range(0, len(sizes), at_once)]
        totals = [sum(part) for part in parts]
        weights = torch.split_with_sizes(weight, totals)
        step = first
        for part, rows, of_rows in zip(parts, drawn.split(totals), weights, strict=True):
            for minibatch in _minibatches(ctx, rows, of_rows, part):
                yield step, *minibatch
                step += 1


def _minibatches(
    ctx: UpdateContext[Any], drawn: Rows, weight: Tensor, sizes: list[int]
) -> Iterator[tuple[Rows, Minibatch]]:
    """Gather the transitions of rows, and cut them into those of each gradient step."""
    cfg = ctx.config
    ctx.lap("learn")
    columns = replay_of(ctx).transitions(drawn, cfg.n_step, cfg.gamma, ctx.policy.scaled)
    # Gradients are means over ranks, of which each has a part of the rows.
    columns["weight"] = weight * (ctx.ranks.size / cfg.batch_size)
    by_step = {
        name: each(partial(torch.split_with_sizes, split_sizes=sizes), column)
        for name, column in columns.items()
    }
    ctx.lap("replay")
    for i, rows in enumerate(drawn.split(sizes)):
        yield rows, {name: each(itemgetter(i), parts) for name, parts in by_step.items()}


def _draw(ctx: UpdateContext[Any], first: int, count: int) -> tuple[Rows, list[int], Tensor]:
    """Return the rows of `count` gradient steps, how many each has, and the weights of all."""
    cfg, replay = ctx.config, replay_of(ctx)
    if replay.priorities:
        assert count == 1
        beta = cfg.priority_beta + (1 - cfg.priority_beta) * ctx.progress
        rows, weight = replay.draw_by_priority(ctx.seed, first, cfg.batch_size, beta)
        return rows, [len(weight)], weight
    rows, sizes = replay.draw(ctx.seed, first, count, cfg.batch_size)
    return rows, sizes, torch.ones(len(rows.env), device=rows.env.device)


def learned_from(ctx: UpdateContext[Any], rows: Rows, error: Tensor) -> None:
    """Write the priorities of rows that a gradient step learned from, if the buffer keeps any.

    Args:
        error: of each row, `[B]`, 0 or more.
    """
    replay = replay_of(ctx)
    if replay.priorities:
        ctx.lap("learn")
        replay.set_priorities(rows, (error + _LEAST_ERROR) ** ctx.config.priority_alpha)
        ctx.lap("replay")


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move the target's weights towards those of `source`, by a share `tau`."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, tau) if tau < 1 else old.copy_(new)
    for before, now in zip(target.buffers(), source.buffers(), strict=True):
        before.copy_(now)
