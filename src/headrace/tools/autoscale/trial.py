"""A trial: a short training with certain sizes in its own process, and its speed.

The workers' fork server starts the process: it has torch imported. The process begins a session, so
that its children can be ended too. It reports the end of updates until it is stopped.
"""

import contextlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch

from headrace.distributed import sessions
from headrace.distributed.channel import pickled
from headrace.errors import EnvError
from headrace.machine.limits import available_bytes
from headrace.training.job import RunRequest
from headrace.training.launch import Launch

_WARM_UP_S = 3.0
"""Assumed duration of one-time work (first calls, lazy imports) after the start."""
_MIN_UPDATES = 3  # for a rate, unless updates take long
_HOPELESS = 0.8  # share of the rate to beat


@dataclass
class Progress:
    """The progress of one training; all times are of one clock (s).

    Attributes:
        compiles: True if the first update may take long because of compilation.
        measure_s: minimum duration that a rate is measured over.
        up: time at which the workers were up; None: not yet.
        updates: end time of each update, and the env steps until then.
    """

    batch: int
    compiles: bool
    measure_s: float
    up: float | None = None
    updates: list[tuple[float, int]] = field(default_factory=list)

    def verdict(
        self, now: float, *, late: bool, to_beat: float = 0.0
    ) -> tuple[Literal["measured", "slow"], float | None] | None:
        """Return the rate if it is known, or cannot come near the rate `to_beat`; None: go on.

        Returns:
            `measured` and the rate (env steps/s); or `slow` (no update in the time) and an upper
            bound of the rate, or None if the rate is not known at all.
        """
        if (start := self._measured_since()) is None:
            return ("slow", None) if late else None
        began, before = start
        later = [update for update in self.updates if update[0] > began]
        if later:
            span, steps = later[-1][0] - began, later[-1][1] - before
            if span >= self.measure_s * (1.0 if len(later) >= _MIN_UPDATES else 1.5):
                return "measured", steps / span
        steps_done = later[-1][1] - before if later else 0
        at_most = (steps_done + self.batch) / max(now - began, 1e-9)
        hopeless = now - began >= self.measure_s and at_most < _HOPELESS * to_beat
        if not (late or hopeless):
            return None
        if later:
            return "measured", steps / span
        return "slow", at_most if now > began else None

    def _measured_since(self) -> tuple[float, int] | None:
        """Return the time from which the rate counts, and the env steps until then.

        That is the end of the first update; or the start of the workers, if the first update took
        so long that one-time work is negligible.
        """
        up = None if self.compiles else self.up
        if not self.updates:
            return None if up is None else (up + _WARM_UP_S, 0)
        first = self.updates[0]
        took_long = up is not None and first[0] - up >= 2 * _WARM_UP_S
        return (up, 0) if up is not None and took_long else first


Outcome = Literal["measured", "slow", "memory", "crashed", "refused"]

_REPORT_EVERY_S = 0.1
_CHECK_EVERY_S = 0.5
"""Interval of memory checks: a quick allocation may exceed the budget for this time."""
_STOP_TIMEOUT_S = 2.0  # for closing environments, before the process is killed
MEMORY_SHARE = 0.8
"""Share of the free memory that is the default budget."""
_NEVER = 10**12

_TRIAL_SETTINGS = {
    "total_env_steps": _NEVER, "stop_at_return": None, "stop_after_s": 0.0, "eval_every": 0,
    "checkpoint_every_s": float(_NEVER), "on_worker_loss": "fail",
}  # fmt: skip


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of a search share.

    Attributes:
        compiles: True if a first update may take long because of compilation.
        on_gpu: True if the environments are on the learner's GPU.
        max_bytes: memory on the GPU if the environments are there, else of all processes of a
            trial; None: 80 % of what is free.
        measure_s: duration that the rate is measured over.
    """

    request: RunRequest
    schedule_env_steps: int
    compiles: bool = False
    on_gpu: bool = False
    max_bytes: int | None = None
    measure_s: float = 2.0

    def memory_limit(self) -> int:
        """Return the most bytes that the processes of a trial may use."""
        limit = None if self.on_gpu else self.max_bytes
        return limit or int(MEMORY_SHARE * available_bytes())


@dataclass
class Trial:
    """The result of a trial.

    Attributes:
        outcome: `measured`; `slow`: no update in its time; `memory`: it exceeded the memory;
            `crashed`; `refused`: invalid sizes, nothing was started.
        rate: env steps/s, or an upper bound if `slow`; None: unknown.
        gpu_bytes: memory that torch held on the first learner's GPU; 0: no GPU.
        busy_cores: cores in use during training; few if environments mostly wait. 0: unknown.
        why: reason in one line, if it was not measured.
    """

    outcome: Outcome
    rate: float | None = None
    memory_bytes: int = 0
    gpu_bytes: int = 0
    gpu_budget: int = 0
    busy_cores: float = 0.0
    took_s: float = 0.0
    why: str = ""

    def describe(self) -> str:
        """Format the outcome as text."""
        if self.outcome == "measured":
            memory = format_gib(self.gpu_bytes or self.memory_bytes)
            return f"{self.rate:,.0f} env steps/s, {memory} ({self.took_s:.1f} s)"
        below = f", below {self.rate:,.0f} env steps/s" if self.rate else ""
        return f"{self.outcome}: {self.why}{below} ({self.took_s:.1f} s)"


def run_trial(
    setup: TrialSetup,
    sizes: Mapping[str, int],
    batch: int,
    *,
    seconds: float = 20.0,
    to_beat: float = 0.0,
) -> Trial:
    """Train with these sizes for a while.

    Args:
        to_beat: rate (env steps/s); a trial that is clearly slower ends early.

    Raises:
        EnvError: the environment raised; the message begins with its traceback.
        UsageError: the run cannot be sent to another process.
        KeyboardInterrupt: the trial was interrupted; none of its processes is left.
    """
    began, kills = time.perf_counter(), sessions.out_of_memory_kills()
    with tempfile.TemporaryDirectory(prefix="headrace-trial-") as folder:
        with contextlib.ExitStack() as stack:
            process = _TrialProcess(setup, sizes, Path(folder), stack)
            progress = Progress(batch, setup.compiles, setup.measure_s)
            trial = process.watch(progress, began + seconds, to_beat)
        if trial.outcome == "crashed" and sessions.out_of_memory_kills() > kills:
            trial.outcome, trial.why = "memory", f"{trial.why}: the kernel was out of memory"
    trial.took_s = time.perf_counter() - began
    return trial


class _TrialProcess:
    """The searching process's handle of a trial; `stack` ends the trial."""

    def __init__(
        self,
        setup: TrialSetup,
        sizes: Mapping[str, int],
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._folder, self._max_bytes = folder, setup.memory_limit()
        self._trial = Trial("crashed")  # until it is known better
        orders = pickled((setup, dict(sizes), str(folder)), "another process")
        self._process = sessions.SessionProcess(_main, orders, stack)

    def watch(self, progress: Progress, deadline: float, to_beat: float) -> Trial:
        """Wait until the rate is known or the trial fails; raise an EnvError of the trial."""
        trial, checked, start = self._trial, 0.0, (0.0, 0.0)
        while True:
            now = time.perf_counter()
            select.select(self._process.waitables, [], [], _CHECK_EVERY_S)
            if (failed := self._receive(progress)) is not None:
                trial.outcome, trial.why = failed
                return trial
            if now - checked >= _CHECK_EVERY_S:
                checked = now
                if self._check_memory() > self._max_bytes:
                    used, limit = format_gib(trial.memory_bytes), format_gib(self._max_bytes)
                    trial.outcome, trial.why = "memory", f"it used {used} of {limit}"
                    return trial
            if progress.up is None and (up := self._start_time()) is not None:
                progress.up, start = up, self._cpu_used()
            late = time.perf_counter() >= deadline
            verdict = progress.verdict(time.perf_counter(), late=late, to_beat=to_beat)
            if verdict is not None:
                trial.outcome, trial.rate = verdict
                if trial.outcome == "slow":
                    trial.why = "no update in its time" if late else "clearly slower than the best"
                trial.memory_bytes = sessions.own_bytes(self._members())
                end, seconds = self._cpu_used()
                if start[0]:
                    trial.busy_cores = (seconds - start[1]) / (end - start[0])
                self._process.stop(_STOP_TIMEOUT_S)
                return trial

    def _receive(self, progress: Progress) -> tuple[Outcome, str] | None:
        """Process its messages; return outcome and reason if it failed."""
        try:
            for message in self._process.received():
                self._trial.gpu_bytes = max(self._trial.gpu_bytes, message["gpu_bytes"])
                self._trial.gpu_budget = message["gpu_budget"]
                if "update" in message:
                    progress.updates.append(message["update"])
                    continue
                kind, why = message["failed"]
                if kind == "env":
                    raise EnvError(why)
                return ("crashed" if kind in ("diverged", "disk") else kind), why
        except EOFError:
            return "crashed", self._process.cause()
        return None

    def _members(self) -> list[int]:
        return sessions.members(self._process.session)

    def _check_memory(self) -> int:
        """Return the memory in use, exactly only if it may exceed the limit."""
        pids = self._members()
        if (resident := sessions.resident_bytes(pids)) > self._max_bytes:
            resident = self._trial.memory_bytes = sessions.own_bytes(pids)
        return resident

    def _cpu_used(self) -> tuple[float, float]:
        """Return the time and the CPU seconds used so far."""
        return time.perf_counter(), sessions.cpu_seconds(self._members())

    def _start_time(self) -> float | None:
        """Return when its workers were up: the run writes its config file then."""
        try:
            age = time.time() - os.stat(self._folder / "run" / "config.json").st_mtime
        except FileNotFoundError:
            return None
        return time.perf_counter() - age


def format_gib(number: int) -> str:
    """Format bytes in GiB."""
    return f"{number / (1 << 30):.2f} GiB"


def _main(orders: bytes, pipe: Any) -> None:
    """Run the trial's process."""
    sessions.begin_session()
    setup, sizes, folder = cloudpickle.loads(orders)
    reporter = _Reporter(pipe)
    try:
        if setup.on_gpu:
            free, total = torch.cuda.mem_get_info(0)
            reporter.gpu_budget = min(total, setup.max_bytes or int(MEMORY_SHARE * free))
            torch.cuda.set_per_process_memory_fraction(reporter.gpu_budget / total, 0)
        schedule = setup.schedule_env_steps
        ended = Launch(reporter.update).start(
            setup.request.change(**_TRIAL_SETTINGS, schedule_env_steps=schedule, **sizes),
            Path(folder) / "run",
        )
        stopped_by = signal.Signals(ended.stopped_by).name
        reporter.send(failed=("crashed", f"It was stopped by {stopped_by}."))
    except BaseException as error:
        reporter.send(failed=sessions.failure(error))


class _Reporter:
    def __init__(self, pipe: Any) -> None:
        self._pipe, self._reported_at = pipe, 0.0
        self.gpu_budget = 0

    def update(self, _: int, metrics: Mapping[str, Any]) -> None:
        """Report the end of an update."""
        now = time.perf_counter()
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self.send(update=(now, metrics["env_steps"]))

    def send(self, **message: Any) -> None:
        """Send a message, and the memory on the GPU."""
        used = torch.cuda.max_memory_reserved(0) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        gpu = {"gpu_bytes": used, "gpu_budget": self.gpu_budget}
        with contextlib.suppress(OSError):  # the searching process has ended
            self._pipe.send(message | gpu)
