"""Checks, before a run begins, of what the Trainer and an Experience cannot do together.

Left out: how minibatches may be fetched, which shows in the epoch (`experience.py`).
"""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from headrace.algos.base import LossSpec
from headrace.config.algorithms import ALGORITHMS
from headrace.config.policies import RANDOM
from headrace.config.settings import FREE, Settings
from headrace.errors import ConfigError
from headrace.models.policy import Policy
from headrace.training.job import Job

_EVAL = "Evaluate a checkpoint: headrace.lightning.write_run, then headrace eval."
INSTEAD = {
    "backend": "The Trainer's strategy exchanges the gradients.",
    "checkpoint_every_s": "The Trainer saves: Trainer(callbacks=[ModelCheckpoint(...)]).",
    "cluster": "On a cluster: headrace.train.",
    "compile": "The Trainer makes the gradient steps.",
    "data": "Learning from recorded steps: headrace.train.",
    "device": "The Trainer chooses it: Trainer(accelerator=...).",
    "eval_env": _EVAL,
    "eval_env_kwargs": _EVAL,
    "eval_episodes": _EVAL,
    "eval_every": _EVAL,
    "init_from": (
        "Load the weights into the module: module.policy.load_state_dict("
        "headrace.load_policy(RUN_DIR).module.state_dict())."
    ),
    "keep": "The Trainer saves: ModelCheckpoint(save_top_k=...).",
    "league": "Leagues keep snapshots in a run directory: headrace.train.",
    "num_accumulation_steps": "Use smaller minibatches, or headrace.train.",
    "stop_after_s": "The Trainer stops: Trainer(max_time=...).",
    "timeline": "Use the Trainer's profiler: Trainer(profiler=...).",
}
"""Settings of a run that would have no effect, and what takes their place."""

TAKEN = {
    "batch_size": (
        "batch_size: the algorithm cuts its batches into minibatches itself. Use minibatch_size or "
        "num_minibatches."
    ),
    "shuffle": "shuffle: the algorithm has an order of its own, which follows from the seed.",
}
"""Arguments of a DataLoader that people give by habit."""


def check_arguments(settings: dict[str, object]) -> None:
    """Raise ConfigError for arguments of a DataLoader."""
    for name, message in TAKEN.items():
        if name in settings:
            raise ConfigError(message)


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for an algorithm or a setting that the Trainer cannot take."""
    if settings.algorithm.data == "replay":
        fitting = [name for name, each in ALGORITHMS.items() if each.data != "replay"]
        raise ConfigError(
            f"algo={settings.run.algo!r} learns from a replay, in gradient steps of several losses "
            f"that the Trainer cannot make.\nUse {', '.join(fitting)}. Or train it with "
            "headrace.train, and have its metrics in Lightning's loggers by "
            "headrace.lightning.LoggerAdapter."
        )
    for name, instead in INSTEAD.items():
        if not settings.source[name].startswith(FREE):
            value = getattr(settings.run, name)
            raise ConfigError(f"{name}={value!r}: an Experience does not take it. {instead}")


def trained_policy(job: Job) -> str:
    """Return the name of the policy that is trained; ConfigError if there are several."""
    names = [name for name in job.shares if name not in job.settings.run.frozen]
    if len(names) > 1:
        rest = ", ".join(f'"{name}": "{RANDOM}"' for name in names[1:])
        raise ConfigError(
            f"{job.spec.id} has the policies {', '.join(names)}, and a LightningModule trains one."
            f"\nFreeze the others, at random or as in another run: frozen={{{rest}}}. Or train all "
            "with headrace.train."
        )
    return names[0]


def check_loss(losses: dict[str, LossSpec], policy: Policy, algo: str) -> LossSpec:
    """Return the only loss, which is over the policy; ConfigError if there is another."""
    first, *others = losses.values()
    if others or first.module is not policy:
        raise ConfigError(
            f"algo={algo!r} has the losses {', '.join(losses)}: expected one, over the policy.\n"
            "Train it with headrace.train."
        )
    return first


def check_trainer(trainer: Trainer, settings: Settings, loss: LossSpec) -> None:
    """Raise ConfigError for a Trainer that does not go with an Experience of these settings."""
    _check_topology(trainer, settings.run.num_learners)
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}): expected 32-true or bf16-mixed."
        )
    if trainer.precision == "bf16-mixed" and settings.network.precision != "bf16":
        raise ConfigError(
            "Trainer(precision='bf16-mixed'), but the policy acts in float32.\nGive both, "
            "so that acting and learning round alike: Experience(..., precision='bf16')."
        )
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}): the algorithm clips already "
            f"(max_grad_norm={loss.max_grad_norm:g}).\nLeave it out, and set the limit there: "
            f"headrace.PPO(max_grad_norm={trainer.gradient_clip_val}), say."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): each minibatch "
            "of the algorithm is one gradient step.\nLeave it out, and set num_minibatches."
        )
    is_whole = trainer.limit_train_batches == 1.0 and not trainer.overfit_batches  # type: ignore[attr-defined]
    if not (is_whole or trainer.fast_dev_run):  # type: ignore[attr-defined]
        raise ConfigError(
            "Trainer(limit_train_batches=..., overfit_batches=...): an epoch is one update, which "
            "is made whole.\nLeave them out. Less data: num_envs, num_steps; fewer steps: "
            "num_epochs."
        )


def _check_topology(trainer: Trainer, num_learners: int) -> None:
    strategy, device = trainer.strategy, trainer.strategy.root_device
    if trainer.world_size != num_learners or trainer.num_nodes != 1:
        raise ConfigError(
            f"The Trainer has {trainer.world_size} processes on {trainer.num_nodes} machines, and "
            f"the Experience num_learners={num_learners}.\nExpected as many, on one machine: "
            f"Experience(..., num_learners={trainer.world_size})."
        )
    starts = getattr(strategy, "_start_method", "popen")
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy) or starts != "popen":
        raise ConfigError(
            f"The Trainer's strategy is a {type(strategy).__name__} (processes by {starts}): "
            "expected one device, or strategy='ddp', which starts the script once for each.\n"
            "Processes that are forked or unpickled would share or lose the Experience's workers."
        )
    if device.type not in ("cpu", "cuda") or (device.index or 0) != 0:
        raise ConfigError(
            f"The Trainer's device is {device}: expected the CPU, or the first CUDA device.\n"
            "Use Trainer(accelerator='cpu'), or choose a GPU by CUDA_VISIBLE_DEVICES."
        )
    if device.type == "cuda" and trainer.world_size > 1:
        raise ConfigError("On several GPUs: headrace.train(..., num_learners=...).")
