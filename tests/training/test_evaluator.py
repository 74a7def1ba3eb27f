"""Evaluations beside training: which weights they have, when training waits, and how they end."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace.distributed.process import math_threads
from headrace.errors import EnvError, UsageError, WorkerError
from headrace.evaluation.evaluate import evaluate
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from headrace.tools.report.history import read_history
from tests.envs.kernels.support import Ring
from tests.marks import repeats
from tests.support import Counting, children

TINY = {"num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "num_minibatches": 2, "quiet": True}
UPDATE = 64
LIMIT_S = 3.0  # of a step; on a busy machine one may take a second


class Env(Counting):
    """Episodes of 5 steps."""

    def __init__(self):
        super().__init__(terminate_at=5)


class Choice(Env):
    """Its reward tells which of many actions was taken."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Discrete(50)

    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, float(action), *ends


class Gate(Env):
    """Its first reset in the evaluation process says so in a pipe, and waits for another pipe."""

    waits = True

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def reset(self, **kwargs):
        if multiprocessing.parent_process() is not None and Gate.waits:
            Gate.waits = False
            with open(f"{self.folder}/here", "w") as here:
                here.write(str(os.getpid()))
            with open(f"{self.folder}/on", "rb", buffering=0) as on:
                on.read(1)
        return super().reset(**kwargs)


class Fails(Env):
    """Cannot be stepped."""

    def step(self, action):
        raise ZeroDivisionError("the evaluated environment failed")


@pytest.fixture
def gate(tmp_path):
    os.mkfifo(tmp_path / "here")
    os.mkfifo(tmp_path / "on")
    return {"eval_env": Gate, "eval_env_kwargs": {"folder": str(tmp_path)}, "eval_episodes": 1}


def arrived(tmp_path):
    """Wait until the evaluation process waits. Return its process id."""
    with (tmp_path / "here").open() as here:
        return int(here.read())


def train(tmp_path, env=Env, name="run", updates=2, **more):
    settings = TINY | {"total_env_steps": updates * UPDATE} | more
    if "algo" in more:
        del settings["num_minibatches"]
    return headrace.train(env, run_dir=tmp_path / name, **settings)


def evaluations(run_dir):
    """Env steps of rows with an evaluation -> env steps of its weights."""
    rows = read_metrics(run_dir)
    return {r["env_steps"]: r["eval_env_steps"] for r in rows if "eval_return" in r}


def same(a, b):
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@repeats(
    ("env", "settings"),
    [
        ("CartPole-v1", {"core": "lstm", "normalize_obs": True, "learner_threads": 2}),
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"normalize_obs": True, "normalize_reward": True, "num_workers": 2}),
        ("headrace/CartPole-v1", {"envs_per_vector": 4}),
        (Choice, {"algo": headrace.DQN(noisy=True, lr=0)}),  # with no noise
        (Ring, {"envs_per_vector": 4}),
    ],
)
def test_results_are_those_of_an_evaluation_in_this_process(tmp_path, env, settings):
    run = train(tmp_path, env, eval_every=UPDATE, eval_episodes=3, seed=4, **settings)
    job, rows = run._job, read_metrics(run.dir)
    assert evaluations(run.dir) == {UPDATE: UPDATE, 2 * UPDATE: 2 * UPDATE}
    with math_threads(settings.get("learner_threads", 1)):
        played = evaluate(
            run.policies, job.maker, spec=job.spec, shares=job.shares, episodes=3, seed=4
        )
    assert rows[-1]["eval_return"] == np.mean(played.returns)
    assert rows[-1]["eval_length"] == np.mean(played.lengths)


def test_training_goes_on_and_the_weights_are_those_of_the_moment(tmp_path, gate):
    def on_update(iteration, metrics):
        assert iteration != 4 or arrived(tmp_path)
        if iteration == 6:  # had the loop waited, nobody would open the gate
            assert "eval_return" not in metrics
            (tmp_path / "on").write_bytes(b"x")

    # Both evaluations return 5, and only the first is the best.
    more = {"schedule_env_steps": 8 * UPDATE, "seed": 3}
    run = train(tmp_path, updates=8, eval_every=4 * UPDATE, on_update=on_update, **gate, **more)
    (first, last), rows = evaluations(run.dir), read_metrics(run.dir)
    assert first in (6 * UPDATE, 7 * UPDATE)
    assert evaluations(run.dir) == {first: 4 * UPDATE, last: 8 * UPDATE}
    curve = read_history(run.dir).curve("eval_return")
    assert curve.env_steps.tolist() == [4 * UPDATE, 8 * UPDATE]
    assert last == 8 * UPDATE and rows[-1]["eval_return"] == 5.0
    best, earlier = (
        checkpoint.newest(run.dir / "best"),
        train(tmp_path, name="4", updates=4, **more),
    )
    kept = headrace.load_policy(run.dir / "best").module.state_dict()
    assert same(kept, earlier.policy.module.state_dict())
    assert not same(kept, run.policy.module.state_dict())
    counters = best.manifest["counters"]
    assert (counters["env_steps"], counters["best_return"]) == (4 * UPDATE, 5.0)
    # and training is what it is without evaluations
    without = train(tmp_path, name="without", updates=8, **more)
    assert same(without.policy.module.state_dict(), run.policy.module.state_dict())


def test_an_environment_that_fails_ends_the_run(tmp_path):
    with pytest.raises(EnvError) as failed:
        train(tmp_path, updates=4, eval_every=2 * UPDATE, eval_env=Fails)
    said = str(failed.value)
    assert "ZeroDivisionError: the evaluated environment failed" in said
    assert "in step 1 with action 0, env 0 of Fails, evaluation, episode 0" in said


def killing(tmp_path, then):
    """Return an `on_update` that kills the evaluation process; `then` is called beside the run."""

    def on_update(iteration, _metrics):
        if iteration == 2:
            os.kill(arrived(tmp_path), signal.SIGKILL)
            threading.Thread(target=then, daemon=True).start()

    return on_update


def test_a_process_that_is_killed_has_a_successor_with_the_same_result(tmp_path, gate):
    undisturbed = train(tmp_path, name="other", updates=4, eval_every=2 * UPDATE, eval_episodes=1)

    def let_the_successor_play():
        arrived(tmp_path)
        (tmp_path / "on").write_bytes(b".")

    settings = {"updates": 4, "eval_every": 2 * UPDATE, **gate}
    with pytest.warns(UserWarning, match=r"died \(SIGKILL\)(.|\n)*Another process evaluates"):
        run = train(tmp_path, on_update=killing(tmp_path, let_the_successor_play), **settings)
    of = [[*evaluations(each.dir).values()] for each in (run, undisturbed)]
    assert of == [[2 * UPDATE, 4 * UPDATE]] * 2
    assert run.summary["best_return"] == undisturbed.summary["best_return"]


def test_a_process_that_is_killed_twice_in_one_evaluation_ends_the_run(tmp_path, gate):
    def kill_again():
        os.kill(arrived(tmp_path), signal.SIGKILL)

    settings = {"updates": 4, "eval_every": 2 * UPDATE, **gate}
    with (
        pytest.warns(UserWarning, match="Another process evaluates"),
        pytest.raises(WorkerError, match=r"The evaluation process died \(SIGKILL\)"),
    ):
        train(tmp_path, on_update=killing(tmp_path, kill_again), **settings)


class Hangs(Env):
    """A step of the evaluation process never returns, in the first processes."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = folder, times

    def step(self, action):
        if multiprocessing.parent_process() is not None:
            with open(f"{self.folder}/hung", "a+") as hung:
                if hung.tell() < self.times:
                    hung.write(".")
                    hung.flush()
                    threading.Event().wait()
        return super().step(action)


def hanging(tmp_path, times):
    kwargs = {"folder": str(tmp_path), "times": times}
    return {"eval_every": UPDATE, "eval_env": Hangs, "eval_env_kwargs": kwargs, "eval_episodes": 1}


@pytest.mark.more
def test_a_process_whose_environment_hangs_has_a_successor_with_the_same_result(tmp_path):
    undisturbed = train(tmp_path, name="other", eval_every=UPDATE, eval_episodes=1)
    with pytest.warns(UserWarning, match=r"died \(exit code 1\)(.|\n)*Another process evaluates"):
        run = train(tmp_path, env_timeout_s=LIMIT_S, **hanging(tmp_path, times=1))
    assert run.summary["best_return"] == undisturbed.summary["best_return"]


@pytest.mark.more
def test_an_environment_that_hangs_again_ends_the_run(tmp_path):
    with pytest.warns(UserWarning), pytest.raises(WorkerError, match="exit code 1"):
        train(tmp_path, env_timeout_s=LIMIT_S, **hanging(tmp_path, times=2))


@pytest.mark.more
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_ctrl_c_gives_up_the_evaluation_and_resume_has_another(tmp_path, gate, is_waited_for):
    """While training goes on, and while the last update waits for it."""
    pids, every = [], 2 if is_waited_for else 4

    def interrupt():
        pids.append(arrived(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    def on_update(iteration, _metrics):
        if not is_waited_for and iteration == every + 1:
            interrupt()

    thread = threading.Thread(target=interrupt)
    if is_waited_for:
        thread.start()
    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path, updates=every * (1 if is_waited_for else 2), eval_every=every * UPDATE,
            on_update=on_update, **gate,
        )  # fmt: skip
    if is_waited_for:
        thread.join()
    assert not children() & set(pids)
    assert evaluations(tmp_path / "run") == {}
    saved = checkpoint.newest(tmp_path / "run").manifest["counters"]
    assert saved["evaluated_at"] == 0
    now = saved["env_steps"] + UPDATE
    resumed = headrace.resume(
        tmp_path / "run", env=Env, eval_env=lambda folder: Env(), total_env_steps=now, quiet=True
    )
    assert evaluations(resumed.dir) == {now: now}


KILLED = """
import sys
import headrace
from tests.training.test_evaluator import Env, Gate, TINY

headrace.train(Env, run_dir=sys.argv[1] + "/run", total_env_steps=10**9, eval_every=128, **TINY,
               eval_env=Gate, eval_env_kwargs={"folder": sys.argv[1]})
"""


def test_the_process_ends_with_a_learner_that_is_killed(tmp_path, gate):
    learner = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        pid = arrived(tmp_path)
        ended = os.pidfd_open(pid)
    finally:
        learner.kill()
        learner.wait()
    with open(ended, "rb"):
        assert select.select([ended], [], [], 10)[0], "the evaluation process lives on"


def test_what_cannot_be_sent_to_the_process_is_refused_at_the_start(tmp_path):
    lock = threading.Lock()

    def make():
        with lock:
            return Env()

    with pytest.raises(
        UsageError, match=r"to the evaluation process: [^\n]*\n.*leave --eval-every"
    ):
        train(tmp_path, make, eval_every=UPDATE)
    assert not (tmp_path / "run/config.json").exists()
    assert train(tmp_path, make, name="other").summary["env_steps"] == 2 * UPDATE


def test_two_learners_have_one_evaluation(tmp_path):
    run = train(
        tmp_path, eval_every=UPDATE, eval_episodes=2, num_learners=2, num_envs=4, envs_per_vector=2
    )
    assert evaluations(run.dir) == {UPDATE: UPDATE, 2 * UPDATE: 2 * UPDATE}
    assert read_metrics(run.dir)[-1]["eval_return"] == 5.0
