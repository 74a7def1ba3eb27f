"""The settings that every run has, whatever its algorithm, in groups."""

import ast
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import tyro

from headrace.config.algorithms import ALGORITHMS
from headrace.configclass import (
    PLAIN_DATA,
    Between,
    Expected,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    configclass,
)


def _parse_kwargs(texts: list[str]) -> dict[str, Any]:
    """Parse `key=value` words; values are Python literals, or else text."""
    kwargs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"expected key=value, got {text!r}")
        try:
            kwargs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            kwargs[key] = value
    return kwargs


def _key_values(metavar: str) -> tyro.constructors.PrimitiveConstructorSpec[dict[str, Any]]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=_parse_kwargs,
        is_instance=lambda instance: isinstance(instance, dict),
        str_from_instance=lambda kwargs: [f"{k}={v}" for k, v in kwargs.items()],
    )


KeyValues = _key_values("key=value")
_Shares = _key_values("POLICY=FIRST:END")
Frozen = _key_values("POLICY=RUN_DIR")
_Demands = _key_values("NAME=AMOUNT|LABEL")
AUTO_WORKERS, AUTO_THREADS = -2, -1
"""What the word `auto` is in the settings of that name until numbers are derived."""


def _number_or_auto(auto: int) -> tyro.constructors.PrimitiveConstructorSpec[int]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT|auto",
        instance_from_str=lambda words: auto if words[0] == "auto" else int(words[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda number: ["auto" if number == auto else str(number)],
    )


_PLAIN = Expected(f"{PLAIN_DATA}; put anything else into a callable that makes the environment")
_BY_POLICY = Expected("names of policies, each with a word or a table")


@configclass
class EnvConfig:
    """The environment, and how it is made."""

    env: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV", help_behavior_hint="")
    ] = ""
    """Environment: a Gymnasium id, a game of PettingZoo's (classic/rps-v2), module:EnvId, or
    module:callable."""
    env_kwargs: Annotated[dict[str, Any], KeyValues, _PLAIN] = field(default_factory=dict)
    """Arguments of the environment's constructor, as in --env-kwargs size=4 name=maze."""
    wrapper: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[MODULE:CALLABLE ...]")] = ()
    """Wrappers of each environment, the innermost first. Each takes an environment and returns
    one."""
    vectorization: Literal["auto", "python", "native"] = "auto"
    """native: the environment's own vector form (a registered vector_entry_point; a kernel
    environment is compiled). python: its Python form, one environment after the other
    (interpreted). auto: native for ALE, for kernel environments, and for environments that step
    tensors."""
    drop_obs_keys: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY ...]")] = ()
    """Keys of a Dict observation that the policy does not see."""
    action_mask: str = "auto"
    """Which actions are allowed: off, info (info["action_mask"]), or a key of the observation.
    auto: an observation or info named action_mask that has an entry for each choice."""


@configclass
class CollectConfig:
    """How batches are collected."""

    num_envs: PositiveInt = 8
    """Environments in all."""
    num_envs_per_learner: NonNegativeInt = 0
    """Environments of each learner, in place of num_envs: the batch grows with the learners.
    0: num_envs is the number of all."""
    num_steps: PositiveInt = 128
    """Env steps per env and batch (T)."""
    num_workers: Annotated[
        int,
        Between(0, minus_one="one for each CPU core", auto=AUTO_WORKERS),
        _number_or_auto(AUTO_WORKERS),
    ] = AUTO_WORKERS
    """Worker processes. 0: environments run in the learner's process. -1: one for each CPU core; on
    a cluster all that its machines have room for. auto: as many as make this run the fastest, from
    what a step, an inference and an update take (measured for at most a second, and remembered)."""
    envs_per_vector: Annotated[int, Between(0, auto=0), _number_or_auto(0)] = 0
    """Environments that are stepped together and share a forward pass of the policy. auto (0): as
    num_workers. A run can be repeated exactly only with the same value; num_workers may differ."""
    lag: Annotated[int, Between(0, 100, minus_one="what is usual for the algorithm")] = -1
    """How far sampling runs ahead of learning. 0: workers wait while the learner works. 1 with ppo
    and a2c: workers make the next batch meanwhile, with weights one update old; this can be
    repeated exactly. 1 or more with appo and impala: workers never stop and act with the newest
    weights; up to so many batches wait for the learner (lag_learning measures the age of their
    steps). dqn: as ppo at 1; from 2 on workers never stop, unless they are ahead of the ratio. -1:
    1 for appo, impala and dqn with workers (dqn: 0 with images; or 2, where the measurement that
    chooses num_workers finds it faster), else 0."""
    inference: Literal["worker", "learner"] = "worker"
    """What computes the actions. worker: each worker, with a copy of the network, on its CPU.
    learner: the learner's process, on its device, for all vectors that are ready at a time; needs
    workers, best with two vectors each. How it rounds depends on which vectors are ready."""
    reseed_episodes: bool = True
    """Seed each episode, so that resume can replay it. --no-reseed-episodes seeds each environment
    once, for environments whose seeded reset is slow."""


@configclass
class FaultsConfig:
    """What happens when an environment or a worker fails."""

    on_env_error: Literal["fail", "restart"] = "fail"
    """After an environment's exception or bad value (NaN, a wrong shape): end the run, or make a
    new environment and begin a new episode."""
    on_worker_loss: Literal["restart", "fail"] = "restart"
    """After a worker died or hung: start another one, which makes its fragment again (to the bit,
    where episodes can be replayed), or end the run. The same after a learner died, if the others
    can go on without what it had."""
    max_worker_restarts: NonNegativeInt = 3
    """Restarts of each worker in 10 minutes, and of all learners together; with --on-env-error
    restart also of each environment. Machines of workers that leave do not count."""
    env_timeout_s: NonNegative = 0.0
    """Seconds that a step or reset may take. 0: 20 times what 99.9 % of them take, at least 60."""
    guards: bool = True
    """Check the values that environments return, and detect hangs. --no-guards shows what that
    costs. Exceptions and dead workers are detected in any case."""


@configclass
class LearnerConfig:
    """Learner processes and their math."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes. auto: cuda if there is a CUDA device, unless gradient steps are
    so small that a CPU is faster."""
    learner_threads: Annotated[
        int, Between(0, auto=AUTO_THREADS), _number_or_auto(AUTO_THREADS)
    ] = AUTO_THREADS
    """CPU threads of the learner's math. 0: one for each core. auto: the same for sac and td3,
    and for ppo, a2c and dqn with images, else 1. A run can be repeated exactly only with the same
    value."""
    compile: bool = False
    """Compile the loss with torch.compile. Needs a C++ compiler, and half a minute in the first
    update. Replaces the gradient that --arithmetic auto has for small networks."""
    num_accumulation_steps: PositiveInt = 1
    """Parts in which the gradient of a minibatch is computed, one after the other. More parts take
    less memory; the gradient is the same."""
    num_learners: Annotated[int, Between(1, auto=-1), _number_or_auto(-1)] = -1
    """Learner processes (ranks). Each steps its share of the environments with its share of the
    workers; they average their gradients. auto (-1): one for each GPU of this machine; on CPUs,
    as many as are fastest, by a measurement. torchrun sets it."""
    deterministic: bool = False
    """Choose what is auto from the number of cores and GPUs alone, and not from what is measured:
    the same command has the same sizes on each machine with as many."""
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the number of learners, or by its square root."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """How learners exchange data. auto: NCCL on GPUs, shared memory among the CPUs of one host,
    else gloo."""
    rank_timeout_s: Annotated[float, Between(1)] = 600.0
    """Seconds that learners wait for one that is alive, before the run ends. Waits for evaluations,
    and on_update of the first learner, count too."""
    check_ranks: NonNegativeInt = 0
    """Compare a hash of all learners' parameters every so many updates. 0: never."""
    init_from: Annotated[str, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """Begin with the weights and normalizers of another run."""
    data: Annotated[str, tyro.conf.arg(metavar="RUN_DIR|MINARI")] = ""
    """Learn from recorded steps, and step no environment: those that another run's replay keeps, or
    a Minari data set (a directory or an id). Env steps are then steps that were read, again and
    again. `resume --data ""` goes on in the environment."""


@configclass
class ClusterConfig:
    """Training on a Ray cluster."""

    cluster: Annotated[str, tyro.conf.arg(metavar="local|auto|ADDRESS")] = ""
    """Train on a Ray cluster: learners and workers are actors on any of its machines. local: start
    Ray here, for this run. auto: the cluster of this machine. Or the address of a cluster. The
    machines of learners must see the run directory. With tune and sweep: each run is whole on one
    of the machines, which must see the study's directory."""
    gpus_per_learner: Annotated[int, Between(-1)] = -1
    """On a cluster: GPUs of each learner. -1: one, where the cluster has enough, else none."""
    cpus_per_worker: NonNegative = 1.0
    """On a cluster: CPU cores of each worker."""
    worker_resources: Annotated[dict[str, Any], _Demands] = field(default_factory=dict)
    """On a cluster: what the machines of workers must have: an amount of a custom resource of Ray
    (slot=1), or a label (kind=cpu)."""
    learner_resources: Annotated[dict[str, Any], _Demands] = field(default_factory=dict)
    """On a cluster: what the machines of learners must have, likewise."""


@configclass
class PoliciesConfig:
    """The algorithm, and the policies of environments with several agents."""

    algo: Annotated[str, tyro.conf.arg(metavar="|".join([*ALGORITHMS, "MODULE:NAME"]))] = "ppo"
    """Algorithm. module:Name: one of your own."""
    model: Annotated[str, tyro.conf.arg(metavar="MODULE:CALLABLE")] = ""
    """Makes your own network, a torch.nn.Module, from the environment's spec. The settings about
    the network's sizes do not apply then."""
    critic: Literal["own", "shared"] = "own"
    """What the values are computed from, in games of several agents. own: what an agent itself
    observes. shared: also the state of the whole game (what PettingZoo's state() gives, or else all
    agents' observations); agents still act by their own observation alone."""
    agent_ids: bool = False
    """Each agent also observes its index among all agents of the game (one-hot), so that agents
    that share a policy can do different things."""
    policies: Annotated[dict[str, Any], _Shares, _BY_POLICY] = field(default_factory=dict)
    """The agents of each policy, for an environment with several agents: --policies runner=10:110
    tagger=0:10 (first:end). Default: one policy for each role of the environment. A file can give
    a policy other settings: [policies.tagger], lr = 1e-3."""
    frozen: Annotated[dict[str, Any], Frozen, _BY_POLICY] = field(default_factory=dict)
    """Policies that act but do not learn, from another run or at random: --frozen tagger=RUN_DIR
    runner=random (RUN_DIR:POLICY, if it has another name there)."""


@configclass
class LeagueConfig:
    """Opponents in games: snapshots of this run, and other runs."""

    league: NonNegativeInt = 0
    """Members of a league that may be opponents at a time: snapshots of this run, and those of
    --league-members. In each episode, the learned policies play all agents, or one side against a
    member. A side is the agents of a policy; with one policy, each agent. 0: no league."""
    snapshot_every: Annotated[int, Between(0, minus_one="no snapshots")] = 0
    """Env steps between snapshots, of which the first is taken at the start. 0: a fortieth of
    total_env_steps. -1: none, and the members are those of --league-members alone."""
    opponents: Literal["uniform", "hard"] = "uniform"
    """Which members are drawn. uniform: all alike. hard: those more often that win."""
    latest_ratio: Annotated[float, Between(0, 1)] = 0.5
    """Share of episodes in which the learned policies play all sides."""
    league_members: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUN_DIR|random ...]")] = ()
    """Further members: the policies of other runs, or a random player."""


@configclass
class LoopConfig:
    """How long to train, and what is evaluated and saved."""

    total_env_steps: PositiveInt = 1_000_000
    """Env steps in all, rounded up to whole batches (num_envs x num_steps)."""
    schedule_env_steps: NonNegativeInt = 0
    """Env steps over which schedules run, counted from the run's start. 0: the first
    total_env_steps. What falls linearly is 0 after that. Kept by resume."""
    stop_at_return: float | None = None
    """Stop once the mean return of the last 100 training episodes reaches this."""
    stop_after_s: NonNegative = 0.0
    """Stop at the end of an update, once the process has run for so many seconds. 0: no limit."""
    seed: NonNegativeInt = 0
    """Root of every random number."""
    eval_every: NonNegativeInt = 0
    """Evaluate after every so many env steps, and keep the best policy in best/. 0: never. A
    process of its own plays meanwhile; training waits for it in the update before the next one."""
    eval_episodes: PositiveInt = 20
    """Episodes of each such evaluation."""
    eval_env: Annotated[str, tyro.conf.arg(metavar="ENV", help_behavior_hint="")] = ""
    """Environment of evaluations, also of `headrace eval`: an id, module:EnvId or module:callable.
    Its spaces must be those of the training environment, and it gets the same wrappers. Default:
    the training environment."""
    eval_env_kwargs: Annotated[dict[str, Any], KeyValues, _PLAIN] = field(default_factory=dict)
    """Arguments of its constructor. Without --eval-env, arguments of the training environment
    that are other ones in evaluations."""
    checkpoint_every_s: NonNegative = 60.0
    """Seconds between checkpoints. One more is written at the end."""
    keep: PositiveInt = 3
    """Checkpoints to keep; older ones are removed."""
    replay_limit_s: NonNegative = 30.0
    """Seconds that resume may spend on replaying the unfinished episodes of one vector."""
    timeline: bool = False
    """Record what each process does when, in the run directory (timeline.npz)."""


@configclass
class RunConfig(  # fields come in the order of the bases, the last one first
    LoopConfig,
    LeagueConfig,
    PoliciesConfig,
    ClusterConfig,
    LearnerConfig,
    FaultsConfig,
    CollectConfig,
    EnvConfig,
):
    """All groups together; flat, as flags, files and keywords are."""

    @property
    def num_vectors(self) -> int:
        """Number of vectors of all environments."""
        return self.num_envs // self.envs_per_vector


GROUPS: dict[str, type[Any]] = {
    "environment": EnvConfig,
    "collection": CollectConfig,
    "faults": FaultsConfig,
    "learner": LearnerConfig,
    "cluster": ClusterConfig,
    "policies": PoliciesConfig,
    "league": LeagueConfig,
    "run": LoopConfig,
}
"""The title of each group in --help."""


def demands(resources: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return what machines must have: amounts of resources, and labels."""
    amounts = {k: float(v) for k, v in resources.items() if isinstance(v, int | float)}
    return amounts, {k: str(v) for k, v in resources.items() if k not in amounts}
