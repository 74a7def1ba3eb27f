"""A LightningModule with an algorithm's loss, and the gradient steps as Headrace makes them.

Left out: where minibatches come from (`experience.py`), and validation: `headrace eval` plays.
"""

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from headrace.algos.base import Metrics
from headrace.batch import Minibatch
from headrace.errors import CheckpointError, ConfigError
from headrace.learner.optimizer import without_denormals
from headrace.lightning.checkpoints import KEY, Loaded
from headrace.lightning.experience import Experience
from headrace.storage.metrics import numbers_in


class PolicyModule(LightningModule):
    """The policy of an Experience, trained by the loss of its algorithm.

    The keys of `state_dict` are `policy.` and those of the policy in Headrace's checkpoints. A
    subclass may add to the loss: override `training_step`, and call `loss`. Modules that it adds
    are trained, too.

    Args:
        experience: given to `Trainer.fit` as well, as `datamodule`.

    Attributes:
        policy: the experience's own: what acts is what learns.
    """

    def __init__(self, experience: Experience) -> None:
        super().__init__()
        self.experience, self.policy = experience, experience.policy
        self._of_step: Metrics = {}

    def loss(self, minibatch: Minibatch) -> tuple[Tensor, Metrics]:
        """Return the algorithm's loss of a minibatch, and the metrics on its page."""
        spec = self.experience.loss
        total, metrics = spec.function(self.policy, minibatch, self.experience.settings.algo)
        self._of_step |= metrics
        return total, metrics

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch."""
        return self.loss(minibatch)[0]

    def configure_optimizers(self) -> Any:
        """Return Adam as Headrace has it.

        The learning rate follows the algorithm's schedule, unless an override of this returns a
        scheduler.
        """
        spec = self.experience.loss
        betas = spec.adam_beta1, 0.999
        return torch.optim.Adam(
            self.parameters(), self.experience.lr, betas, spec.adam_eps, fused=True
        )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Shorten the gradient to the algorithm's `max_grad_norm`; mask one that is not finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.experience.loss.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if optimizer.defaults.get("fused"):
            # As in Headrace: the kernel leaves weights and moments as they are, and the update ends
            # with NonFiniteError.
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self._of_step["grad_norm"] = norm

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make a gradient step, and go on to the next minibatch or the end of the update."""
        self._follow_schedule()
        with without_denormals():
            super().optimizer_step(*args, **kwargs)
        metrics, self._of_step = self._of_step, {}
        self.experience.answer(metrics)
        self._follow_schedule()  # what LearningRateMonitor reads
        if self.experience.is_done:
            self.trainer.should_stop = True

    def _follow_schedule(self) -> None:
        if not self.trainer.lr_scheduler_configs:
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.experience.lr

    def on_train_epoch_end(self) -> None:
        """Log the metrics of the update. One that is not known yet, as a return, is left out."""
        metrics = numbers_in(self.experience.metrics)
        shown = {name: metrics.pop(name) for name in ("mean_return",) if name in metrics}
        self.log_dict(metrics, sync_dist=True)
        self.log_dict(shown, sync_dist=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        """Raise ConfigError unless the Trainer has the same Experience."""
        if stage == "fit" and getattr(self.trainer, "datamodule", None) is not self.experience:
            raise ConfigError(
                "A PolicyModule trains with the Experience that it was made from.\nGive it to the "
                "Trainer: trainer.fit(module, datamodule=experience)."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run, so that it can be resumed, and its policy loaded."""
        checkpoint[KEY] = self.experience.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the run, if the Trainer resumes one; else only weights are loaded."""
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        if KEY not in checkpoint:
            raise CheckpointError(
                "The checkpoint holds no run of Headrace's: expected one that the Trainer saved "
                "with a headrace.lightning.PolicyModule."
            )
        self.experience.restore(Loaded.of(checkpoint[KEY], Path(str(self.trainer.ckpt_path))))
