"""Whole runs with a league: snapshots, resume, ranks, workers that never stop or die, Ray."""

import hashlib
import json
import random

import pytest
import torch

import headrace
from headrace.config.resolve import resolve
from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import EnvError
from headrace.leagues.league import FOLDER
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.faults.test_env import assert_balanced, assert_same_run
from tests.faults.test_workers import Chaos
from tests.leagues.support import GRID, RPS, SMALL_GRID, Pack, Takes, Trio
from tests.marks import repeats
from tests.support import learner_for

UPDATE = 8 * 12
SETTINGS = {
    "quiet": True, "num_envs": 8, "num_steps": 12, "envs_per_vector": 4, "seed": 3, "lr": 1e-2,
    "lr_schedule": "linear", "num_minibatches": 4, "num_epochs": 2, "hidden_sizes": (8,),
    "ent_coef": 0.0, "schedule_env_steps": 12 * UPDATE, "league": 3, "snapshot_every": 2 * UPDATE,
    "opponents": "hard", "league_members": ("random",), "latest_ratio": 0.3,
}  # fmt: skip


def train(path, env=RPS, updates=8, **more):
    if env == GRID:  # so long that episodes are under way between batches
        more = {"env_kwargs": SMALL_GRID | {"max_episode_steps": 30}} | more
    if isinstance(env, str) and not more.get("num_workers"):  # all are one vector
        more = {"envs_per_vector": None} | more
    settings = SETTINGS | {"total_env_steps": updates * UPDATE} | more
    given = {name: value for name, value in settings.items() if value is not None}
    return headrace.train(env, run_dir=path, **given)


def snapshots_of(run_dir):
    """The bytes of all snapshots, by file."""
    files = sorted((run_dir / FOLDER).glob("step_*/*"))
    return {str(of.relative_to(run_dir)): hashlib.sha256(of.read_bytes()).hexdigest()
            for of in files}  # fmt: skip


def policies_of(directory):
    """All weights of a checkpoint's policies."""
    saved = checkpoint.newest(directory)
    return {
        f"{name}.{key}": tensor
        for name in saved.manifest["policies"]
        for key, tensor in saved.tensors(f"policy_{name}").items()
    }


def assert_equal_tensors(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def league_of(run):
    return checkpoint.newest(run.dir).manifest["league"]


@pytest.mark.parametrize("env", [RPS, Pack], ids=["one policy", "two policies"])
def test_snapshots_stay_as_they_were_taken_and_are_the_weights_of_their_moment(tmp_path, env):
    seen, found = {}, []

    def note(update, metrics):
        seen[update] = snapshots_of(tmp_path / "r")
        found.append(metrics["league_members"])

    settings = {"updates": 7, "snapshot_every": UPDATE}
    run = train(tmp_path / "r", env, on_update=note, **settings)
    at_the_end = snapshots_of(run.dir)
    files = 2 if env == RPS else 3  # the manifest, and each policy
    for update, hashes in seen.items():
        assert len(hashes) == files * (update + 1)
        assert hashes.items() <= at_the_end.items()
    assert len(set(at_the_end.values())) == len(at_the_end) == files * 8
    assert found == [float(update + 2) for update in range(1, 8)]  # and one random player
    for updates in (1, 4):
        other = train(tmp_path / str(updates), env, **settings | {"updates": updates})
        taken = run.dir / FOLDER / f"step_{updates * UPDATE:012d}"
        assert_equal_tensors(policies_of(other.dir), policies_of(taken))
    assert_equal_tensors(policies_of(run.dir), policies_of(taken.parent / f"step_{672:012d}"))
    # Not of each tensor: the observation is 0, so that the first layers stay as they were.
    final = policies_of(run.dir)
    assert any(not tensor.equal(final[name]) for name, tensor in policies_of(taken).items())


def test_the_first_snapshot_is_the_untrained_policy(tmp_path):
    run = train(tmp_path / "r", updates=2)
    given = {name: value for name, value in SETTINGS.items() if name != "quiet"}
    settings = resolve(given | {"env": RPS}, interface="kernel")
    learner = learner_for(settings, env_spec(EnvMaker(RPS, native=True)))
    untrained = headrace.load_policy(run.dir / FOLDER / f"step_{0:012d}").module
    assert_equal_tensors(untrained.state_dict(), learner.policies["default"].state_dict())
    # Or the one that a run begins with
    again = train(tmp_path / "again", updates=1, init_from=str(run.dir), seed=9)
    first = policies_of(again.dir / FOLDER / f"step_{0:012d}")
    assert_equal_tensors(first, policies_of(run.dir))


def assert_same_league(one, other):
    """All that a checkpoint has, and the snapshots."""
    a, b = (checkpoint.newest(run.dir) for run in (one, other))
    assert a.manifest["files"].keys() == b.manifest["files"].keys()
    for file in a.manifest["files"]:
        name = file.removesuffix(".safetensors")
        assert_equal_tensors(a.tensors(name), b.tensors(name))
    assert a.manifest["league"] == b.manifest["league"]
    assert snapshots_of(one.dir) == snapshots_of(other.dir)
    for name in ("env_steps", "episodes", "mean_return", "agent_steps"):
        assert one.summary[name] == other.summary[name], name


NO_EPOCHS = {"num_minibatches": None, "num_epochs": None}
CASES = {
    "in turns": (Takes, {}),
    "kernel, on the device": (GRID, {}),
    "at once, in workers": (Trio, {"num_workers": 2}),
    "one move, on the device": (RPS, {}),
    "kernel, in workers": (GRID, {"num_workers": 2}),
    "two policies": (Pack, {}),
    "a2c": (Takes, {"algo": "a2c"} | NO_EPOCHS),
}


@repeats("case", CASES, keep=2)
def test_stopped_and_resumed_is_uninterrupted(tmp_path, case):
    env, more = CASES[case]
    whole = train(tmp_path / "whole", env, **more)
    for updates in (1, 5):
        part = train(tmp_path / f"part {updates}", env, updates, **more)
        if env != RPS:
            workers = checkpoint.newest(part.dir).arrays("workers")
            under_way = [workers[n] > 0 for n in workers if n.endswith("episode_step")]
            members = [workers[n] >= 0 for n in workers if n.endswith("seats.member")]
            assert any((a & b).any() for a, b in zip(under_way, members, strict=True))
        resumed = part.resume(total_env_steps=8 * UPDATE, quiet=True)
        assert_same_league(whole, resumed)
    record = league_of(whole)
    assert len(record["members"]) == 1 + 5
    assert len(record["active"]) == 3
    assert sum(of["games"] > 0 for of in record["members"]) > 3


def test_a_crash_repeats_the_snapshots_after_the_last_checkpoint(tmp_path):
    """And they are the same files."""
    whole = train(tmp_path / "whole")

    def crash(update, metrics):
        if update == 6:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "r", on_update=crash, checkpoint_every_s=0.0)
    saved = sorted((tmp_path / "r" / "checkpoints").glob("step_*"))[-1]
    saved.rename(saved.parent / ".step_gone")
    saved_at = checkpoint.newest(tmp_path / "r").manifest["counters"]["env_steps"]
    taken = sorted((tmp_path / "r" / FOLDER).glob("step_*"))[-1].name
    assert saved_at < int(taken.removeprefix("step_")) == 6 * UPDATE
    resumed = headrace.resume(tmp_path / "r", quiet=True)
    assert_same_league(whole, resumed)


def test_two_ranks_have_the_same_pool_and_payoffs_as_one(tmp_path):
    """Of 2,048 episodes of a batch 1,000 count, whoever played them."""
    sizes = {"num_envs": 64, "num_steps": 32, "num_minibatches": 4}
    more = {"total_env_steps": 5 * 2048, "snapshot_every": 2048, "schedule_env_steps": 20_000}
    one, two = (
        train(tmp_path / str(n), num_learners=n, check_ranks=1, **sizes | more) for n in (1, 2)
    )
    records = [league_of(run) for run in (one, two)]
    assert records[0] == records[1]
    assert sum(of["games"] for of in records[0]["members"]) > 150
    assert len(records[0]["members"]) == 7
    for at in (0, 1, 5):
        a, b = (policies_of(run.dir / FOLDER / f"step_{2048 * at:012d}") for run in (one, two))
        for name, tensor in a.items():
            assert float((tensor - b[name]).abs().max()) <= 1e-5, (at, name)
    assert one.summary["episodes"] == two.summary["episodes"] == 5 * 2048


@pytest.mark.more
@pytest.mark.parametrize("env", [Takes, GRID], ids=["in turns", "kernel"])
def test_two_ranks_play_games_that_last(tmp_path, env):
    """One rank's state goes on as two, and back."""
    first = train(tmp_path / "r", env, updates=4, num_learners=2, check_ranks=1)
    second = first.resume(total_env_steps=6 * UPDATE, num_learners=1, quiet=True)
    third = second.resume(total_env_steps=8 * UPDATE, num_learners=2, quiet=True)
    assert_balanced(third.summary)
    alone = train(tmp_path / "alone", env)
    members = [[of["source"] for of in league_of(run)["members"]] for run in (alone, third)]
    assert members[0] == members[1]


@repeats("lag", [1, 0])
@repeats("env", [Takes, Trio], ids=["in turns", "at once"])
def test_runs_with_workers_are_the_same_as_those_without(tmp_path, env, lag):
    one, *others = (train(tmp_path / str(n), env, num_workers=n, lag=lag) for n in (0, 1, 2))
    for other in others:
        assert_same_league(one, other)
        assert_balanced(other.summary)
    assert one.summary["agent_steps"] < env_spec(EnvMaker(env)).num_agents * 8 * UPDATE


@pytest.mark.parametrize("algo", ["appo", pytest.param("impala", marks=pytest.mark.more)])
def test_workers_that_never_stop_play_a_league(tmp_path, algo):
    more = {} if algo == "appo" else NO_EPOCHS
    run = train(tmp_path / "r", Takes, 12, algo=algo, num_workers=2, lag=2, **more)
    assert_balanced(run.summary)
    record = league_of(run)
    assert len(record["members"]) > 5
    assert sum(of["games"] for of in record["members"]) > 20
    assert run.summary["env_steps"] == 12 * UPDATE
    resumed = run.resume(total_env_steps=16 * UPDATE, quiet=True)
    assert_balanced(resumed.summary)


@pytest.mark.fault_a
@pytest.mark.more
def test_a_run_whose_workers_are_killed_equals_the_whole_run(tmp_path):
    settings = {"updates": 16, "num_workers": 2, "snapshot_every": 3 * UPDATE}
    whole = train(tmp_path / "whole", Takes, **settings)
    chaos = Chaos(random.Random(1), within_s=0.02)

    def kill_now_and_then(update, metrics):
        if update in (4, 9, 13):
            chaos.soon()

    run = train(
        tmp_path / "r", Takes, on_update=kill_now_and_then, max_worker_restarts=100, **settings
    )
    chaos.join()
    assert run.summary["restarts"] >= 2
    assert_balanced(run.summary)
    assert run.summary["lost_env_steps"] == 0
    assert_same_run(run, whole)
    assert league_of(run) == league_of(whole)
    assert snapshots_of(run.dir) == snapshots_of(whole.dir)


class Stumbles(Takes):
    """Fails in some episodes."""

    def step(self, action):
        if self.heap == 7 and action == 1:
            raise RuntimeError("over")
        super().step(action)


def test_a_game_that_fails_is_dropped_and_the_next_episode_has_a_draw_of_its_own(tmp_path):
    with pytest.raises(EnvError, match="over"):
        train(tmp_path / "ends", Stumbles)
    runs = [
        train(tmp_path / str(n), Stumbles, on_env_error="restart", max_worker_restarts=10_000,
              num_workers=n) for n in (0, 2)
    ]  # fmt: skip
    assert_same_league(*runs)
    for run in runs:
        assert_balanced(run.summary)
        assert run.summary["ledger"]["dropped_episodes"] > 5


def test_metrics_and_progress_tell_of_the_league(tmp_path, capsys):
    run = train(tmp_path / "r", quiet=False)
    rows = read_metrics(run.dir)
    record = league_of(run)
    assert rows[-1]["league_rating"] == pytest.approx(record["rating"])
    assert [row["league_members"] for row in rows] == [2, 3, 3, 4, 4, 5, 5, 6]
    assert all(0 <= row["league_score"] <= 1 for row in rows)
    assert "league score 0." in capsys.readouterr().out
    settings = json.loads((run.dir / "config.json").read_text())["settings"]
    assert settings["league_members"] == ["random"]


def test_an_evaluation_is_of_the_learned_policies_alone(tmp_path):
    run = train(tmp_path / "r", Pack, eval_every=4 * UPDATE, eval_episodes=4)
    played = run.evaluate(episodes=4)
    assert played.by_policy.keys() == {"hunter", "prey"}
    assert any("eval_return" in row for row in read_metrics(run.dir))


@pytest.mark.slow
def test_a_league_on_ray_equals_one_here_though_members_travel_as_data(tmp_path):
    more = {"num_workers": 2}
    here = train(tmp_path / "here", Takes, **more)
    there = train(tmp_path / "there", Takes, cluster="local", **more)
    assert_same_run(here, there)
    assert league_of(here) == league_of(there)
    assert snapshots_of(here.dir) == snapshots_of(there.dir)
