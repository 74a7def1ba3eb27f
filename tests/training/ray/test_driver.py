"""Runs on Ray: the same fragments and the same run as without it, wherever the parts are."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import ray
import torch

import headrace
from headrace.collectors.asynchronous import AsynchronousCollector
from headrace.collectors.backends import ray_backend
from headrace.collectors.backends.ray_backend import RayBackend
from headrace.collectors.backends.ray_requests import Needs
from headrace.collectors.synchronous import SynchronousCollector
from headrace.config.resolve import resolve, values_for_resume
from headrace.config.run_config import RunConfig, demands
from headrace.distributed.ranks import RankInfo
from headrace.envs.api import Guards
from headrace.errors import ConfigError, EnvError, RunDirError
from headrace.models.policy import Network
from headrace.storage import checkpoint, run_dir
from headrace.training.ray import connect
from headrace.training.ray.learner_actor import QueuedDisplay, _check_run_dir
from headrace.weights import FlatWeights
from tests.collectors.test_lag import at_lag_1
from tests.envs.games.support import Camp
from tests.envs.games.turns_support import Table
from tests.faults.support import start
from tests.faults.test_env import assert_balanced, assert_same_run
from tests.faults.test_machine import LOOPBACK, sockets
from tests.ladder.test_collect import equal
from tests.marks import repeats
from tests.python import command
from tests.support import (
    Counting,
    children,
    inline,
    never,
    plan_for,
    policies_for,
    short_cartpole,
    still_alive,
)
from tests.training.test_env_changes import Slope, curriculum

CORES = 4
SMALL = {
    "num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "total_env_steps": 4 * 16 * 6,
    "num_workers": 2, "num_minibatches": 4, "quiet": True, "check_ranks": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """One of this machine, with room for `CORES` workers or learners."""
    before = children()
    with connect.connected(RunConfig(cluster="local", num_workers=CORES - 1)):
        ours = children() - before
        yield
    assert still_alive(ours, within_s=10) == []


_open = []


@pytest.fixture(autouse=True)
def no_actors_left():
    """For the next test, which needs the room."""
    yield
    while _open:
        _open.pop().close()


def actors(
    plan, num_workers=2, stop=never, state=None, say=print, kind=SynchronousCollector, room=CORES
):
    here = ray.get_runtime_context().get_node_id()
    make_backend = functools.partial(RayBackend, needs=Needs(machines=[here] * room))
    _open.append(kind(plan, num_workers, stop, state, say, make_backend))
    return _open[-1]


@repeats(
    "plan",
    [
        pytest.param({"num_steps": 40, "num_envs": 6}, id="ends"),
        pytest.param(
            {"network": Network(core="lstm", normalize_obs=True)}, id="core", marks=pytest.mark.slow
        ),
        pytest.param({"num_envs": 2}, id="one vector"),
    ],
)
def test_inline_equals_ray(cluster, plan):
    """Rung 2."""
    plan = plan_for(short_cartpole, **plan)
    one, many = inline(plan), actors(plan, num_workers=min(2, plan.num_vectors))
    finals = 0
    try:
        for version in range(4):
            for collector in (one, many):
                collector.publish(policies_for(plan, seed=version), version)
            a, b = one.collect(), many.collect()
            for x, y in zip(a.fragments, b.fragments, strict=True):
                equal(x, y)
                finals += int(x.num_final)
            assert sorted(a.episodes) == sorted(b.episodes)
            received = sum(t.nbytes for f in b.fragments for t in _tensors(f))
            rest = b.metrics["fragments_bytes"] - received
            assert 0 <= rest < 64 * len(plan.layouts[0]) * plan.num_vectors  # columns are aligned
            assert b.metrics["fragments_remote_bytes"] == 0
            assert b.metrics["weights_bytes"] == FlatWeights.num_bytes(policies_for(plan))
    finally:
        one.close()
    assert finals > 1, "truncated episodes must be among them"
    assert one.ledger == many.ledger


def _tensors(fragment):
    for of in vars(fragment).values():
        yield from of.values() if isinstance(of, dict) else [of]


@repeats("game", [Table, Camp])
def test_inline_equals_ray_for_a_game_of_two_policies(cluster, game):
    plan = plan_for(game, num_steps=12, policies={})
    one, many = inline(plan), actors(plan)
    waits = 0
    try:
        for version in range(3):
            for collector in (one, many):
                collector.publish(policies_for(plan, seed=version), version)
            a, b = one.collect(), many.collect()
            assert len(a.fragments) == len(b.fragments) == 2 * plan.num_vectors
            for x, y in zip(a.fragments, b.fragments, strict=True):
                equal(x, y)
                waits += int((~x.valid).sum())
            assert sorted(a.episodes) == sorted(b.episodes)
            assert a.agent_steps == b.agent_steps > 0
    finally:
        one.close()
    assert waits > 0
    assert one.ledger == many.ledger


@pytest.mark.more
def test_at_lag_1_it_is_the_same_as_well(cluster):
    plan = plan_for(short_cartpole, num_steps=20, lag=1)
    for one, many in zip(
        at_lag_1(inline(plan), plan, 5), at_lag_1(actors(plan), plan, 5), strict=True
    ):
        for x, y in zip(one, many, strict=True):
            assert all(map(torch.equal, _of(x), _of(y)))


def _of(fields):
    """Those that are whole: of final observations there is room for more."""
    return [fields[name] for name in ("action", "reward", "truncated", "policy_version")]


@pytest.mark.more
def test_asynchronous_workers_act_with_newer_weights_and_deliver_each_step_once(cluster):
    plan = plan_for(Counting, num_steps=8, lag=2, asynchronous=True)
    collector = actors(plan, kind=AsynchronousCollector)
    seen = {v: [] for v in plan.vectors}
    versions = {v: [] for v in plan.vectors}
    for version in range(12):
        collector.publish(policies_for(plan, seed=version), version)
        batch = collector.collect()
        assert batch.metrics["queue_depth"] <= 2
        for fragment in batch.fragments:
            v = int(fragment.env_id[0]) // plan.envs_per_vector
            seen[v] += fragment.obs[:-1, 0, 0].tolist()  # counts the steps of its only episode
            versions[v] += fragment.policy_version[:, 0].tolist()
        assert int(fragment.policy_version.max()) <= version
    collector.halt()
    ledger = collector.ledger
    collector.close()
    for v in plan.vectors:
        assert seen[v] == list(map(float, range(len(seen[v]))))  # each once, in order
        assert versions[v] == sorted(versions[v])
    assert len({of for v in versions.values() for of in v}) > 4
    learned = sum(map(len, seen.values())) * plan.envs_per_vector
    assert ledger.collected == learned + ledger.lost


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(ray_backend, "_SHARE_AFTER_S", 0.2)
    monkeypatch.setattr(ray_backend, "_FIRST_SHARE_AFTER_S", 0.2)


@pytest.mark.more
def test_workers_share_a_host_until_there_is_a_machine(cluster, no_patience):
    """And the fragments are the same as if each had its own."""
    plan = plan_for(short_cartpole, num_steps=20, num_envs=6)
    keep = ray.remote(num_cpus=CORES - 1)(_Nothing).remote()  # room for one is left
    ray.get(keep.__ray_ready__.remote())
    one, many = inline(plan), actors(plan, num_workers=3, room=1)
    up = []
    for version in itertools.count():
        for collector in (one, many):
            collector.publish(policies_for(plan, seed=version), version)
        a, b = one.collect(), many.collect()
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
        up.append(b.metrics["workers_up"])
        if version == 2:
            ray.kill(keep)
        if up[-1] == 3 and many.workers[2].host is many.workers[2].home:
            break
        for collector in (one, many):
            collector.release_batch(more=True)
    assert up[:3] == [1, 1, 1]
    assert len({id(worker.host) for worker in many.workers}) > 1
    assert many.ledger == one.ledger  # nothing was lost
    one.close()


class _Nothing:
    pass


@pytest.mark.slow
def test_asynchronous_worker_that_moves_loses_only_its_begun_fragments(cluster, no_patience):
    plan = plan_for(Counting, num_steps=50, lag=2, asynchronous=True)
    keep = ray.remote(num_cpus=CORES - 1)(_Nothing).remote()
    ray.get(keep.__ray_ready__.remote())
    collector = actors(plan, kind=AsynchronousCollector, room=1)
    learned, up = 0, []
    mover = collector.workers[1]
    while not up or up[-1] < 2 or mover.host is not mover.home:
        collector.publish(policies_for(plan), len(up))
        batch = collector.collect()
        learned += batch.env_steps
        up.append(batch.metrics["workers_up"])
        collector.release_batch(more=True)
        if len(up) == 3:
            ray.kill(keep)
    assert up[0] == 1
    collector.halt()
    ledger = collector.ledger
    collector.close()
    assert ledger.collected == learned + ledger.lost
    assert ledger.restarts == 0  # to move is not to be lost


class FailsAt20(Counting):
    def step(self, action):
        if self.t == 20:
            raise ZeroDivisionError("of my own")
        return super().step(action)


@pytest.mark.more
def test_environment_s_exception_has_its_traceback(cluster):
    collector = actors(plan_for(FailsAt20))
    collector.publish(policies_for(plan_for(Counting)), 0)
    collector.collect()
    collector.publish(policies_for(plan_for(Counting)), 1)
    with pytest.raises(EnvError, match=r"(?s)Traceback.*ZeroDivisionError: of my own.*env \d of"):
        collector.collect()


@pytest.mark.more
def test_machine_that_lacks_a_module_ends_the_start(cluster):
    plan = plan_for(functools.partial(_import_there, os.getpid()))
    with pytest.raises(EnvError, match="ModuleNotFoundError: No module named 'not_there'"):
        actors(plan)


def _import_there(here):
    if os.getpid() != here:
        import not_there  # noqa: F401
    return Counting()


@pytest.mark.more
def test_dead_worker_is_replaced_and_repeats_its_fragment(cluster, tmp_path):
    flag = tmp_path / "died"
    plan = plan_for(
        functools.partial(DiesOnce, flag, os.getpid()), num_steps=20, guards=Guards(max_restarts=1)
    )
    said = []
    one, many = inline(plan), actors(plan, say=said.append)
    for version in range(3):
        for collector in (one, many):
            collector.publish(policies_for(plan, seed=version), version)
        for x, y in zip(one.collect().fragments, many.collect().fragments, strict=True):
            equal(x, y)
    assert flag.exists()
    (text,) = said
    assert "died" in text and "It is replaced." in text
    ledger = many.ledger
    assert (ledger.restarts, ledger.lost) == (1, 0)
    assert ledger.collected == 3 * 20 * 4 + ledger.remade
    one.close()


class DiesOnce(Counting):
    """In the 30th step of an env, in one process."""

    def __init__(self, flag, here):
        super().__init__()
        self.flag, self.here = flag, here

    def step(self, action):
        if self.t == 30 and os.getpid() != self.here:
            with contextlib.suppress(FileExistsError):
                self.flag.touch(exist_ok=False)  # both workers may be here at a time
                os.kill(os.getpid(), 9)
        return super().step(action)


@pytest.mark.more
def test_working_actor_is_not_given_up_at_a_short_limit(cluster):
    """Though its fragment takes three times as long."""
    collector = actors(plan_for(Slow, num_steps=80, guards=Guards(env_timeout_s=0.8)))
    collector.publish(policies_for(plan_for(Counting)), 0)
    assert collector.collect() is not None
    assert collector.ledger.restarts == 0


class Slow(Counting):
    def step(self, action):
        time.sleep(0.015)
        return super().step(action)


@pytest.mark.more
@pytest.mark.parametrize("algo", ["ppo", pytest.param("appo", marks=pytest.mark.slow)])
def test_two_learners_on_a_cluster_learn_as_two_processes_do(cluster, tmp_path, algo):
    how = SMALL | {"algo": algo, "num_learners": 2, "lag": 0, "num_envs": 8}
    seen = []
    there = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "ray", cluster="local",
        on_update=lambda number, metrics: seen.append((number, metrics["env_steps"])), **how,
    )  # fmt: skip
    here = headrace.train("CartPole-v1", run_dir=tmp_path / "here", **how)
    assert_same_run(there, here)
    assert_balanced(there.summary)
    updates = here.summary["env_steps"] // (8 * 16)
    assert seen == [(k, k * 8 * 16) for k in range(1, updates + 1)]
    assert {"rank 1", "rank 1, worker 0"} <= set(there.summary["worker_meters"])
    more = headrace.resume(there.dir, total_env_steps=2 * 4 * 16 * 6, quiet=True)
    same = headrace.resume(here.dir, total_env_steps=2 * 4 * 16 * 6, quiet=True)
    assert_same_run(more, same)


@pytest.mark.more
def test_changes_of_environments_are_those_of_a_run_without_a_cluster(cluster, tmp_path):
    how = SMALL | {"on_update": curriculum, "total_env_steps": 4 * 16 * 8}
    there = headrace.train(Slope, run_dir=tmp_path / "ray", cluster="local", **how)
    here = headrace.train(Slope, run_dir=tmp_path / "here", **how | {"num_workers": 0})
    assert_same_run(there, here)
    changes = checkpoint.newest(there.dir).manifest["counters"]["env_changes"]
    assert [change[0] for change in changes] == ["set_wind", "speed"]
    with pytest.raises(ConfigError, match="on_update returned 5: expected None"):
        headrace.train(
            Slope, run_dir=tmp_path / "wrong", cluster="local", **how | {"on_update": lambda *_: 5}
        )


@pytest.mark.more
def test_learner_error_ends_the_run_with_its_type(cluster, tmp_path):
    with pytest.raises(EnvError, match="ZeroDivisionError: of my own") as caught:
        headrace.train(FailsAt20, run_dir=tmp_path / "run", cluster="local", **SMALL)
    assert "--on-env-error restart" in "\n".join(caught.value.__notes__)


@pytest.mark.more
def test_error_in_on_update_ends_the_run(cluster, tmp_path):
    def on_update(number, metrics):
        raise ZeroDivisionError("of the caller's own")

    with pytest.raises(ZeroDivisionError, match="of the caller's own"):
        headrace.train(
            "CartPole-v1", run_dir=tmp_path / "run", cluster="local", on_update=on_update, **SMALL
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cpus_per_worker": 2.0}, r"cpus_per_worker=2.0, but this run is not on a cluster"),
        ({"worker_resources": {"a": 1}}, r"worker_resources=.*not on a cluster"),
        ({"cluster": "local", "learner_resources": {"a": 1}}, "this machine alone"),
        ({"cluster": "auto", "inference": "learner", "num_workers": 2}, "Use --inference worker"),
        ({"cluster": "auto", "backend": "mpi"}, "mpirun"),
        ({"cluster": "auto", "device": "cpu", "gpus_per_learner": 1}, "expected one of the two"),
        ({"cluster": "auto", "gpus_per_learner": -2}, "at least -1"),
    ],
)
def test_impossible_cluster_settings_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        resolve({"env": "CartPole-v1"} | given)


def test_clusters_have_workers_by_default():
    def of(cores=6, **given):
        return resolve({"env": "CartPole-v1", "num_envs": 48, **given}, cores=cores).run

    assert (of(cluster="auto").num_workers, of().num_workers) == (6, 0)
    assert of(cluster="auto", num_workers=0).num_workers == 0
    assert of(cluster="auto", num_workers=24, envs_per_vector=0).num_vectors >= 24
    of_kernels = resolve({"env": "headrace/CartPole-v1", "cluster": "auto"}, interface="kernel").run
    assert of_kernels.num_workers == 0


def test_demands_are_amounts_or_labels():
    assert demands({"slot": 1, "part": 0.5, "kind": "cpu"}) == (
        {"slot": 1.0, "part": 0.5},
        {"kind": "cpu"},
    )


def test_a_learner_that_does_not_see_the_run_directory_says_so(cluster, tmp_path):
    with pytest.raises(RunDirError, match=r"Learner 2 of 3, on 127.0.0.1, does not see .*gone"):
        _check_run_dir(tmp_path / "gone", RankInfo(1, 3, 0))


def test_queued_display_keeps_order_and_leaves_out_fast_updates():
    display = QueuedDisplay()
    display.say("first")
    for k in range(100):
        display.update({"env_steps": k} | ({"eval_return": 1.0} if k == 50 else {}), {})
    display.answer(changes := headrace.set_envs(speed=2.0))
    assert display.on_update(1, {}) == changes
    found = display.fetch(1.0)
    assert [each[0] for each in found] == ["say", "update", "update", "on_update"]
    assert found[2][1]["env_steps"] == 50
    assert display.env_steps == 99
    assert display.fetch(0.0) == []


@pytest.mark.parametrize(("cluster", "kept"), [("", ()), ("local", ("cpus_per_worker",))])
def test_resume_without_a_cluster_drops_its_settings(cluster, kept):
    """Resumed without it."""
    of_it = {"cpus_per_worker": 2.0, "worker_resources": {"a": 1.0}, "learner_resources": {"b": 1}}
    before = {"env": "CartPole-v1", "cluster": "10.0.0.1:6379", "num_workers": 2} | of_it
    config = {"settings": resolve(before).flat(), "origin": dict.fromkeys(before, "given")}
    again = resolve(values_for_resume(config, {"cluster": cluster})[0]).run
    for name, value in of_it.items():
        default = getattr(RunConfig(), name)
        assert getattr(again, name) == (value if name in kept else default)
    moved = resolve(values_for_resume(config, {"cluster": "10.0.0.2:6379"})[0]).run
    assert {name: getattr(moved, name) for name in of_it} == of_it


@pytest.mark.more
def test_missing_cluster_raises_config_error(tmp_path, monkeypatch):
    """And soon. Processes of their own: this one has a cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster that has ended
    said = {
        "127.0.0.1:1": "There is no Ray cluster at this address",
        "locl": "expected HOST:PORT",
        "auto": "This machine belongs to no Ray cluster that lets this process in",
    }
    flags = ["--run-dir", "run"]
    processes = [
        start(command("train", "CartPole-v1", "--cluster", address, *flags), tmp_path)
        for address in said
    ]
    for process, words in zip(processes, said.values(), strict=True):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2
        assert words in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.more
def test_local_cluster_is_closed_to_others_and_ends_with_the_run(tmp_path, monkeypatch):
    """F30, F12: from the command line."""
    flags = ["--num-workers", "1", "--num-envs", "4", "--total-env-steps", "1000000000"]
    words = command("train", "CartPole-v1", "--cluster", "local", "--run-dir", "run", *flags)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whatever the user has
    before = children()
    process = start(words, tmp_path)
    for line in process.stdout:
        if "env steps" in line and "/s" in line:
            break
    ours = children() - before
    assert run_dir.left_mark(tmp_path / "run").pid == process.pid
    found = sockets(ours)
    assert sum(listens for _, listens in found) > 4
    assert {address for address, _ in found} <= LOOPBACK
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in ours} == {here}
    with pytest.raises(grpc.RpcError) as refused:
        _ask(_gcs_address(ours))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Stopped by SIGTERM" in out and "Saved in" in out
    assert run_dir.left_mark(tmp_path / "run") is None
    assert still_alive(ours, within_s=10) == []
    checkpoint.newest(tmp_path / "run")


def _gcs_address(pids):
    """Where Ray's processes find each other."""
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        for word in words:
            if word.startswith("--gcs-address="):
                return word.partition("=")[2]
    raise AssertionError("no raylet among them")


def _ask(address):
    """What runs there? Asked without a token."""
    with grpc.insecure_channel(address) as channel:
        jobs = channel.unary_unary("/ray.rpc.JobInfoGcsService/GetAllJobInfo")
        return jobs(b"", timeout=10)


@pytest.mark.more
def test_worker_starts_without_a_compiler():
    """Its imports are most of what a worker's start takes."""
    code = (
        "import sys, headrace.collectors.backends.worker_host;print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
