"""Exports a policy: finds it, writes the file, and checks it at once.

Left out: the graph (`module.py`), its formats (`programs.py`, `to_onnx.py`), which file may be
written (`output.py`), the comparison (`check.py`).
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
from headrace.batch import Obs, arrays
from headrace.config.algorithms import AlgorithmLike
from headrace.envs.factory import EnvLike, WrapperLike
from headrace.errors import ConfigError, ExportError, HeadraceError
from headrace.evaluation.evaluate import observations_of
from headrace.evaluation.trained_policies import TrainedPolicy, folder_of, load_policy
from headrace.interop.export import programs
from headrace.interop.export.check import Comparer, Comparison
from headrace.interop.export.module import ExportedPolicy, has_value
from headrace.interop.export.observations import random_observations
from headrace.interop.export.output import SUFFIX, Format, format_of, refuse_existing
from headrace.interop.export.to_onnx import OPSET, OnnxSession, check_packages, to_onnx
from headrace.learner.frozen import random_names
from headrace.models.custom import ModelFactory
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint
from headrace.storage.files import write_output
from headrace.training.api import players_of_run, several
from headrace.training.job import RunRequest

_NUM_RANDOM = 1024
_SEED = 0


_CALLS: dict[Format, str] = {
    "onnx": 'onnxruntime.InferenceSession("{}").run(None, {})',
    "torch-export": 'torch.export.load("{}").module()({})',
}


@dataclass(frozen=True)
class Exported:
    """A policy in a file, which was checked.

    Attributes:
        metadata: what is in the file beside the policy, texts by name.
        checked_by: what ran the file, with its version.
        checks: comparisons with the policy.
        notes: what else is to be said of the check.
    """

    path: Path
    format: Format
    metadata: dict[str, str]
    checked_by: str
    checks: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the file does what the policy does."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for `headrace export --json`."""
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes": self.path.stat().st_size,
            "metadata": self.metadata,
            "checked_by": self.checked_by,
            "checks": [check.to_json() for check in self.checks],
            "notes": list(self.notes),
            "ok": self.ok,
        }

    def describe(self) -> str:
        """Return the file, its arrays, and the result of the check, for people."""
        lines = [f"Wrote {self.path} ({self.path.stat().st_size:,} bytes)"]
        for side in ("inputs", "outputs"):
            lines.append(f"{side}:")
            for array in json.loads(self.metadata[side]):
                shape = ", ".join(map(str, array["shape"]))
                lines.append(
                    f"  {array['name']:<12} {array['dtype']} [{shape}]: {array['meaning']}"
                )
        names = ", ".join(f'"{each["name"]}": ...' for each in json.loads(self.metadata["inputs"]))
        lines.append(f"To call it: {_CALLS[self.format].format(self.path, '{' + names + '}')}")
        lines.append(f"Compared with the policy, by {self.checked_by}:")
        lines += [f"  {check.describe()}" for check in self.checks]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def export_policy(
    run_dir: str | Path,
    output: str | Path | None = None,
    *,
    format: Format | None = None,
    best: bool = False,
    policy: str | None = None,
    stochastic: bool = False,
    value: bool = False,
    env: EnvLike | None = None,
    eval_env: EnvLike | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    model: str | ModelFactory | None = None,
    algo: AlgorithmLike | None = None,
) -> Exported:
    """Write a policy to one file that runs without Headrace, and check the file.

    The file maps the environment's own observations to its own actions, both `[batch, ...]`, in
    fp32, and normalizes and scales them. docs/export.md names the arrays.

    Args:
        run_dir: of a run, its `best`, a checkpoint, or a policy that was pulled.
        output: file to write, or its directory. Default: `policy.onnx` or `policy.pt2` in
            `run_dir` (or its `best`), or here for a checkpoint or a pulled policy. Of what exists,
            only an earlier export of the same format is overwritten.
        format: `onnx` or `torch-export`. Default: by the suffix of `output`, or `onnx`.
        best: the best policy that `eval_every` kept, not the newest.
        policy: name, in a run with several.
        stochastic: draw actions from `noise`, an input, as in training; default: the likeliest.
        value: give the value of each observation, too.
        env, eval_env, wrapper: the environment again, if it is code: the file is also checked on
            its observations.
        model, algo: the network and the algorithm again, if they are your own.

    Raises:
        ConfigError: a contradiction, code that must be named again, or a file that exists.
        CheckpointError: there is no usable checkpoint, or none of that policy.
        MissingExtraError: the `export` extra is missing.
        ExportError: the network cannot be exported; or the file, which is kept, does not do what
            the policy does. The message says what differs.
    """
    output = Path(output) if output else None
    format = format_of(format, output)
    if format == "onnx":
        check_packages()
    request = RunRequest({}, env, several(wrapper), model, algo, eval_env=eval_env)
    run_dir = checkpoint.followed(Path(run_dir))
    directory = folder_of(run_dir, best=best)
    saved = checkpoint.newest(directory)
    name = _name_of(saved, policy)
    trained = load_policy(saved.path, model, name, algo)
    _refuse(run_dir, name, trained, stochastic=stochastic, value=value)
    path = _path(output, directory, saved, _file_name(saved, name, format, stochastic), format)
    exported = _Export(trained, saved, name, format, stochastic=stochastic, value=value)
    recorded = _recorded(run_dir, request, name, best=best)
    exported.write(path)
    result = exported.checked(path, *recorded)
    if not result.ok:
        raise ExportError(f"{path} does not do what the policy does.\n{result.describe()}")
    return result


def _name_of(saved: Checkpoint, wanted: str | None) -> str:
    name = checkpoint.policy_name(saved, wanted)
    if wanted is not None and wanted != name:
        raise ConfigError(f"policy={wanted!r}: {saved.path} holds one policy, {name!r}.")
    return name


def _path(
    output: Path | None, directory: Path, saved: Checkpoint, name: str, format: Format
) -> Path:
    """Return the path of a file, by default in no checkpoint; ConfigError if it is another's."""
    path = output or (Path() if saved.path == directory else directory)
    if output is None or output.is_dir():
        path /= name
    refuse_existing(path, format)
    return path


def _refuse(
    run_dir: Path, name: str, trained: TrainedPolicy, *, stochastic: bool, value: bool
) -> None:
    """Raise ConfigError for what the policy does not have."""
    if value and not has_value(trained):
        reason = "its critic sees the state of the game"
        if not trained.spec.state_key:
            reason = "its critics are apart from it, and judge actions"
        raise ConfigError(f"--value: the policy {name!r} gives no value ({reason}). Leave it out.")
    # A checkpoint lies two folders below its run, the best one's folder one.
    folders = (run_dir, *run_dir.absolute().parents[:2])
    runs = [folder for folder in folders if (folder / "config.json").is_file()]
    if stochastic or not runs:
        return
    if name in random_names(rundir.read_config(runs[0])["settings"].get("frozen", {})):
        raise ConfigError(
            f"The policy {name!r} acts at random: it has no likeliest action.\nUse --stochastic."
        )


def _file_name(saved: Checkpoint, name: str, format: Format, stochastic: bool) -> str:
    words = ["policy"]
    if len(saved.manifest["policies"]) > 1:
        words.append(name)
    if stochastic:
        words.append("stochastic")
    return "_".join(words) + SUFFIX[format]


class _Export:
    """One policy on its way to one file."""

    def __init__(
        self,
        trained: TrainedPolicy,
        saved: Checkpoint,
        name: str,
        format: Format,
        *,
        stochastic: bool,
        value: bool,
    ) -> None:
        self._trained, self._format = trained, format
        self._module = ExportedPolicy(trained, stochastic=stochastic, value=value).eval()
        self._comparer = Comparer(trained, stochastic=stochastic)
        self._random = random_observations(trained.spec, trained.module, _NUM_RANDOM, _SEED)
        self.metadata = _metadata(trained, saved, name, self._module, stochastic=stochastic)
        if format == "onnx":
            self.metadata["opset"] = str(OPSET)

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all; ExportError, ConfigError."""
        program = programs.program_of(
            self._module, self._comparer.example(self._random, _NUM_RANDOM)
        )
        if self._format == "onnx":
            data = to_onnx(program, self._module, self.metadata)
        else:
            buffer = io.BytesIO()
            programs.save(program, buffer, json.dumps(self.metadata))
            data = buffer.getvalue()
        write_output(path, data)

    def checked(self, path: Path, recorded: Obs | None, where: str) -> Exported:
        """Return the result of the check of a file.

        Args:
            recorded: observations of the environment; None: there are none.
            where: of which environment they are, or why there are none.
        """
        session = OnnxSession(path) if self._format == "onnx" else programs.TorchSession(path)
        samples, notes = [(f"{_NUM_RANDOM:,} random observations", self._random)], list[str]()
        if recorded is None:
            notes.append(f"No recorded observations: {where}")
        else:
            count = len(arrays(recorded)[0])
            samples.append((f"{count:,} observations of {where}", recorded))
        checks = list[Comparison]()
        for of, obs in samples:
            count = len(arrays(obs)[0])
            checks.append(self._comparer.compare(session, obs, count, of))
            if self._trained.network.precision == "bf16":
                same = self._comparer.same_in_bf16(obs, count)
                notes.append(
                    f"The file computes in fp32. The policy in bf16 takes the same action for "
                    f"{same:,} of {of}."
                )
        return Exported(
            path, self._format, self.metadata, session.name, tuple(checks), tuple(notes)
        )


def _metadata(
    trained: TrainedPolicy,
    saved: Checkpoint,
    name: str,
    module: ExportedPolicy,
    *,
    stochastic: bool,
) -> dict[str, str]:
    """Return what a file says of itself. `inputs`, `outputs` and `spec` are JSON."""
    described = saved.manifest["policies"][name]
    return {
        "headrace": headrace.__version__,
        "env": trained.spec.id,
        "policy": name,
        "algo": str(described["algo"]),
        "actions": "stochastic" if stochastic else "greedy",
        "env_steps": "" if saved.env_steps is None else str(saved.env_steps),
        "checkpoint_sha256": saved.sha256,
        "inputs": json.dumps([array.to_json() for array in module.inputs]),
        "outputs": json.dumps([array.to_json() for array in module.outputs]),
        "spec": json.dumps(trained.spec.to_json()),
    }


def _recorded(
    run_dir: Path, request: RunRequest, name: str, *, best: bool
) -> tuple[Obs | None, str]:
    """Return observations of the run's environment, and its name; or None, and why not.

    Raises:
        HeadraceError: an environment that the caller has named cannot be played.
    """
    try:
        policies, shares, _, maker, spec = players_of_run(run_dir, request, best=best)
        found = observations_of(policies, maker, spec=spec, shares=shares)[name]
        if not len(arrays(found)[0]):
            return None, f"the policy observed nothing in the first steps of {spec.id}"
        return found, spec.id
    except HeadraceError as error:
        named = request.env is not None or request.eval_env is not None or request.wrappers
        if named and (run_dir / "config.json").is_file():
            raise
        return None, str(error).replace("\n", " ")
