"""Which settings a trial has: at random, from a grid, by TPE, or by CMA-ES.

A sampler keeps no state. What it returns follows from the study's seed, the number of the trial and
what is known of the trials before, so a study that is cut goes on as it would have. TPE is Optuna's
(Akiba et al. 2019, arXiv:1907.10902; Bergstra et al. 2011), CMA-ES that of `cmaes` (Hansen 2016,
arXiv:1604.00772). Left out: what becomes of a trial (`pruning.py`).
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.tuning.space import Parameter, Space, places


@dataclass(frozen=True)
class Observed:
    """What is known of a trial when another is asked for.

    Attributes:
        values: of the space's parameters.
        score: at its last rung, as large as possible; None: it failed.
        env_steps: of that rung; 0: it has reached none yet.
        is_whole: whether that was its last.
    """

    number: int
    values: Mapping[str, Any]
    score: float | None
    env_steps: int
    is_whole: bool


class Sampler(ABC):
    """Chooses the settings of a trial."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed

    @abstractmethod
    def ask(self, number: int, observed: Sequence[Observed]) -> dict[str, Any]:
        """Return the settings of trial `number`."""

    def _generator(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, number])


class RandomSampler(Sampler):
    """Each setting at random, whatever was found."""

    def ask(self, number: int, observed: Sequence[Observed]) -> dict[str, Any]:
        rng = self._generator(number)
        return {name: each.at(float(rng.random())) for name, each in self.space.items()}


class GridSampler(Sampler):
    """All combinations, three values of each range; trial 1 has the first.

    Args:
        shuffled: in a random order, so that the first few are spread over the grid.
    """

    def __init__(self, space: Space, seed: int, *, shuffled: bool = True) -> None:
        super().__init__(space, seed)
        axes = [each.grid() for each in space.values()]
        self._points = [dict(zip(space, point, strict=True)) for point in itertools.product(*axes)]
        if shuffled:
            self._points = [self._points[i] for i in self._generator(0).permutation(len(self))]

    def __len__(self) -> int:
        return len(self._points)

    def ask(self, number: int, observed: Sequence[Observed]) -> dict[str, Any]:
        return self._points[(number - 1) % len(self._points)]


class TpeSampler(Sampler):
    """Optuna's tree-structured Parzen estimator; the first ten are random."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._optuna = _optuna("tpe")

    def ask(self, number: int, observed: Sequence[Observed]) -> dict[str, Any]:
        optuna = self._optuna
        seed = int(self._generator(number).integers(1 << 31))
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials(as_optuna(optuna, self.space, observed))
        trial = study.ask({name: _distribution(optuna, p) for name, p in self.space.items()})
        return {name: _from_optuna(p, trial.params[name]) for name, p in self.space.items()}


class CmaEsSampler(Sampler):
    """CMA-ES on the unit cube; each generation is of trials that reached a rung, by number."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        try:
            import cmaes
        except ModuleNotFoundError as error:
            raise _missing("cmaes", error) from None
        self._cmaes = cmaes

    def ask(self, number: int, observed: Sequence[Observed]) -> dict[str, Any]:
        bounds = np.array([[0.0, 1.0]] * max(2, len(self.space)))  # it takes no fewer
        seed = int(self._generator(number).integers(1 << 31))
        cma = self._cmaes.CMA(np.full(len(bounds), 0.5), 0.3, bounds=bounds, seed=seed)
        ended = [(places(self.space, each.values), each) for each in observed if each.env_steps]
        known = [
            (np.array([*place, 0.5][: len(bounds)]), _cost(each))
            for place, each in ended
            if place is not None
        ]
        size = cma.population_size
        for first in range(0, len(known) - size + 1, size):
            cma.tell(known[first : first + size])
        point = cma.ask()
        return {
            name: each.at(float(share))
            for (name, each), share in zip(self.space.items(), point, strict=False)
        }


SAMPLERS: dict[str, Callable[[Space, int], Sampler]] = {
    "tpe": TpeSampler, "random": RandomSampler, "grid": GridSampler, "cmaes": CmaEsSampler,
}  # fmt: skip


def make_sampler(name: str, space: Space, seed: int) -> Sampler:
    """Return the sampler of a name; ConfigError, or MissingExtraError without its package."""
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name!r}: expected one of {', '.join(SAMPLERS)}.")
    return SAMPLERS[name](space, seed)


def as_optuna(optuna: Any, space: Space, observed: Sequence[Observed]) -> list[Any]:
    """Return trials as Optuna has them.

    One that waits at a rung, or was stopped there, counts as pruned, which is worse than all that
    reached a later one. One that failed, or has no return, counts as pruned before any rung, which
    is the worst of all; one under way as running.
    """
    states, trials = optuna.trial.TrialState, []
    for each in observed:
        if places(space, each.values) is None:
            continue
        has_score = each.score is not None and math.isfinite(each.score)
        state = states.COMPLETE if each.is_whole and has_score else states.PRUNED
        if not each.env_steps and each.score is not None:
            state = states.RUNNING
        at_rung = has_score and state == states.PRUNED
        trials.append(
            optuna.trial.create_trial(
                state=state,
                value=each.score if state == states.COMPLETE else None,
                params={name: _to_optuna(p, each.values[name]) for name, p in space.items()},
                distributions={name: _distribution(optuna, p) for name, p in space.items()},
                intermediate_values={each.env_steps: each.score} if at_rung else None,
            )
        )
    return trials


def importances(space: Space, observed: Sequence[Observed]) -> dict[str, float]:
    """Return how much each parameter decides the score, in shares of 1, the greatest first.

    By PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255). {} if there are too few whole trials.

    Raises:
        MissingExtraError: the `tune` extra is missing.
    """
    optuna = _optuna("tpe")
    study = optuna.create_study(direction="maximize")
    study.add_trials([t for t in as_optuna(optuna, space, observed) if t.value is not None])
    if len({trial.value for trial in study.trials}) < 4:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in found.items()}


def _optuna(sampler: str) -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise _missing(sampler, error) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _missing(sampler: str, error: ModuleNotFoundError) -> MissingExtraError:
    return MissingExtraError(
        f"The sampler {sampler} needs a package that is not installed ({error}).\n"
        f"To install it: {install_command('tune')}\nOr use --sampler random."
    )


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    of = optuna.distributions
    if parameter.kind == "choice":
        return of.CategoricalDistribution(list(range(len(parameter.of))))
    if parameter.kind == "int":
        return of.IntDistribution(*parameter.of)
    return of.FloatDistribution(*map(float, parameter.of), log=parameter.kind != "uniform")


def _to_optuna(parameter: Parameter, value: Any) -> Any:
    if parameter.kind == "choice":
        return parameter.index(value)
    number = parameter.number(value)
    return int(number) if parameter.kind == "int" else number


def _from_optuna(parameter: Parameter, value: Any) -> Any:
    if parameter.kind == "choice":
        return parameter.of[value]
    return value if parameter.kind == "int" else parameter.value(value)


def _cost(trial: Observed) -> float:
    """Return what CMA-ES makes small: only the order counts."""
    return 1e300 if trial.score is None or trial.score == -math.inf else -trial.score
