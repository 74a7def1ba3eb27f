"""One rank's learner: its policy, optimizer, normalizers and version.

Left out: what is computed from a batch (the algorithm's page), when (`train.py`), files
(`checkpoint.py`).
"""

from typing import Any

import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment, Minibatch, each
from headrace.meter import Meter
from headrace.models import policy as policies
from headrace.models.policy import ModelFactory
from headrace.optim import Optimizer
from headrace.returns import discounted_sum
from headrace.run.config import Settings
from headrace.seeding import derive, permutation
from headrace.spec import EnvSpec


class Learner:
    """Turns batches into better weights.

    Args:
        settings: the run's.
        spec: of the environment.
        model: makes the user's own network, if there is one.
        device: where to compute.
        meter: of this process.
    """

    def __init__(
        self,
        settings: Settings,
        spec: EnvSpec,
        model: ModelFactory | None,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._settings, self._device, self._meter = settings, device, meter
        seed = derive(settings.run.seed, "model")
        self.policy = policies.build(spec, settings.network, seed, model).to(device)
        self.optimizer = Optimizer(self.policy, settings.algo.max_grad_norm)
        self.version = 0
        """Updates made so far: the version of the weights."""
        self.learner_steps = 0
        """Optimizer steps made so far."""
        self._return_so_far = torch.zeros(settings.run.num_envs, device=device)

    def update(self, fragments: list[Fragment], progress: float) -> dict[str, float]:
        """Learn from one batch.

        Args:
            fragments: `[T, n]` each; together all envs of the rank, in order.
            progress: share of the schedules that has passed, in [0, 1].

        Returns:
            Metrics; `nonfinite` is not 0 if a gradient or parameter was (`Optimizer.broken`).
        """
        experience = batch.join(fragments, self._device)
        self._meter.lap("transport")
        algo = self._settings.algo_module
        env_id = experience.env_id.cpu().numpy()
        seed, num_steps = self._settings.run.seed, experience.num_steps

        def order_of_epoch(epoch: int) -> Tensor:
            order = permutation(seed, env_id, self.version, epoch, num_steps)
            return torch.from_numpy(order).to(self._device)

        steps_before = self.optimizer.num_steps
        metrics: dict[str, Tensor] = algo.update(
            self.policy,
            self._loss,
            self.optimizer,
            experience,
            self._settings.algo,
            progress=progress,
            order_of_epoch=order_of_epoch,
        )
        self._update_normalizers(experience)
        self.version += 1
        self.learner_steps += self.optimizer.num_steps - steps_before
        metrics["nonfinite"] = self.optimizer.broken()
        # The only place in an iteration where the host waits for the device.
        values = torch.stack([metric.to(self._device) for metric in metrics.values()]).tolist()
        self._meter.lap("learn")
        return dict(zip(metrics, values, strict=True))

    def _loss(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        result: tuple[Tensor, dict[str, Tensor]] = self._settings.algo_module.loss(
            self.policy, minibatch, self._settings.algo
        )
        return result

    @torch.no_grad()
    def _update_normalizers(self, experience: Fragment) -> None:
        """After the update: while learning, what was acted must look as it did then."""
        valid = experience.valid
        if self.policy.normalize_obs is not None:
            seen = self.policy.seen(each(lambda o: o[:-1], experience.obs))
            self.policy.normalize_obs.update(seen, valid)
        if self.policy.normalize_reward is not None:
            done = experience.terminated | experience.truncated
            reward = self.policy.clipped(experience.reward)
            total = discounted_sum(reward, done, self._return_so_far, self._settings.algo.gamma)
            self._return_so_far = total[-1]
            self.policy.normalize_reward.update(total[:-1][valid])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """File name -> named tensors: everything that is learned."""
        return {
            "policy_default": dict(self.policy.state_dict()),
            "learner_default": self.optimizer.state() | {"return_so_far": self._return_so_far},
        }

    def load_state(self, state: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Restore what `state` gave, and the counts that the manifest holds."""
        self.policy.load_state_dict(state["policy_default"])
        learned = dict(state["learner_default"])
        self._return_so_far = learned.pop("return_so_far").to(self._device)
        self.optimizer.load_state(learned)
        self.version, self.learner_steps = counters["version"], counters["learner_steps"]
