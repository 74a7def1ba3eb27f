"""The verb `export`, and its flags."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.cli.commands import RunVerb
from headrace.cli.verbs import Verb
from headrace.interop.export.api import Format, export_policy


@dataclass(frozen=True, kw_only=True)
class _Export(RunVerb):
    best: bool = False
    """Export the best policy that --eval-every kept, not the newest."""
    policy: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """The policy, in a run with several."""
    stochastic: bool = False
    """Draw actions as in training, from `noise`, which is one more input of the file. Default: the
    likeliest."""
    value: bool = False
    """Have the file give the value of each observation, too."""
    format: Format = "onnx"
    """onnx, or torch-export: a program that torch.export.load reads."""
    output: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")
    ] = None
    """File to write. Default: policy.onnx or policy.pt2 in the run's directory (with --best, in its
    best/), with the policy's name if there are several."""

    def execute(self, argv: list[str]) -> None:
        """Write the file, check it, and print the result."""
        with contextlib.redirect_stdout(self.out):  # an environment may print
            exported = export_policy(
                self.run_dir,
                self.output,
                format=self.format,
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


FLAGS: dict[str, type[Verb]] = {"export": _Export}
