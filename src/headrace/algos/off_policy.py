"""What algorithms share that learn from replay: settings, and which gradient steps are due.

Left out: what is learned (`dqn.py`).
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import Named, Share, UpdateContext
from headrace.batch import Fragment, Minibatch
from headrace.configclass import NonNegative, NonNegativeInt, PositiveInt, configclass
from headrace.device_seeding import batch_noise, goal_draws
from headrace.distributed.ranks import Ranks
from headrace.errors import ConfigError
from headrace.replay.buffer import ReplayBuffer, Rows
from headrace.replay.hindsight import has_goals
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
    hindsight: Share = 0.0
    """Share of drawn transitions whose goal is replaced by one that the episode reached later
    (Andrychowicz et al. 2017, arXiv:1707.01495): for environments with desired_goal."""
    replay_dir: str = ""
    """Directory, on a disk, of a temporary file that holds the observations, so that they may be
    larger than memory; "": memory holds them. For learners on a CPU."""
    save_replay: bool = True
    """Keep the transitions in checkpoints. Without them, a resumed run collects learning_starts env
    steps before it goes on to learn, and differs from one that was not interrupted."""

    def learner_steps_after(self, env_steps: int) -> int:
        """Return the gradient steps that are due by then, since the start of the run."""
        # The ratio as it is written: 0.29 * 100 in binary numbers is less than 29.
        ratio = Fraction(str(float(self.replay_ratio)))
        return int(ratio * max(0, env_steps - self.learning_starts))


def replay_buffer(spec: EnvSpec, config: ReplayConfig, num_envs: int, ranks: Ranks) -> ReplayBuffer:
    """Build the buffer of an algorithm, for `num_envs` environments of this rank.

    Raises:
        ConfigError: goals are to be replaced, and cannot be.
    """
    if config.hindsight and not has_goals(spec):
        raise ConfigError(
            f"hindsight={config.hindsight} replaces goals: expected Dict observations with "
            f"desired_goal and achieved_goal of one form, but {spec.id} has "
            f"{spec.observation.describe()}.\nLeave --hindsight out."
        )
    if config.hindsight and config.n_step > 1:
        raise ConfigError(
            f"hindsight={config.hindsight} and n_step={config.n_step}: with another goal the "
            "rewards of later steps would be others as well.\nUse --n-step 1, or --hindsight 0."
        )
    return ReplayBuffer(
        spec, config.replay_size, num_envs, ranks,
        prioritized=config.priority_alpha > 0,
        hindsight=config.hindsight,
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
    """Add the newest data to the buffer, once: an update may be made again after a loss."""
    replay = replay_of(ctx)
    if replay.newest_version != ctx.version:
        replay.insert(source)
        replay.newest_version = ctx.version
    replay.count_env_steps(ctx.env_steps, ctx.new_env_steps, ctx.version)
    ctx.lap("replay")


Draws = Iterator[tuple[int, Rows, Minibatch]]
"""Of each gradient step its number since the start, the rows it learns from, and their contents."""


def due_steps(ctx: UpdateContext[Any], num_normal: int = 0) -> Draws:
    """Yield the gradient steps that are due, and what they learn from.

    The numbers follow from counters that are saved, so that the ratio of gradient steps to env
    steps is exact over any interruption.

    Args:
        num_normal: normal numbers for each row: `noise`, `[B, num_normal]`. They belong to the
            gradient step and the row's place in its batch.
    """
    draw = _by_priority if replay_of(ctx).priorities else _uniformly
    yield from draw(ctx, due(ctx), num_normal)


def due(ctx: UpdateContext[Any]) -> range:
    """Return the numbers of the gradient steps that are due."""
    replay = replay_of(ctx)
    # Without any transition yet, the gradient steps are made up for.
    if replay.is_refilling or not len(replay):
        return range(0)
    env_steps = ctx.env_steps + ctx.new_env_steps - replay.env_steps_of_refills
    return range(ctx.learner_steps, ctx.config.learner_steps_after(env_steps))


def _by_priority(ctx: UpdateContext[Any], steps: range, num_normal: int) -> Draws:
    """Draw for one gradient step at a time, since each changes priorities."""
    cfg, seed, replay, scaled = ctx.config, ctx.seed, replay_of(ctx), ctx.policy.scaled
    row_weight = _row_weight(ctx)
    beta = cfg.priority_beta + (1 - cfg.priority_beta) * ctx.progress

    @ctx.recorded("draw")
    def draw(of: Named) -> Named:
        rows, weight = replay.draw_by_priority(seed, of["step"], cfg.batch_size, of["beta"])
        columns = replay.transitions(rows, cfg.n_step, cfg.gamma, scaled)
        if num_normal:
            columns["noise"] = batch_noise(seed, of["step"], rows.slot, num_normal)
        columns |= {"weight": weight * row_weight, "share": torch.full_like(weight, row_weight)}
        return columns | {"rows": vars(rows)}

    for step in steps:
        ctx.lap("learn")
        minibatch = draw({"step": step, "beta": beta})
        rows = Rows(**minibatch.pop("rows"))
        if cfg.hindsight:
            replay.relabel(minibatch, rows, goal_draws(seed, step, rows.slot), scaled)
        ctx.lap("replay")
        yield step, rows, minibatch


def _uniformly(ctx: UpdateContext[Any], steps: range, num_normal: int) -> Draws:
    """Draw for many gradient steps at once, which takes hardly longer than for one."""
    cfg, replay = ctx.config, replay_of(ctx)
    of_batch = 2 * replay.obs_bytes * cfg.batch_size
    at_once = max(1, _MOST_BYTES[replay.end.device.type] // of_batch)
    draws = max(1, _MOST_DRAWN // cfg.batch_size)
    for first in steps[::draws]:
        ctx.lap("learn")
        count = min(draws, steps.stop - first)
        drawn, sizes = replay.draw(ctx.seed, first, count, cfg.batch_size)
        returns = replay.returns(drawn, cfg.n_step, cfg.gamma, ctx.policy.scaled)
        ctx.lap("replay")
        parts = [sizes[i : i + at_once] for i in range(0, len(sizes), at_once)]
        counts = [sum(part) for part in parts]
        pieces = zip(*(torch.split_with_sizes(of, counts) for of in returns), strict=True)
        step = first
        for part, rows, of_part in zip(parts, drawn.split(counts), pieces, strict=True):
            for minibatch in _minibatches(ctx, rows, of_part, part, step, num_normal):
                yield step, *minibatch
                step += 1


def _minibatches(
    ctx: UpdateContext[Any],
    drawn: Rows,
    returns: tuple[Tensor, ...],
    sizes: list[int],
    first: int,
    num_normal: int,
) -> Iterator[tuple[Rows, Minibatch]]:
    """Gather the transitions of rows, and cut them into those of each gradient step from `first`.

    Args:
        returns: of these rows, from `ReplayBuffer.returns`.
        sizes: rows of each gradient step.
    """
    cfg = ctx.config
    ctx.lap("learn")
    columns = replay_of(ctx).with_returns(drawn, *returns)
    columns["weight"] = torch.full_like(columns["reward"], _row_weight(ctx))
    if num_normal or cfg.hindsight:
        steps = torch.arange(first, first + len(sizes)).repeat_interleave(torch.tensor(sizes))
        steps = steps.to(drawn.slot.device, non_blocking=True)
    if num_normal:
        columns["noise"] = batch_noise(ctx.seed, steps, drawn.slot, num_normal)
    if cfg.hindsight:
        uniform = goal_draws(ctx.seed, steps, drawn.slot)
        replay_of(ctx).relabel(columns, drawn, uniform, ctx.policy.scaled)
    minibatches = list(_cut(columns, sizes))
    ctx.lap("replay")
    yield from zip(drawn.split(sizes), minibatches, strict=True)


def _cut(columns: Minibatch, sizes: list[int]) -> Iterator[Minibatch]:
    """Cut columns, those of dicts within included, into pieces of so many rows."""
    pieces = [
        _cut(column, sizes) if isinstance(column, dict) else torch.split_with_sizes(column, sizes)
        for column in columns.values()
    ]
    for of_piece in zip(*pieces, strict=True):
        yield dict(zip(columns, of_piece, strict=True))


def _row_weight(ctx: UpdateContext[Any]) -> float:
    """Return the weight of a row in the sum that a loss is.

    Gradients are means over ranks, each of which has some of the rows.
    """
    return ctx.ranks.size / float(ctx.config.batch_size)


def update_priorities(ctx: UpdateContext[Any], rows: Rows, error: Tensor) -> None:
    """Write the priorities of rows that a gradient step learned from, if the buffer keeps any.

    Args:
        error: of each row, `[B]`, 0 or more.
    """
    replay, alpha = replay_of(ctx), ctx.config.priority_alpha
    if not replay.priorities:
        return

    @ctx.recorded("priorities")
    def write(of: Named) -> Named:
        replay.set_priorities(Rows(**of["rows"]), (of["error"] + _LEAST_ERROR) ** alpha)
        return {}

    ctx.lap("learn")
    write({"rows": vars(rows), "error": error})
    ctx.lap("replay")


@torch.no_grad()
def update_target(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move the target's weights towards those of `source`, by a share `tau`."""
    old: list[Tensor] = list(target.parameters())
    new: list[Tensor] = list(source.parameters())
    torch._foreach_lerp_(old, new, tau) if tau < 1 else torch._foreach_copy_(old, new)
    for before, now in zip(target.buffers(), source.buffers(), strict=True):
        before.copy_(now)
