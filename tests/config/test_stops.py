"""The way of one setting, from its flag to the loss, is six files long.

A file counts if one of its functions receives the value: as words of a command line, as an entry
of a mapping, as a field of a config, or alone. Sealed carriers (`RunRequest`, `Settings`, `Job`) do
not count: whoever passes them on does not know what is inside. Files that only parse, check or
choose by the value, and hand it back, are named below.
"""

import sys
from pathlib import Path

import headrace
from headrace.cli import commands
from headrace.cli.main import _main

SOURCE = Path(headrace.__file__).parent
STOPS = [
    "cli/commands.py", "config/resolve.py", "learner/learner.py", "algos/ppo.py",
    "algos/targets.py", "returns.py",
]  # fmt: skip
BESIDES = {
    "cli/main.py": "passes the command line on",
    "cli/argv.py": "finds flags in the command line",
    "cli/flags.py": "knows which flags are settings",
    "cli/verbs.py": "parses it",
    "config/old_names.py": "replaces former spellings",
    "configclass.py": "checks types and bounds",
    "config/checks.py": "checks what must divide",
    "config/algorithms.py": "finds the algorithm",
    "models/fast_paths.py": "chooses who computes the gradient",
    "algos/schedules.py": "changes values that have a schedule",
    "algos/base.py": "is the algorithms' base",
    "algos/manual_gradient.py": "computes the gradient of the loss",
}
VALUE = 0.8765


def holds(argument):
    """Whether an argument is the value, or has it in the open."""
    if isinstance(argument, list | tuple):
        return str(VALUE) in map(str, argument)
    if isinstance(argument, float):
        return argument == VALUE
    if isinstance(argument, dict):
        return argument.get("gamma") == VALUE
    return (
        not isinstance(argument, type) and getattr(argument, "__dict__", {}).get("gamma") == VALUE
    )


def test_gamma_makes_six_stops_from_its_flag_to_the_loss(tmp_path):
    files = []

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            file = str(Path(code.co_filename).relative_to(SOURCE))
            if file not in files and any(holds(frame.f_locals.get(name)) for name in names):
                files.append(file)

    assert commands.FLAGS  # imported, so that nothing of that is traced
    sizes = ["--num-envs", "2", "--envs-per-vector", "2", "--num-steps", "16"]
    sizes += ["--total-env-steps", "32"]
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        code = _main(
            ["train", "CartPole-v1", "--gamma", str(VALUE), *sizes, "--run-dir", f"{tmp_path}/run"]
        )
    finally:
        sys.setprofile(before)
    assert code == 0
    assert {*files} - {*BESIDES} == {*STOPS}
