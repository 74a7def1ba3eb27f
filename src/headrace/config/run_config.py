"""What every run has to settle, whatever its algorithm: the environment, how much, how many.

Left out: where values come from, and whether they fit together (`resolve.py`).
"""

import ast
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import tyro

from headrace.configclass import configclass


def _parse_kwargs(texts: list[str]) -> dict[str, Any]:
    """`key=value` words; values are Python literals, or else text."""
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
    return tyro.constructors.PrimitiveConstructorSpec[dict[str, Any]](
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
_Learners = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="INT|auto",
    instance_from_str=lambda words: -1 if words[0] == "auto" else int(words[0]),
    is_instance=lambda instance: isinstance(instance, int),
    str_from_instance=lambda number: [str(number)],
)


@configclass
class RunConfig:
    """What to train on, for how long, and with how many of everything."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """Environment: a Gymnasium id, module:EnvId, or module:callable."""
    algo: Literal["ppo", "a2c", "appo", "impala"] = "ppo"
    """Algorithm."""
    total_env_steps: int = 1_000_000
    """Train for this many env steps in all, rounded up to whole batches (num_envs x num_steps)."""
    num_envs: int = 8
    """Environments in all."""
    num_steps: int = 128
    """Env steps per env and batch (T)."""
    num_workers: int = 0
    """Processes that step the environments; 0: the learner does it itself; -1: one for each CPU
    core. On a cluster -1 is the default, and means all that its machines have room for."""
    envs_per_vector: int = 0
    """Environments that are stepped together, and that one forward pass of the policy serves; 0:
    num_envs / CPU cores, with --inference learner so that each worker has two vectors. A run can be
    repeated exactly only with the same value; num_workers may differ."""
    lag: int = -1
    """How many updates old the weights may be when a step is taken; 0: workers wait while the
    learner works. 1, ppo and a2c: workers make the next batch meanwhile; can be repeated exactly. 1
    or more, appo and impala: workers never stop, act with the newest weights, and up to so many
    batches wait for the learner (how old a step is by then is measured: lag_learning). -1: 2 for
    appo and impala with workers, else 0."""
    inference: Literal["worker", "learner"] = "worker"
    """What computes the actions. worker: each process that steps environments, with a copy of the
    network, on its CPU; learner: the learner's process, on its device, for all vectors that are
    ready at a time (needs workers, best with two vectors each; how it rounds depends on which are
    ready)."""
    vectorization: Literal["auto", "python", "native"] = "auto"
    """native: the environment's own vector form (a registered vector_entry_point; of a kernel
    environment: compiled); python: its Python form, one after the other (interpreted); auto: native
    for ALE, kernel environments, those that step tensors, and where a preset says so."""
    env_kwargs: Annotated[dict[str, Any], KeyValues] = field(default_factory=dict)
    """Passed to the environment's constructor, as in --env-kwargs size=4 name=maze."""
    wrapper: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[MODULE:CALLABLE ...]")] = ()
    """Put around each environment, the first one innermost: gets an environment, gives one."""
    drop_obs_keys: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY ...]")] = ()
    """Keys of a Dict observation that the policy does not see."""
    action_mask: str = "auto"
    """Which actions are allowed: off, info (info["action_mask"]), or the key of an observation;
    auto: an observation or info called action_mask that has an entry for each choice."""
    policies: Annotated[dict[str, Any], _Shares] = field(default_factory=dict)
    """Which agents each policy acts for, of an environment that has several: --policies
    runner=10:110 tagger=0:10 (first:end); {}: one policy for each of its roles. In a file also
    settings of its own: [policies.tagger], lr = 1e-3."""
    frozen: Annotated[dict[str, Any], Frozen] = field(default_factory=dict)
    """Policies that do not learn, but act as those of another run, or at random: --frozen
    tagger=RUN_DIR runner=random (RUN_DIR:POLICY, if it has another name there)."""
    model: Annotated[str, tyro.conf.arg(metavar="MODULE:CALLABLE")] = ""
    """Makes a network of your own, a torch.nn.Module, from the environment's spec; the network's
    settings about sizes do not apply then."""
    init_from: Annotated[str, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """Begin with the weights (and normalizers) of another run."""
    eval_every: int = 0
    """Evaluate each time that so many env steps have passed (0: never), and keep the best policy
    in best/."""
    eval_episodes: int = 20
    """Episodes of each such evaluation."""
    seed: int = 0
    """Root of every random number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes; auto: cuda if there is one."""
    num_learners: Annotated[int, _Learners] = 1
    """Learner processes (ranks) that share the work: each steps its share of the environments with
    its share of the workers, and they average their gradients. auto (-1): one for each GPU of this
    machine. torchrun sets it."""
    num_envs_per_learner: int = 0
    """In place of num_envs, for a batch that grows with the learners (0: num_envs is the number of
    all)."""
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the number of learners, or its square root."""
    num_accumulation_steps: int = 1
    """Parts in which the gradient of a minibatch is computed, one after the other: takes less
    memory, and gives the same."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """How learners reach each other; auto: NCCL on GPUs, shared memory among the CPUs of one host,
    else gloo."""
    rank_timeout_s: float = 600.0
    """Give up when a learner that is alive lets the others wait for so long (seconds): the first
    one's evaluations and on_update count, too."""
    on_env_error: Literal["fail", "restart"] = "fail"
    """What an environment's exception or bad value (NaN, a wrong shape) leads to: the end of the
    run, or a new environment and episode."""
    on_worker_loss: Literal["restart", "fail"] = "restart"
    """What the death or silence of a worker leads to: another one, which makes its fragment again
    (to the bit, where episodes can be replayed), or the end of the run."""
    cluster: Annotated[str, tyro.conf.arg(metavar="local|auto|ADDRESS")] = ""
    """Run on a Ray cluster: learners and workers are actors then, on any of its machines. local:
    start Ray here, for this run; auto: the cluster that this machine belongs to; or the address of
    one. Learners' machines must see the run directory."""
    gpus_per_learner: int = -1
    """On a cluster: GPUs of each learner; -1: one, where the cluster has enough, else none."""
    cpus_per_worker: float = 1.0
    """On a cluster: CPU cores of each worker."""
    worker_resources: Annotated[dict[str, Any], _Demands] = field(default_factory=dict)
    """On a cluster: what machines of workers must have: an amount of one of Ray's custom resources
    (slot=1), or a label (kind=cpu)."""
    learner_resources: Annotated[dict[str, Any], _Demands] = field(default_factory=dict)
    """On a cluster: what machines of learners must have, likewise."""
    env_timeout_s: float = 0.0
    """Seconds that a step or reset may take; 0: 20 times what 99.9 % of them take, at least 60."""
    max_worker_restarts: int = 3
    """Restarts of each worker (and each environment, with on_env_error restart) in 10 minutes; on a
    cluster also of the learners. Machines that go do not count for their workers."""
    guards: bool = True
    """Check what environments give, and watch for silence; --no-guards shows what that costs.
    Exceptions and dead workers are seen in any case."""
    check_ranks: int = 0
    """Compare a hash of all learners' parameters every so many updates (0: never)."""
    learner_threads: int = 1
    """CPU threads of the learner's math (0: one per core). A run can be repeated exactly only with
    the same value."""
    compile: bool = False
    """Compile the loss with torch.compile (needs a C++ compiler, and half a minute in the first
    update); in place of the gradient that --arithmetic auto has for small networks."""
    stop_at_return: float | None = None
    """Stop once the mean return of the last 100 training episodes reaches this."""
    stop_after_s: float = 0.0
    """Stop once the process has run for so many seconds, at the end of an update (0: no limit)."""
    schedule_env_steps: int = 0
    """Env steps over which schedules run; 0: the first total_env_steps. Kept by resume,
    unless it gets another."""
    checkpoint_every_s: float = 60.0
    """Seconds between checkpoints (one more at the end)."""
    timeline: bool = False
    """Keep what each process did when, in the run directory (timeline.npz)."""
    keep: int = 3
    """Checkpoints kept; older ones are removed."""
    reseed_episodes: bool = True
    """Seed each episode, so that resume can replay it; --no-... seeds each environment once, for
    environments whose seeded reset is slow."""
    replay_limit_s: float = 30.0
    """Seconds that resume may spend on replaying the episodes of one vector."""

    @property
    def num_vectors(self) -> int:
        """How many vectors the environments make."""
        return self.num_envs // self.envs_per_vector


def demands(given: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What machines must have: amounts of resources, and labels."""
    amounts = {k: float(v) for k, v in given.items() if isinstance(v, int | float)}
    return amounts, {k: str(v) for k, v in given.items() if k not in amounts}
