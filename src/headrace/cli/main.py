"""The command line: `headrace VERB ...`. Finds the verb, and turns errors into exit codes.

Exit codes: 0; 2 for usage; 129, 130 and 143 after SIGHUP, SIGINT and SIGTERM; 1 for anything else.
This file imports nothing heavy: `headrace --help` is quick, and the math libraries' thread counts
are set before these are loaded.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from headrace import __version__
from headrace.catalog.families import advice_without_env, family_of
from headrace.cli.argv import as_typed, is_on, rename_flags, value_of
from headrace.errors import ConfigError, HeadraceError, UsageError, did_you_mean

VERBS = {
    "train": "Train an agent on an environment.",
    "list": "Show environments by family, their presets, and the returns that are known.",
    "resume": "Go on with a run from its newest checkpoint.",
    "eval": "Evaluate a trained agent over whole episodes, and film one.",
    "exploit": "Train against a run's policies alone: how far can one get?",
    "tournament": "Let the policies of runs of one game play each other, and rank them.",
    "check-env": "Find what is wrong with an environment, before training on it.",
    "runs": "Show the runs below a folder: progress, returns, state.",
    "compare": "Compare runs in groups: returns with intervals, curves, settings that differ.",
    "plot": "Draw the learning curve of each run.",
    "profile": "Show where a run's time goes, what limits it, and what to change.",
    "simulate": "Predict the speed with other numbers of workers and learners, from a profile.",
    "autoscale": "Measure which sizes train fastest on this machine.",
    "tune": "Search for settings that learn better than the preset.",
    "sweep": "Train all combinations of some settings, each with several seeds.",
    "plan": "Find which machines to rent for a goal, and what they cost.",
    "report": "Write a run to one HTML page: curves, time, faults, settings.",
    "export": "Write a policy to one file, ONNX or torch.export's, that runs without Headrace.",
    "import-sb3": "Make a run of a model of Stable-Baselines3: to evaluate, to train on.",
    "import-zoo": "Make a --config file of RL Zoo's settings.",
    "push": "Share a policy, with a card that tells its returns.",
    "pull": "Get a policy that is shared, and check it.",
    "track": "Send a run's metrics to Trackio, MLflow or Weights & Biases.",
    "doctor": "Show what this machine has, and which packages each extra lacks.",
}
QUICK_VERBS = {
    "list": "list_command",
    "track": "track_command",
    **dict.fromkeys(("compare", "plot", "runs"), "runs_commands"),
}
"""Verbs that answer at once, since their file imports nothing heavy -> their file in `cli/`."""
HOMES = {
    **QUICK_VERBS,
    **dict.fromkeys(("autoscale", "plan", "profile", "report", "simulate"), "tool_commands"),
    **dict.fromkeys(("check-env", "doctor", "eval", "resume", "train"), "commands"),
    **dict.fromkeys(("sweep", "tune"), "tuning_commands"),
    **dict.fromkeys(("exploit", "tournament"), "league_commands"),
    **dict.fromkeys(("export", "import-sb3", "import-zoo", "pull", "push"), "interop_commands"),
}
"""All verbs -> their file in `cli/`."""


def _help() -> str:
    verbs = "\n".join(f"  {verb:<11}{text}" for verb, text in VERBS.items())
    return (
        f"usage: headrace VERB ...\n\nTrains reinforcement-learning agents.\n\n{verbs}\n\n"
        "headrace VERB --help shows a verb's flags; headrace --version the version.\n"
        "A first run: headrace train CartPole-v1"
    )


def main(argv: list[str] | None = None) -> None:
    """Run one verb and exit."""
    # Until a run brings handlers of its own. An exception would be lost if it came in the middle of
    # an import; there is nothing to clear up yet.
    signal.signal(signal.SIGINT, _leave)
    faulthandler.enable()  # an environment's segmentation fault, in this process, leaves its stack
    warnings.formatwarning = lambda message, *_: f"headrace: warning: {message}\n"
    sys.exit(_main(sys.argv[1:] if argv is None else argv))


def _leave(_number: int, _frame: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"headrace {__version__}")
        return 0
    if argv[0] not in VERBS:
        is_env = family_of(argv[0]) or ":" in argv[0]
        hint = (
            f" Did you mean headrace train {argv[0]}?" if is_env else did_you_mean(argv[0], VERBS)
        )
        print(
            f"headrace: there is no verb {argv[0]!r}.{hint}\nExpected one of {', '.join(VERBS)}.\n"
            "headrace --help says what each does.",
            file=sys.stderr,
        )
        return 2
    # Idle threads of the math libraries spin, and two processes that do halve each other. The
    # learner's own count is set later, by torch.
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    if argv[0] == "eval":  # a film is drawn into memory: neither library needs a screen for that
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        return _run_verb(argv[0], argv[1:])
    except KeyboardInterrupt as stop:
        print("\n".join(["Interrupted.", *getattr(stop, "__notes__", ())]), file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)  # a run's has its signal
    except BrokenPipeError:  # `headrace ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_verb(verb: str, argv: list[str]) -> int:
    try:
        if verb in QUICK_VERBS:
            from headrace.cli.verbs import parse_flags

            return parse_flags(verb, VERBS[verb], flags_of(verb), argv).execute(argv) or 0
        if verb == "train" and not argv:
            raise ConfigError(advice_without_env())
        if _may_start_processes(verb, argv):
            from headrace.distributed import child_process

            child_process.warm_up(
                *(["headrace.tuning.runners.part"] if HOMES[verb] == "tuning_commands" else [])
            )
        with _quick_imports():
            from headrace.cli.flags import parse

            flags, argv = flags_of(verb), rename_flags(argv)
        return parse(verb, VERBS[verb], flags, argv).execute(argv) or 0
    except HeadraceError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if isinstance(error, UsageError):  # others may quote the user's own code
            said = as_typed(said, argv)
        print(f"headrace {verb}: {said}", file=sys.stderr)
        if is_on(argv, "json") and os.environ.get("RANK", "0") == "0":
            print(json.dumps({"error": type(error).__name__, "message": said}))
        return 2 if isinstance(error, UsageError) else 1


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Keep the garbage collector from what is imported within the `with`.

    Imports make many objects, and each pass of the collector visits all of them: 0.1 s. They live
    until the process ends, so later passes leave them out as well.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def flags_of(verb: str) -> Any:
    """Load the class of a verb's flags."""
    return importlib.import_module(f"headrace.cli.{HOMES[verb]}").FLAGS[verb]


def _may_start_processes(verb: str, argv: list[str]) -> bool:
    """Guess before flags are parsed if a run starts workers, or a process for evaluations.

    A wrong guess only delays the start.
    """
    if verb in ("autoscale", "sweep", "tune") or is_on(argv, "auto_scale"):
        return True
    counts = (value_of(argv, name) for name in ("num_workers", "eval_every"))
    return verb in ("exploit", "train") and any(count not in (None, "0") for count in counts)
