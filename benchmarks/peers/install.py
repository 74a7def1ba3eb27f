"""Installs what the benchmarks compare with: one virtual environment per peer.

    python benchmarks/peers/install.py           # all of them
    python benchmarks/peers/install.py sb3 base  # some

They pin clashing versions of gymnasium and numpy, and so live apart, in `benchmarks/.venvs/NAME`.
An environment is remembered by a file in it, and made anew when its pins or the Python change. One
that can not be made is named, with the end of pip's output; the others go on, and the benchmarks
show its peer as missing.
"""

import argparse
import platform
import shutil
import subprocess
import sys
from pathlib import Path

VENVS = Path(__file__).resolve().parents[1] / ".venvs"
MARKER = "installed.txt"
"""In a virtual environment that is complete: what it was made from."""

# torch first, and held: with none there yet, an open range fetches several GB of CUDA packages.
TORCH = "torch==2.13.0"
GYMNASIUM = ["gymnasium[mujoco]==1.4.0", "numpy==2.4.6", "ale-py==0.12.1", "mujoco==4.0.0"]
UNEVEN = ["highway-env==1.12.1", "minigrid==3.2.0"]
GAMES = ["pettingzoo==1.27.0", "mpe2==1.1.1"]
PEERS = {
    # the plain PPO, and ale-py's and Gymnasium's own vector environments
    "base": [*GYMNASIUM, *UNEVEN],
    "sb3": [
        "stable-baselines3==2.9.2",
        *GYMNASIUM,
        "gymnasium[box2d]==1.4.0",
        "opencv-python-headless==5.0.0.93",
        *UNEVEN,
    ],
    "sf": ["sample-factory==2.1.1", "gymnasium==0.29.1", "numpy==1.26.4"],
    "tianshou": [
        "tianshou==2.0.1",
        "gymnasium==1.4.0",
        "numpy==2.4.6",
        "ale-py==0.12.1",
        "opencv-python-headless==5.0.0.93",
        *UNEVEN,
    ],
    "rllib": ["ray[rllib]==2.60.0", "gymnasium==1.2.2", "numpy==2.4.6", *UNEVEN, *GAMES],
    # the search for settings of stable-baselines3's own zoo
    "zoo": [
        "rl_zoo3==2.9.2",
        "stable-baselines3==2.9.2",
        "optuna==5.0.0",
        "pandas==2.3.3",  # for its report
        "gymnasium==1.4.0",
        "numpy==2.4.6",
    ],
}


def python_of(name: str) -> Path:
    """The interpreter of a peer's virtual environment."""
    return VENVS / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Whether that virtual environment is there, complete, and made from these pins."""
    marker = VENVS / name / MARKER
    return marker.exists() and marker.read_text() == _made_from(name)


def installed_python(name: str) -> Path:
    """The interpreter of a peer that is installed; RuntimeError: it is not."""
    if not is_installed(name):
        raise RuntimeError(f"not installed: python benchmarks/peers/install.py {name}")
    return python_of(name)


def _made_from(name: str) -> str:
    minor = ".".join(platform.python_version_tuple()[:2])
    return "\n".join([f"Python {minor}", TORCH, *PEERS[name]]) + "\n"


def install(name: str) -> str | None:
    """Make one virtual environment; what went wrong, if anything did."""
    home = VENVS / name
    if home.exists():
        shutil.rmtree(home)
    home.parent.mkdir(exist_ok=True)
    constraints = home / "constraints.txt"
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [*pip, TORCH],
        # numpy 1 has no wheels for newer Pythons: say so, rather than compile it for minutes
        [*pip, "-c", str(constraints), "--only-binary", "numpy", *PEERS[name]],
    ):
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            tail = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-15:])
            return f"{' '.join(command)}\nended with {ended.returncode}:\n{tail}"
        constraints.write_text(TORCH + "\n")
    (home / MARKER).write_text(_made_from(name))
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PEERS)}; none: all")
    names = parser.parse_args().names or list(PEERS)
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"unknown peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    failed = []
    for name in names:
        if is_installed(name):
            print(f"{name}: there already")
            continue
        print(f"{name}: installing {TORCH} {' '.join(PEERS[name])}", flush=True)
        if problem := install(name):
            failed.append(name)
            print(f"{name}: {problem}", flush=True)
    if failed:
        print(f"Not installed: {', '.join(failed)}. The benchmarks show them as missing.")


if __name__ == "__main__":
    main()
