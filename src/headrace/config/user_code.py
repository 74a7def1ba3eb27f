"""The user's own wrappers, network and algorithm. Left out: environments (`envs/factory.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.algos.base import Algorithm
from headrace.config.algorithms import AlgorithmLike, algorithm_name, load_algorithm
from headrace.envs.factory import WrapperLike
from headrace.errors import ConfigError
from headrace.importing import load_callable
from headrace.models.custom import ModelFactory


@dataclass(frozen=True)
class Code:
    """The user's own code, beside the environment."""

    wrappers: tuple[WrapperLike, ...] = ()
    model: ModelFactory | None = None
    algorithm: Algorithm[Any] | None = None

    def names(self) -> dict[str, Any]:
        """Return the settings for config.json: they tell that the code must be named again."""
        names: dict[str, Any] = {}
        if self.wrappers:
            names["wrapper"] = tuple(
                w if isinstance(w, str) else getattr(w, "__name__", "wrapper")
                for w in self.wrappers
            )
        if self.model is not None:
            own = getattr(self.model, "__qualname__", "model")
            names["model"] = f"{getattr(self.model, '__module__', '')}:{own}"
        if self.algorithm is not None:
            names["algo"] = algorithm_name(type(self.algorithm))
        return names


NO_CODE = Code()


def code(
    wrappers: Sequence[WrapperLike],
    model: str | ModelFactory | None,
    algo: AlgorithmLike | None = None,
) -> Code:
    """Return code as a caller names it: callables, or `module:callable` for what is loaded here.

    Raises:
        ConfigError: there is no such module or callable.
    """
    if isinstance(model, str):
        model = load_callable(model, ConfigError) if model else None
    return Code(tuple(wrappers), model, load_algorithm(algo) if algo else None)
