"""Training with PyTorch Lightning's Trainer.

    from headrace.lightning import Experience, PolicyModule

    experience = Experience("CartPole-v1", algo=headrace.PPO(), total_env_steps=100_000)
    trainer = lightning.Trainer(max_epochs=-1)
    trainer.fit(PolicyModule(experience), datamodule=experience)

The public names are loaded when they are first used. Left out: algorithms with a replay or several
losses, several GPUs, and leagues (docs/lightning.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

from headrace.catalog import extras
from headrace.errors import MissingExtraError, install_command

if TYPE_CHECKING:
    from headrace.lightning.checkpoints import load_policy as load_policy
    from headrace.lightning.checkpoints import write_run as write_run
    from headrace.lightning.experience import Experience as Experience
    from headrace.lightning.loggers import LoggerAdapter as LoggerAdapter
    from headrace.lightning.module import PolicyModule as PolicyModule

_HOME = {
    "Experience": "headrace.lightning.experience",
    "LoggerAdapter": "headrace.lightning.loggers",
    "PolicyModule": "headrace.lightning.module",
    "load_policy": "headrace.lightning.checkpoints",
    "write_run": "headrace.lightning.checkpoints",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562); MissingExtraError without Lightning."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.lightning' has no attribute {name!r}")
    if extras.version("lightning") is None:
        raise MissingExtraError(
            "headrace.lightning needs PyTorch Lightning (`import lightning`), and it is not "
            f"installed.\nTo install it: {install_command('lightning')}"
        )
    return getattr(importlib.import_module(_HOME[name]), name)
