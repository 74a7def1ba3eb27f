"""Runs contestants in turns (A B C A B C ...), and says how fast each was.

Each turn is a process of its own, so that nothing is left over from the one before; in turns,
because a shared machine is faster now and slower then, and so all of them get some of both. Each
contestant must do the same work, and prints, last, one line of JSON (`RESULT {...}` or only the
object) with `env_steps`, what it did in all, and `env_steps_per_s`. Left out: what is compared
(`cartpole.py`, `atari.py`), and how peers are installed (`peers/install.py`).
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import install

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = "{scratch}"
"""In a command: a folder that is empty at the start of the turn, and removed after it."""
COMMON_PACKAGES = ("torch", "gymnasium", "numpy", "ale-py")
MOST_EXTRA_WORK = 1.1  # asynchronous trainers end a little after the goal


class TurnError(Exception):
    """A turn gave no figure; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """Something that is measured.

    Attributes:
        name: in tables.
        command: program (absolute path) and arguments; run in the repository's root.
        threads: for the math libraries (OMP_NUM_THREADS and the like).
        packages: whose versions are written down, as the command's Python has them.
        venv: the peer's virtual environment (`peers/install.py`); None: this Python's own.
        is_peer: others are compared with it.
        must_say: what stands in its output if it did the work that is meant, such as the shape of
            an observation; without it, the turn fails.
    """

    name: str
    command: Sequence[str]
    threads: int = 1
    packages: Sequence[str] = ()
    venv: str | None = None
    is_peer: bool = False
    must_say: str = ""

    @property
    def missing(self) -> str | None:
        """Why it can not run at all, if so."""
        if self.venv is None or install.is_installed(self.venv):
            return None
        return f"not installed: python benchmarks/peers/install.py {self.venv}"


def headrace(
    name: str, arguments: Sequence[str], threads: int = 1, must_say: str = ""
) -> Contestant:
    """Headrace, as its users run it: `headrace train`, with `--json`."""
    program = Path(sys.executable).with_name("headrace")
    command = [str(program), "train", *arguments, "--run-dir", f"{SCRATCH}/run", "--json"]
    packages = ("headrace", *COMMON_PACKAGES)
    return Contestant(name, command, threads, packages, must_say=must_say)


def headrace_driver(
    name: str, module: str, arguments: Sequence[str], threads: int = 1
) -> Contestant:
    """A part of Headrace, by its driver: the module `benchmarks.MODULE` in this environment."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return Contestant(name, command, threads, ("headrace", *COMMON_PACKAGES))


def driver(
    name: str, venv: str, module: str, arguments: Sequence[str], threads: int = 1, package: str = ""
) -> Contestant:
    """A peer, by its driver: the module `benchmarks.peers.MODULE` in its virtual environment."""
    command = [str(install.python_of(venv)), "-m", f"benchmarks.peers.{module}", *arguments]
    packages = (package, *COMMON_PACKAGES) if package else COMMON_PACKAGES
    return Contestant(name, command, threads, packages, venv, is_peer=True)


def take_turn(contestant: Contestant, env_steps: int, limit_s: float) -> dict[str, Any]:
    """Run a contestant once; what it printed: `env_steps_per_s` and more.

    Raises:
        TurnError: it failed, printed no result, did other work, or took longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        command = [word.replace(SCRATCH, scratch) for word in contestant.command]
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
            str(contestant.threads),
        )
        out, err = Path(scratch, "stdout"), Path(scratch, "stderr")
        with out.open("w") as stdout, err.open("w") as stderr:
            # A session of its own: whatever it starts can be ended with it.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | threads,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if process.returncode is None:  # too late, or Ctrl-C here
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said, complained = out.read_text().strip(), err.read_text().strip()
    tail = "\n".join(said.splitlines()[-5:] + complained.splitlines()[-15:])
    if late:
        raise TurnError(f"took longer than {limit_s:g} s, and was ended\n{tail}")
    if process.returncode:
        raise TurnError(f"ended with {process.returncode}\n{tail}")
    if contestant.must_say not in said + complained:
        raise TurnError(f"did other work: expected {contestant.must_say!r} in its output\n{tail}")
    return _result(said.rpartition("\n")[2], env_steps, tail)


def _result(last_line: str, env_steps: int, tail: str) -> dict[str, Any]:
    """What a contestant's last line says, if it is about the work that was asked for."""
    try:
        result: dict[str, Any] = json.loads(last_line.removeprefix("RESULT "))
        _, done = float(result["env_steps_per_s"]), int(result["env_steps"])
    except (ValueError, TypeError, KeyError) as error:
        raise TurnError(
            "printed no result: expected, as the last line, JSON with env_steps_per_s and "
            f"env_steps ({type(error).__name__}: {error})\n{tail}"
        ) from error
    if not env_steps <= done <= MOST_EXTRA_WORK * env_steps:
        raise TurnError(
            f"did other work: {done:,} env steps; expected {env_steps:,} and at most "
            f"{MOST_EXTRA_WORK - 1:.0%} more\n{tail}"
        )
    return result


def compare(
    contestants: Sequence[Contestant], *, turns: int, env_steps: int, limit_s: float = 300.0
) -> dict[str, Any]:
    """Let contestants run in turns.

    Args:
        contestants: in this order, in each turn.
        turns: how often each runs.
        env_steps: what each must do in a turn.
        limit_s: what a turn may take.

    Returns:
        Plain data: the work, and `contestants`, with `turns` (env steps/s), `median`, `min`, `max`
        and `of_best_peer` of each, and `mean_returns` at the end of each turn, which show that it
        has learned. One that is `missing` or has `failed` says so, and has no median; a failure
        ends its part.
    """
    rows = [_row(contestant) for contestant in contestants]
    for turn in range(turns):
        for contestant, row in zip(contestants, rows, strict=True):
            if row["missing"] or row["failed"]:
                continue
            try:
                result = take_turn(contestant, env_steps, limit_s)
            except TurnError as error:
                row["failed"] = f"turn {turn + 1}: {error}"
                print(f"{contestant.name}: failed in {row['failed']}", flush=True)
                continue
            rate = result["env_steps_per_s"]
            row["turns"].append(rate)
            row["mean_returns"].append(result.get("mean_return"))
            row["meters"].append(result.get("meter"))
            print(f"turn {turn + 1}/{turns}  {contestant.name}: {rate:,.0f}", flush=True)
    for row in rows:
        if row["turns"] and not row["failed"]:
            rates = row["turns"]
            row |= {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    best = max((row["median"] or 0 for row in rows if row["is_peer"]), default=0)
    for row in rows:
        row["of_best_peer"] = row["median"] / best if row["median"] and best else None
    return {"env_steps": env_steps, "contestants": rows}


def _row(contestant: Contestant) -> dict[str, Any]:
    missing = contestant.missing
    if missing:
        print(f"{contestant.name}: {missing}", flush=True)
    words = [_outside_of_root(word) for word in contestant.command]
    return {
        "name": contestant.name,
        "is_peer": contestant.is_peer,
        "command": shlex.join(words),
        "threads": contestant.threads,
        "versions": {} if missing else _versions(contestant),
        "missing": missing,
        "failed": None,
        "turns": [],
        "mean_returns": [],
        "meters": [],
        **dict.fromkeys(("median", "min", "max")),
    }


def _outside_of_root(word: str) -> str:
    """A path without what is particular to this checkout."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


_ASK_VERSIONS = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def _versions(contestant: Contestant) -> dict[str, str | None]:
    """What the contestant's Python has installed; None: not there."""
    python = str(install.python_of(contestant.venv)) if contestant.venv else sys.executable
    asked = [python, "-c", _ASK_VERSIONS, *contestant.packages]
    versions: dict[str, str | None] = json.loads(subprocess.check_output(asked, text=True))
    return versions


def machine() -> dict[str, Any]:
    """Where and when: what a figure means nothing without."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_uncommitted_changes": None if changes is None else bool(changes),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "platform": platform.platform(),
    }


def _git(*arguments: str) -> str | None:
    """None: a copy of the files that is no repository, or no git on this machine."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    return subprocess.check_output(("git", *arguments), cwd=ROOT, text=True).strip()


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def table(title: str, results: dict[str, Any]) -> str:
    """The same for people."""
    rows = results["contestants"]
    width = max(len(row["name"]) for row in rows)
    peers = [row["name"] for row in rows if row["is_peer"]]
    of = f"of {peers[0]}" if len(peers) == 1 else "of best peer"
    lines = [
        f"{title} (env steps/s)",
        f"{'':<{width}}  {'median':>8}  {'min':>8}  {'max':>8}  {of:>12}",
    ]
    for row in rows:
        if row["median"] is None:
            why = row["missing"] or "FAILED in " + (row["failed"] or "").partition("\n")[0]
            lines.append(f"{row['name']:<{width}}  {why}")
            continue
        ratio = f"{row['of_best_peer']:>12.2f}" if row["of_best_peer"] else f"{'-':>12}"
        rates = "  ".join(f"{row[key]:>8,.0f}" for key in ("median", "min", "max"))
        lines.append(f"{row['name']:<{width}}  {rates}  {ratio}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """One table: a title, who takes part, and the work of a turn."""

    title: str
    contestants: Sequence[Contestant]
    env_steps: int


def run(name: str, description: str, comparisons: Sequence[Comparison], turns: int) -> int:
    """A benchmark's `main`: measure, write `results/NAME.json`, print tables last.

    Returns:
        The exit code: 1 if a contestant failed.
    """
    known = [contestant.name for c in comparisons for contestant in c.contestants]
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=turns, help=f"default: {turns}")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="those with this in the name; repeatable"
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help=f"default: benchmarks/results/{name}.json"
    )
    flags = parser.parse_args()
    if flags.turns < 1:
        parser.error(f"--turns {flags.turns}: expected 1 or more")
    for text in flags.only or ():
        if not any(text in name for name in known):
            parser.error(f"--only {text!r} fits none of: {'; '.join(known)}")
    if flags.only and not flags.output:
        parser.error("--only needs an --output of its own, so that whole results stay")
    output = flags.output or ROOT / "benchmarks" / "results" / f"{name}.json"
    results = {"benchmark": name, "machine": machine(), "turns": flags.turns, "tables": {}}
    for comparison in comparisons:
        chosen = [
            contestant
            for contestant in comparison.contestants
            if not flags.only or any(text in contestant.name for text in flags.only)
        ]
        if chosen:
            results["tables"][comparison.title] = compare(
                chosen, turns=flags.turns, env_steps=comparison.env_steps
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nWritten: {output}")
    for title, of_table in results["tables"].items():
        print(f"\n{table(title, of_table)}")
    rows = [row for of_table in results["tables"].values() for row in of_table["contestants"]]
    return int(any(row["failed"] for row in rows))
