"""An algorithm of your own: REINFORCE with a baseline (Williams 1992), in a file outside Headrace.

    headrace train CartPole-v1 --algo examples.own_algorithm:Reinforce --total-env-steps 60000
    headrace resume RUN_DIR --algo examples.own_algorithm:Reinforce --total-env-steps 120000
    headrace eval RUN_DIR --algo examples.own_algorithm:Reinforce

A run's directory may not name code, so resume and eval get the name again. From Python:
`headrace.train("CartPole-v1", algo=ReinforceConfig(lr=5e-3))`, or `algo=Reinforce`. Each field of
the settings is a flag as well: --baseline-coef 1.0.
"""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.algos.base import (
    Algorithm,
    AlgorithmConfig,
    LossSpec,
    Metrics,
    Modules,
    UpdateContext,
    policy_loss,
)
from headrace.algos.targets import minibatches, values
from headrace.batch import Fragment, Minibatch, StoredOutputs, each
from headrace.configclass import NonNegative, configclass
from headrace.models.policy import Policy


@configclass
class ReinforceConfig(AlgorithmConfig):
    """Settings: lr, lr_schedule, gamma, max_grad_norm and adam_eps, and these."""

    lr: NonNegative = 5e-3
    baseline_coef: NonNegative = 0.5
    """Weight of the baseline's loss."""


def loss(policy: Policy, minibatch: Minibatch, cfg: ReinforceConfig) -> tuple[Tensor, Metrics]:
    """Return the loss of a minibatch, and metrics.

    The weights of all ranks' rows add up to the number of ranks, so that sums are means. A pure
    function: with several learners its gradients are averaged, and --compile compiles it.
    """
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"])
    weight = minibatch["weight"]
    policy_loss = -(log_prob * minibatch["advantage"] * weight).sum()
    baseline_loss = ((value - minibatch["target"]).square() * weight).sum()
    total = policy_loss + cfg.baseline_coef * baseline_loss
    metrics = {"policy_loss": policy_loss, "baseline_loss": baseline_loss}
    metrics["entropy"] = (entropy * weight).sum()
    return total, {name: metric.detach() for name, metric in metrics.items()}


class Reinforce(Algorithm[ReinforceConfig]):
    """One step down the gradient of each batch, over the returns of its episodes."""

    Config = ReinforceConfig
    data = "on_policy"  # learns from what the newest weights did: lag 0 or 1
    stored_outputs: ClassVar[StoredOutputs] = {"value": ((), torch.float32)}  # with each step

    def losses(self, modules: Modules, config: ReinforceConfig) -> dict[str, LossSpec]:
        """Return each loss with the module that it trains; each has an optimizer of its own."""
        return policy_loss(loss, modules, config)

    def update(self, source: Fragment, ctx: UpdateContext[ReinforceConfig]) -> Metrics:
        """Learn from a batch: arrays are `[T, N]`, observations `[T + 1, N, ...]`."""
        value = source.stored_outputs["value"]
        reward = ctx.policy.scaled(source.reward)  # clipped and normalized, as the settings say
        # The value after each step: of the next row, and of the last observation where time is up.
        _, next_value = values(ctx.policy, source, value)
        future, target = next_value[-1], torch.empty_like(value)
        for t in reversed(range(source.num_steps)):
            future = torch.where(source.truncated[t], next_value[t], future) * ~source.terminated[t]
            future = target[t] = reward[t] + ctx.config.gamma * future
        rows = {
            "obs": each(lambda obs: obs[:-1].flatten(0, 1), source.obs),
            "action": source.action.flatten(0, 1),
            "valid": source.valid.flatten(),
            "target": target.flatten(),
            "advantage": (target - value).flatten(),
        }
        whole = minibatches(rows, None, ctx.ranks, normalize_advantage=True)[0]
        return ctx.step("policy", whole, ctx.config.lr) | {"lr": torch.tensor(ctx.config.lr)}
