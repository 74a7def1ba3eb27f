"""The interface of an algorithm: settings, losses, and the update.

`config/algorithms.py` lists the algorithms by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headrace.algos.schedules import Schedule, ScheduleByPoints
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import (
    Between,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    configclass,
)
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
    lr_schedule: Schedule = "constant"
    """Keep the learning rate; let it fall to 0 over schedule_env_steps; or go through points
    [[env_steps, value], ...]."""
    gamma: Share = 0.99
    """Discount per env step."""
    max_grad_norm: NonNegative = 0.5
    """Gradients longer than this (L2) are shortened to it; 0: never."""
    adam_eps: NonNegative = 1e-5
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""


@configclass
class ActorCriticConfig(AlgorithmConfig):
    """Settings of algorithms that learn from advantages."""

    gamma_schedule: ScheduleByPoints = "constant"
    """Keep gamma, or change it at points."""
    gae_lambda: Share = 0.95
    """Decay of the advantage trace."""
    gae_lambda_schedule: ScheduleByPoints = "constant"
    """Keep gae_lambda, or go through points."""
    normalize_advantage: bool = False
    """Give the advantages of each minibatch mean 0 and deviation 1."""
    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    ent_schedule: Schedule = "constant"
    """Schedule of ent_coef, as lr_schedule."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""


@configclass
class EpochsConfig:
    """More settings, of algorithms that pass over each batch several times, in minibatches.

    No AlgorithmConfig: as a second base class it would undo the changes of the first.
    """

    num_epochs: PositiveInt = 4
    """Passes over each batch."""
    num_minibatches: PositiveInt = 4
    """Minibatches per epoch; rounded to divide num_steps (with a recurrent core: num_envs)."""
    minibatch_size: NonNegativeInt = 0
    """Rows of a minibatch (env steps), of all learners together, or with num_envs_per_learner of
    each; in place of num_minibatches. The nearest size that divides the batch is taken. 0: the
    batch / num_minibatches."""


Metrics = dict[str, Any]
"""Scalars on the learner's device, or floats; of a loss also numbers of each row, `[B]`."""
Modules = dict[str, nn.Module]
"""All that is learned or saved, by name. `policy` is the only module that acts."""
Named = dict[str, Any]
"""Tensors, or dicts of tensors, by name. Among arguments also numbers."""
Recordable = Callable[[Named], Named]
ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)
ConfigT_co = TypeVar("ConfigT_co", bound=AlgorithmConfig, covariant=True)


@dataclass(frozen=True)
class LossSpec:
    """A loss and the module that it trains. Each loss has its own optimizer.

    Attributes:
        function: (module, minibatch, config) -> (loss, metrics); pure. Both are sums over rows; a
            metric may be of each row instead. `config` has no schedule in force: pass a value of
            this update in the minibatch, as a scalar tensor.
        module: trained whole. The function may use other modules; do not make them submodules of
            this module, or they are trained too.
        max_grad_norm: limit of the gradient's L2 norm; 0: none.
        adam_eps: added to Adam's root mean square of each gradient.
        adam_beta1: of Adam's mean gradient, the share that is left of the one before.
        may_skip: whether a minibatch may leave some parameters without a gradient.
        prepare: minibatch -> more columns of it, such as targets that change with each step. They
            replace those of the same name. No gradient flows back through them.
    """

    function: Callable[[Any, Minibatch, Any], tuple[Tensor, Metrics]]
    module: nn.Module
    max_grad_norm: float
    adam_eps: NonNegative
    adam_beta1: float = 0.9
    may_skip: bool = False
    prepare: Callable[[Minibatch], Minibatch] | None = None


class Divides(NamedTuple):
    """A required division: `parts` must divide `number`. `reason` ends the error message."""

    whole: str
    number: int
    by: str
    parts: int
    reason: str


class Sizes(Protocol):
    """The sizes of a run that `Algorithm.divides` reads."""

    @property
    def num_envs(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


@dataclass(frozen=True)
class UpdateContext(Generic[ConfigT_co]):
    """The inputs of an update, beside its data.

    Attributes:
        modules: from `Algorithm.build`.
        step: (name of a loss, minibatch, lr) -> metrics. Takes one optimizer step. The metrics
            include `grad_norm`, the norm before clipping. {} for a step that is passed over, since
            it was made before the loss of another rank.
        minibatch_order: number of epochs E -> `[E, T, N]`: permutations of the steps of each env;
            with a recurrent core `[E, N]`: the position of each env among those of all ranks.
        config: the algorithm's settings; one with a schedule has its value at this update.
        progress: share of schedule_env_steps that has passed, in [0, 1].
        seed: of the run.
        version: updates before this one.
        learner_steps: steps of the first loss before this update.
        env_steps: env steps of the whole run before this data.
        new_env_steps: those of this data, of all ranks.
        lap: (span of `meter.SPANS`) -> None. Gives the time since the last lap to it.
        recorded: name -> a decorator, which makes a function a CUDA graph where that is possible.
            The function maps a dict of tensors and numbers to a dict of tensors. The first one of a
            name is kept, so whatever changes between updates must be among its arguments, and it
            must not hold this context, whose batch would stay in memory. Numbers may come as
            tensors. The function uses the device's memory alone, and never waits for the device.
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
    new_env_steps: int = 0
    lap: Callable[[str], None] = lambda span: None
    recorded: Callable[[str], Callable[[Recordable], Recordable]] = lambda _: _as_it_is

    def scalars(self, like: Tensor, *names: str) -> Minibatch:
        """Return settings as scalar tensors, for a minibatch whose loss reads them there.

        Args:
            like: has their dtype and device.
        """
        return {name: like.new_full((), getattr(self.config, name)) for name in names}


def _as_it_is(function: Recordable) -> Recordable:
    return function


class Algorithm(ABC, Generic[ConfigT]):
    """The base class of algorithms. An algorithm has no state: its modules hold all state.

    Attributes:
        name: as in `--algo`; "" for an algorithm outside the package.
        data: the data that it learns from. `on_policy`: of the newest weights, or one update older
            (lag 0 and 1). `lag_corrected`: of older weights, with a correction; workers never wait.
            `replay`: of any age; a module of the algorithm stores it.
        several_learners: of an algorithm with a replay, whether several learners may share it: each
            adds its own environments' data to a module that is `OfEnvs`.
        stored_outputs: columns that acting writes to a fragment beside the action.
        recurrent: whether it learns policies with a recurrent core (`Policy.forward`).
        asynchronous_form: the name of a lag-corrected algorithm with the same settings, if any.
    """

    name: ClassVar[str] = ""
    Config: type[ConfigT]
    data: ClassVar[Literal["on_policy", "lag_corrected", "replay"]] = "on_policy"
    several_learners: ClassVar[bool] = False
    stored_outputs: ClassVar[StoredOutputs] = {}
    recurrent: ClassVar[bool] = False
    asynchronous_form: ClassVar[str] = ""

    @property
    def accepts_any_lag(self) -> bool:
        """Whether the algorithm learns from data of any older weights."""
        return self.data != "on_policy"

    def is_asynchronous(self, lag: int) -> bool:
        """Return whether, with this lag, workers never stop. Else they make one batch at a time."""
        return lag > {"on_policy": 1, "lag_corrected": 0, "replay": 1}[self.data]

    @property
    def learners_help(self) -> bool:
        """Whether several learners are faster than one.

        A minibatch of a replay is small: a part of it takes as long as the whole.
        """
        return self.data != "replay"

    def build_policy(
        self, spec: EnvSpec, network: Network, config: ConfigT, model: ModelFactory | None = None
    ) -> Policy:
        """Build the policy. Workers and evaluation build only this, and load its weights.

        Raises:
            UsageError: the user's model does not fit.
        """
        return Policy(spec, network, model)

    def check(self, spec: EnvSpec) -> None:
        """Raise ConfigError if it cannot learn to act in such environments."""

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: ConfigT,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        """Build all modules: the policy, and any critics, target networks or buffers.

        Args:
            num_rows: environments of this rank, times the agents of each that the policy acts for.
        """
        return {"policy": policy}

    @abstractmethod
    def losses(self, modules: Modules, config: ConfigT) -> dict[str, LossSpec]:
        """Return the losses by name. `learner_steps` counts the steps of the first one."""

    def divides(self, run: Sizes, network: Network, config: ConfigT) -> list[Divides]:
        """Return the divisions that must have no remainder."""
        return []

    def minibatch_rows(self, run: Sizes, config: ConfigT) -> int:
        """Return the rows of a minibatch, over all ranks."""
        return run.num_envs * run.num_steps

    def warning(self, metrics: Mapping[str, float], config: ConfigT) -> str:
        """Return what the metrics of an update warn of, with the remedy, or "". It is said once."""
        return ""

    @abstractmethod
    def update(self, source: Fragment, ctx: UpdateContext[ConfigT]) -> Mapping[str, Tensor | float]:
        """Learn from the newest data, `[T, N]`. Return the metrics of this update.

        Rewards are as the environment gave them: `ctx.policy.scaled` clips and normalizes them.
        """


def epoch_divides(run: Sizes, network: Network, config: EpochsConfig) -> list[Divides]:
    """Return what the minibatches of an epoch must divide."""
    parts = "num_minibatches", config.num_minibatches
    if network.core == "none":
        reason = "each minibatch takes equally many steps of every env"
        return [Divides("num_steps", run.num_steps, *parts, reason)]
    reason = "with a recurrent core each takes all steps of equally many envs"
    return [Divides("num_envs", run.num_envs, *parts, reason)]


def policy_loss(
    function: Callable[[Any, Minibatch, Any], tuple[Tensor, Metrics]],
    modules: Modules,
    config: AlgorithmConfig,
) -> dict[str, LossSpec]:
    """Return the losses of an algorithm with a single loss over the whole policy."""
    return {"policy": LossSpec(function, modules["policy"], config.max_grad_norm, config.adam_eps)}


def mean_of(seen: list[Metrics]) -> dict[str, Tensor]:
    """Return the mean of each metric over the gradient steps that have it; {} without any."""
    names = dict.fromkeys(name for metrics in seen for name in metrics)
    return {name: _mean([m[name] for m in seen if name in m]) for name in names}


def share_of(minibatch: Minibatch) -> Tensor:
    """Return each row's share of means, `[B]`: `share`; without one, `weight`."""
    share: Tensor = minibatch["share" if "share" in minibatch else "weight"]
    return share


def mean_over_rows(of_rows: Mapping[str, Tensor], minibatch: Minibatch) -> dict[str, Tensor]:
    """Return the mean of each metric of rows `[B]`; the mean over ranks is that of all rows.

    Args:
        minibatch: its `share` is each row's share of the mean; without one, `weight` is.
    """
    share = share_of(minibatch)
    return {name: (each * share).sum() for name, each in of_rows.items()}


def _mean(values: list[Tensor | float]) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value) for value in values]).mean()
    return torch.tensor(values, dtype=torch.float64).mean()
