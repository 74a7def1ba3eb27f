"""Several learners, as their users start them: by ourselves and by torchrun; and what ends them."""

import contextlib
import datetime
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time

import gymnasium as gym
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, is_initialized

import headrace
from headrace.config.derive import derive
from headrace.config.resolve import read_settings, resolve, values_for_resume
from headrace.distributed.local_ranks import Failure, first_cause
from headrace.distributed.ranks import _GLOO, JoinedRanks, RankInfo, backend_for, device_of
from headrace.errors import (
    ConfigError,
    EnvError,
    NonFiniteError,
    RankError,
    RankLostError,
    RunDirError,
)
from headrace.storage import checkpoint
from headrace.storage.run_dir import write_config
from headrace.training.launch import _refuse_another
from tests import python
from tests.distributed.ranks_support import on_ranks
from tests.marks import repeats
from tests.support import children, inline, learner_for, plan_for, short_cartpole, still_alive

SETTINGS = {
    "num_envs": 16, "num_steps": 32, "envs_per_vector": 4, "num_minibatches": 4, "seed": 3,
    "quiet": True,
}  # fmt: skip
UPDATE = 16 * 32
CUDA = ("cuda:0", "cuda:1")


def weights(run):
    return checkpoint.newest(run.dir).tensors("policy_default")


def close(a, b, tolerance=1e-5):
    for name, value in weights(a).items():
        assert (value - weights(b)[name]).abs().max() <= tolerance, name


# Of three workers the first learner has two.
@repeats("num_workers", [3, 0, 2])
def test_two_learners_equal_one_learner(tmp_path, num_workers):
    seen = []
    runs = [
        headrace.train(
            short_cartpole, run_dir=tmp_path / str(count), num_learners=count,
            num_workers=num_workers, total_env_steps=2 * UPDATE, check_ranks=1,
            on_update=lambda i, m: seen.append(m), **SETTINGS,
        )
        for count in (1, 2)
    ]  # fmt: skip
    close(*runs)
    for name in ("env_steps", "episodes", "learner_steps"):
        assert runs[0].summary[name] == runs[1].summary[name]
    assert runs[0].mean_return == pytest.approx(runs[1].mean_return)
    assert {"rank1/learn_s", "rank1/allreduce_s", "rank0/wait_s"} <= seen[-1].keys()
    others = runs[1].summary["worker_meters"]
    assert "rank 1" in others
    shares = [sum(name.startswith(f"rank {rank}, ") for name in others) for rank in (0, 1)]
    assert shares == [-(-num_workers // 2), num_workers // 2]


@pytest.mark.more
def test_target_kl_stops_all_learners_together(tmp_path):
    """At a mean KL over all of them, which that of each is now below, now above."""
    algo = headrace.PPO(lr=5e-3, num_epochs=10, num_minibatches=4, target_kl=0.02)
    given = {name: value for name, value in SETTINGS.items() if name != "num_minibatches"}
    runs = [
        headrace.train(
            short_cartpole, algo=algo, run_dir=tmp_path / str(count), num_learners=count,
            total_env_steps=5 * UPDATE, rank_timeout_s=10, **given,
        )
        for count in (1, 2)
    ]  # fmt: skip
    close(*runs, 1e-4)
    steps = [run.summary["learner_steps"] for run in runs]
    assert steps[0] == steps[1] < 5 * 10 * 4


class Forgetful(torch.nn.Module):
    """A network of which a layer is never used."""

    def __init__(self, spec):
        super().__init__()
        self.enter, self.never = torch.nn.Linear(spec.seen.size, 32), torch.nn.Linear(5, 5)
        self.params, self.value = torch.nn.Linear(32, 2), torch.nn.Linear(32, 1)

    def forward(self, obs):
        hidden = torch.relu(self.enter(obs.flatten(1)))
        return self.params(hidden), self.value(hidden).squeeze(-1)


@pytest.mark.more
@repeats("parts", [1, 2])
def test_custom_networks_may_skip_parameters(tmp_path, parts):
    runs = [
        headrace.train(
            short_cartpole, model=Forgetful, run_dir=tmp_path / str(count), num_learners=count,
            total_env_steps=2 * UPDATE, num_accumulation_steps=parts, **SETTINGS,
        )
        for count in (1, 2)
    ]  # fmt: skip
    close(*runs)


@pytest.mark.more
@pytest.mark.parametrize("then", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_two_learners_resumed_as_one_or_four(tmp_path, then):
    own = SETTINGS | {"envs_per_vector": 8, "network": headrace.Network(normalize_reward=True)}
    whole = headrace.train(
        short_cartpole, run_dir=tmp_path / "whole", num_learners=2, total_env_steps=6 * UPDATE,
        **own,
    )  # fmt: skip
    headrace.train(
        short_cartpole, run_dir=tmp_path / "part", num_learners=2, total_env_steps=3 * UPDATE,
        schedule_env_steps=6 * UPDATE, **own,
    )  # fmt: skip
    resumed = headrace.resume(
        tmp_path / "part", env=short_cartpole, num_learners=then, total_env_steps=6 * UPDATE,
        quiet=True,
    )  # fmt: skip
    assert resumed.summary["env_steps"] == 6 * UPDATE
    assert resumed.summary["episodes"] == whole.summary["episodes"]
    close(whole, resumed, 1e-3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_learners": 3}, "16 = 3 x 5 \\+ 1"),
        ({"num_learners": 2, "num_workers": 1}, "at least one worker for each learner"),
        ({"num_learners": 2, "backend": "nccl", "device": "cpu"}, "use gloo"),
        ({"num_learners": 2, "backend": "mpi"}, "built without it"),
        ({"num_learners": 2, "num_envs_per_learner": 4}, "expected one of the two"),
        ({"num_learners": 2, "num_envs": 12}, "envs_per_vector=4: 6 = 1 x 4 \\+ 2"),
        (
            {"num_learners": 4, "num_workers": 8},
            "num_workers=8, (.|\n)*only 1 vector to share out of each learner",
        ),
        ({"num_learners": 0}, r"num_learners=0 .*expected at least 1"),
    ],
)
def test_impossible_sizes_of_a_job_are_refused(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        headrace.train("CartPole-v1", run_dir=tmp_path / "run", **SETTINGS | given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scale", "learners", "lr"),
    [("none", 4, 1e-3), ("sqrt", 4, 2e-3), ("linear", 4, 4e-3), ("linear", 1, 1e-3)],
)
def test_learning_rate_is_scaled_once_and_shown(scale, learners, lr):
    given = {"env": "Pendulum-v1", "algo": "a2c", "lr": 1e-3, "num_envs": 16}
    settings = resolve(given | {"num_learners": learners, "lr_scale": scale})
    assert settings.algo.lr == pytest.approx(lr)
    assert ("0.001 x" in settings.source["lr"]) == (lr != 1e-3)
    # The batch of a run stays, and so does its rate.
    config = {"settings": settings.flat(), "origin": settings.source}
    again, _ = values_for_resume(config, {"num_learners": 2})
    assert resolve(again).algo.lr == pytest.approx(lr)


def test_resume_takes_the_workers_that_are_named():
    settings = resolve({"env": "CartPole-v1", "num_envs": 8, "envs_per_vector": 2})
    config = {"settings": settings.flat(), "origin": settings.source}
    for named, learners, workers in ((3, 1, 3), (-1, 2, 2), (4, 2, 4), (3, 2, 3)):
        changes = {"num_workers": named, "num_learners": learners}
        again = derive(read_settings(values_for_resume(config, changes)[0]), cores=2)
        assert again.run.num_workers == workers
    with pytest.raises(ConfigError, match="at least one worker for each learner"):
        resolve(values_for_resume(config, {"num_workers": 1, "num_learners": 2})[0])


def test_sizes_of_each_learner_and_of_single_policies_stay_when_a_run_is_resumed():
    sizes = {"num_learners": 2, "num_envs_per_learner": 8, "num_steps": 256, "lr_scale": "linear"}
    both = {"num_minibatches": 32, "minibatch_size": 64}
    policies = {"a": {"agents": ":2", "lr": 1e-3, "minibatch_size": 32}, "b": "2:"}
    settings = resolve({"env": "Pendulum-v1", "policies": policies} | sizes | both)
    again, _ = values_for_resume({"settings": settings.flat(), "origin": settings.source}, {})
    resumed = resolve(again)
    for run in (settings, resumed):
        assert (run.algo.num_minibatches, run.algo.minibatch_size) == (32, 128)
        assert (run.of("a").algo.lr, run.of("a").algo.minibatch_size) == (2e-3, 64)
    assert "scaled" in settings.source["policies"]


def test_vectors_have_to_fit_the_share_of_a_learner():
    assert resolve({"env": "CartPole-v1", "num_learners": 4}).run.envs_per_vector == 2
    with pytest.raises(ConfigError, match="2 = 0 x 4 \\+ 2"):
        resolve({"env": "CartPole-v1", "num_envs": 8, "num_learners": 4, "envs_per_vector": 4})
    with pytest.raises(ConfigError, match=r"num_learners=0 .*expected at least 1"):
        resolve({"env": "CartPole-v1", "num_learners": 0})


@pytest.mark.slow
def test_batch_grows_with_num_envs_per_learner(tmp_path, capsys):
    common = {name: value for name, value in SETTINGS.items() if name not in ("quiet", "num_envs")}
    sizes = {"each": {"num_envs_per_learner": 8}, "all": {"num_envs": 16}}
    each, whole = (
        headrace.train(
            short_cartpole, run_dir=tmp_path / name, num_learners=2, total_env_steps=UPDATE,
            lr_scale="linear", **common | size,
        )
        for name, size in sizes.items()
    )  # fmt: skip
    close(each, whole, 0.0)
    said = capsys.readouterr().out
    assert "2 learners over shared memory, each with 8 envs; lr_scale=linear: lr=0.0006" in said
    resumed = headrace.resume(
        tmp_path / "each", env=short_cartpole, num_learners=4, total_env_steps=2 * UPDATE,
        quiet=True,
    )  # fmt: skip
    assert resumed.summary["env_steps"] == 2 * UPDATE  # not more environments than before


def test_each_learner_gets_one_gpu(monkeypatch):
    # No GPU here: what torch says of them is put in its mouth
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("auto", "cuda"):
        assert [device_of(name, rank) for rank in (0, 1)] == list(map(torch.device, CUDA))
        with pytest.raises(ConfigError, match=r"Learner 3 (.|\n)*there are 2(.|\n)*learners 2"):
            device_of(name, 2)
    assert device_of("cpu", 5) == torch.device("cpu")
    with pytest.raises(ConfigError, match="Learner 3"):
        headrace.train("CartPole-v1", **SETTINGS, num_learners=4, device="cuda")


def test_backend_follows_the_device():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert (backend_for("auto", gpu), backend_for("auto", cpu)) == ("nccl", "gloo")
    assert (backend_for("gloo", gpu), backend_for("gloo", cpu)) == ("gloo", "gloo")


def ways(ranks):
    return ranks.transport, ranks.gather_bytes(b"%d" % ranks.rank)


@pytest.mark.slow
def test_ranks_of_one_host_use_shared_memory_by_default():
    assert on_ranks(2, ways) == [("shared memory", [b"0", b"1"])] * 2
    assert on_ranks(2, ways, backend="gloo") == [("gloo", [b"0", b"1"])] * 2


def unanswered(ranks):
    """What rank 0 sees of two sums that rank 1 does not take part in."""
    store, seen = dist.distributed_c10d._get_default_store(), []
    if ranks.rank == 1:
        store.wait(["seen"], datetime.timedelta(seconds=60))
        return seen
    for one in [dist.all_reduce(torch.zeros(2), async_op=True) for _ in range(2)]:
        try:
            with ranks.meeting():
                one.wait()
        except RankLostError as error:
            seen.append(str(error.__cause__))
    store.set("seen", "")
    return seen


def test_loss_is_seen_in_each_wait_that_ends_with_it():
    """The second one's error may not name gloo: it depends on which of two timers is first."""
    seen, _ = on_ranks(2, unanswered, backend="gloo", limit_s=3.0)
    assert len(seen) == 2
    for text in (*seen, "Application timeout caused pair closure"):
        assert re.search(_GLOO, text)


def drift(ranks):
    settings = resolve({"env": "CartPole-v1", "num_learners": 2})
    plan = plan_for("CartPole-v1")
    learner = learner_for(settings, plan.spec, ranks)
    learner.check_equal()
    if ranks.rank == 1:
        with torch.no_grad():
            next(learner.policies["default"].parameters())[0, 0] += 1e-6
    with pytest.raises(RankError, match=r"not the same:\n  rank 0: [0-9a-f]{16}\n  rank 1: "):
        learner.check_equal()


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_different_parameters_of_ranks_raise_rank_error(backend):
    on_ranks(2, drift, backend=backend)


class Failing(gym.Wrapper):
    """Fails in its 100th step, on the first rank besides `first`'s process that comes so far."""

    def __init__(self, how, first, mark):
        super().__init__(short_cartpole())
        self.how, self.first, self.mark, self.steps = how, first, mark, 0

    def is_chosen(self):
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            return True

    def step(self, action):
        self.steps += 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self.steps == 100 and os.getpid() != self.first and self.is_chosen():
            if self.how == "raises":
                raise KeyError("not on rank 0")
            if self.how == "exits":
                os._exit(3)
            if self.how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            reward = 3e38
        return obs, reward, terminated, truncated, info


OTHERS = [("gloo", 2), ("auto", 4)]


@pytest.mark.parametrize(
    ("backend", "learners"),
    [("auto", 2), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
@repeats(
    ("how", "error", "words"),
    [
        ("is killed", RankError, r"Rank [1-3] of \d died .SIGKILL(.|\n)*out-of-memory"),
        ("raises", EnvError, r"KeyError: 'not on rank 0'(.|\n)*rank [1-3] of \d"),
        ("exits", RankError, r"Rank [1-3] of \d died .exit code 3"),
        ("diverges", NonFiniteError, "gradient or parameter was NaN"),
    ],
)
def test_failure_of_one_rank_ends_all(tmp_path, how, error, words, backend, learners):
    first, before, mark = os.getpid(), children(), tmp_path / "failed"
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        headrace.train(
            lambda: Failing(how, first, mark), run_dir=tmp_path / "run", num_learners=learners,
            backend=backend, rank_timeout_s=10, total_env_steps=10**6, checkpoint_every_s=0,
            normalize_reward=False, on_worker_loss="fail", **SETTINGS,
        )  # fmt: skip
    # What is not finite would be so again.
    again = f"To go on: headrace resume {tmp_path / 'run'} --env module:callable"
    assert (again in str(getattr(caught.value, "__notes__", ""))) == (error is not NonFiniteError)
    assert time.monotonic() - began < 5 * 15
    assert children() == before


def test_joined_ranks_restore_the_excepthook_and_refuse_a_second_job():
    limit, before = datetime.timedelta(seconds=20), sys.excepthook

    def job():
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        return JoinedRanks(RankInfo(0, 1, 0), store, "gloo", torch.device("cpu"), 20.0)

    with contextlib.closing(job()):
        assert sys.excepthook is not before
        with pytest.raises(ConfigError, match="rank of another"):
            job()
    assert sys.excepthook is before
    job().close()


def test_failed_join_leaves_no_process_group(monkeypatch):
    def late(*_):
        raise RankError("nobody came")

    monkeypatch.setattr(JoinedRanks, "gather_bytes", late)
    limit = datetime.timedelta(seconds=20)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    with pytest.raises(RankError, match="nobody came"):
        JoinedRanks(RankInfo(0, 1, 0), store, "gloo", torch.device("cpu"), 20.0)
    assert not is_initialized()


def not_a_number(ranks):
    settings = resolve({"env": "Pendulum-v1", "num_envs": 4, "num_steps": 16, "num_learners": 2})
    plan = plan_for("Pendulum-v1", num_envs=2, num_steps=16, first_env=2 * ranks.rank)
    collector = inline(plan)
    learner = learner_for(settings, plan.spec, ranks)
    collector.publish(learner.policies, learner.version)
    fragments = collector.collect().fragments
    if ranks.rank == 1:
        fragments[0].reward[3, 0] = float("nan")
    nonfinite = learner.update(learner.assemble(fragments), 0)["nonfinite"]
    learner.check_equal()
    collector.close()
    return nonfinite, all(
        bool(p.isfinite().all()) for p in learner.policies["default"].parameters()
    )


@repeats("backend", ["auto", "gloo"])
def test_nan_on_one_rank_is_masked_on_all(backend):
    (seen, finite), other = on_ranks(2, not_a_number, backend=backend)
    assert seen > 0 and finite
    assert other == (seen, finite)


def rounds(ranks):
    """How often ranks met in an update, by the number of parts that minibatches are computed in."""
    found = []
    for count in (1, 4):
        given = {"env": "CartPole-v1", "num_envs": 8, "num_steps": 32, "num_learners": 2}
        settings = resolve(given | {"num_accumulation_steps": count, "num_minibatches": 2})
        plan = plan_for("CartPole-v1", num_envs=4, num_steps=32, first_env=4 * ranks.rank)
        collector = inline(plan)
        learner = learner_for(settings, plan.spec, ranks)
        collector.publish(learner.policies, learner.version)
        before = ranks._exchange._round
        learner.update(learner.assemble(collector.collect().fragments), 0)
        found.append(ranks._exchange._round - before)
        collector.close()
    return found


@pytest.mark.more
def test_ranks_average_once_per_minibatch():
    for whole, parts in on_ranks(2, rounds):
        assert whole == parts > 0


def headrace_command(*words):
    return python.command(*words)


ONE_NODE = ("--standalone", "--nproc-per-node", "2")


def torchrun(*words, options=ONE_NODE):
    start = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*start, "-m", "headrace", *map(str, words)]


SHORT = (
    "train CartPole-v1 --num-envs 16 --num-steps 32 --envs-per-vector 4 --num-minibatches 4 "
    f"--seed 3 --total-env-steps {4 * UPDATE} --check-ranks 1 --json"
).split()


OWN_ENV = """
import os, pathlib, signal, sys, threading
import gymnasium as gym

MARK = pathlib.Path(__file__).with_name("failed")

class Own(gym.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 100 and WHEN:
            WHAT
        return self.env.step(action)

def make():
    return Own(gym.make("CartPole-v1"))
"""


def own_env(folder, when, what):
    """SHORT, on a module of the user's in which that happens in an environment's 100th step."""
    text = OWN_ENV.replace("WHEN", when).replace("WHAT", what)
    (folder / "own.py").write_text(text)
    return [word if word != "CartPole-v1" else "own:make" for word in SHORT]


def with_path(folder):
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def summary(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


AT_ITS_END = """
import atexit, os, pathlib
import gymnasium as gym

@atexit.register
def threads():
    tasks = pathlib.Path("/proc/self/task")
    names = [path.read_text() for path in tasks.glob("*/comm")]
    pathlib.Path(__file__).with_name(f"threads_{os.getpid()}").write_text("".join(names))

def make():
    return gym.make("CartPole-v1")
"""


@pytest.mark.more
@pytest.mark.parametrize("arithmetic", ["auto", "plain"])  # plain: with DistributedDataParallel
@pytest.mark.parametrize("started_by", [pytest.param("ours", marks=pytest.mark.slow), "torchrun"])
def test_gloo_threads_end_before_the_interpreter(tmp_path, started_by, arithmetic):
    """One that is about to free a tensor meanwhile aborts the process, once in many runs."""
    (tmp_path / "own.py").write_text(AT_ITS_END)
    words = [word if word != "CartPole-v1" else "own:make" for word in SHORT]
    words += ["--backend", "gloo", "--arithmetic", arithmetic, "--run-dir", tmp_path / "run"]
    command = (
        torchrun(*words)
        if started_by == "torchrun"
        else headrace_command(*words, "--num-learners", 2)
    )
    summary(python.run(command, env=with_path(tmp_path)))
    found = [path.read_text() for path in tmp_path.glob("threads_*")]
    assert len(found) >= 2
    assert not any("gloo" in names for names in found)


@pytest.mark.slow
def test_torchrun_equals_num_learners_and_two_jobs_do_not_mix(tmp_path):
    commands = {
        "ours": headrace_command(*SHORT, "--num-learners", 2, "--run-dir", tmp_path / "ours"),
        "other": headrace_command(*SHORT, "--num-learners", 2, "--run-dir", tmp_path / "other"),
        "torchrun": torchrun(*SHORT, "--run-dir", tmp_path / "torchrun"),
    }
    started = {
        name: python.Python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    found = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=100)
        found[name] = summary(subprocess.CompletedProcess([], process.returncode, out, err))
    states = [checkpoint.newest(tmp_path / name).tensors("policy_default") for name in commands]
    for state in states[1:]:
        for name, value in states[0].items():
            assert value.equal(state[name]), name
    for each in found.values():
        assert each["env_steps"] == 4 * UPDATE
        assert each["mean_return"] == found["ours"]["mean_return"]


def test_torchrun_goes_on_with_other_learners_but_not_with_another_policy(tmp_path):
    table = {"agents": ":2", "lr": 1e-3, "hidden_sizes": [16]}

    def settings(learners, **changes):
        given = {"env": "Pendulum-v1", "num_learners": learners, "num_envs_per_learner": 8}
        policies = {"a": table | changes, "b": "2:"}
        return resolve(given | {"lr_scale": "linear", "policies": policies})

    began = settings(2)
    write_config(tmp_path, {"settings": began.flat(), "origin": {}, "env_is_code": False})
    _refuse_another(tmp_path, settings(4))
    with pytest.raises(RunDirError, match=r"holds another run:\n  policies: "):
        _refuse_another(tmp_path, settings(4, hidden_sizes=[32]))


OWN_SCRIPT = """
import os, pathlib, time
import gymnasium as gym
import headrace

RANK = os.environ["RANK"]
os.environ["TZ"] = f"UTC{RANK}"  # an hour behind on rank 1, so that it names another directory
time.tzset()
updates = []


def on_update(iteration, _):
    updates.append(iteration)


run = headrace.train(
    lambda: gym.make("CartPole-v1"), quiet=True, total_env_steps=128, num_envs=4, num_steps=16,
    envs_per_vector=2, num_minibatches=1,
    on_update=on_update if RANK in os.environ["RANKS_WITH_ON_UPDATE"] else None,
)
told = f"{run.dir.resolve(strict=True)} {run.summary['run_dir']} {updates}"
pathlib.Path("ran_" + RANK).write_text(told)
"""


@pytest.mark.more
@pytest.mark.parametrize("with_on_update", ["01", "0"])
def test_torchrun_s_ranks_share_the_default_directory_and_rank_0_reports(tmp_path, with_on_update):
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", *ONE_NODE, "own.py"]
    env = with_path(os.getcwd()) | {"RANKS_WITH_ON_UPDATE": with_on_update}
    done = python.run(command, timeout=100, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    told = [(tmp_path / f"ran_{rank}").read_text() for rank in range(2)]
    place = f"{run_dir} runs/{run_dir.name}"
    assert told == [f"{place} [1, 2]", f"{place} []"]


def two_nodes():
    """Options for each of two agents on this host that are as good as on two."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    meet_at = ("--rdzv-backend", "c10d", "--rdzv-endpoint", where)
    return [("--nnodes", "2", "--nproc-per-node", "1", *meet_at)] * 2


@pytest.mark.more
@pytest.mark.parametrize("every_s", [0, 1000], ids=["each update is saved", "none is saved before"])
@pytest.mark.parametrize("nodes", ["one node", pytest.param("two nodes", marks=pytest.mark.slow)])
def test_torchrun_restart_resumes_from_what_was_learned(tmp_path, nodes, every_s):
    """The rank that is left saves it before it ends."""
    before = children()
    once = 'os.environ["RANK"] == "1" and not MARK.exists()'
    words = own_env(tmp_path, once, "MARK.touch(); os.kill(os.getpid(), signal.SIGKILL)")
    words += ["--run-dir", tmp_path / "run"]
    words += ["--checkpoint-every-s", every_s]
    agents = [
        python.Python(
            torchrun(*words, options=[*options, "--max-restarts", "1"]), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=with_path(tmp_path),
        )
        for options in ([ONE_NODE] if nodes == "one node" else two_nodes())
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    out, err = map("".join, zip(*said, strict=True))
    assert (tmp_path / "failed").exists()
    assert [agent.returncode for agent in agents] == [0] * len(agents), err[-3000:]
    told = json.loads(out.splitlines()[-1])
    ledger, lost = told["ledger"], told["lost_env_steps"]
    assert told["env_steps"] == ledger["learned"] == 4 * UPDATE
    assert ledger["collected"] == ledger["learned"] + lost + ledger["remade"]
    assert "Resumed from step_000000001536" in err
    assert children() == before


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signal_to_rank_0_saves_the_run(tmp_path, number):
    whole = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "whole", num_learners=2, total_env_steps=6 * UPDATE,
        **SETTINGS,
    )  # fmt: skip

    def interrupt(iteration, _):
        if iteration == 3:
            os.kill(os.getpid(), number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        headrace.train(
            "CartPole-v1", run_dir=tmp_path / "part", num_learners=2, on_update=interrupt,
            total_env_steps=6 * UPDATE, **SETTINGS,
        )  # fmt: skip
    resumed = headrace.resume(tmp_path / "part", quiet=True)
    close(whole, resumed, 0.0)
    assert resumed.summary["episodes"] == whole.summary["episodes"]


@repeats("started_by", ["us", "torchrun"])
def test_killing_the_first_process_ends_all(tmp_path, started_by):
    """Not even a rank that is stuck in a step, and its worker."""
    on_rank_1 = 'os.environ.get("RANK") == "1" or sys.argv[0] == "-c"'
    stuck = 'print("stuck", file=sys.stderr, flush=True); threading.Event().wait()'
    words = [*own_env(tmp_path, f"({on_rank_1})", stuck), "--run-dir", tmp_path / "run"]
    ours = headrace_command(*words, "--num-learners", "2")
    command = torchrun(*words) if started_by == "torchrun" else ours
    before = children()
    process = python.Python(command, stderr=subprocess.PIPE, text=True, env=with_path(tmp_path))
    assert any(line == "stuck\n" for line in process.stderr)
    started = children() - before
    process.kill()
    assert len(started) >= 2
    assert still_alive(started, within_s=5 * 10) == []
    process.communicate()  # until then, what they print has somewhere to go


@pytest.mark.slow
def test_stuck_rank_0_ends_all(tmp_path):
    words = own_env(tmp_path, 'sys.argv[0] != "-c"', "threading.Event().wait()")
    words += ["--num-learners", 2, "--rank-timeout-s", 2, "--run-dir", tmp_path / "run"]
    before = children()
    done = python.run(
        headrace_command(*words), timeout=5 * 15, env=with_path(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Rank 0 has not answered for 2 s" in done.stderr
    assert "(rank 1 of 2)\nRank 0 is stuck as well, here:" in done.stderr
    assert 'own.py", line 13 in step' in done.stderr
    assert children() == before


@pytest.mark.more
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signal_to_another_rank_stops_all_and_is_shown(tmp_path, number):
    before = children()

    def interrupt(iteration, _):
        if iteration == 3:
            (pid,) = children() - before
            os.kill(pid, number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        headrace.train(
            "CartPole-v1", run_dir=tmp_path / "run", num_learners=2, on_update=interrupt,
            total_env_steps=10**6, **SETTINGS,
        )  # fmt: skip
    assert headrace.resume(tmp_path / "run", total_env_steps=8192, quiet=True).summary["env_steps"]


@pytest.mark.slow
def test_run_with_workers_resumes_with_more_learners(tmp_path):
    settings = SETTINGS | {"num_workers": 1, "total_env_steps": UPDATE}
    headrace.train("CartPole-v1", run_dir=tmp_path / "run", **settings)
    for learners, workers in ((2, 2), (4, 4), (1, 4)):
        resumed = headrace.resume(tmp_path / "run", num_learners=learners, quiet=True)
        config = json.loads((resumed.dir / "config.json").read_text())["settings"]
        assert (config["num_learners"], config["num_workers"]) == (learners, workers)


@pytest.mark.slow
def test_num_learners_that_contradicts_torchrun_is_refused(tmp_path):
    words = [*SHORT, "--num-learners", "3", "--run-dir", tmp_path / "run"]
    done = python.run(torchrun(*words), timeout=100)
    assert done.returncode == 1  # torchrun's own
    assert "num_learners=3, but torchrun started 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("started_by", ["us", "torchrun"])
def test_two_learners_learn_cartpole(tmp_path, started_by, seed):
    words = ["train", "CartPole-v1", "--seed", seed, "--total-env-steps", 100_000, "--json"]
    words += ["--run-dir", tmp_path / "run"]
    ours = headrace_command(*words, "--num-learners", 2)
    command = torchrun(*words) if started_by == "torchrun" else ours
    done = python.run(command, timeout=200)
    assert summary(done)["mean_return"] >= 475


@pytest.mark.more
def test_torchrun_ends_all_ranks_when_one_fails(tmp_path):
    words = own_env(tmp_path, 'os.environ["RANK"] == "1"', 'raise KeyError("on rank 1")')
    before = children()
    done = python.run(
        torchrun(*words, "--run-dir", tmp_path / "run"), timeout=100, env=with_path(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert "KeyError: 'on rank 1'" in done.stderr
    assert "of own:make" in done.stderr and "(rank 1 of 2)" in done.stderr
    assert "Rank 1 is gone; its own message says why" in done.stderr
    assert "(rank 0 of 2)" in done.stderr
    assert children() == before


def test_first_cause_is_the_first_error_that_is_not_a_loss():
    loss, death = Failure(1.0, 2, RankError("lost")), Failure(math.inf, 1, RankError("died"))
    errors = [Failure(3.0, 0, EnvError("later")), Failure(2.0, 3, EnvError("first"))]
    assert first_cause([loss, death, *errors]) == errors[1]
    assert first_cause([loss, death]) == death
    assert first_cause([loss, Failure(0.5, 0, RankError("lost"))]).at == 0.5
    assert first_cause([]) is None
