"""Steps that another run keeps in its replay buffer, read from its newest checkpoint."""

from pathlib import Path

import torch

from headrace.batch import each, select
from headrace.errors import ConfigError
from headrace.replay.buffer import ReplayBuffer, Rows
from headrace.replay.memory import frames_in
from headrace.replay.steps import Steps, joined
from headrace.spec import EnvSpec
from headrace.storage import checkpoint
from headrace.storage.checkpoint import Checkpoint
from headrace.storage.row_log import read_rows

_NAME, _MODULE = "learner_default", "modules.replay."


def read_run(run_dir: Path, spec: EnvSpec) -> Steps:
    """Return the steps in the buffer of a run, environment after environment.

    Raises:
        ConfigError: the run has none, or its environment has other spaces.
        CheckpointError: it cannot be read.
    """
    saved = checkpoint.newest(run_dir)
    with checkpoint.as_written(saved.path):
        of_run = EnvSpec.from_json(saved.manifest["policies"]["default"]["spec"])
    if (of_run.observation, of_run.action) != (spec.observation, spec.action):
        raise ConfigError(
            f"data={str(run_dir)!r}: its steps are of another environment, {of_run.id}, whose "
            f"spaces are not those of {spec.id}.\nName the environment of the data."
        )
    if _NAME not in saved.manifest.get("rows", {}):
        raise ConfigError(
            f"data={str(run_dir)!r}: this run keeps no steps. Expected one of an algorithm that "
            "learns from replay (sac, td3, dqn, ...), without --no-save-replay."
        )
    if f"{_MODULE}state" in saved.tensors(_NAME):
        raise ConfigError(
            f"data={str(run_dir)!r}: this run keeps sequences, for its recurrent core.\n"
            "Use one of single steps (--core none)."
        )
    with checkpoint.as_written(saved.path):
        buffer = _buffer(saved, spec)
    of_envs = [_of_env(buffer, env) for env in range(buffer.num_envs)]
    return joined([steps for steps in of_envs if steps is not None])


def _buffer(saved: Checkpoint, spec: EnvSpec) -> ReplayBuffer:
    """Return the buffer of a checkpoint, without its priorities."""
    tensors = select(saved.tensors(_NAME), _MODULE)
    capacity, num_envs = tensors["truncated"].shape
    buffer = ReplayBuffer(spec, (capacity - frames_in(spec)) * num_envs, num_envs)
    for name, tensor in buffer.state_dict().items():
        if name not in buffer.columns:
            tensor.copy_(tensors[name])
    read_rows(saved.path.parent, saved.manifest["rows"][_NAME], buffer)
    return buffer


def _of_env(buffer: ReplayBuffer, env: int) -> Steps | None:
    """Return the steps of one environment, oldest first; None without any."""
    listed = torch.arange(int(buffer.num_gone[env]), int(buffer.num_starts[env]))
    if not len(listed):
        return None
    number = buffer.starts[listed % buffer.capacity, env]
    at, of = number % buffer.capacity, torch.full_like(number, env)
    found = buffer.transitions(Rows(number, of, of), 1, 1.0, lambda reward: reward)
    terminated = buffer.terminated[at, of]
    # The numbers of steps have a gap where an episode was cut off or steps were lost. What follows
    # the newest step is not known.
    goes_on = torch.diff(number, append=number[-1:]) == 1
    truncated = ~(terminated | goes_on)
    return Steps(
        found["obs"],
        found["action"],
        found["reward"],
        terminated,
        truncated,
        each(lambda obs: obs[truncated], found["next_obs"]),
    )
