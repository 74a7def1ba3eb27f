"""What is trained: each listed id that has a preset, and a few tasks besides.

Left out: training (`runs.py`), the page (`page.py`).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrace.catalog.families import families
from headrace.config.preset_tables import algorithms_of_preset, preset_table
from headrace.errors import UsageError, did_you_mean

SEEDS = 3
AN_HOUR = {
    "BipedalWalkerHardcore-v3": 5_000_000,
    "CarRacing-v3": 100_000,
    "ALE/Pong-v5": 600_000,
    **dict.fromkeys(
        (
            "ALE/Breakout-v5", "ALE/BeamRider-v5", "ALE/Qbert-v5", "ALE/Seaquest-v5",
            "ALE/SpaceInvaders-v5",
        ),
        400_000,
    ),
}  # fmt: skip
"""What is trained with one seed, and for fewer env steps than its preset says: up to an hour."""
ELSEWHERE = ("headrace/TagGridWorld-v0", "headrace/TagContinuous-v0")
"""What another benchmark measures (docs/tag.md)."""


@dataclass(frozen=True)
class Task:
    """A preset, as it is trained; or settings besides it, with a label."""

    family: str
    env: str
    algo: str = "ppo"
    flags: tuple[str, ...] = ()
    label: str = ""
    num_seeds: int = SEEDS

    @property
    def name(self):
        """The name of its results, and of its runs."""
        env = self.env.replace("/", "-").partition(":")[0]
        return "-".join(filter(None, (env, self.algo, self.label)))

    @property
    def is_code(self):
        return ":" in self.env


def _memory(core):
    """A task that takes a memory, with and without one."""
    flags = (
        f"--core {core} --normalize-obs --normalize-reward --lr 5e-4 --lr-schedule linear "
        "--clip-schedule linear --num-epochs 10 --num-minibatches 1 --num-envs 8 "
        "--envs-per-vector 4 --num-steps 64 --total-env-steps 149504"
    )
    env = "examples.cartpole_without_velocities:make"
    return Task("memory", env, flags=tuple(flags.split()), label=core)


_C51 = "--distribution c51 --v-min -300 --v-max 300"
DQN_PARTS = {
    "no-layer-norm": "--no-layer-norm",
    "no-double-q": "--no-double-q",
    "no-n-step": "--n-step 1",
    "no-double-q-no-n-step": "--no-double-q --n-step 1",
    "dueling": "--dueling",
    "prioritized": "--priority-alpha 0.5",
    "noisy": "--noisy",
    "c51": _C51,
    "qr": "--distribution qr",
    "rainbow": f"--dueling --priority-alpha 0.5 --noisy {_C51}",
    "ratio-0.5": "--replay-ratio 0.5",
}
"""Variants of the preset, by label: without a part of the defaults, or with another of Rainbow."""

# One core for an hour and a half
_PONG = (
    "--env-kwargs", "repeat_action_probability=0.0", "--precision", "bf16",
    "--total-env-steps", "1000000", "--stop-after-s", "5400",
)  # fmt: skip


def _part(label):
    flags = DQN_PARTS[label]
    return Task("box2d", "LunarLander-v3", "dqn", tuple(flags.split()), label)


BESIDES = (
    *(
        Task("classic-control", "CartPole-v1", algo, ("--lag", "4"), "lag-4")
        for algo in ("appo", "impala")
    ),
    *(_memory(core) for core in ("lstm", "gru", "none")),
    *(_part(label) for label in DQN_PARTS),
    Task("atari", "ALE/Pong-v5", "dqn", _PONG, "no-sticky-actions", num_seeds=1),
)
"""Tasks that do not follow from presets."""


def tasks():
    """All tasks, by family. PPO is trained with each preset, others if it has a table for them."""
    found = []
    for family in families().values():
        for env in family.ids:
            if preset_table(env)[0] != "none" and env not in ELSEWHERE:
                algos = dict.fromkeys(["ppo", *algorithms_of_preset(env)])
                found += [_preset(family.name, env, algo) for algo in algos]
        found += [task for task in BESIDES if task.family == family.name]
    return [*found, *(task for task in BESIDES if task.family not in families())]


def _preset(family, env, algo):
    if env not in AN_HOUR:
        is_short = env.endswith("Pendulum-v1") or env.startswith("headrace/")
        takes_hours = algo in ("sac", "td3", "tqc") and not is_short
        return Task(family, env, algo, num_seeds=1 if takes_hours else SEEDS)
    return Task(family, env, algo, ("--total-env-steps", str(AN_HOUR[env])), num_seeds=1)


def chosen(env="", algo="", label=None):
    """The tasks of a pattern of ids, or of a family, of an algorithm, and of a label.

    A preset itself has the label "".

    Raises:
        UsageError: there is none.
    """
    found = [
        task
        for task in tasks()
        if (not env or task.family == env or fnmatchcase(task.env, env))
        and algo in ("", task.algo)
        and label in (None, task.label)
    ]
    if not found:
        known = {task.env for task in tasks()} | {task.family for task in tasks()}
        raise UsageError(
            f"No task has --env {env!r}, --algo {algo!r} and --label {label!r}: expected a listed "
            "id with a preset, a pattern of such ids, or a family; an algorithm and a label that "
            f"docs/presets.md has.{did_you_mean(env, known)}"
        )
    return found
