"""Members of a league: snapshots, policies of other runs and algorithms, a random player."""

import json
import shutil

import pytest
import torch

import headrace
from headrace.config.policies import assign_agents, sides_of
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.seats import Pool
from headrace.errors import CheckpointError
from headrace.leagues.league import FOLDER
from headrace.leagues.members import MemberLoader, packed, with_policies
from headrace.storage import checkpoint
from tests.leagues.support import RPS, LargePack, Pack, Takes

SMALL = {"quiet": True, "num_envs": 8, "num_steps": 16, "hidden_sizes": (8,)}


def train(path, env=RPS, updates=3, **more):
    settings = SMALL | {"total_env_steps": updates * 128} | more
    if settings.get("algo", "ppo") == "ppo":
        settings = {"num_minibatches": 4} | settings
    return headrace.train(env, run_dir=path, **settings)


RUNS = {
    "a2c": (RPS, {"algo": "a2c", "seed": 5, "hidden_sizes": (4, 4)}),
    "other spaces": (Takes, {}),
    "dqn": (RPS, {"algo": "dqn", "learning_starts": 64, "replay_size": 1000}),
    "core": (RPS, {"core": "gru", "num_minibatches": 2}),
    "pack": (Pack, {}),
    "pack, one policy": (Pack, {"policies": {"all": ":"}}),
    "pack, hunters apart": (Pack, {"policies": {"a": "0:1", "b": "1:2", "prey": "2:3"}}),
    "large pack": (LargePack, {}),
}


class Others(dict):
    """The directories of `RUNS`, which are trained when they are asked for."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, name):
        env, settings = RUNS[name]
        self[name] = train(self.folder / str(len(self)), env, **settings).dir
        return self[name]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return Others(tmp_path_factory.mktemp("others"))


def sides_for(env, policies=None):
    spec = env_spec(EnvMaker(env, native=isinstance(env, str)))
    sides = sides_of(assign_agents(policies or {}, spec), league=True)
    return {side: (agents, spec.for_agents(agents)) for side, (_, agents) in sides.items()}


def assert_equal(module, other):
    one, two = module.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def test_a_member_s_policy_is_the_one_that_was_trained(others):
    sides = sides_for(RPS)
    assert list(sides) == ["default.0", "default.1"]
    for name in ("a2c", "dqn"):
        loaded = MemberLoader(sides).load(str(others[name]))
        trained = headrace.load_policy(others[name])
        for side in sides:
            assert_equal(loaded[side].module, trained.module)
            assert not any(of.requires_grad for of in loaded[side].module.parameters())
    by_side = MemberLoader(sides_for(Pack)).load(str(others["pack"]))
    for side in ("hunter", "prey"):
        trained = headrace.load_policy(others["pack"], policy=side)
        assert_equal(by_side[side].module, trained.module)


def test_policies_that_travel_as_data_are_the_same(tmp_path, others):
    """A machine that cannot see the directory has all that it needs."""
    run = train(tmp_path / "r", league=2, snapshot_every=128)
    snapshot = tmp_path / "r" / FOLDER / f"step_{128:012d}"
    for source, sides in (
        (snapshot, sides_for(RPS)), (others["dqn"], sides_for(RPS)), (run.dir, sides_for(RPS)),
        (others["pack"], sides_for(Pack)),
    ):  # fmt: skip
        loader = MemberLoader(sides)
        here = loader.load(str(source))
        gone = str(tmp_path / "not on this machine")
        pool = Pool((1,), (1.0,), 0.0, ("random", gone), {1: packed(source)})
        there = loader(pool, 1)
        assert there.keys() == here.keys() == sides.keys()
        for side in sides:
            assert_equal(there[side].module, here[side].module)
            assert there[side].spec == here[side].spec
            assert there[side].network == here[side].network
        with pytest.raises(CheckpointError, match="There is no directory"):
            loader(Pool((1,), (1.0,), 0.0, ("random", gone)), 1)
        bare = Pool((0, 1), (1.0, 1.0), 0.0, ("random", str(source)))
        assert with_policies(bare, [0, 1]).data == pool.data  # who is random needs none


def record_of(run):
    return checkpoint.newest(run.dir).manifest["league"]


def test_runs_of_other_algorithms_and_a_random_player_are_met(tmp_path, others):
    members = (str(others["a2c"]), "random", str(others["dqn"]))
    run = train(tmp_path / "r", league=4, league_members=members, latest_ratio=0.2)
    record = record_of(run)
    assert [of["source"] for of in record["members"]][:4] == [*members, f"step_{0:012d}"]
    assert all(of["games"] > 10 for of in record["members"][:3])
    alone = train(tmp_path / "2", league=3, league_members=members, snapshot_every=-1)
    assert [of["source"] for of in record_of(alone)["members"]] == list(members)
    assert not (alone.dir / FOLDER).exists()


def test_a_game_s_agents_may_be_shared_out_in_another_way(tmp_path, others):
    one, two = (str(others[name]) for name in ("pack, one policy", "pack"))
    for k, (members, policies) in enumerate((((one, two), {}), ((two, one), {"all": ":"}))):
        run = train(
            tmp_path / str(k), Pack, league=3, league_members=members, policies=policies,
            latest_ratio=0.0,
        )  # fmt: skip
        assert all(of["games"] > 3 for of in record_of(run)["members"][:2])


@pytest.mark.parametrize(
    ("name", "env", "message"),
    [
        ("pack", RPS, r"The policies of .* act for 3 agents, and this game has 2\.\nA memb"),
        ("other spaces", RPS, r"is of another environment \(.*Takes, not .*RockPaperScissors-v0\)"),
        ("large pack", Pack, "act for 4 agents, and this game has 3"),
        ("pack, hunters apart", Pack, r"no policy for all agents 0:2 together(.|\n)*same game"),
        ("core", RPS, "has a recurrent core, and members of a league have no memory.\nName a"),
        ("nowhere", RPS, "There is no directory .*nowhere"),
    ],
)
def test_what_cannot_play_is_refused_before_the_run_begins(tmp_path, others, name, env, message):
    source = str(others[name] if name in RUNS else tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path / "r", env, league=3, league_members=("random", source))
    assert not (tmp_path / "r").exists()


def test_a_league_of_one_agent_is_refused(tmp_path):
    with pytest.raises(headrace.errors.ConfigError, match="CartPole-v1 has one agent: expected a"):
        train(tmp_path / "r", "CartPole-v1", league=3)
    assert not (tmp_path / "r").exists()


def test_a_damaged_snapshot_is_not_played(tmp_path):
    """The run goes on with whole ones alone, or ends with the name of the file."""
    run = train(tmp_path / "r", league=2, snapshot_every=128)
    for saved in (run.dir / FOLDER).glob("step_*"):
        file = saved / "policy_default.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"policy_default.safetensors is damaged"):
        headrace.resume(run.dir, total_env_steps=5 * 128, quiet=True)


def test_a_run_goes_on_when_a_member_s_run_has_moved_only_if_it_is_put_back(tmp_path, others):
    source = tmp_path / "member"
    shutil.copytree(others["a2c"], source)
    run = train(tmp_path / "r", league=2, league_members=(str(source),))
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"There is no directory .*member"):
        headrace.resume(run.dir, total_env_steps=5 * 128, quiet=True)
    (tmp_path / "elsewhere").rename(source)
    assert headrace.resume(run.dir, total_env_steps=5 * 128, quiet=True).summary["env_steps"] == 640
    assert json.loads((run.dir / "config.json").read_text())["settings"]["league"] == 2
