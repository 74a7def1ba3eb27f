"""The verbs that import from other libraries, export policies and share them; and their flags."""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import tyro

from headrace.cli.commands import RunVerb
from headrace.cli.verbs import JsonVerb, OptionalPath, RunDir, Verb
from headrace.config.run_config import KeyValues
from headrace.errors import ConfigError
from headrace.interop.export.api import export_policy
from headrace.interop.export.output import Format
from headrace.interop.import_sb3 import import_sb3
from headrace.interop.import_zoo import import_zoo
from headrace.interop.sb3_settings import DEFAULTS
from headrace.interop.sb3_zip import READ
from headrace.interop.share import EPISODES, pull, push


@dataclass(frozen=True, kw_only=True)
class _ImportSb3(JsonVerb):
    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL.zip")]
    """What Stable-Baselines3's model.save() wrote."""
    env: Annotated[str, tyro.conf.arg(metavar="ENV")]
    """The environment that it was trained in: a Gymnasium id, module:EnvId, or module:callable."""
    env_kwargs: Annotated[dict[str, Any], KeyValues] = field(default_factory=dict)
    """Arguments of the environment's constructor, as in --env-kwargs size=4 name=maze."""
    wrapper: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[MODULE:CALLABLE ...]")] = ()
    """Wrappers of the environment, the innermost first."""
    algo: Annotated[str, tyro.conf.arg(metavar="|".join(READ), help_behavior_hint="")] = ""
    """The algorithm, if the file does not say it, as with a policy class of your own."""
    normalizer: OptionalPath = None
    """Its VecNormalize, in the .npz file that the script in docs/import.md writes."""
    run_dir: OptionalPath = None
    """Directory of the new run. Default: a new one below runs/."""

    def execute(self, argv: list[str]) -> None:
        """Make a run of the model; CheckpointError, UsageError, RunDirError."""
        if self.algo not in ("", *READ):
            raise ConfigError(f"--algo {self.algo}: expected one of {', '.join(READ)}.")
        imported = import_sb3(
            self.model,
            self.env,
            algo=self.algo,
            normalizer=self.normalizer,
            run_dir=self.run_dir,
            env_kwargs=self.env_kwargs,
            wrapper=self.wrapper,
        )
        self.answer(imported.to_json(), imported.describe())


@dataclass(frozen=True, kw_only=True)
class _ImportZoo(JsonVerb):
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.yml")]
    """RL Zoo's settings of an algorithm, such as its ppo.yml, or the config.yml of a run."""
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """The entry in the file, such as HalfCheetah-v4. An Atari game has the entry `atari`."""
    algo: Annotated[str, tyro.conf.arg(metavar="|".join(DEFAULTS), help_behavior_hint="")] = ""
    """The algorithm, if the file is not named after it."""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")
    ] = None
    """The new file (TOML), for --config. Default: ENV_ALGO.toml."""

    def execute(self, argv: list[str]) -> None:
        """Write the settings, and say what has no counterpart; UsageError."""
        converted = import_zoo(self.file, self.env, algo=self.algo, output=self.output)
        self.answer(converted.to_json(), converted.describe())


@dataclass(frozen=True, kw_only=True)
class _Push(RunVerb):
    to: Annotated[str, tyro.conf.arg(metavar="DIR|hf:USER/NAME")]
    """Where to share: a new directory, or a repository on the Hugging Face Hub."""
    best: bool = False
    """Share the best policy that --eval-every kept, not the newest."""
    episodes: int = EPISODES
    """Whole episodes to play now, whose returns the card tells."""
    seed: int = 0
    """Root of the environments' seeds (never those of training)."""

    def execute(self, argv: list[str]) -> None:
        """Evaluate and share; ConfigError, CheckpointError, EnvError, HubError."""
        pushed = push(
            self.run_dir,
            self.to,
            self.request({}),
            best=self.best,
            episodes=self.episodes,
            seed=self.seed,
            say=lambda progress: print(progress, file=sys.stderr),
        )
        self.answer(pushed.to_json(), pushed.describe())


@dataclass(frozen=True, kw_only=True)
class _Pull(JsonVerb):
    place: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR|hf:USER/NAME")]
    """What `headrace push` has made: a directory, or a repository on the Hugging Face Hub."""
    run_dir: OptionalPath = None
    """The new directory. Default: one below runs/."""

    def execute(self, argv: list[str]) -> None:
        """Copy and check; ConfigError, CheckpointError, RunDirError, HubError."""
        pulled = pull(self.place, self.run_dir)
        self.answer(pulled.to_json(), pulled.describe())


@dataclass(frozen=True, kw_only=True)
class _Export(RunVerb):
    run_dir: RunDir
    """Directory of a run, its best/, a checkpoint, or a policy that `headrace pull` copied."""
    best: bool = False
    """Export the best policy that --eval-every kept, not the newest."""
    policy: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """The policy, in a run with several."""
    stochastic: bool = False
    """Draw actions as in training, from `noise`, which is one more input of the file. Default: the
    likeliest."""
    value: bool = False
    """Have the file give the value of each observation, too."""
    format: Annotated[
        str, tyro.conf.arg(metavar="|".join(get_args(Format)), help_behavior_hint="")
    ] = ""
    """torch-export is a program that torch.export.load reads. Default: as the suffix of --output
    says (.onnx, .pt2), or onnx."""
    output: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")
    ] = None
    """File to write, or the directory of policy.onnx or policy.pt2. Default: the run's directory
    (with --best, its best/); for a checkpoint or a pulled policy, the current directory. Only an
    earlier export of the same format is overwritten."""

    def execute(self, argv: list[str]) -> None:
        """Write the file, check it, and print the result."""
        with contextlib.redirect_stdout(self.out):  # an environment may print
            exported = export_policy(
                self.run_dir,
                self.output,
                format=cast(Format, self.format) or None,
                best=self.best,
                policy=self.policy or None,
                stochastic=self.stochastic,
                value=self.value,
                env=self.env or None,
                eval_env=self.eval_env or None,
                wrapper=self.wrapper,
                model=self.model or None,
                algo=self.algo or None,
            )
        self.answer(exported.to_json(), exported.describe())


FLAGS: dict[str, type[Verb]] = {
    "export": _Export,
    "import-sb3": _ImportSb3,
    "import-zoo": _ImportZoo,
    "push": _Push,
    "pull": _Pull,
}
