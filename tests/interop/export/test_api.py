"""`headrace export` as its users meet it: in real environments, and where it refuses."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import headrace
from headrace.catalog import extras
from headrace.cli.main import _main
from headrace.errors import CheckpointError, ConfigError, ExportError, MissingExtraError
from headrace.interop.export import programs
from headrace.interop.export.check import Comparer
from headrace.interop.export.programs import METADATA_FILE
from headrace.interop.export.to_onnx import OnnxSession
from headrace.models.policy import Policy
from headrace.spec import Space
from headrace.storage import checkpoint
from tests.envs.games.support import Camp
from tests.interop.export import cases
from tests.marks import repeats
from tests.models.test_custom import Linear
from tests.models.test_masks import Refusing
from tests.project.test_project import ROOT

SETTINGS = {"num_envs": 4, "num_steps": 16, "envs_per_vector": 4, "quiet": True, "seed": 1}
PAGE = (ROOT / "docs/export.md").read_text()
RUNNER, EPISODE, PROGRAM = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def train(path, env="CartPole-v1", steps=512, **more):
    settings = {"num_minibatches": 4} if "algo" not in more else {}
    return headrace.train(
        env, run_dir=path / "run", total_env_steps=steps, **SETTINGS | settings | more
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("cartpole"), eval_every=256, normalize_obs=True)


def agent_of(path):
    """The runner of docs/export.md."""
    names = {}
    exec(RUNNER, names)
    return names["Agent"](str(path))


def episodes(make, act, begin, count=3):
    """Actions and return of each episode of a plain loop."""
    env, played = make(), []
    for seed in range(count):
        obs, info = env.reset(seed=seed)
        begin()
        actions, total, over = [], 0.0, False
        while not over:
            action = act(obs, info)
            obs, reward, terminated, truncated, info = env.step(action)
            actions.append(np.asarray(action))
            total, over = total + reward, terminated or truncated
        played.append((np.stack(actions), total))
    env.close()
    return played


ENVS = {
    "CartPole": dict(env="CartPole-v1", normalize_obs=True),
    "masked": dict(env=Refusing),
    "recurrent": dict(env="CartPole-v1", core="lstm", num_minibatches=2),
    "Pendulum": dict(env="Pendulum-v1", algo="sac", learning_starts=64, hidden_sizes=(32, 32)),
}


@repeats("name", ENVS, keep=3)
def test_an_exported_policy_plays_each_episode_as_the_policy(name, tmp_path):
    run = train(tmp_path, **ENVS[name])
    env = ENVS[name]["env"]
    given = {} if isinstance(env, str) else {"env": env}
    result = headrace.export_policy(run.dir, **given)
    assert [check.of for check in result.checks][1].startswith("512 observations of")
    agent, policy = agent_of(result.path), headrace.load_policy(run.dir)
    is_masked = name == "masked"

    def exported(obs, info):
        mask = {"action_mask": info["action_mask"]} if is_masked else {}
        return agent({"obs": obs} | mask)["action"][0]

    def native(obs, info):
        return policy(obs, info["action_mask"]) if is_masked else policy(obs)

    make = env if is_masked else lambda: gym.make(env)
    ours = episodes(make, exported, agent.reset)
    theirs = episodes(make, native, policy.reset)
    if name == "recurrent":  # the same memory at the end of the last episode
        np.testing.assert_allclose(agent.state, policy._memory, atol=1e-5)
        assert np.abs(agent.state).max() > 0.01
    for (actions, total), (own_actions, own_total) in zip(ours, theirs, strict=True):
        assert actions.dtype == own_actions.dtype or name != "Pendulum"
        np.testing.assert_allclose(actions, own_actions, atol=1e-3 if name == "Pendulum" else 0)
        assert total == pytest.approx(own_total, abs=1e-2 if name == "Pendulum" else 0)


def test_the_page_s_program_plays_where_headrace_and_torch_are_not(run, tmp_path):
    headrace.export_policy(run.dir, tmp_path / "policy.onnx")
    without = "import sys; sys.modules |= dict.fromkeys(('headrace', 'torch'))\n"
    done = subprocess.run(
        [sys.executable, "-c", without + RUNNER + EPISODE], cwd=tmp_path, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policy = run.policy
    [(_, own)] = episodes(
        lambda: gym.make("CartPole-v1"), lambda obs, _: policy(obs), policy.reset, 1
    )
    assert float(done.stdout) == own
    assert len(RUNNER.splitlines()) < 36


def test_the_page_s_program_of_torch_acts_where_headrace_is_not(run, tmp_path):
    headrace.export_policy(run.dir, tmp_path / "policy.pt2")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['headrace'] = None\n" + PROGRAM],
        cwd=tmp_path, text=True, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == run.policy(gym.make("CartPole-v1").reset(seed=0)[0])


@pytest.mark.parametrize(("suffix", "number"), [("onnx", 0), ("pt2", "action")])
def test_the_call_that_is_printed_calls_the_file(run, tmp_path, suffix, number):
    exported = headrace.export_policy(run.dir, tmp_path / f"policy.{suffix}")
    (call,) = re.findall("^To call it: (.*)$", exported.describe(), re.MULTILINE)
    obs = np.ones((3, 4), np.float32)
    code = call.replace("...", "obs" if suffix == "onnx" else "torch.from_numpy(obs)")
    outputs = eval(code, {"onnxruntime": onnxruntime, "torch": torch, "obs": obs})
    assert np.asarray(outputs[number]).tolist() == run.policy(obs).tolist()


def test_the_best_policy_is_exported_beside_the_newest(run):
    newest = headrace.export_policy(run.dir)
    best = headrace.export_policy(run.dir, best=True)
    assert best.path == run.dir / "best/policy.onnx"
    saved = checkpoint.newest(run.dir / "best")
    assert best.metadata["checkpoint_sha256"] == saved.sha256
    assert int(best.metadata["env_steps"]) == saved.env_steps
    assert newest.metadata["env_steps"] == "512"
    written = json.loads((checkpoint.newest(run.dir).path / "manifest.json").read_text())
    assert newest.metadata["checkpoint_sha256"] == written["sha256"]


def test_files_say_what_they_are(run):
    onnx_file = headrace.export_policy(run.dir)
    props = {p.key: p.value for p in onnx.load(onnx_file.path).metadata_props}
    assert props == onnx_file.metadata
    assert props["headrace"] == headrace.__version__
    assert (props["actions"], props["policy"], props["algo"]) == ("greedy", "default", "ppo")
    assert headrace.EnvSpec.from_json(json.loads(props["spec"])) == run.policy.spec
    program = headrace.export_policy(run.dir, format="torch-export", stochastic=True)
    assert program.path == run.dir / "policy_stochastic.pt2"
    files = {METADATA_FILE: ""}
    torch.export.load(program.path, extra_files=files)
    assert json.loads(files[METADATA_FILE]) == program.metadata
    assert program.metadata["actions"] == "stochastic"


@repeats("case", cases.SOME, ids=lambda case: ", ".join(case))
def test_a_program_of_torch_export_acts_as_the_policy(case, tmp_path):
    result = headrace.export_policy(
        cases.save(tmp_path, case), format="torch-export", stochastic=True
    )
    [check] = result.checks
    assert (check.rows, check.different, check.beyond_rounding) == (1024, 0, ())
    names = {str(node.target) for node in torch.export.load(result.path).graph.nodes}
    assert not [name for name in names if "lstm" in name or "gru" in name]


def test_each_of_several_policies_is_exported(tmp_path, capsys):
    run = headrace.train(
        Camp, run_dir=tmp_path / "run", total_env_steps=128, policies={"a": "0:3", "b": "3:4"},
        frozen={"b": "random"}, num_minibatches=4, agent_ids=True,
        **SETTINGS,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"holds the policies a and b.*\n.*export --policy a"):
        headrace.export_policy(run.dir)
    result = headrace.export_policy(run.dir, policy="a", env=Camp)
    assert result.path == run.dir / "policy_a.onnx"
    assert [check.ok for check in result.checks] == [True, True]
    agent = agent_of(result.path)
    obs = np.array([0.5, 2.0, -3.0])
    own = headrace.load_policy(run.dir, policy="a")(obs, agent=1)
    np.testing.assert_allclose(agent({"obs": obs, "agent": 1})["action"][0], own, atol=1e-5)
    with pytest.raises(ConfigError, match=r"acts at random.*\n.*Use --stochastic"):
        headrace.export_policy(run.dir, policy="b")
    with pytest.raises(ConfigError, match="acts at random"):
        headrace.export_policy(checkpoint.newest(run.dir).path, policy="b")
    assert _main(["export", str(run.dir), "--policy", "b", "--stochastic", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(run.dir / "policy_b_stochastic.onnx")
    assert "--env" in said["notes"][0]


def test_an_environment_that_is_named_and_cannot_be_made_is_refused(run, tmp_path):
    with pytest.raises(headrace.errors.UsageError, match="There is no module 'nonsense'"):
        headrace.export_policy(run.dir, tmp_path / "new.onnx", env="nonsense:thing")
    assert not (tmp_path / "new.onnx").exists()


class Branching(Linear):
    def forward(self, obs):
        return super().forward(self.shifted(obs))

    def shifted(self, obs):
        return obs + 1 if obs.sum() > 0 else obs  # a branch on a value


class Bessel(Linear):
    def forward(self, obs):
        return super().forward(torch.special.bessel_j0(obs))  # no such operation


class Counts(Linear):
    def forward(self, obs):
        return super().forward(obs.reshape(len(obs), -1))


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branching, "# a branch on a value"), (Bessel, "# no such operation")],
)
def test_a_network_that_cannot_be_exported_is_refused_by_its_line(model, line, tmp_path):
    saved = cases.save_policy(tmp_path, *of_own(), model)
    with pytest.raises(ExportError) as refused:
        headrace.export_policy(saved, model=model)
    source = Path(__file__).read_text().splitlines()
    number = next(i for i, text in enumerate(source, 1) if text.endswith(line))
    assert f"{__file__}:{number}\n    {source[number - 1].strip()}" in str(refused.value)
    assert not list(saved.glob("*.onnx"))


def of_own():
    head = cases.HEADS["PPO, Discrete"]
    return head, cases.spec_of(head, cases.NUMBERS)


@repeats("model", [Counts, Linear])
def test_an_own_network_is_exported(model, tmp_path):
    saved = cases.save_policy(tmp_path, *of_own(), model)
    with pytest.raises(ConfigError, match="a network of its own"):
        headrace.export_policy(saved)
    assert headrace.export_policy(saved, model=model).ok


class Biased(nn.Module):
    """Takes the place of a file, and gives something else."""

    def __init__(self, path, name, wrong):
        super().__init__()
        self.session, self.name, self.wrong = OnnxSession(path), "a biased one", (name, wrong)

    def __call__(self, inputs):
        outputs, (name, wrong) = self.session(inputs), self.wrong
        return outputs | {name: wrong(outputs[name])}


def flipped(action):
    """One of the rows that are computed at once: another choice of -1, 0 and 1."""
    others = action.copy()
    others[1:2] = (action[1:2] + 2) % 3 - 1
    return others


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("action", flipped, r"1,023 of 1,024 actions equal, 1 DIFFER.*\n    Row 4: action is"),
        ("action", lambda a: a.astype(np.int32), "1,024 DIFFER"),
        ("params", lambda params: params * np.float32(1.01), "params DIFFERS"),
        ("value", lambda value: value + np.float32(0.1), "value DIFFERS"),
    ],
)
def test_a_file_that_differs_is_kept_and_said_to_differ(name, wrong, says, tmp_path, monkeypatch):
    from headrace.interop.export import api

    monkeypatch.setattr(api, "OnnxSession", lambda path: Biased(path, name, wrong))
    saved = cases.save(tmp_path, cases.EACH)
    with pytest.raises(ExportError, match=says):
        headrace.export_policy(saved, value=name == "value")
    assert (saved / "policy.onnx").is_file()


def test_a_wide_component_of_an_action_does_not_hide_what_a_narrow_one_does(tmp_path, monkeypatch):
    from headrace.interop.export import api

    action = Space("box", (2,), "float32", (-1.0, -20_000.0), (1.0, 20_000.0))
    head = dataclasses.replace(cases.HEADS["PPO, Box"], action=action)
    saved = cases.save_policy(tmp_path, head, cases.spec_of(head, cases.NUMBERS))
    assert headrace.export_policy(saved).ok

    def turned(action):
        return action * np.float32([-1, 1])

    monkeypatch.setattr(api, "OnnxSession", lambda path: Biased(path, "action", turned))
    with pytest.raises(ExportError, match=r"\d DIFFER"):
        headrace.export_policy(saved)


def test_a_choice_that_rounding_decides_is_a_tie(tmp_path, monkeypatch):
    from headrace.interop.export import api

    saved = cases.save(tmp_path, cases.EACH)
    policy = headrace.load_policy(saved)
    with torch.no_grad():  # two logits of each row are the same
        policy.module.model.actor.weight[1] = policy.module.model.actor.weight[0]
        policy.module.model.actor.bias[1] = policy.module.model.actor.bias[0]
    described = checkpoint.newest(saved).manifest["policies"]
    same = checkpoint.write(
        tmp_path / "same", 1, {"policy_default": policy.module.state_dict()},
        {"policies": described},
    ).parent  # fmt: skip

    def nudged(path):
        return Biased(path, "params", lambda params: params + np.float32([0, 1e-6, 0]))

    def taking_the_other(path):
        session = nudged(path)

        def compute(inputs):
            outputs = session(inputs)
            return outputs | {"action": outputs["params"].argmax(-1) - 1}

        compute.name = "another rounding"
        return compute

    monkeypatch.setattr(api, "OnnxSession", taking_the_other)
    [check] = headrace.export_policy(same).checks
    assert check.ties > 100
    assert check.identical + check.ties == 1024


class Contrary(Policy):
    """Does not act by its head."""

    def act_greedily(self, obs, state=None):
        return {"action": self(obs)[0].argmin(-1)}


def test_a_policy_that_does_not_act_by_its_head_is_no_tie(tmp_path):
    saved = cases.save(tmp_path, cases.EACH)
    path = headrace.export_policy(saved).path
    policy = headrace.load_policy(saved)
    policy.module.__class__ = Contrary
    obs = cases.observations(policy, 100)
    check = Comparer(policy, stochastic=False).compare(OnnxSession(path), obs, 100, "some")
    assert (check.different, check.ties, check.ok) == (100, 0, False)


def test_without_its_packages_onnx_is_refused_with_the_extra(run, monkeypatch, capsys):
    have = extras.version
    monkeypatch.setattr(extras, "version", lambda n: None if n == "onnxscript" else have(n))
    with pytest.raises(MissingExtraError, match=r"onnxscript must be installed.*\n.*\[export\]"):
        headrace.export_policy(run.dir)
    assert headrace.export_policy(run.dir, format="torch-export").ok


def test_what_cannot_be_is_refused(run, tmp_path):
    for match, given in {
        "expected one of onnx, torch-export": {"format": "torchscript"},
        "holds one policy, 'default'": {"policy": "tagger"},
        "takes no model": {"model": Linear},
        "cannot be written.*\n.*--output": {"output": "/proc/nowhere/policy.onnx"},
    }.items():
        with pytest.raises(headrace.HeadraceError, match=match):
            headrace.export_policy(run.dir, **given)
    with pytest.raises(ConfigError, match="no best policy"):
        headrace.export_policy(train(tmp_path, steps=64).dir, best=True)
    saved = cases.save(tmp_path / "sac", ("SAC, Box", "Box of numbers", "none"))
    with pytest.raises(ConfigError, match=r"--value.*critics are apart"):
        headrace.export_policy(saved, value=True)


def test_the_command_prints_the_check_and_nothing_of_torch_s(run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "export", str(run.dir), "-o", "new/a.onnx"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Wrote new/a.onnx (")
    assert lines[-2].startswith("  1,024 random observations: 1,024 of 1,024 actions equal")
    assert lines[-1].startswith("  512 observations of CartPole-v1: 512 of 512 actions equal")


def test_the_command_takes_a_network_and_an_algorithm_of_one_s_own(tmp_path, capsys):
    own = {"model": "tests.models.test_custom:Linear", "algo": "examples.own_algorithm:Reinforce"}
    path = train(tmp_path, steps=64, **own).dir
    flags = [word for name, of in own.items() for word in (f"--{name}", of)]
    assert _main(["export", str(path), *flags]) == 0
    assert "512 of 512 actions equal" in capsys.readouterr().out


def test_the_table_of_the_page_is_what_was_measured_of_all_pairs():
    results = json.loads(cases.RESULTS.read_text())
    assert f"<!-- covered:begin -->\n{cases.table(results)}\n<!-- covered:end -->" in PAGE
    assert {tuple(row["case"]) for row in results["cases"]} == set(cases.pairs())
    assert all(row["check"]["ok"] for row in results["cases"])


def test_quiet_leaves_logging_as_it_was(capsys):
    import logging

    with programs.quiet():
        print("chatter")
        logging.getLogger("torch").error("chatter")
    assert logging.root.manager.disable == logging.NOTSET
    assert capsys.readouterr() == ("", "")
