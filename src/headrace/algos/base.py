"""The contract of an algorithm: its settings, its losses, and how it learns from new data.

Each page beside this file implements it; `config/algorithms.py` lists them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import Between, NonNegative, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec

Share = Annotated[float, Between(0, 1)]


@configclass
class AlgorithmConfig:
    """Settings that every algorithm has."""

    lr: NonNegative = 3e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate, or let it fall to 0 over schedule_env_steps."""
    gamma: Share = 0.99
    """Discount per env step."""
    max_grad_norm: NonNegative = 0.5
    """Gradients longer than this (L2) are shortened to it."""
    adam_eps: NonNegative = 1e-5
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""


@configclass
class ActorCriticConfig(AlgorithmConfig):
    """Settings of algorithms that learn from advantages."""

    gae_lambda: Share = 0.95
    """Decay of the advantage trace."""
    normalize_advantage: bool = False
    """Give the advantages of each minibatch mean 0 and deviation 1."""
    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""


Metrics = dict[str, Tensor]
"""Scalars on the learner's device."""
Modules = dict[str, nn.Module]
"""All that is learned or saved, by name. `policy` is the only module that acts."""
ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)
ConfigT_co = TypeVar("ConfigT_co", bound=AlgorithmConfig, covariant=True)


@dataclass(frozen=True)
class LossSpec:
    """A loss and the parameters that it trains, with an optimizer of their own.

    Attributes:
        function: (module, minibatch, config) -> (loss, metrics); pure. Both are sums over rows.
        module: the first argument; all of its parameters are trained. The function may use other
            modules, which must not be registered in this one.
        max_grad_norm: gradients longer than this (L2) are shortened to it.
        adam_eps: epsilon of Adam.
        may_skip: whether a minibatch may leave some parameters without a gradient.
    """

    function: Callable[[Any, Minibatch, Any], tuple[Tensor, Metrics]]
    module: nn.Module
    max_grad_norm: float
    adam_eps: NonNegative
    may_skip: bool = False


class Divides(NamedTuple):
    """A number that another one must divide, and why (the end of an error message)."""

    whole: str
    number: int
    by: str
    parts: int
    reason: str


class Sizes(Protocol):
    """The settings of a run that `Algorithm.divides` may need."""

    @property
    def num_envs(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


@dataclass(frozen=True)
class UpdateContext(Generic[ConfigT_co]):
    """What an update works with, beside its data.

    Attributes:
        policy: the policy that is learned.
        modules: from `Algorithm.build`.
        config: settings of the algorithm.
        step: (loss, minibatch, lr) -> metrics: one optimizer step on the loss of that name. Adds
            `grad_norm`, the gradient's norm before clipping.
        minibatch_order: number of epochs E -> `[E, T, N]`: permutations of the steps of each env;
            with a recurrent core `[E, N]`: the place of each env among those of all ranks.
        ranks: the ranks of the job.
        progress: share of the schedules that has passed, in [0, 1].
        seed: the run's seed.
        version: updates made before this one.
        learner_steps: steps of the first loss made before this update.
        env_steps: env steps of the whole run before this data.
    """

    policy: Policy
    modules: Modules
    config: ConfigT_co
    step: Callable[[str, Minibatch, float], Metrics]
    minibatch_order: Callable[[int], Tensor]
    ranks: Ranks
    progress: float
    seed: int = 0
    version: int = 0
    learner_steps: int = 0
    env_steps: int = 0

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return self.scheduled(self.config.lr, self.config.lr_schedule)

    def scheduled(self, value: float, schedule: str) -> float:
        """Return `value`, or what a linear schedule leaves of it."""
        return value * (1 - self.progress if schedule == "linear" else 1.0)


class Algorithm(Generic[ConfigT]):
    """One way to learn. It has no state: what it learns and remembers lies in its modules.

    Attributes:
        name: as in `--algo`; one outside the package needs none.
        Config: the class of its settings.
        data: what it can learn from. `on_policy`: data of the newest weights, or of the update
            before (lag 0 and 1). `lag_corrected`: data of older weights, which it corrects for, so
            that workers need never wait. `replay`: data of any age; what it keeps of it is a module
            of its own.
        stored_outputs: what acting writes to a fragment beside the action.
        asynchronous_form: the name of a lag-corrected algorithm with the same settings, if any.
    """

    name: ClassVar[str] = ""
    Config: type[ConfigT]
    data: ClassVar[Literal["on_policy", "lag_corrected", "replay"]] = "on_policy"
    stored_outputs: ClassVar[StoredOutputs] = {}
    asynchronous_form: ClassVar[str] = ""

    @property
    def accepts_any_lag(self) -> bool:
        """Whether it may learn from the data of any older weights."""
        return self.data != "on_policy"

    def build_policy(
        self, spec: EnvSpec, network: Network, config: ConfigT, model: ModelFactory | None = None
    ) -> Policy:
        """Build what acts. Workers and evaluation build this alone, and load its weights.

        Raises:
            UsageError: the user's model does not fit.
        """
        return Policy(spec, network, model)

    def build(self, policy: Policy, spec: EnvSpec, config: ConfigT) -> Modules:
        """Build what learns: the policy, and critics, target networks or a buffer beside it."""
        return {"policy": policy}

    def losses(self, modules: Modules, config: ConfigT) -> dict[str, LossSpec]:
        """Return the losses by name. The steps of the first one are counted."""
        raise NotImplementedError

    def divides(self, run: Sizes, network: Network, config: ConfigT) -> list[Divides]:
        """Return which sizes must divide into which."""
        return []

    def minibatch_rows(self, run: Sizes, config: ConfigT) -> int:
        """Return the number of rows of one minibatch, over all ranks."""
        return run.num_envs * run.num_steps

    def update(self, source: Fragment, ctx: UpdateContext[ConfigT]) -> Metrics:
        """Learn from the newest data, `[T, N]`; the metrics are those of this update."""
        raise NotImplementedError


def policy_loss(
    function: Callable[[Any, Minibatch, Any], tuple[Tensor, Metrics]],
    modules: Modules,
    config: AlgorithmConfig,
) -> dict[str, LossSpec]:
    """Return the losses of an algorithm that has one, over the whole policy."""
    return {"policy": LossSpec(function, modules["policy"], config.max_grad_norm, config.adam_eps)}
