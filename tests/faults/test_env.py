"""Faults of environments: F02 to F05 and F08, in the learner's process and in workers."""

import json
import os
import re
import signal
import time

import gymnasium as gym
import numpy as np
import pytest

import headrace
from headrace.envs.api import Guards
from headrace.envs.faulty import Faulty
from headrace.errors import EnvError, UsageError, WorkerError
from headrace.seeding import derive
from headrace.storage import checkpoint, run_dir
from tests.faults.support import run as run_in
from tests.marks import repeats
from tests.python import command
from tests.support import Counting, children, inline, plan_for, policies_for, workers

pytestmark = pytest.mark.fault_a

SMALL = {
    "num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "total_env_steps": 4 * 16 * 8,
    "quiet": True, "algo": headrace.PPO(num_minibatches=2, num_epochs=1),
}  # fmt: skip


def train(path, num_workers=2, faults="", once="", **more):
    kwargs = {"faults": faults, "once": str(once)}
    return headrace.train(
        "headrace.envs.faulty:Faulty", run_dir=path, num_workers=num_workers, env_kwargs=kwargs,
        **SMALL | more,
    )  # fmt: skip


def assert_balanced(summary):
    """I1: every step that was collected was learned from, is lost, or was made again."""
    ledger = summary["ledger"]
    assert (
        ledger["collected"] == ledger["learned"] + summary["lost_env_steps"] + ledger["remade"]
    ), ledger
    assert ledger["learned"] == summary["env_steps"]


def assert_same_run(one, other):
    """I7: the same weights, to the bit, and the same episodes."""
    a, b = (checkpoint.newest(run.dir).tensors("policy_default") for run in (one, other))
    assert all(a[name].equal(b[name]) for name in a)
    for name in ("env_steps", "episodes", "mean_return"):
        assert one.summary[name] == other.summary[name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed") / "run")


DEATHS = {"segv": "SIGSEGV", "abort": "SIGABRT", "exit": "exit code 3", "kill": "SIGKILL"}


@repeats("kind", DEATHS, keep=2)
def test_f02_death_in_a_step_is_reported_and_the_run_goes_on_to_the_bit(
    tmp_path, capsys, undisturbed, measured, kind
):
    (tmp_path / "once").mkdir()
    run = train(tmp_path / "run", faults=f"{kind}@40", once=tmp_path / "once", quiet=False)
    said = capsys.readouterr().out
    # The 40th step of an environment is the eighth of its third fragment.
    found = re.search(
        rf"Worker (.) died \({DEATHS[kind]}\), in step (\d+) with action ([01]), env (\d) of "
        r"headrace.envs.faulty:Faulty, worker (.), episode (\d+) \(reset seed (\d+), ",
        said,
    )
    assert found, said
    assert int(found[4]) // 2 == int(found[1]) == int(found[5])
    if kind in ("segv", "abort"):
        assert "Current thread" in said and "faulty.py" in said  # where Python was
    assert "It is replaced." in said
    assert run.summary["restarts"] == 1
    assert_balanced(run.summary)
    assert_same_run(run, undisturbed)
    measured("F02", f"{kind} in a step, replaced", lost_env_steps=run.summary["lost_env_steps"])


def test_f02_death_without_restart_fails_with_its_cause(tmp_path):
    with pytest.raises(WorkerError, match=r"died \(SIGSEGV\), in step \d+ with action") as caught:
        (tmp_path / "once").mkdir()
        train(tmp_path / "run", faults="segv@40", once=tmp_path / "once", on_worker_loss="fail")
    assert "--on-worker-loss restart" in str(caught.value)
    assert "_fail" in str(caught.value) and "Extension modules" not in str(caught.value)


class DiesInItsThird(Counting):
    """Episodes of 7 steps; the process ends in the fourth step of the third."""

    def __init__(self):
        super().__init__(truncate_at=7)
        self.resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        return super().reset(**kwargs)

    def step(self, action):
        if self.resets == 3 and self.t == 3:
            os._exit(9)
        return super().step(action)


@repeats("num_steps", [32, 17, 16, 4], keep=2)
def test_f02_reported_position_is_right_in_any_fragment(num_steps):
    """Step 18 of the env: in the first fragment, its last step but one, its second's first, ..."""
    plan = plan_for(
        DiesInItsThird, num_steps=num_steps, num_envs=1, envs_per_vector=1,
        guards=Guards(on_worker_loss="fail"),
    )  # fmt: skip
    collector = workers(plan, 1)
    collector.publish(policies_for(plan), 0)
    seed = derive(plan.seed, "env", 0, 2)
    with pytest.raises(WorkerError) as caught:
        for _ in range(5):
            collector.collect()
    assert re.search(
        r"Worker 0 died \(exit code 9\), in step 4 with action [01], env 0 of DiesInItsThird, "
        rf"worker 0, episode 2 \(reset seed {seed}, 3 steps so far\)",
        str(caught.value),
    ), caught.value
    collector.close()


@repeats(("when", "num_workers"), [("init", 0), ("reset", 2), ("30", 0), ("close", 2)], keep=2)
def test_f03_exception_reaches_the_user_in_two_seconds(tmp_path, when, num_workers):
    words = ["faults=" + f"crash@{when}"]
    flags = [
        *("--num-envs", "4", "--envs-per-vector", "2", "--num-steps", "16"),
        *("--total-env-steps", "512", "--num-minibatches", "2", "--num-workers", str(num_workers)),
    ]
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty", *flags,
         "--env-kwargs", *words, "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    err = done.stderr
    assert done.returncode == 1
    lines = err.splitlines()
    assert lines[0] == "headrace train: Traceback (most recent call last):"
    assert "faulty.py" in lines[1]
    named = next(line for line in lines if line and not line.startswith((" ", "headrace train:")))
    place = f"{when} (" if when != "30" else "30 (30 "
    assert named.startswith(f"headrace.envs.faulty.FaultyError: told to crash at {place}"), err
    where = next(line for line in lines if line.startswith("The environment failed"))
    assert "Faulty" in where


@pytest.mark.parametrize("num_workers", [0, 2])
def test_f03_seconds_from_the_exception_to_the_caller(measured, num_workers):
    plan = plan_for(Faulty, kwargs={"faults": "crash@20"}, num_steps=64)
    collector = workers(plan) if num_workers else inline(plan)
    collector.publish(policies_for(plan), 0)
    began = time.monotonic()
    with pytest.raises(EnvError, match="FaultyError: told to crash at 20"):
        collector.collect()
    seen = time.monotonic() - began  # 20 steps of 10 us each, and what it takes to be told
    where = "worker" if num_workers else "learner's process"
    measured("F03", f"exception in a step, {where}", detect_s=seen, within_s=2)
    collector.close()


def test_f04_worker_that_crashes_at_every_start_ends_the_run(tmp_path, measured):
    class OnlyHere(Faulty):
        def __init__(self, learner):
            super().__init__("" if os.getpid() == learner else "exit@init")

    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"died \(exit code 3\)") as caught:
        headrace.train(
            OnlyHere, env_kwargs={"learner": os.getpid()}, num_workers=2, run_dir=tmp_path / "run",
            **SMALL,
        )  # fmt: skip
    assert "more than 3 times in 10 minutes (--max-worker-restarts)" in str(caught.value)
    measured(
        "F04", "exit at every start", recover_s=time.monotonic() - began, recover_within_s=60,
    )  # fmt: skip
    assert not (tmp_path / "run").exists()  # it never came to be a run


LIMITS_S = [1.0, pytest.param(3.0, marks=pytest.mark.faults)]
"""3 s is what docs/faults.md reports."""


@pytest.mark.parametrize("limit_s", LIMITS_S)
@repeats(
    ("kind", "when"),
    [(kind, when) for when in ("step", "reset") for kind in ("hang", "spin", "hold")],
    keep=1,
)
def test_f05_hanging_worker_is_killed_and_replaced(tmp_path, measured, kind, when, limit_s):
    """The other worker's fragment stays; the stack says where it hung."""
    told = []
    fault = f"{kind}@{40 if when == 'step' else 'reset'}"
    (tmp_path / f"{kind}@reset").touch()  # not in the first one: in the first that is seeded here
    plan = plan_for(
        lambda: Hanging(fault, tmp_path), num_steps=32, guards=Guards(env_timeout_s=limit_s)
    )
    collector = workers(plan, say=lambda text: told.append((time.time(), text)))
    collector.publish(policies_for(plan), 0)
    for _ in range(4):
        assert collector.collect() is not None
    recovered = time.time()
    ((seen, text),) = told
    began = float((tmp_path / "began").read_text())
    assert f"has not answered for {limit_s:g} s and was killed (see --env-timeout-s)" in text
    assert "(most recent call first)" in text and "faulty.py" in text, text
    assert collector.ledger.restarts == 1 and collector.ledger.lost == 0
    assert 0 < collector.ledger.remade <= 2 * 32
    collector.close()
    measured(
        "F05", f"{kind} in a {when}, limit {limit_s:g} s", detect_s=seen - began, within_s=4,
        recover_s=recovered - seen, lost_env_steps=0,
    )  # fmt: skip


class Hanging(Faulty):
    """Hangs once over all processes, and says when; in a reset, it is the second."""

    def __init__(self, fault, folder):
        self.folder, self.resets, self.fault = folder, 0, fault
        super().__init__(fault)

    def reset(self, **kwargs):
        self.resets += 1
        return super().reset(**kwargs)

    def _first_time(self, fault):
        if fault.endswith("reset") and self.resets < 2:
            return False
        try:
            with (self.folder / "began").open("x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            return False
        return True


@pytest.mark.parametrize("limit_s", LIMITS_S)
@repeats("kind", ["hang", "spin"])
def test_f05_hang_in_the_learner_s_process_prints_the_stack_and_ends(
    tmp_path, measured, kind, limit_s
):
    began = time.monotonic()
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty",
         "--env-kwargs", f"faults={kind}@200", "--env-timeout-s", limit_s, "--num-steps", "128",
         "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    took = time.monotonic() - began
    assert done.returncode == 1
    text = f"the environment has not answered for {limit_s:g} s (--env-timeout-s), in step"
    assert text in done.stderr
    assert "faulty.py" in done.stderr
    assert run_dir.left_mark(tmp_path / "run") is None
    what = f"{kind} in the learner's process, limit {limit_s:g} s, with its start"
    measured("F05", what, recover_s=took)


def test_f05_slow_environment_in_the_learner_s_process_goes_on(tmp_path):
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty",
         "--env-kwargs", "slow_step=0.2", "slow_reset=0.2", "--env-timeout-s", "0.6",
         "--num-envs", "4", "--envs-per-vector", "4", "--num-steps", "2", "--num-minibatches", "2",
         "--total-env-steps", "8", "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.more
def test_f05_slow_environment_in_a_worker_goes_on():
    """Each step shorter than the limit, all of a vector's together longer; so are resets."""
    plan = plan_for(
        Faulty, kwargs={"slow_step": 0.2, "slow_reset": 0.2}, num_envs=4, envs_per_vector=4,
        num_steps=2, guards=Guards(env_timeout_s=0.6),
    )  # fmt: skip
    collector = workers(plan, num_workers=1)
    collector.publish(policies_for(plan), 0)
    assert collector.collect() is not None
    assert collector.ledger.restarts == 0
    collector.close()


class Bad(Counting):
    """Gives something bad at its fifth step, and only then."""

    def __init__(self, how, choices=False):
        super().__init__(truncate_at=12)
        self.how, self.choices = how, choices
        if choices:
            self.observation_space = gym.spaces.Discrete(4)

    def _obs(self):
        return self.t % 4 if self.choices else super()._obs()

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.t == 5:
            obs, reward = {
                "nan": lambda: (np.full(2, np.nan, np.float32), reward),
                "inf": lambda: (np.full(2, np.inf, np.float32), reward),
                "nan reward": lambda: (obs, float("nan")),
                "one number": lambda: (np.ones(1, np.float32), reward),
                "one row": lambda: (np.ones((1, 2), np.float32), reward),
                "text": lambda: (np.array(["a", "b"]), reward),
                "none": lambda: (None, reward),
                "no choice": lambda: (7, reward),
            }[self.how]()
        return obs, reward, *rest


BAD = {
    "nan": r"observation that is not finite: \[nan nan\]\n\(env 0 of .* 5 steps so far",
    "inf": r"observation that is not finite: \[inf inf\]\n\(env 0 of .* 5 steps so far",
    "nan reward": r"a reward that is not finite: nan\n\(env 0 of .* 5 steps so far",
    "one number": r"an observation of shape \(1,\) .*declares Box\(2,\).*env 0 of",
    "one row": r"an observation of shape \(1, 2\) .*declares Box\(2,\).*env 0 of",
    "text": r"shape \(2,\) and dtype <U1, but .*env 0 of",
    "none": r"dtype object, but .*env 0 of",
    "no choice": r"not in its space: observation 7, .* it declares Discrete\(4\) \(env 0 of",
}


@pytest.mark.filterwarnings("ignore:invalid value")  # of the policy, which has seen it
@repeats(("make", "how"), [(make, how) for make in (inline, workers) for how in BAD], len(BAD) + 1)
def test_f08_bad_value_ends_the_run_and_is_named(make, how):
    plan = plan_for(Bad, kwargs={"how": how, "choices": how == "no choice"})
    collector = make(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match=BAD[how].replace("env 0", r"env \d")):
        collector.collect()
    collector.close()


@repeats(("make", "how"), [(make, how) for make in (inline, workers) for how in BAD], len(BAD) + 1)
def test_f08_bad_value_drops_the_episode_on_restart(make, how):
    said = []
    choices = how == "no choice"
    plan = plan_for(
        Bad, kwargs={"how": how, "choices": choices}, num_steps=4, num_envs=2,
        guards=Guards(on_env_error="restart", max_restarts=2),
    )  # fmt: skip
    collector = make(plan, 1, say=said.append) if make is workers else make(plan, say=said.append)
    collector.publish(policies_for(plan), 0)
    first = collector.collect().fragments[0]
    assert first.valid.all() and not first.truncated.any()
    second = collector.collect().fragments[0]
    # The fifth step is the first of this fragment: no row of it, and new episodes after it.
    assert second.valid.tolist() == [[False, False]] + [[True, True]] * 3
    counts = second.obs if choices else second.obs[:, :, 0]
    assert counts[1:].T.tolist() == [[0, 1, 2, 3]] * 2
    assert np.isfinite(second.obs.numpy()).all() and np.isfinite(second.reward.numpy()).all()
    assert second.stored_outputs["value"].isfinite().all()
    assert len(said) == 2 and "An episode was dropped: " in said[0]
    assert [text.count("env 0 of") for text in said] == [1, 0] and "\n" not in said[0]
    ledger = collector.ledger
    assert (ledger.collected, ledger.lost, ledger.dropped_episodes) == (16, 2, 2)
    third = collector.collect().fragments[0]
    # Steps 4 and 5 of the new episodes: the bad one is the second row, cut off from the first.
    assert third.valid.tolist() == [[True, True], [False, False], [True, True], [True, True]]
    assert third.truncated.tolist() == [[True, True], [True, True], [False] * 2, [False] * 2]
    final_obs, step, row = third.finals()
    assert step.tolist() == [0, 0] and row.tolist() == [0, 1]
    assert (final_obs if choices else final_obs[:, 0]).tolist() == [0 if choices else 4] * 2
    with pytest.raises(
        EnvError, match=r"more than 2 times in 10 minutes \(--max-worker-restarts\)"
    ):
        for _ in range(4):
            collector.collect()
    collector.close()


@repeats("num_workers", [0, 2])
def test_f08_run_with_dropped_episodes_has_a_balanced_ledger(tmp_path, num_workers):
    faults = "crash@40 nan@50 wrong_shape@60"
    run = train(
        tmp_path / "run", num_workers, faults=faults, on_env_error="restart",
        max_worker_restarts=10,
    )  # fmt: skip
    assert_balanced(run.summary)
    assert run.summary["ledger"]["dropped_episodes"] == 4 * 8 * 16 // 4 // 40 * 4
    assert run.summary["lost_env_steps"] == run.summary["ledger"]["dropped_episodes"]
    for path in (tmp_path / "run/checkpoints").glob("step_*"):
        tensors = checkpoint.newest(path).tensors("policy_default")
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_f08_safe_cast_is_reported_once(tmp_path, capsys):
    class Doubles(Counting):
        def __init__(self):
            super().__init__(truncate_at=12)
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def _obs(self):
            return super()._obs().astype(np.float64)

    headrace.train(Doubles, run_dir=tmp_path / "run", **SMALL | {"quiet": False})
    assert capsys.readouterr().out.count("is float64, and stored as float32") == 1


def test_native_vector_refuses_to_drop_episodes(tmp_path):
    with pytest.raises(UsageError, match="on_env_error='restart', but one env"):
        headrace.train(
            "CartPole-v1", vectorization="native", on_env_error="restart", run_dir=tmp_path / "run"
        )


def test_unknown_faults_are_refused():
    for faults, words in (
        ("sgv@3", "expected KIND@WHEN, as in segv@500"),
        ("nan@reset", "nan is of steps"),
        ("segv", "and the number of a step"),
    ):
        with pytest.raises(UsageError, match=words):
            Faulty(faults)


def test_error_leaves_no_process(tmp_path):
    before = children()
    with pytest.raises(WorkerError):
        train(tmp_path / "run", faults="segv@40", on_worker_loss="fail")
    # The server that forks, and Python's tracker
    assert len(children() - before) <= 2


class AlwaysThere(Faulty):
    """Dies at step 12 of every first episode: made again as it was, it would die again."""

    def __init__(self, learner):
        super().__init__()
        self.learner, self.seeds = learner, []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._t == 11 and self.seeds[-1] % 2 and os.getpid() != self.learner:
            os._exit(7)
        return super().step(action)


def test_repeated_failure_ends_with_new_episodes():
    """Episodes whose seed is odd kill their worker, always at the same step."""
    said = []
    plan = plan_for(
        AlwaysThere, kwargs={"learner": os.getpid()}, num_envs=1, envs_per_vector=1, num_steps=64,
        guards=Guards(max_restarts=100), seed=4,
    )  # fmt: skip
    collector = workers(plan, num_workers=1, say=said.append)
    collector.publish(policies_for(plan), 0)
    while collector.ledger.restarts < 3:  # at least one was lost at the same place twice
        assert collector.collect() is not None
    died = [text for text in said if "Worker 0 died (exit code 7), in step 12" in text]
    anew = [text for text in said if "Worker 0: 1 episodes could not be brought back" in text]
    assert len(died) == collector.ledger.restarts and len(died) + len(anew) == len(said)
    assert anew and collector.ledger.lost > 0
    collector.close()


def test_run_ended_by_an_environment_resumes_with_restart(tmp_path):
    """It would fail at the same step again: all of it is repeated, to the bit."""
    where = tmp_path / "run"
    with pytest.raises(EnvError, match="FaultyError: told to crash at 70") as caught:
        train(where, 0, faults="crash@70", checkpoint_every_s=0)
    again = f"headrace resume {where} --env headrace.envs.faulty:Faulty --on-env-error restart"
    assert again in "\n".join(caught.value.__notes__)
    before = checkpoint.newest(where).manifest["counters"]["env_steps"]
    assert 0 < before < SMALL["total_env_steps"]
    env = "headrace.envs.faulty:Faulty"
    with pytest.raises(EnvError, match="FaultyError: told to crash"):
        headrace.resume(where, env=env, quiet=True)
    resumed = headrace.resume(
        where, env=env, quiet=True, on_env_error="restart", max_worker_restarts=20
    )
    assert resumed.summary["ledger"]["dropped_episodes"] > 0
    assert_balanced(resumed.summary)
    with pytest.raises(
        UsageError, match="goes on with the seed that it has; resume takes total_env"
    ):
        headrace.resume(where, env=env, seed=3)
    with pytest.raises(UsageError, match="on_env_error='perhaps'"):
        headrace.resume(where, env=env, on_env_error="perhaps")


@repeats("when", ["init", "reset", "close"])
def test_f05_first_environment_is_watched_too(tmp_path, when):
    """Ten times the limit, as for all that are made; masks are looked for in a first reset."""
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty",
         "--env-kwargs", f"faults=hang@{when}", "--env-timeout-s", "0.2", "--num-workers", "2",
         "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has not answered for 2 s (--env-timeout-s), while the first one was made" in done.stderr
    assert "faulty.py" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.more
def test_losses_of_other_learners_workers_are_shown(tmp_path):
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty",
         "--env-kwargs", "faults=crash@20", "--on-env-error", "restart",
         "--max-worker-restarts", "50", "--num-learners", "2", "--num-envs", "4",
         "--num-steps", "16", "--total-env-steps", "256", "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    said = done.stdout + done.stderr
    dropped = int(re.search(r"(\d+) episodes dropped", done.stdout)[1])
    assert said.count("An episode was dropped: ") == dropped > 0
    assert re.search(
        r"Rank 1: An episode was dropped: headrace.envs.faulty.FaultyError: told to crash at 20 "
        r"\(20 steps so far\) \(File .*faulty.py., line \d+, in _fail\). The environment failed in "
        r"step \d+ with action [01], env [23] of",
        done.stderr,
    ), done.stderr


@pytest.mark.parametrize("make", [inline, workers])
def test_failed_first_reset_is_reported(tmp_path, make):
    said, done = [], tmp_path / "crash@reset"
    done.touch()  # not in the one that is made to read the spaces
    plan = plan_for(
        Faulty, kwargs={"faults": "crash@reset", "once": str(tmp_path)},
        guards=Guards(on_env_error="restart"),
    )  # fmt: skip
    done.unlink()
    collector = make(plan, say=said.append)
    collector.publish(policies_for(plan), 0)
    assert collector.collect() is not None
    assert len(said) == 1 and "told to crash at reset" in said[0]
    assert (collector.ledger.dropped_episodes, collector.ledger.lost) == (1, 0)
    collector.close()


class LateReset(Counting):
    """Its third reset returns something else than the first ones did."""

    def __init__(self, returned):
        super().__init__(terminate_at=3)
        self.returned, self.resets = returned, 0

    def reset(self, **kwargs):
        self.resets += 1
        return self.returned if self.resets == 3 else super().reset(**kwargs)


@pytest.mark.parametrize("shape", [(1,), (3,)])
def test_every_reset_is_checked(shape):
    """One number would be broadcast, and learned from without a word."""
    returned = np.zeros(shape, np.float32), {}
    plan = plan_for(LateReset, kwargs={"returned": returned}, num_envs=1, envs_per_vector=1)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match=r"reset returned .*episode 2"):
        collector.collect()
    collector.close()


class Seedless(Counting):
    """Has a reset as older libraries had it."""

    def reset(self):
        return super().reset()


def test_a_reset_without_a_seed_is_told_what_to_take():
    with pytest.raises(EnvError, match=r"Expected a reset as Gymnasium's: .*seed=None"):
        plan_for(Seedless)


@pytest.mark.parametrize(
    ("fault", "message"), [("crash", "told to crash at 5"), ("nan", "is not finite")]
)
def test_failure_is_json_with_advice(tmp_path, fault, message):
    done = run_in(
        command("train", "headrace.envs.faulty:Faulty", "--env-kwargs", f"faults={fault}@5",
         "--json", "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["error"] == "EnvError" and message in told["message"]
    check = "What else does not fit: headrace check-env headrace.envs.faulty:Faulty"
    assert (check in told["message"]) == (fault == "nan")
    hint = "If it fails rarely: --on-env-error restart drops such an episode, and the run goes on."
    for text in (told["message"], done.stderr):
        assert hint in text and "headrace resume" not in text  # there is no checkpoint yet


@repeats(("num_learners", "where"), [(1, "True"), (2, "sys.argv[0] == '-c'")])
def test_f02_crash_in_the_learner_s_process_prints_its_stack(tmp_path, num_learners, where):
    """With two learners, in the one that the first has started."""
    (tmp_path / "own.py").write_text(
        "import sys\nfrom headrace.envs.faulty import Faulty\n"
        f"def make():\n    return Faulty('segv@5' if {where} else '')\n"
    )
    done = run_in(
        command("train", "own:make", "--num-learners", str(num_learners),
         "--run-dir", str(tmp_path / "run")),
        tmp_path,
    )  # fmt: skip
    assert done.returncode == (1 if num_learners > 1 else -signal.SIGSEGV)
    assert re.search(r"Segmentation fault\n\n(.*\n)+.*faulty.py.*_fail", done.stderr), done.stderr


@pytest.mark.parametrize("make", [inline, workers])
def test_first_dropped_episodes_are_shown(make):
    said = []
    plan = plan_for(
        Faulty, kwargs={"faults": "crash@1"}, num_steps=30,
        guards=Guards(on_env_error="restart", max_restarts=10**9),
    )  # fmt: skip
    collector = make(plan, say=said.append)
    collector.publish(policies_for(plan), 0)
    collector.collect()
    assert collector.ledger.dropped_episodes == 4 * 30
    assert len(said) == 21 and "are counted, but not shown" in said[-1]
    collector.close()
