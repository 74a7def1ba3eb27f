"""F16, F17: what was stopped goes on as if it had not been, and the same seed is the same run."""

import shutil
import time

import pytest

import headrace
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.marks import repeats
from tests.support import short_cartpole

pytestmark = pytest.mark.fault_a

UPDATE = 4 * 32
LAST = 52
SETTINGS = {
    "num_envs": 4, "num_steps": 32, "envs_per_vector": 2, "quiet": True, "seed": 5,
    "schedule_env_steps": LAST * UPDATE,
    "algo": headrace.PPO(
        lr=3e-3, lr_schedule="linear", clip_schedule="linear", num_minibatches=2, num_epochs=2
    ),
    "network": headrace.Network(
        hidden_sizes=(16,), normalize_obs=True, normalize_reward=True
    ),
}  # fmt: skip
TIMES = ("_s", "env_steps_per_s")
ONCE_A_SECOND = ("seconds/", "ledger/")  # in whichever row a second has passed


def content(run_dir, updates=None):
    """All that a run has learned and counted after so many updates; default: at its end."""
    step = "" if updates is None else f"checkpoints/step_{updates * UPDATE:012d}"
    saved = checkpoint.newest(run_dir / step)
    arrays = {
        (name, key): array.tobytes()
        for name in ("policy_default", "learner_default", "workers")
        for key, array in saved.arrays(name).items()
    }
    rows = [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(TIMES) and not name.startswith(ONCE_A_SECOND)
        }
        for row in read_metrics(run_dir)[:updates]
    ]
    return arrays, saved.manifest["counters"], saved.manifest["learner"], rows


WHO = {"inline": {"num_workers": 0}, "workers": {"num_workers": 2}, "learners": {"num_learners": 2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By who samples: the directory of a run that nothing has stopped, with all its checkpoints."""
    made = {}

    def of(who):
        if who not in made:
            last = 9 if who == "learners" else LAST
            made[who] = headrace.train(
                short_cartpole, run_dir=tmp_path_factory.mktemp("whole") / who, keep=LAST,
                checkpoint_every_s=0.0, total_env_steps=last * UPDATE, **SETTINGS | WHO[who],
            ).dir  # fmt: skip
        return made[who]

    return of


MORE = [
    pytest.param(who, k, marks=pytest.mark.more)
    for who, k in (
        *(("inline", k) for k in (1, 50)),
        *(("workers", k) for k in (1, 7, 50)),
        ("learners", 7),
    )
]


@pytest.mark.parametrize(
    ("who", "stop_after"),
    [("inline", 7), *MORE],
)
def test_resumed_equals_uninterrupted(tmp_path, whole, who, stop_after, measured):
    """F16."""
    headrace.train(
        short_cartpole, run_dir=tmp_path / "run", total_env_steps=stop_after * UPDATE,
        **SETTINGS | WHO[who],
    )  # fmt: skip
    began, seen = time.monotonic(), []
    resumed = headrace.resume(
        tmp_path / "run", env=short_cartpole, total_env_steps=(stop_after + 2) * UPDATE,
        on_update=lambda *_: seen.append(time.monotonic()), quiet=True,
    )  # fmt: skip
    assert content(resumed.dir, stop_after + 2) == content(whole(who), stop_after + 2)
    lost = resumed.summary["lost_env_steps"]
    measured("F16", f"stopped and resumed, {who}", recover_s=seen[0] - began, lost_env_steps=lost)


ENVS = {
    "discrete": {"env": short_cartpole},
    "continuous": {"env": "Pendulum-v1"},
    "native": {"env": "CartPole-v1", "vectorization": "native"},
}


OTHERS = [
    ("discrete", "workers"), ("discrete", "learners"), ("continuous", "inline"),
    ("continuous", "workers"), ("native", "inline"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("env", "who"),
    [
        ("discrete", "inline"),
        ("native", "workers"),
        *(pytest.param(*case, marks=pytest.mark.more) for case in OTHERS),
        pytest.param("continuous", "learners", marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_is_the_same_run(tmp_path, env, who):
    """F17."""
    settings = SETTINGS | {"total_env_steps": 3 * UPDATE} | ENVS[env] | WHO[who]
    first, again = (
        headrace.train(run_dir=tmp_path / name, **settings).dir for name in ("first", "again")
    )
    assert content(first) == content(again)
    if who == "inline":
        settings["seed"] += 1
        other = headrace.train(run_dir=tmp_path / "other", **settings).dir
        assert content(first)[0] != content(other)[0]
    shutil.rmtree(tmp_path)


@repeats("env", ENVS)
def test_run_is_the_same_with_any_number_of_workers(tmp_path, env):
    settings = SETTINGS | {"total_env_steps": 3 * UPDATE} | ENVS[env]
    one, other = (
        content(headrace.train(run_dir=tmp_path / who, **settings | WHO[who]).dir)
        for who in ("inline", "workers")
    )
    assert one == other
