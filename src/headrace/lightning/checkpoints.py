"""The Trainer's checkpoints: what they have of a run, read without unpickling code.

Left out: writing them, which the Trainer does (`PolicyModule.on_save_checkpoint`).
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.batch import select
from headrace.config.algorithms import AlgorithmLike
from headrace.errors import CheckpointError
from headrace.evaluation import trained_policies
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.models.custom import ModelFactory
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint
from headrace.storage.torch_file import load_plain

KEY = "headrace"
"""The key of a run's state in a Trainer's checkpoint, beside `state_dict` and others."""


@dataclass(frozen=True)
class Loaded(Checkpoint):
    """A checkpoint of a run that is in memory: its part of one of the Trainer's."""

    files: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], path: Path = Path("the last fit")) -> "Loaded":
        """Read what `Experience.state` has returned."""
        with checkpoint.as_written(path):
            files = state["files"]
            names = {"files": dict.fromkeys(f"{name}.safetensors" for name in files)}
            return cls(path, json.loads(state["manifest"]) | names, files)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return dict(self.files[name])

    def check_whole(self) -> None:
        """Raise CheckpointError if it was saved within an update."""
        if "counters" not in self.manifest:
            raise CheckpointError(
                "The checkpoint was saved within an epoch, where an update was under way: training "
                "cannot go on from there.\nUse one that was saved at an epoch's end, as "
                "ModelCheckpoint(every_n_epochs=1) does. Its policy can be loaded: "
                "headrace.lightning.load_policy."
            )


def write_run(path: str | Path, run_dir: str | Path) -> Path:
    """Write the policies in a Trainer's checkpoint as a Headrace run; return its directory.

    `headrace.load_policy`, `headrace eval` and all that reads a trained run take it. It cannot be
    resumed: the optimizer's state is the Trainer's.

    Args:
        path: of a `.ckpt` that was saved with a `PolicyModule`. It is read with
            `torch.load(weights_only=True)`.
        run_dir: a new directory.

    Raises:
        CheckpointError: it cannot be read, or holds no run of Headrace's.
        RunDirError: the directory holds a run already, or cannot be written.
    """
    path, run_dir = Path(path), Path(run_dir)
    expected = (
        "Expected a checkpoint of the Trainer's. Hyperparameters that a module saves must be "
        "plain, too."
    )
    found = load_plain(path, str(path), expected)
    if not isinstance(found, dict) or KEY not in found:
        raise CheckpointError(
            f"{path} holds no run of Headrace's: expected a checkpoint that the Trainer saved with "
            "a headrace.lightning.PolicyModule."
        )
    with checkpoint.as_written(path):
        state = found[KEY]
        manifest, config = json.loads(state["manifest"]), json.loads(state["config"])
        frozen = config["settings"]["frozen"]
        (trained,) = (name for name in manifest["policies"] if name not in frozen)
        files = {name: of for name, of in state["files"].items() if name.startswith("policy_")}
        files[f"policy_{trained}"] = select(found["state_dict"], "policy.")
        env_steps = manifest.get("counters", {}).get("env_steps", 0)
        # Policies alone: with counters it would look like a run that can be resumed.
        manifest = {name: manifest[name] for name in ("headrace", "seed", "policies")}
    with rundir.locked(run_dir):
        rundir.refuse_used(run_dir)
        rundir.write_config(run_dir, config)
        with rundir.writable(run_dir):
            checkpoint.write(run_dir / "checkpoints", env_steps, files, manifest)
    return run_dir


def load_policy(
    path: str | Path,
    model: str | ModelFactory | None = None,
    policy: str | None = None,
    algo: AlgorithmLike | None = None,
) -> TrainedPolicy:
    """Load a policy from a Trainer's checkpoint: `headrace.load_policy`, for a `.ckpt`.

    Args:
        path: as `write_run` takes it.
        model, policy, algo: as `headrace.load_policy` takes them.

    Raises:
        CheckpointError, ConfigError: as `write_run` and `headrace.load_policy`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_run(path, Path(folder) / "run")
        return trained_policies.load_policy(run_dir, model, policy, algo)
