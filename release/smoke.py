"""Commands that a user of each extra gives first, and what one without the extra is told.

Left out: whether what they compute is right, which the tests say, and what `LEFT_OUT` names.
"""

import os
import subprocess
import time
from pathlib import Path

LIMIT_S = 300
"""A deadline against hanging, for one command."""


def _trains(env: str, env_steps: int, *, name: str, episodes: int = 1) -> list[str]:
    return [
        f"train {env} --total-env-steps {env_steps} --run-dir {name}",
        f"eval {name} --episodes {episodes}",
    ]


SMOKES: dict[str, list[str]] = {
    "": _trains("CartPole-v1", 4096, name="plain", episodes=2),
    "classic-control": _trains("Pendulum-v1", 4096, name="pendulum"),
    "box2d": _trains("LunarLander-v3", 4096, name="lander"),
    "mujoco": _trains("HalfCheetah-v5", 4096, name="cheetah"),
    "atari": _trains("ALE/Pong-v5", 2048, name="pong"),
    "minigrid": _trains("MiniGrid-Empty-5x5-v0", 4096, name="grid"),
    "highway": _trains("highway-fast-v0", 256, name="highway"),
    "kernels": _trains("headrace/CartPole-v1", 16384, name="kernel"),
    "pettingzoo": _trains("mpe2/simple_spread-v3", 2048, name="spread"),
    "export": [*_trains("CartPole-v1", 2048, name="exported"), "export exported"],
    "plan": ["plan --need '1 gpus 8 cpus'"],
    "plot": [*_trains("CartPole-v1", 2048, name="drawn"), "plot drawn", "report drawn"],
    "demo": [
        "train CartPole-v1 --total-env-steps 2048 --run-dir demo",
        "plot demo",
        "eval demo --episodes 1 --video demo/agent.mp4",
    ],
    "ray": ["train CartPole-v1 --total-env-steps 2048 --cluster local --num-workers 2"],
    "tune": ["tune CartPole-v1 --trials 2 --total-env-steps 2048 --study study"],
    "zoo": ["import-zoo <(printf 'CartPole-v1:\\n  n_timesteps: 1e5\\n') CartPole-v1 --algo ppo"],
}
"""Commands of `headrace` by extra; "": those that need none. Those of a row run in one folder."""

NEEDS: dict[str, str] = {
    "box2d": "train LunarLander-v3",
    "mujoco": "train HalfCheetah-v5",
    "atari": "train ALE/Pong-v5",
    "minigrid": "train MiniGrid-Empty-5x5-v0",
    "highway": "train highway-v0",
    "kernels": "train headrace/CartPole-v1",
    "pettingzoo": "train mpe2/simple_spread-v3",
    "export": "export plain",
    "hub": "pull hf:nobody/nothing",
    "plan": "plan --need '1 gpus 8 cpus'",
    "plot": "plot plain",
    "video": "eval plain --episodes 1 --video film.mp4",
    "ray": "train CartPole-v1 --cluster local",
    "tune": "tune CartPole-v1",
    "wandb": "track plain --to wandb",
    "mlflow": "track plain --to mlflow",
    "trackio": "track plain --to trackio",
    "zoo": "import-zoo /dev/null CartPole-v1 --algo ppo",
}
"""Commands that end with how to install the extra, where it is not installed."""

LEFT_OUT: dict[str, str] = {
    "dev": "what `make test` installs",
    "docs": "builds the documentation, from a clone",
    "hub": "needs the network and an account",
    "lightning": "is used from Python: docs/lightning.md, which a test runs",
    "minari": "needs a data set, which Minari fetches; tests/datasets make one",
    "mlflow": "make test-trackers",
    "trackio": "make test-trackers",
    "wandb": "make test-trackers",
    "video": "part of demo",
}
"""Extras without commands above -> why."""


class SmokeError(Exception):
    """A command that did not end, or did not say, what it should."""


def smoke(python: Path, extras: tuple[str, ...], version: str, folder: Path) -> float:
    """Use an installed Headrace as a newcomer would, from an empty folder; return the seconds.

    Raises:
        SmokeError: The first command that did something else than expected.
    """
    began = time.perf_counter()
    home = _run([str(python), "-c", "import headrace; print(headrace.__file__)"], folder)
    if not Path(home.strip()).is_relative_to(python.parents[1]):
        raise SmokeError(f"headrace was imported from {home.strip()}")
    command = str(python.parent / "headrace")
    if (said := _run([command, "--version"], folder)) != f"headrace {version}\n":
        raise SmokeError(f"headrace --version: {said!r}")
    doctor = _run([command, "doctor"], folder)
    for extra in extras:
        if f"  {extra:<16} ready\n" not in doctor:
            raise SmokeError(f"headrace doctor does not find {extra} ready:\n{doctor}")
    _run([command, "list"], folder)
    for line in [each for extra in extras or ("",) for each in SMOKES[extra]]:
        _run(["bash", "-c", f"exec {command} {line}"], folder)
    if not extras:
        for extra, line in NEEDS.items():
            said = _run(["bash", "-c", f"exec {command} {line}"], folder, fails=True)
            if f"pip install 'headrace[{extra}]'" not in said:
                raise SmokeError(f"headrace {line} does not name its extra {extra}:\n{said}")
    return round(time.perf_counter() - began, 1)


def _run(command: list[str], folder: Path, fails: bool = False) -> str:
    """Run a command with a home of its own; return what it said."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env | {"HOME": str(folder)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SmokeError(f"{command[-1]} did not end within {LIMIT_S} s") from error
    if bool(done.returncode) != fails:
        raise SmokeError(f"{command[-1]} ended with {done.returncode}:\n{done.stdout[-1500:]}")
    return done.stdout
