"""Several policies: who acts for whom, what each learns from, and what does not learn."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import headrace
from headrace.cli import main
from headrace.collectors.device import DeviceCollector
from headrace.config.policies import assign_agents
from headrace.config.resolve import read_config_file, resolve
from headrace.errors import CheckpointError, ConfigError, NonFiniteError
from headrace.learner.learner import Learner, PolicyLearner
from headrace.meter import Meter
from headrace.spec import Agents
from headrace.storage import checkpoint
from headrace.tools import plotting
from tests.envs.kernels.support import Ring
from tests.marks import repeats
from tests.support import never, plan_for, policy_plan

CPU = torch.device("cpu")
SETTINGS = {"num_envs": 4, "num_steps": 16, "seed": 5, "quiet": True, "vectorization": "native"}
UPDATE = 64


@pytest.fixture(scope="module")
def spec():
    return plan_for(Ring, native=True).spec


def test_each_role_has_a_policy_unless_told_otherwise(spec):
    roles = {"first": Agents(0, 2), "second": Agents(2, 1)}
    assert assign_agents({}, spec) == roles
    assert assign_agents({"second": {"lr": 1.0}}, spec) == roles
    assert assign_agents({"all": ":"}, spec) == {"all": Agents(0, 3)}
    other = {"b": {"agents": "1:3", "lr": 1.0}, "a": "0:1"}
    assert list(assign_agents(other, spec).items()) == [("a", Agents(0, 1)), ("b", Agents(1, 2))]
    assert assign_agents({"second": None, "a": "0:2"}, spec) == {"a": Agents(0, 2)} | {
        "second": Agents(2, 1)
    }
    alone = plan_for(lambda: __import__("gymnasium").make("CartPole-v1")).spec
    assert assign_agents({}, alone) == {"default": Agents(0, 1)}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": "0:2"}, "agent 2 of Ring is of none"),
        ({"a": "0:2", "b": "1:3"}, "agent 1 of Ring is of a and b"),
        ({"a": "0:4"}, "within 0:3"),
        ({"a": "2:2"}, "expected agents as first:end"),
        ({"a": "x"}, "expected agents as first:end"),
        ({"a": 3}, "expected agents as first:end"),
        ({"secondx": {"lr": 1.0}}, "Did you mean second"),
        ({"../x": "0:3"}, "expected a name of letters"),
    ],
)
def test_policies_that_do_not_fit_are_refused(spec, policies, message):
    with pytest.raises(ConfigError, match=message):
        assign_agents(policies, spec)


def test_a_policy_has_settings_of_its_own(tmp_path):
    file = tmp_path / "ring.toml"
    file.write_text(
        "lr = 1e-3\nhidden_sizes = [16]\n[policies.second]\nlr = 5e-3\nhidden_sizes = [4, 4]\n"
    )
    settings = resolve({"env": "x:Ring"}, read_config_file(file))
    assert settings.of("first").algo.lr == 1e-3
    assert settings.of("second").algo.lr == 5e-3
    assert settings.of("second").network.hidden_sizes == (4, 4)
    assert settings.of("second").algo.gamma == settings.algo.gamma
    for wrong, message in (
        ({"num_envs": 3}, "Unknown setting 'num_envs' .policies.second"),
        ({"lr": "x"}, "lr='x' .policies.second.: expected float"),
        ({"lr": -1.0}, r"lr=-1.0 \(policies.second\): expected at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve({"env": "x:Ring", "policies": {"second": wrong}})


def batch_of_each(settings, spec, team, num_batches=1):
    plan = plan_for(
        Ring, num_envs=4, envs_per_vector=4, num_steps=16, native=True,
        network=settings.network,
    )  # fmt: skip
    policies = {
        name: policy_plan(spec, team.networks[name], share, learns=name in team.learners)
        for name, share in assign_agents({}, spec).items()
    }
    collector = DeviceCollector(replace(plan, policies=policies), CPU, Meter(), never)
    for version in range(num_batches):
        collector.publish(team.policies, version)
        collected = collector.collect()
        yield collected.fragments
    collector.close()


def test_each_policy_learns_from_its_own_agents_and_nothing_else(spec):
    settings = resolve({"env": "x:Ring", "num_envs": 4, "num_steps": 16})
    shares = assign_agents({}, spec)
    team = Learner(settings, shares, spec, None, CPU, Meter())
    alone = {
        name: PolicyLearner(settings, spec, None, CPU, Meter(), name=name, num_agents=share.size)
        for name, share in shares.items()
    }
    weights = [dict(policy.state_dict()) for policy in team.policies.values()]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for fragments in batch_of_each(settings, spec, team, 2):
        metrics = team.update(team.assemble(fragments), 0)
        for (name, learner), fragment in zip(alone.items(), fragments, strict=True):
            expected = learner.update(learner.assemble([fragment]), 0)
            assert metrics[f"{name}/loss"] == expected["loss"]
            for key, tensor in learner.policy.state_dict().items():
                assert torch.equal(tensor, team.policies[name].state_dict()[key]), key


def test_rows_of_agents_that_left_teach_nothing(spec):
    settings = resolve({"env": "x:Ring", "num_envs": 4, "num_steps": 16})
    shares = assign_agents({}, spec)
    teams = [Learner(settings, shares, spec, None, CPU, Meter()) for _ in range(2)]
    (fragments,) = batch_of_each(settings, spec, teams[0])
    teams[0].update(teams[0].assemble(fragments), 0)
    gone = ~fragments[0].valid
    assert gone.any()
    fragments[0].obs[:-1][gone] = 100.0
    fragments[0].action[gone] = 0
    fragments[0].stored_outputs["log_prob"][gone] = -3.0
    teams[1].update(teams[1].assemble(fragments), 0)
    for one, other in zip(*(team.policies.values() for team in teams), strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def train(tmp_path, name, updates=3, **more):
    return headrace.train(
        Ring, run_dir=tmp_path / name, total_env_steps=updates * UPDATE, **SETTINGS | more
    )


def test_start_of_a_run_shows_what_computes_for_each_policy(tmp_path, capsys):
    train(tmp_path, "r", updates=1, policies={"second": {"arithmetic": "plain"}}, quiet=False)
    assert "act = numpy and torch (--arithmetic plain), gradient" in capsys.readouterr().out


def test_a_run_with_two_policies_is_saved_evaluated_and_loaded(tmp_path):
    run = train(tmp_path, "r", policies={"second": {"hidden_sizes": [4]}})
    files = {path.name for path in (tmp_path / "r/checkpoints/latest").parent.glob("step_*/*")}
    assert {"policy_first.safetensors", "learner_second.safetensors"} <= files
    assert set(run.summary["mean_return_by_policy"]) == {"first", "second"}
    assert 0 < run.summary["agent_steps"] < 3 * run.summary["env_steps"]
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert {"first/loss", "second/entropy", "first/mean_return", "agent_steps"} <= rows[-1].keys()
    assert set(run.policies) == {"first", "second"}
    shape = run.policies["second"].module.model.actor.weight.shape
    assert shape == (5, 4)
    assert headrace.load_policy(run.dir, policy="second")(np.zeros(4, np.float32)).shape == (2,)
    with pytest.raises(CheckpointError, match="policies first and second"):
        headrace.load_policy(run.dir)
    played = run.evaluate(episodes=5)
    assert len(played.by_policy["first"]) == len(played.returns) == 5
    for whole, first, second in zip(played.returns, *played.by_policy.values(), strict=True):
        assert whole == pytest.approx((2 * first + second) / 3)


@repeats(("frozen", "core"), [({}, "none"), ({"first": "random"}, "none"), ({}, "gru")])
def test_a_run_with_two_policies_goes_on_as_if_uninterrupted(tmp_path, frozen, core):
    more = {"frozen": frozen, "network": headrace.Network(core=core, core_size=4)}

    def weights(run):
        saved = checkpoint.newest(run.dir)
        names = [name.removesuffix(".safetensors") for name in saved.manifest["files"]]
        return {f"{n}.{key}": t for n in names for key, t in saved.tensors(n).items()}

    whole = train(tmp_path, "whole", 4, **more)
    train(tmp_path, "part", 2, **more)
    resumed = headrace.resume(tmp_path / "part", env=Ring, total_env_steps=4 * UPDATE, quiet=True)
    one, other = weights(whole), weights(resumed)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    for name in ("mean_return", "mean_return_by_policy", "agent_steps", "learner_steps"):
        assert whole.summary[name] == resumed.summary[name], name


def test_a_frozen_policy_is_another_runs_and_stays_as_it_is(tmp_path):
    first = train(tmp_path, "first", policies={"second": {"hidden_sizes": [4]}})
    run = train(tmp_path, "next", frozen={"second": str(first.dir)})
    before, after = (r.policies["second"].module.state_dict() for r in (first, run))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    # Also when that run is gone
    first.dir.rename(tmp_path / "elsewhere")
    resumed = headrace.resume(run.dir, env=Ring, total_env_steps=5 * UPDATE, quiet=True)
    for name, tensor in before.items():
        assert torch.equal(tensor, resumed.policies["second"].module.state_dict()[name]), name
    assert "second/loss" not in (run.dir / "metrics.jsonl").read_text()


def test_a_random_policy_is_uniform(tmp_path):
    run = train(tmp_path, "r", frozen={"first": "random"})
    module = run.policies["first"].module
    params, _ = module(torch.randn(50, 4) * 10)
    assert (params == params[0, 0]).all()


@pytest.mark.more
def test_a_random_policy_plays_random_actions_where_others_are_greedy(tmp_path, capsys):
    more = {"seed": 0, "eval_every": 3 * UPDATE, "eval_episodes": 40}
    run = train(tmp_path, "r", frozen={"first": "random"}, **more)
    actions = run.episode()["action"][1:, :2].reshape(-1, 2)
    assert len(np.unique(actions, axis=0)) > 1
    found = np.mean(run.evaluate(40).returns)
    constant = run.policies["first"]
    constant.is_random = False  # the likeliest of equally likely actions is always the same
    assert np.mean(run.evaluate(40, policies={"first": constant}).returns) != found
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval_return"] == pytest.approx(found)
    trained = train(tmp_path, "t")
    played = trained.evaluate(40, policies={"first": run.policies["first"]}).by_policy["second"]
    for of, flags, expected in (
        (run, [], run.evaluate(40).by_policy["second"]),
        (trained, ["--frozen", "first=random"], played),
    ):
        argv = ["eval", str(of.dir), "--episodes", "40", "--json", *flags]
        assert main._main([*argv, "--env", "tests.envs.kernels.support:Ring"]) == 0
        means = json.loads(capsys.readouterr().out.splitlines()[-1])["mean_return_by_policy"]
        assert means["second"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"frozen": {"third": "random"}}, "there is no policy 'third', but first, second"),
        ({"frozen": {"first": "random", "second": "random"}}, "are frozen.\nLeave one out"),
        ({"envs_per_vector": 2}, "envs_per_vector=2, but of Ring all .* one vector: all 4"),
        ({"lag": 1}, "lag=1, but of Ring all are stepped together"),
        ({"frozen": {"first": "nowhere"}}, "There is no directory nowhere"),
    ],
)
def test_what_does_not_go_with_several_policies_is_refused(tmp_path, more, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train(tmp_path, "r", **more)
    assert not (tmp_path / "r/config.json").exists()


def test_flags_name_policies(tmp_path, capsys):
    game, here = "tests.envs.kernels.support:Ring", str(tmp_path / "r")
    flags = (
        "--vectorization native --num-envs 4 --num-steps 16 --total-env-steps 64 "
        "--policies a=0:1 b=1:3 --frozen a=random --json"
    )
    assert main._main(["train", game, *flags.split(), "--run-dir", here]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)["mean_return_by_policy"]) == {"a", "b"}
    number = r"-?\d+\.\d"
    assert re.search(f"return a {number}, b {number} ", err)  # progress
    assert re.search(f"the last episodes a {number}, b {number}\\.", err)
    label = "tests.envs.kernels.support:Ring ppo seed 0"
    lines = list(plotting.curves(tmp_path / "r"))
    assert [line[0] for line in lines] == [f"{label}: a", f"{label}: b"]
    assert [line[1].env_steps.tolist() for line in lines] == [[64], [64]]
    assert main._main(["eval", here, "--episodes", "3", "--env", game]) == 0
    out, _ = capsys.readouterr()
    assert "\n  a: " in out
    assert "\n  b: " in out


def mean_of(run, name, capsys, *flags):
    """The mean return of a policy, by `headrace eval`."""
    argv = ["eval", str(run.dir), "--episodes", "40", "--stochastic", "--json", *flags]
    assert main._main([*argv, "--env", "tests.envs.kernels.support:Ring"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["mean_return_by_policy"][name]


@pytest.mark.more
def test_others_play_in_place_of_a_run_s_own(tmp_path, capsys):
    shares = {"a": "0:1", "b": "1:3"}
    run = train(tmp_path, "r", policies=shares, updates=20)
    other = train(tmp_path, "o", policies={"one": "0:1", "two": "1:3"}, frozen={"two": "random"})
    found = [
        mean_of(run, "b", capsys, *flags)
        for flags in ([], ["--frozen", f"b={other.dir}:two"], ["--frozen", "b=random"])
    ]
    assert found[0] != found[1] == found[2]
    with_theirs = run.evaluate(40, stochastic=True, policies={"b": other.policies["two"]})
    assert np.mean(with_theirs.by_policy["b"]) == pytest.approx(found[1])
    with pytest.raises(ConfigError, match="this run has a, b"):
        run.evaluate(1, policies={"c": other.policies["two"]})
    argv = ["eval", str(run.dir), "--env", "tests.envs.kernels.support:Ring", "--frozen"]
    for given, told in (("c=random", "there is no policy 'c', but a, b"),
                        (f"b={other.dir}", "--frozen b=RUN_DIR:one")):  # fmt: skip
        assert main._main([*argv, given]) != 0
        assert told in capsys.readouterr().err
    again = train(tmp_path, "f", policies=shares, frozen={"b": f"{other.dir}:two"})
    goal = again.summary["env_steps"] + UPDATE
    gone_on = headrace.resume(again.dir, env=Ring, total_env_steps=goal, quiet=True)
    assert gone_on.summary["env_steps"] == goal


def test_a_file_has_settings_of_policies_that_flags_name(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[policies.a]\nlr = 0.5\n[policies.b]\nlr = 0.25\nagents = '1:3'\n")
    given = {"env": "e", "policies": {"a": "0:2", "b": "2:3"}}
    settings = resolve(given, read_config_file(file))
    assert settings.run.policies == {
        "a": {"agents": "0:2", "lr": 0.5}, "b": {"agents": "2:3", "lr": 0.25},
    }  # fmt: skip
    assert [settings.of(name).algo.lr for name in "ab"] == [0.5, 0.25]
    assert resolve({"env": "e", "policies": {"a": ":"}}).run.policies == {"a": ":"}


def test_batches_of_all_policies_are_kept_if_an_update_is_not_finite(tmp_path):
    with pytest.raises(NonFiniteError, match="The batch is in"):
        headrace.train(
            Ring, run_dir=tmp_path / "run", total_env_steps=10 * UPDATE,
            algo=headrace.PPO(lr=1e38), **SETTINGS,
        )  # fmt: skip
    (path,) = (tmp_path / "run").glob("bad_batch_*")
    assert {"first/reward", "second/reward"} <= set(load_file(path))
