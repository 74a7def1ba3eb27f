"""The loop of a study: what is run next, until nothing is left; then the best on fresh seeds.

    repeat:  a process is free   -> the next seed of a trial under way; else a trial that goes on to
                                    its next rung; else a new trial (or, once all members of a
                                    population have ended, their next generation)
             a process has ended -> what it measured, or why it failed, is written down

All that is decided follows from the files of the directory (`plan.py`), so that a study that was
cut goes on as it would have. Left out: which settings (`samplers.py`), which trials go on
(`pruning.py`, `population.py`), processes (`runners/`), what is shown of it (`results.py`).
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.distributed.process import interruptible
from headrace.errors import ConfigError, HeadraceError, RunDirError, flags_of
from headrace.storage.run_dir import writable
from headrace.training.job import RunRequest
from headrace.tuning import population
from headrace.tuning.plan import Plan, Trial, run_dir, write_trial
from headrace.tuning.pruning import Standing, last_promoted, promoted
from headrace.tuning.runners.api import Ended, Runner
from headrace.tuning.runners.choice import make_runner
from headrace.tuning.runners.part import Part
from headrace.tuning.samplers import GridSampler, Observed, Sampler, make_sampler
from headrace.tuning.space import parse_space

Say = Callable[[str], None]

_LARGEST_RESERVE = 0.5  # share of the budget for measuring again
_START_S = 3.0  # of a run: assumed until one is known
_FOREVER_S = 1e9
_MOST_FAILURES = 3  # of the first trials, with which a study ends


class Key(NamedTuple):
    """Which part of which run."""

    number: int
    seed: int
    rung: int
    is_fresh: bool = False


def _seems_broken(plan: Plan, trials: list[Trial]) -> bool:
    """Return whether several trials have failed, and none was ever measured."""
    failures = sum(trial.state == "failed" for trial in trials)
    was_measured = any(trial.measured for trial in trials)
    return failures >= min(_MOST_FAILURES, plan.trials) and not was_measured


def all_failed(plan: Plan, trials: list[Trial]) -> list[str]:
    """Return that the first trials all failed, in two sentences; [] if one was measured or runs."""
    if not _seems_broken(plan, trials) or any(trial.state == "running" for trial in trials):
        return []
    failures = sum(trial.state == "failed" for trial in trials)
    return [
        f"The first {failures} trials all failed.",
        "When that is mended, begin a new study: failed trials are not tried again.",
    ]


class Search:
    """A study under way.

    Args:
        request: of the preset's run, with the plan's fixed settings; it has the user's code.
        trials: that are known from before.
    """

    def __init__(
        self, plan: Plan, request: RunRequest, folder: Path, trials: list[Trial], say: Say
    ) -> None:
        self.plan, self.folder, self.trials = plan, folder, trials
        self._request, self._say = request, say
        self._sampler: Sampler = _sampler_of(plan)
        self._before_s = max((trial.spent_s for trial in trials), default=0.0)
        self._began = time.monotonic()

    def run(self) -> None:
        """Run until nothing is left, or the budget is spent.

        Raises:
            HeadraceError: the first trials all failed.
            RunDirError: the directory cannot be written.
            KeyboardInterrupt: at a signal; what was under way is saved.
        """
        with (
            interruptible(),
            contextlib.closing(make_runner(self.plan, self.folder, self._say)) as runner,
        ):
            try:
                ends = functools.partial(self._search_ends, runner)
                self._work(runner, self._next_of_search, ends)
                self._work(runner, self._next_of_final, lambda: self.plan.budget_s or _FOREVER_S)
            except KeyboardInterrupt:
                self._stop(runner)
                raise

    @property
    def spent_s(self) -> float:
        """Seconds of the study so far, those before it was cut included."""
        return self._before_s + time.monotonic() - self._began

    def _work(
        self, runner: Runner, following: Callable[[Runner], Key | None], ends: Callable[[], float]
    ) -> None:
        while True:
            left = ends() - self.spent_s
            while left > 0 and not runner.is_full and (key := following(runner)) is not None:
                runner.start(key, self._part(key))
            if not runner.keys:
                return
            if left <= 0:
                self._stop(runner)
                return
            for ended in runner.wait(time.monotonic() + left):
                self._finish(ended, runner)

    def _stop(self, runner: Runner) -> None:
        """Stop all that is under way. What did not end by itself goes on from its checkpoint."""
        for ended in runner.stop():
            if ended.outcome == "measured":
                self._finish(ended, runner)
        if self.trials:
            self._write(self.trials[-1])  # with the seconds until now

    def _part(self, key: Key) -> Part:
        plan, trial = self.plan, self.trials[key.number]
        settings = trial.changes | plan.sizes | {"seed": key.seed}
        if plan.metric.goal is not None:
            settings["stop_at_return"] = plan.metric.goal
        directory = run_dir(self.folder, plan, key.number, key.seed, fresh=key.is_fresh)
        return Part(
            self._request.change(**settings),
            str(directory),
            plan.rungs[key.rung],
            plan.eval_episodes if plan.metric.is_evaluated else 0,
            plan.seed + key.is_fresh,
            {} if key.is_fresh else population.schedules_of_copy(trial),
        )

    # The search

    def _search_ends(self, runner: Runner) -> float:
        """Return the seconds of the study at which the search ends, if there is a budget."""
        plan = self.plan
        if not plan.budget_s:
            return _FOREVER_S
        runs = (1 + plan.final_trials) * len(plan.final_seeds)
        per_step = [
            part["seconds"] / max(1, part["env_steps"])
            for trial in self.trials
            for rung in trial.measured[:1]
            for part in rung.values()
        ]
        if not runs or not per_step:
            return plan.budget_s
        each = _START_S + statistics.median(per_step) * plan.total_env_steps
        reserve: float = each * -(-runs // runner.slots)
        return plan.budget_s - min(reserve, _LARGEST_RESERVE * plan.budget_s)

    def _next_of_search(self, runner: Runner) -> Key | None:
        plan = self.plan
        while True:
            for trial in self.trials:
                if trial.state == "running" and (key := self._next_seed(trial, runner)):
                    return key
            if plan.population:
                if runner.keys or not self._next_generation():
                    return None
                continue
            standings = self._standings()
            following = promoted(plan.pruner, len(plan.rungs), standings)
            # After several failures, those under way show first whether any trial works.
            is_more = len(self.trials) < plan.trials and not _seems_broken(plan, self.trials)
            if following is None and is_more:
                self._begin_trial()
                continue
            has_whole = any(trial.state == "whole" for trial in self.trials)
            if following is None and not runner.keys and not has_whole:
                following = last_promoted(len(plan.rungs), standings)
            if following is None:
                return None
            trial = self.trials[following.number]
            trial.state = "running"
            self._write(trial)

    def _next_generation(self) -> bool:
        """Begin a population, or let its members go on. Return whether there is more to run."""
        plan = self.plan
        if len(self.trials) < plan.population:
            for _ in range(plan.population - len(self.trials)):
                self._begin_trial()
            return True
        living = [trial for trial in self.trials if trial.state == "waiting"]
        if not living:
            return False
        generation = min(trial.rung(len(plan.seeds)) for trial in living)
        # A study may have been cut when some members had gone on: after this exchange.
        if not population.is_exchanged(plan, self.trials, generation):
            for exchange in population.exchanges(plan, self.trials, generation):
                self._replace(exchange, generation)
        for trial in self.trials:
            if trial.state == "waiting" and trial.rung(len(plan.seeds)) == generation:
                trial.state = "running"
                self._write(trial)
        return True

    def _replace(self, exchange: population.Exchange, generation: int) -> None:
        """Replace a member by a copy of another, unless that has been done."""
        plan, (loser, donor) = self.plan, (exchange.loser, exchange.donor)
        if not any(trial.replaces == loser.number for trial in self.trials):
            job = self._request.change(**donor.changes, **plan.sizes).job(Path())
            number, space = len(self.trials), parse_space(plan.space, "the study")
            child = population.child_of(exchange, number, plan, space, job.settings, generation)
            with writable(self.folder):
                for seed in plan.seeds:
                    source, target = (
                        run_dir(self.folder, plan, trial.number, seed) for trial in (donor, child)
                    )
                    population.copy_run(source, target)
            self.trials.append(child)
            self._write(child)
            replay = population.describe_replay(job.settings.algo)
            self._say(
                f"{child.name} replaces {loser.name} after {plan.rungs[generation]:,} env steps: "
                + flags_of({name: f"{value:.4g}" for name, value in child.values.items()})
                + (f"; {replay}" if replay else "")
            )
        if loser.state != "failed":
            loser.state = "replaced"
            self._write(loser)

    def _next_seed(self, trial: Trial, runner: Runner) -> Key | None:
        rung = trial.rung(len(self.plan.seeds)) + 1
        known = trial.measured[rung] if rung < len(trial.measured) else {}
        for seed in self.plan.seeds:
            key = Key(trial.number, seed, rung)
            if str(seed) not in known and key not in runner.keys:
                return key
        return None

    def _standings(self) -> list[Standing]:
        plan, count = self.plan, len(self.plan.seeds)
        return [
            Standing(t.number, t.rung(count), t.scores(plan.metric, count), t.state == "waiting")
            for t in self.trials
            if t.state != "failed"
        ]

    def _begin_trial(self) -> None:
        """Choose the settings of a new trial. One whose settings are refused has failed."""
        number, changes = len(self.trials), dict[str, Any]()
        is_sweep = self.plan.verb == "sweep"
        if number or is_sweep:
            changes = self._sampler.ask(number + is_sweep, observed(self.plan, self.trials))
        trial = Trial(number, changes, dict(changes))
        try:
            flat = settings_of(self._request, trial.changes | self.plan.sizes)
            trial.values = {name: flat[name] for name in self.plan.space}
        except ConfigError as error:
            trial.state, trial.reason = "failed", f"refused: {str(error).splitlines()[0]}"
        self.trials.append(trial)
        self._write(trial)
        if trial.reason:
            self._end_if_all_failed(trial.reason)

    # The best again, on fresh seeds

    def _next_of_final(self, runner: Runner) -> Key | None:
        plan, last = self.plan, len(self.plan.rungs) - 1
        first = first_finalists(plan, self.trials)
        rest = finalists(plan, self.trials)[len(first) :]
        # Seed by seed, so that a budget that ends too early leaves some to compare.
        pairs = [(trial, seed) for seed in plan.final_seeds for trial in first]
        pairs += [(trial, seed) for trial in rest for seed in plan.final_seeds]
        keys = [Key(t.number, s, last, is_fresh=True) for t, s in pairs if not t.has_fresh(s)]
        return next((key for key in keys if key not in runner.keys), None)

    # What has ended

    def _finish(self, ended: Ended, runner: Runner) -> None:
        key, trial = Key(*ended.key), self.trials[ended.key[0]]
        if ended.outcome == "stopped":
            return  # it was saved, and goes on from there
        if ended.outcome == "disk":
            raise RunDirError(
                f"Trial {trial.number} cannot go on: {ended.why}\n"
                "All that was saved is kept. When that is mended: "
                f"{self.plan.command(self.folder)}"
            )
        if ended.outcome == "measured":
            self._keep(trial, key, ended.measured)
        else:
            self._fail(trial, key, ended, runner)
        self._write(trial)
        self._say(self._line(trial, key))
        if trial.state == "failed":
            self._end_if_all_failed(ended.why)

    def _keep(self, trial: Trial, key: Key, measured: dict[str, Any]) -> None:
        plan = self.plan
        trial.seconds += measured["seconds"]
        if key.is_fresh:
            trial.fresh[str(key.seed)] = measured
            return
        if key.rung == len(trial.measured):
            trial.measured.append({})
        before = trial.measured[key.rung - 1].get(str(key.seed)) if key.rung else None
        if before is not None:  # these seconds have been counted
            trial.seconds -= before["seconds"]
        rung = trial.measured[key.rung]
        rung[str(key.seed)] = measured
        if len(rung) == len(plan.seeds):
            has_ended = all(map(plan.metric.ends, rung.values()))
            is_last = key.rung == len(plan.rungs) - 1
            trial.state = "whole" if is_last or has_ended else "waiting"

    def _fail(self, trial: Trial, key: Key, ended: Ended, runner: Runner) -> None:
        lines = [line for line in ended.why.splitlines() if line.strip()]
        # An environment's text begins with its traceback, which ends with the error's line.
        reason = next((x for x in lines if not x.startswith((" ", "Traceback"))), lines[0])
        reason = f"{ended.outcome}: {reason if ended.outcome == 'env' else lines[0]}"
        if key.is_fresh:
            trial.failures[str(key.seed)] = reason
            return
        trial.state, trial.reason = "failed", reason
        for seed in self.plan.seeds:
            runner.cancel(Key(key.number, seed, key.rung))

    def _end_if_all_failed(self, why: str) -> None:
        """Raise HeadraceError if several trials have failed, and none was ever measured."""
        if ended := all_failed(self.plan, self.trials):
            raise HeadraceError(
                f"{ended[0]} The last one said:\n{why}\n"
                f"Each trial's output: {self.folder / 'trials'}/*.log\n{ended[1]}"
            )

    def _write(self, trial: Trial) -> None:
        trial.spent_s = self.spent_s
        write_trial(self.folder, trial)

    def _line(self, trial: Trial, key: Key) -> str:
        plan = self.plan
        name = trial.name
        if key.is_fresh:
            ended = [t.has_fresh(s) for t in finalists(plan, self.trials) for s in plan.final_seeds]
            name += f", fresh seed {key.seed} ({sum(ended)} of {len(ended)})"
        elif len(plan.seeds) > 1:
            name += f", seed {key.seed}"
        reason = trial.failures.get(str(key.seed)) if key.is_fresh else trial.reason
        if reason:
            return f"{name}: failed, {reason}"
        measured = trial.fresh if key.is_fresh else trial.measured[key.rung]
        part = measured[str(key.seed)]
        value = plan.metric.describe(plan.metric.value(part))
        text = f"{name}: {plan.metric.title} {value} after {part['env_steps']:,} env steps"
        is_first = not (key.rung or key.is_fresh)
        return f"{text} {flags_of(trial.changes)}".rstrip() if is_first else text


def _sampler_of(plan: Plan) -> Sampler:
    space = parse_space(plan.space, "the study")
    if plan.verb == "sweep":
        return GridSampler(space, plan.seed, shuffled=False)
    return make_sampler(plan.sampler, space, plan.seed)


def settings_of(request: RunRequest, changes: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a trial's run, by name; ConfigError if they are refused."""
    return request.change(**changes).job(Path()).settings.flat()


def observed(plan: Plan, trials: list[Trial]) -> list[Observed]:
    """Return what samplers are told of trials."""
    found, count = [], len(plan.seeds)
    for trial in trials:
        scores = trial.scores(plan.metric, count)
        rung = len(scores) - 1
        steps = plan.rungs[rung] if scores else 0
        score = None if trial.state == "failed" else (scores[-1] if scores else 0.0)
        found.append(Observed(trial.number, trial.values, score, steps, trial.state == "whole"))
    return found


def ranked(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Return the trials with a score, the best first: by the last rung, then by the score there.

    A trial that reached its goal before all env steps counts as one that reached the last rung.
    """
    count, last = len(plan.seeds), len(plan.rungs) - 1

    def order(trial: Trial) -> tuple[Any, ...]:
        scores = trial.scores(plan.metric, count)
        rung = last if trial.state == "whole" else len(scores) - 1
        return (-rung, -scores[-1], trial.number)

    scored = [t for t in trials if t.state != "failed" and t.scores(plan.metric, count)]
    return sorted(scored, key=order)


def finalists(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Return the trials that are measured again: the best few, and the preset."""
    if not plan.final_seeds or not plan.final_trials:
        return []
    best = [trial for trial in ranked(plan, trials) if not trial.is_preset][: plan.final_trials]
    presets = [trial for trial in trials if trial.is_preset and trial.state != "failed"]
    return [*presets, *best]


def first_finalists(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Return the preset and the best trial, which are measured before the others."""
    return finalists(plan, trials)[:2]
