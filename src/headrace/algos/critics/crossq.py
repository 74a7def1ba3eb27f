"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605): SAC without target critics.

Batch normalization takes their place. The settings, the losses that differ, and the algorithm.
docs/sac.md explains details.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import LossSpec, Metrics, Modules
from headrace.algos.critics import sac
from headrace.algos.critics.sac import SAC, SACAlgorithm
from headrace.algos.critics.shared import loss_of_outputs
from headrace.batch import Minibatch, each
from headrace.configclass import PositiveInt, configclass
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.batch_norm import by_batch
from headrace.models.critics.critics import Critics
from headrace.models.critics.heads import SquashedGaussian
from headrace.models.critics.temperature import Temperature
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network
from headrace.spec import EnvSpec

_BETA1 = 0.5  # of Adam, for critics and policy
WITHOUT_EFFECT = (
    "tau", "layer_norm", "dropout", "critics_in_target", "num_quantiles", "dropped_quantiles",
)  # fmt: skip
"""Settings of SAC that have no effect with batch normalization and without target critics."""


@configclass
class CROSSQ(SAC):
    """Settings of CrossQ."""

    policy_delay: PositiveInt = 3


def critics_loss(
    critics: Critics,
    minibatch: Minibatch,
    cfg: Any,
    *,
    policy: ActorPolicy,
    temperature: Temperature,
) -> tuple[Tensor, Metrics]:
    """Return the loss of critics, and its metrics, as `shared.critics_loss`.

    Values of both observations come from one pass, so that one batch has the moments of both.

    Args:
        minibatch: rows of `obs, next_obs, action, reward, discount, weight`, and of `next_action`
            and `next_log_prob`.
    """
    obs, next_obs = (policy.normalized(minibatch[name]) for name in ("obs", "next_obs"))
    both = each(lambda now, after: torch.cat((now, after)), obs, next_obs)
    with by_batch(critics):
        outputs = critics(both, torch.cat((minibatch["action"], minibatch["next_action"])))
    now, after = outputs.chunk(2, 1)
    value = critics.estimate.of_next(after.detach(), minibatch["noise"])
    value = value - (temperature() * minibatch["next_log_prob"]).unsqueeze(-1)
    reward, discount = minibatch["reward"].unsqueeze(-1), minibatch["discount"].unsqueeze(-1)
    target = torch.addcmul(reward, discount, value)
    return loss_of_outputs(critics.estimate, now, target, minibatch)


def actor_loss(
    policy: ActorPolicy, minibatch: Minibatch, cfg: SAC, **of: Any
) -> tuple[Tensor, Metrics]:
    """Return `sac.actor_loss`, with the policy's layers normalized by the batch."""
    with by_batch(policy):
        return sac.actor_loss(policy, minibatch, cfg, **of)


class CrossQAlgorithm(SACAlgorithm):
    """CrossQ: SAC whose critics and policy have batch normalization, and no targets."""

    name, Config, takes_choices = "crossq", CROSSQ, False
    has_targets = recurrent = False
    several_learners = False  # moments are of one learner's rows

    def build_policy(
        self, spec: EnvSpec, network: Network, config: SAC, model: ModelFactory | None = None
    ) -> ActorPolicy:
        head = SquashedGaussian(spec.action.size, is_random=config.learning_starts > 0)
        return ActorPolicy(spec, network, head, model, batch_norm=True)

    def build_critics(self, spec: EnvSpec, network: Network, config: SAC) -> Critics:
        return Critics(spec, network, config.num_critics, batch_norm=True)

    def losses(self, modules: Modules, config: SAC) -> dict[str, LossSpec]:
        named: dict[str, Any] = dict(modules)
        policy, critics, temperature = named["policy"], named["critics"], named["temperature"]

        def next_actions(rows: Minibatch) -> Minibatch:
            normal = rows["noise"][:, : policy.num_draws]
            action, log_prob = sac.draw(policy, rows["next_obs"], normal)
            return {"next_action": action, "next_log_prob": log_prob}

        of_critics = partial(critics_loss, policy=policy, temperature=temperature)
        of_actor = partial(actor_loss, critics=critics, temperature=temperature)
        spec = partial(LossSpec, max_grad_norm=config.max_grad_norm, adam_eps=config.adam_eps)
        return {
            "critics": spec(of_critics, critics, adam_beta1=_BETA1, prepare=next_actions),
            "policy": spec(of_actor, policy, adam_beta1=_BETA1),
            "temperature": spec(sac.temperature_loss, temperature),
        }
