"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236), and what Rainbow added to them.

The settings, the loss of a minibatch, and the algorithm. docs/dqn.md explains details and metrics.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headrace.algos.action_values import recurrent_dqn
from headrace.algos.action_values.q_learning import (
    QLearning,
    QLearningConfig,
    explore,
    loss_of_outputs,
    of_action,
    q_policy,
)
from headrace.algos.base import (
    LossSpec,
    Metrics,
    Modules,
    Named,
    Share,
    UpdateContext,
    mean_of,
    mean_over_rows,
)
from headrace.algos.off_policy import (
    ReplayConfig,
    replay_of,
    store,
    update_priorities,
    update_target,
)
from headrace.algos.sequences import SequenceConfig, due_draws, replay_for
from headrace.batch import Fragment, Minibatch
from headrace.configclass import PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.action_values.noisy import renew_noise
from headrace.models.action_values.q_policy import QPolicy
from headrace.models.action_values.value_distributions import value_distribution
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec

_ACTING, _LEARNING, _TARGETS = range(3)  # uses of noise in weights
_MOST_CLIPPED = 0.01  # share of targets outside of c51's range


@configclass
class DQN(SequenceConfig, ReplayConfig, QLearningConfig):
    """Settings of DQN."""

    double_q: bool = True
    """Let the network choose the next action whose value the target network gives."""
    target_update_interval: PositiveInt = 250
    """Gradient steps between updates of the target network."""
    tau: Share = 1.0
    """Share of the network's weights in an update of the target network; 1: a copy. Small ones go
    with a target_update_interval of 1."""
    distribution: Literal["none", "c51", "qr"] = "none"
    """Learn the distribution of the return in place of its mean: by probabilities of fixed returns
    (c51), or by its quantiles (qr)."""
    num_atoms: PositiveInt = 51
    """Returns, or quantiles, of a distribution."""
    v_min: float = -10.0
    """The least return of c51, in scaled rewards."""
    v_max: float = 10.0
    """The greatest return of c51."""
    noisy: bool = False
    """Explore by noise in the weights. Random actions are then left out, unless their probability
    is given."""


@configclass
class Rainbow(DQN):
    """Settings of DQN with all that Rainbow added (Hessel et al. 2018, arXiv:1710.02298)."""

    n_step: PositiveInt = 3
    priority_alpha: Share = 0.5
    dueling: bool = True
    noisy: bool = True
    distribution: Literal["none", "c51", "qr"] = "c51"


def loss(policy: QPolicy, minibatch: Minibatch, cfg: DQN) -> tuple[Tensor, Metrics]:
    """Return the loss of a minibatch, and its metrics.

    Args:
        minibatch: rows of `obs, action, weight`, and of `targets`.

    Returns:
        The metric `error` is of each row, `[B]`.
    """
    outputs = of_action(policy.outputs(minibatch["obs"]), minibatch["action"])
    return loss_of_outputs(policy.returns, outputs, minibatch)


@torch.no_grad()
def targets(rows: Minibatch, *, policy: QPolicy, target: QPolicy, cfg: DQN) -> Minibatch:
    """Return the targets of transitions, from `ValueDistribution.target`."""
    # y = r + γ Q_target(s', argmax_a Q(s', a));  without double_q: the argmax of Q_target
    # (van Hasselt et al. 2016, arXiv:1509.06461)
    next_obs = rows["next_obs"]
    outputs = target.outputs(next_obs)
    best = policy.best(policy.outputs(next_obs) if cfg.double_q else outputs, next_obs)
    discount = policy.if_any_is_allowed(rows["discount"], next_obs)
    return target.returns.target(of_action(outputs, best), rows["reward"], discount)


@torch.no_grad()
def best_values(policy: QPolicy, target: QPolicy, rows: Minibatch) -> Metrics:
    """Return the mean value of the best actions, and how far the target network is from it."""
    outputs = policy.outputs(rows["obs"])
    best = policy.best(outputs, rows["obs"])
    value, earlier = (
        policy.returns.mean(of_action(each, best))
        for each in (outputs, target.outputs(rows["obs"]))
    )
    of_rows = {"max_value": value, "target_gap": (value - earlier).abs()}
    return mean_over_rows(of_rows, rows)


def _renew_for_learning(ctx: UpdateContext[DQN], step: int) -> None:
    modules, seed = ctx.modules, ctx.seed

    @ctx.recorded("noise")
    def renew(of: Named) -> Named:
        renew_noise(modules["policy"], seed, of["step"], _LEARNING)
        renew_noise(modules["target"], seed, of["step"], _TARGETS)
        return {}

    renew({"step": step})


class DQNAlgorithm(QLearning[DQN]):
    """DQN: acts greedily but for epsilon, and learns from replay."""

    name, Config, data, several_learners, recurrent = "dqn", DQN, "replay", True, True

    def build_policy(
        self, spec: EnvSpec, network: Network, config: DQN, model: ModelFactory | None = None
    ) -> QPolicy:
        returns = value_distribution(
            config.distribution, config.num_atoms, config.v_min, config.v_max
        )
        return q_policy(spec, network, config, model, returns, noisy=config.noisy)

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: DQN,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        target = copy.deepcopy(policy).requires_grad_(False)
        target.normalize_obs = policy.normalize_obs  # the same input for both
        replay = replay_for(policy, spec, config, num_rows, ranks)
        return {"policy": policy, "target": target, "replay": replay}

    def losses(self, modules: Modules, config: DQN) -> dict[str, LossSpec]:
        policy, target = modules["policy"], modules["target"]
        assert isinstance(policy, QPolicy)
        assert isinstance(target, QPolicy)
        of, targets_of = loss, targets
        if policy.state_size:
            of, targets_of = recurrent_dqn.loss, recurrent_dqn.targets
        of_rows = partial(targets_of, policy=policy, target=target, cfg=config)
        return {
            "policy": LossSpec(of, policy, config.max_grad_norm, config.adam_eps, prepare=of_rows)
        }

    def warning(self, metrics: Mapping[str, float], config: DQN) -> str:
        if (clipped := metrics.get("clipped_targets", 0.0)) <= _MOST_CLIPPED:
            return ""
        return (
            f"{clipped:.1%} of c51's targets are outside of v_min={config.v_min:g} to "
            f"v_max={config.v_max:g}, and clipped. Use a wider range (--v-min, --v-max)."
        )

    def minibatch_rows(self, run: object, config: DQN) -> int:
        return config.batch_size

    def update(self, source: Fragment, ctx: UpdateContext[DQN]) -> Metrics:
        cfg, policy, target = ctx.config, ctx.modules["policy"], ctx.modules["target"]
        assert isinstance(policy, QPolicy)
        assert isinstance(target, QPolicy)
        store(ctx, source)
        seen: list[Metrics] = []
        drawn = None
        rows: Minibatch = {}
        for step, drawn, rows in due_draws(ctx):
            if cfg.noisy:
                _renew_for_learning(ctx, step)
            metrics = ctx.step("policy", rows, ctx.config.lr)
            update_priorities(ctx, drawn, metrics.pop("error"))
            seen.append(metrics)
            if (step + 1) % cfg.target_update_interval == 0:
                update_target(target, policy, cfg.tau)
        of_last = best_values(policy, target, rows) if seen and not policy.state_size else {}
        if cfg.noisy:
            renew_noise(policy, ctx.seed, ctx.version, _ACTING)
        epsilon = cfg.epsilon(ctx.progress)
        explore(ctx.policy, epsilon)
        return (
            mean_of(seen)
            | of_last
            | replay_of(ctx).metrics(drawn)
            | {"lr": torch.tensor(ctx.config.lr), "epsilon": torch.tensor(epsilon)}
        )


class RainbowAlgorithm(DQNAlgorithm):
    """DQN whose settings begin as those of Rainbow."""

    name, Config = "rainbow", Rainbow
