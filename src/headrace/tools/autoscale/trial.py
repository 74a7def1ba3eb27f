"""A trial: a training of certain sizes, in a process of its own, and how fast it was.

The process is forked by the server of worker processes, which has torch imported, and begins a
session, with which all that it starts can be ended. It says when updates end, and goes on until it
is told to stop; everything is decided here, in the process that searches.

Left out: which sizes are tried (`search.py`), when a rate is known (`trial.py`).
"""

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch

from headrace.distributed import child_process
from headrace.distributed.local_ranks import pickled
from headrace.errors import EnvError, HeadraceError, UsageError
from headrace.tools.autoscale import resources
from headrace.training import launch
from headrace.training.job import RunRequest

# How fast a training is, by when its updates end; and when enough of them were seen.


_WARM_UP_S = 3.0
"""What comes only once (first calls, lazy imports) is taken to be over so soon after the start."""
_UPDATES = 3  # that a rate is made of, unless they take long
_HOPELESS = 0.8  # of the rate that is to be beaten


@dataclass
class Progress:
    """Of one training; times are readings of one clock (s).

    Attributes:
        batch: env steps of each update.
        compiles: whether the first update may take long because something is compiled.
        measure_s: the rate is to be one of at least so long.
        up: when samplers were there; None: not yet.
        updates: when one ended, and the env steps until then.
    """

    batch: int
    compiles: bool
    measure_s: float
    up: float | None = None
    updates: list[tuple[float, int]] = field(default_factory=list)

    def verdict(
        self, now: float, *, late: bool, to_beat: float = 0.0
    ) -> tuple[Literal["measured", "slow"], float | None] | None:
        """What is known of the rate, once nothing more need be known; None: not yet.

        Args:
            now: the time.
            late: it must be decided now.
            to_beat: it is of no use to go on if the rate will not be near this one.

        Returns:
            `measured` and the rate (env steps/s); or `slow`, because there was no update in the
            time, and what the rate is below, or None where nothing is known.
        """
        if (since := self._since()) is None:
            return ("slow", None) if late else None
        begun, before = since
        later = [update for update in self.updates if update[0] > begun]
        if later:
            span, steps = later[-1][0] - begun, later[-1][1] - before
            if span >= self.measure_s * (1.0 if len(later) >= _UPDATES else 1.5):
                return "measured", steps / span
        taken = later[-1][1] - before if later else 0
        at_most = (taken + self.batch) / max(now - begun, 1e-9)
        hopeless = now - begun >= self.measure_s and at_most < _HOPELESS * to_beat
        if not (late or hopeless):
            return None
        if later:
            return "measured", steps / span
        return "slow", at_most if now > begun else None

    def _since(self) -> tuple[float, int] | None:
        """When the time that counts began, and the env steps until then.

        That is the end of the first update; or the samplers' start, if that update took so long
        that what comes once is little beside it.
        """
        up = None if self.compiles else self.up
        if not self.updates:
            return None if up is None else (up + _WARM_UP_S, 0)
        first = self.updates[0]
        took_long = up is not None and first[0] - up >= 2 * _WARM_UP_S
        return (up, 0) if up is not None and took_long else first


Outcome = Literal["measured", "slow", "memory", "crashed", "refused"]

_SAY_EVERY_S = 0.1
_LOOK_EVERY_S = 0.5
"""At the processes' memory: a quick allocation may be over the budget for so long."""
_STOP_WITHIN_S = 2.0  # environments are closed as at the end of any run; then it is killed
SHARE = 0.8
"""Of what memory is free, unless the user gives a budget."""
_NEVER = 10**12

_ONLY_TRIED = {
    "total_env_steps": _NEVER, "stop_at_return": None, "stop_after_s": 0.0, "eval_every": 0,
    "checkpoint_every_s": float(_NEVER), "on_worker_loss": "fail",
}  # fmt: skip
_OUT_OF_MEMORY = re.compile(
    r"^([\w.]*(MemoryError|OutOfMemoryError)\b.*|.*(can't|[Cc]annot) allocate memory.*)$", re.M
)


@dataclass(frozen=True)
class Trained:
    """What all trials of a search train.

    Attributes:
        schedule_env_steps: of the run that is to come.
        compiles: whether a first update may take long because something is compiled.
        on_gpu: environments are where the learner is, on a GPU.
    """

    request: RunRequest
    schedule_env_steps: int
    compiles: bool = False
    on_gpu: bool = False


@dataclass(frozen=True)
class Limits:
    """What a trial may take.

    Attributes:
        seconds: until it is ended.
        measure_s: over which its rate is measured, if it comes so far.
        memory_bytes: of this machine, for all its processes; None: 80 % of what is available.
        gpu_bytes: of a GPU, where environments are on one; None: 80 % of what is free there.
        to_beat: a rate (env steps/s); what is clearly slower is ended early.
    """

    seconds: float = 20.0
    measure_s: float = 2.0
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    to_beat: float = 0.0


@dataclass(frozen=True)
class Trial:
    """How one ended.

    Attributes:
        outcome: `measured`; `slow`: no update came in its time; `memory`: it wanted more than there
            is; `crashed`; `refused`: sizes that cannot be, and nothing was started.
        rate: env steps/s; of a slow one, what its rate is below; None: not known.
        memory_bytes: that its processes took together.
        gpu_bytes: that torch held on the (first) learner's GPU; 0: there is none.
        gpu_budget: that it may have held.
        busy_cores: that it used while it trained: few, if environments mostly wait. 0: not known.
        took_s: from start to end.
        why: it was not measured, in a line.
    """

    outcome: Outcome
    rate: float | None = None
    memory_bytes: int = 0
    gpu_bytes: int = 0
    gpu_budget: int = 0
    busy_cores: float = 0.0
    took_s: float = 0.0
    why: str = ""


def run_trial(trained: Trained, sizes: Mapping[str, int], batch: int, limits: Limits) -> Trial:
    """Train with these sizes for a while.

    Args:
        trained: what.
        sizes: settings by name, beside those that were given.
        batch: env steps of an update.
        limits: of time and memory.

    Raises:
        EnvError: the environment raised; the message begins with its traceback.
        UsageError: it cannot be sent to another process.
        KeyboardInterrupt: nothing is left of the trial.
    """
    begun, kills = time.perf_counter(), resources.out_of_memory_kills()
    with tempfile.TemporaryDirectory(prefix="headrace-trial-") as folder:
        with contextlib.ExitStack() as stack:
            process = _Process(trained, sizes, Path(folder), limits, stack)
            progress = Progress(batch, trained.compiles, limits.measure_s)
            outcome, rate, why = process.watch(progress, begun + limits.seconds, limits.to_beat)
        if outcome == "crashed" and resources.out_of_memory_kills() > kills:
            outcome, why = "memory", f"{why}: the kernel was out of memory"
    took_s = time.perf_counter() - begun
    return Trial(
        outcome, rate, process.memory_bytes, process.gpu_bytes, process.gpu_budget,
        process.busy_cores, took_s, why,
    )  # fmt: skip


class _Process:
    """The searching process's end of a trial; `stack` ends it."""

    def __init__(
        self,
        trained: Trained,
        sizes: Mapping[str, int],
        folder: Path,
        limits: Limits,
        stack: contextlib.ExitStack,
    ) -> None:
        self._folder = folder
        self._budget = limits.memory_bytes or int(SHARE * resources.available_bytes())
        self.memory_bytes = self.gpu_bytes = self.gpu_budget = 0
        self.busy_cores = 0.0
        orders = pickled((trained, dict(sizes), str(folder), limits.gpu_bytes), "another process")
        with child_process.context() as context:  # signals come when it is known what to clear up
            self._words, theirs = context.Pipe(duplex=False)
            stack.callback(self._words.close)
            self._process = context.Process(target=_main, args=(orders, theirs))
            self._process.start()
            stack.callback(self._end)
            theirs.close()

    def watch(
        self, progress: Progress, deadline: float, to_beat: float
    ) -> tuple[Outcome, float | None, str]:
        """Until its rate is known, or it fails: outcome, rate, why.

        Raises:
            EnvError: see `run_trial`.
        """
        looked, used = 0.0, (0.0, 0.0)
        while True:
            now = time.perf_counter()
            select.select([self._words, self._process.sentinel], [], [], _LOOK_EVERY_S)
            if (failed := self._listen(progress)) is not None:
                return failed
            if now - looked >= _LOOK_EVERY_S:
                looked = now
                if self._look() > self._budget:
                    had, budget = gib(self.memory_bytes), gib(self._budget)
                    return "memory", None, f"it took {had}, of {budget} that it may"
            if progress.up is None and (up := self._up()) is not None:
                progress.up, used = up, self._used()
            late = time.perf_counter() >= deadline
            known = progress.verdict(time.perf_counter(), late=late, to_beat=to_beat)
            if known is not None:
                self._look_back(used)
                self._stop()
                why = "no update in its time" if late else "clearly slower than the best"
                return *known, why if known[0] == "slow" else ""

    def _listen(self, progress: Progress) -> tuple[Outcome, None, str] | None:
        """Take in what it says; how it failed, if it did."""
        try:
            while self._words.poll():
                said = json.loads(self._words.recv_bytes())
                self.gpu_bytes = max(self.gpu_bytes, said["gpu_bytes"])
                self.gpu_budget = said["gpu_budget"]
                if "update" in said:
                    progress.updates.append((said["update"][0], said["update"][1]))
                else:
                    return _failure(said["error"], said["text"])
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            return "crashed", None, self._last_words() or child_process.cause_of_death(code)[0]
        return None

    def _look(self) -> int:
        """At the memory that it takes; the exact look is dear, and seldom needed."""
        pids = resources.members(self._process.pid)
        if (resident := resources.resident_bytes(pids)) > self._budget:
            self.memory_bytes = resources.own_bytes(pids)
            return self.memory_bytes
        return resident

    def _used(self) -> tuple[float, float]:
        """The time, and that of processors that it has used."""
        return time.perf_counter(), resources.cpu_seconds(resources.members(self._process.pid))

    def _look_back(self, used: tuple[float, float]) -> None:
        """At what it takes, now that it has trained for a while; `used` is from its beginning."""
        self.memory_bytes = resources.own_bytes(resources.members(self._process.pid))
        now, seconds = self._used()
        if used[0]:
            self.busy_cores = (seconds - used[1]) / (now - used[0])

    def _up(self) -> float | None:
        """When its samplers were there: a run's description is written then."""
        try:
            age = time.time() - os.stat(self._folder / "run" / "config.json").st_mtime
        except FileNotFoundError:
            return None
        return time.perf_counter() - age

    def _last_words(self) -> str:
        """The error of a process that crashed, as Python's fault handler leaves it."""
        with contextlib.suppress(OSError):
            lines = (self._folder / "output").read_text(errors="replace").splitlines()
            return next((line for line in lines if line.startswith("Fatal Python error")), "")
        return ""

    def _stop(self) -> None:
        """Ask for an end such as any run has, and wait a moment for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        self._process.join(_STOP_WITHIN_S)

    def _end(self) -> None:
        self._process.kill()
        resources.end(self._process.pid)
        self._process.join()
        self._process.close()


def gib(number: int) -> str:
    """Bytes, for people."""
    return f"{number / (1 << 30):.2f} GiB"


def _failure(kind: str, text: str) -> tuple[Outcome, None, str]:
    """What an error in the process means.

    Raises:
        EnvError: it is the environment's.
    """
    if found := _OUT_OF_MEMORY.search(text):
        return "memory", None, found[0].strip().partition(". ")[0]
    if kind == "EnvError":
        raise EnvError(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if kind == "UsageError":
        return "refused", None, lines[0]
    # Of a traceback the error is the last line; errors of ours begin with what happened.
    last = lines[-1] if text.startswith("Traceback") else lines[0]
    return "crashed", None, last


def _main(orders: bytes, words: Any) -> None:
    """The trial's process, from its first line to its last."""
    os.setsid()
    child_process.end_with_learner()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, child_process.SIGNALS)
    trained, sizes, folder, gpu_bytes = cloudpickle.loads(orders)
    output = os.open(Path(folder) / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    faulthandler.enable(2)
    says = _Says(words)
    try:
        if trained.on_gpu:
            says.gpu_budget = _limit_gpu(gpu_bytes)
        schedule = trained.schedule_env_steps
        ended = launch.start(
            trained.request.change(**_ONLY_TRIED, schedule_env_steps=schedule, **sizes),
            run_dir=Path(folder) / "run",
            on_update=says.update,
        )
        says.error("Stopped", f"It was stopped by {signal.Signals(ended.stopped_by).name}.")
    except HeadraceError as error:
        kind = "UsageError" if isinstance(error, UsageError) else type(error).__name__
        says.error(kind, str(error))
    except BaseException as error:
        says.error(type(error).__name__, traceback.format_exc())
    sys.stdout.flush()


def _limit_gpu(most_bytes: int | None) -> int:
    """Have torch refuse more memory of the (first) learner's GPU than this; how much that is."""
    free, total = torch.cuda.mem_get_info(0)
    budget = min(total, most_bytes or int(SHARE * free))
    torch.cuda.set_per_process_memory_fraction(budget / total, 0)
    return budget


class _Says:
    """The trial's end of the pipe."""

    def __init__(self, words: Any) -> None:
        self._words, self._said_at = words, 0.0
        self.gpu_budget = 0

    def update(self, _: int, metrics: Mapping[str, Any]) -> None:
        """An update has ended."""
        now = time.perf_counter()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            self._send({"update": [now, metrics["env_steps"]]})

    def error(self, kind: str, text: str) -> None:
        """It is over."""
        self._send({"error": kind, "text": text})

    def _send(self, what: dict[str, Any]) -> None:
        used = torch.cuda.max_memory_reserved(0) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        of_gpu = {"gpu_bytes": used, "gpu_budget": self.gpu_budget}
        with contextlib.suppress(OSError):  # nobody listens any more
            self._words.send_bytes(json.dumps(what | of_gpu).encode())
