"""Models of Stable-Baselines3, as it saves them, act the same as runs, and train on."""

import base64
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from examples.reach_goal import ReachGoal
from headrace.config.algorithms import ALGORITHMS
from headrace.errors import CheckpointError, RunDirError
from headrace.interop.import_sb3 import import_sb3
from headrace.interop.sb3_zip import read_model
from headrace.interop.share import pull, push
from headrace.models.policy import Network
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.tools.runs.records import load_runs
from headrace.training.job import RunRequest, job_of_run
from headrace.training.rank import build_learner
from tests import python
from tests.interop import support
from tests.marks import repeats

sb3 = pytest.importorskip("stable_baselines3")
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/import.md"
HERE = "tests.interop.support"
WIDE = {"policy_kwargs": {"net_arch": [16, 8], "activation_fn": torch.nn.ELU}}
ROLLOUT = {"n_steps": 32, "batch_size": 16}
REPLAY = {"buffer_size": 500, "learning_starts": 20}
OF_IMAGES = {"n_steps": 16, "batch_size": 8, "n_epochs": 1}
CASES = {  # name: algorithm, policy, environment, arguments
    "ppo choices": ("PPO", "MlpPolicy", "CartPole-v1", ROLLOUT),
    "ppo continuous": (
        "PPO",
        "MlpPolicy",
        f"{HERE}:steering",
        {"n_steps": 32, "batch_size": 16, **WIDE},
    ),
    "a2c": ("A2C", "MlpPolicy", "CartPole-v1", {}),
    "dqn": ("DQN", "MlpPolicy", "CartPole-v1", REPLAY),
    "sac": ("SAC", "MlpPolicy", f"{HERE}:steering", REPLAY | {"policy_kwargs": {"n_critics": 3}}),
    "ppo pictures": ("PPO", "CnnPolicy", f"{HERE}:pictures", OF_IMAGES),
    "ppo gears": ("PPO", "MlpPolicy", f"{HERE}:gears", ROLLOUT),
    "a2c steering": ("A2C", "MlpPolicy", f"{HERE}:steering", {}),
    "dqn pictures": ("DQN", "CnnPolicy", f"{HERE}:pictures", REPLAY),
    "sac goals": ("SAC", "MultiInputPolicy", f"{HERE}:goals", REPLAY | {"ent_coef": 0.1}),
    "ppo rooms": ("PPO", "MlpPolicy", f"{HERE}:rooms", ROLLOUT),
}
STEPS = 64


def env_of(name):
    """The environment itself, as Stable-Baselines3 takes it."""
    module, _, function = name.partition(":")
    return getattr(support, function)() if function else module


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of a case -> its model, and the file that it was saved to; each is trained once."""
    folder, made = tmp_path_factory.mktemp("sb3"), {}

    def get(name):
        if name not in made:
            algo, policy, env, kwargs = CASES[name]
            model = getattr(sb3, algo)(policy, env_of(env), seed=3, device="cpu", **kwargs)
            model.learn(STEPS)
            if policy == "CnnPolicy":
                spread(model, observations(env))
            path = folder / f"{name}.zip"
            model.save(path)
            made[name] = model, path
        return made[name]

    return get


def observations(env, count=1000):
    """Random observations, stacked as those of a vector of environments are."""
    env = env_of(env)
    space = gym.make(env).observation_space if isinstance(env, str) else env.observation_space
    space.seed(1)
    samples = [space.sample() for _ in range(count)]
    if isinstance(samples[0], dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    if space.dtype == np.uint8:  # of other colours each, or all would look alike to a network
        colours = np.random.default_rng(1).random((count, 1, 1, 3))
        samples = [
            (sample * colour).astype(np.uint8)
            for sample, colour in zip(samples, colours, strict=True)
        ]
    return np.stack(samples)


@torch.no_grad()
def spread(model, obs):
    """Shift the outputs for actions so that each is the largest one for some observations."""
    seen, _ = model.policy.obs_to_tensor(obs)
    if isinstance(model, sb3.DQN):
        model.q_net.q_net[-1].bias -= model.q_net(seen).mean(0)
    else:
        logits = model.policy.get_distribution(seen).distribution.logits
        model.policy.action_net.bias -= logits.mean(0)


def check_actions(policy, model, obs, seen=None):
    """Greedy actions are equal, those of continuous spaces within 1e-5."""
    theirs, _ = model.predict(obs if seen is None else seen, deterministic=True)
    ours = policy(obs)
    assert ours.shape == theirs.shape and len(theirs) == 1000
    assert len(np.unique(theirs)) > 1  # else it would show little
    if np.issubdtype(theirs.dtype, np.integer):
        np.testing.assert_array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def tensors_of(obs):
    if isinstance(obs, dict):
        return {key: torch.from_numpy(of) for key, of in obs.items()}
    return torch.from_numpy(obs)


@torch.no_grad()
def check_values(run_dir, model, obs, **seen):
    """Values, or values of actions, are equal within 1e-4 of their size."""
    policy, algo = headrace.load_policy(run_dir), type(model).__name__
    theirs, _ = model.policy.obs_to_tensor(seen.get("seen", obs))
    params, value = policy.module(tensors_of(obs))
    if algo in ("PPO", "A2C"):
        pairs = [(value, model.policy.predict_values(theirs)[:, 0])]
    elif algo == "DQN":
        pairs = [(params, model.q_net(theirs)), (value, model.q_net(theirs).amax(-1))]
        target = modules_of(run_dir)["target"]
        pairs.append((target(tensors_of(obs))[0], model.q_net_target(theirs)))
    else:
        action = torch.rand(len(value), model.action_space.shape[0]) * 2 - 1
        modules = modules_of(run_dir)
        pairs = [
            (modules[ours](tensors_of(obs), action)[:, :, 0], torch.cat(of(theirs, action), -1).T)
            for ours, of in (("critics", model.critic), ("target", model.critic_target))
        ]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def modules_of(run_dir, env=None):
    """The algorithm's modules, with the weights of the newest checkpoint."""
    name = rundir.read_config(run_dir)["settings"]["env"]
    newest = checkpoint.newest(run_dir)
    job = job_of_run(run_dir, RunRequest({}, name if ":" in name else env), saved=newest)
    learner = build_learner(job, torch.device("cpu"), headrace.meter.Meter())
    checkpoint.restore(learner.sections(), newest)
    return learner.learners["default"].modules


@repeats("name", CASES, keep=7)
def test_actions_and_values_are_those_of_stable_baselines3(name, saved, tmp_path):
    model, path = saved(name)
    imported = import_sb3(path, CASES[name][2], run_dir=tmp_path / "run")
    assert imported.env_steps == model.num_timesteps >= STEPS
    obs = observations(CASES[name][2])
    check_actions(headrace.load_policy(tmp_path / "run"), model, obs)
    check_values(tmp_path / "run", model, obs)


@pytest.mark.parametrize("name", ["ppo continuous", "sac"])
def test_deviations_of_actions_are_those_of_stable_baselines3(name, saved, tmp_path):
    model, path = saved(name)
    import_sb3(path, CASES[name][2], run_dir=tmp_path / "run")
    policy, obs = headrace.load_policy(tmp_path / "run"), observations(f"{HERE}:steering")
    low, high = (torch.tensor(of) for of in ([-2.0, 0.0], [1.0, 3.0]))
    with torch.no_grad():
        params, _ = policy.module(tensors_of(obs))
        if name == "sac":
            mean, log_std, _ = model.actor.get_action_dist_params(torch.from_numpy(obs))
            torch.testing.assert_close(params, torch.cat((mean, log_std), -1), rtol=0, atol=1e-5)
            assert modules_of(tmp_path / "run")["temperature"]() == model.log_ent_coef.exp()
        else:
            std = policy.module.head.log_std.exp() * (high - low) / 2
            torch.testing.assert_close(std, model.policy.log_std.exp())


def test_an_imported_run_explores_on_as_the_model_did(saved, tmp_path):
    model, path = saved("dqn")
    import_sb3(path, "CartPole-v1", run_dir=tmp_path / "dqn")
    epsilon = headrace.load_policy(tmp_path / "dqn").module.head.epsilon
    assert float(epsilon) == pytest.approx(model.exploration_rate)
    assert model.exploration_rate < 1
    import_sb3(saved("sac")[1], f"{HERE}:steering", run_dir=tmp_path / "sac")
    assert float(headrace.load_policy(tmp_path / "sac").module.head.is_random) == 0
    # Of two components there, of each here.
    assert saved("sac")[0].target_entropy == -2
    assert rundir.read_config(tmp_path / "sac")["settings"]["target_entropy"] == -1
    for name in ("dqn", "sac"):
        manifest = checkpoint.newest(tmp_path / name).manifest
        assert manifest["counters"]["env_steps"] == STEPS
        assert manifest["learner"]["learner_steps"] == saved(name)[0]._n_updates > 0


def test_hindsight_is_that_of_the_model(tmp_path):
    kwargs = {"n_sampled_goal": 3, "goal_selection_strategy": "final"}
    model = sb3.SAC(
        "MultiInputPolicy", ReachGoal(), replay_buffer_class=sb3.HerReplayBuffer,
        replay_buffer_kwargs=kwargs, device="cpu", buffer_size=100,
    )  # fmt: skip
    model.save(tmp_path / "model.zip")
    env = "examples.reach_goal:ReachGoal"
    imported = import_sb3(tmp_path / "model.zip", env, run_dir=tmp_path / "run")
    settings = rundir.read_config(tmp_path / "run")["settings"]
    assert settings["hindsight"] == 0.75
    assert "goal_selection_strategy='final': goals are of the future" in imported.notes


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    """A model that was trained with VecNormalize, its file, and that of its statistics."""
    folder = tmp_path_factory.mktemp("normalized")
    venv = VecNormalize(DummyVecEnv([support.steering, support.steering]))
    model = sb3.PPO("MlpPolicy", venv, n_steps=32, batch_size=16, seed=1, device="cpu")
    model.learn(STEPS)
    model.save(folder / "model.zip")
    venv.save(folder / "normalizer.pkl")
    (script,) = re.findall(r"```python\n(import pickle.*?)```", PAGE.read_text(), re.S)
    (folder / "script.py").write_text(script)
    subprocess.run(
        [sys.executable, "script.py", "normalizer.pkl", "normalizer.npz"], cwd=folder, check=True
    )
    return model, folder


def test_a_normalizer_comes_by_the_script_of_the_page(normalized, tmp_path):
    model, folder = normalized
    import_sb3(
        folder / "model.zip", f"{HERE}:steering",
        normalizer=folder / "normalizer.npz", run_dir=tmp_path / "run",
    )  # fmt: skip
    obs, venv = observations(f"{HERE}:steering"), model.get_vec_normalize_env()
    seen = venv.normalize_obs(obs)
    policy = headrace.load_policy(tmp_path / "run")
    check_actions(policy, model, obs, seen)
    check_values(tmp_path / "run", model, obs, seen=seen)
    reward = np.array([-3.0, 0.5, 40.0])
    ours = policy.module.scaled(torch.from_numpy(reward))
    np.testing.assert_allclose(ours, venv.normalize_reward(reward), rtol=1e-5)


@pytest.mark.parametrize(("name", "is_told"), [("dqn", True), ("sac", True), ("a2c", False)])
def test_a_file_that_may_lack_its_normalizer_is_imported_with_a_note(
    name, is_told, saved, tmp_path
):
    imported = import_sb3(saved(name)[1], CASES[name][2], run_dir=tmp_path / "run")
    told = [note for note in imported.notes if "trained with VecNormalize" in note]
    assert [told[0] in imported.describe()] == [True] if is_told else told == []


def test_a_missing_normalizer_is_warned_of(normalized, tmp_path):
    with pytest.warns(UserWarning, match="trained with VecNormalize.*--normalizer"):
        import_sb3(normalized[1] / "model.zip", f"{HERE}:steering", run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_obs": 5.0}, "clip_obs=5"),
        ({"obs_mean": np.zeros(3)}, r"mean of the observation has the shape \(3,\)"),
        ({"obs_mean": None}, "neither obs_mean nor reward_mean"),
        ({"obs_mean": np.array([{}], dtype=object)}, r"cannot be read: it is no .npz file of num"),
        ({"obs_var": np.full(5, -1.0)}, "obs_var has other than usable numbers"),
        ({"obs_mean": np.full(5, np.nan)}, "obs_mean has other than usable numbers"),
        ({"clip_obs": np.full(2, 10.0)}, "clip_obs is not one number"),
        ({"epsilon": 1e-5}, "epsilon=1e-05"),
    ],
    ids=[
        "another clip",
        "another shape",
        "none",
        "a pickle",
        "negative",
        "NaN",
        "two clips",
        "epsilon",
    ],
)
def test_a_normalizer_that_differs_is_refused(change, message, normalized, tmp_path):
    with np.load(normalized[1] / "normalizer.npz") as file:
        arrays = {name: file[name] for name in file.files} | change
    without = change.get("obs_mean", "") is None
    kept = {k: v for k, v in arrays.items() if v is not None and not (without and "mean" in k)}
    np.savez(tmp_path / "other.npz", **kept)
    with pytest.raises(CheckpointError, match=message):
        import_sb3(
            normalized[1] / "model.zip", f"{HERE}:steering",
            normalizer=tmp_path / "other.npz", run_dir=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_pickle_in_place_of_the_normalizer_is_refused_without_numpy_s_advice(saved, tmp_path):
    (tmp_path / "vecnormalize.pkl").write_bytes(pickle.dumps({"mean": 1.0}))
    with pytest.raises(CheckpointError, match=r"no \.npz file of numbers") as caught:
        import_sb3(
            saved("a2c")[1], "CartPole-v1", normalizer=tmp_path / "vecnormalize.pkl",
            run_dir=tmp_path / "run",
        )  # fmt: skip
    assert "unsafely" not in str(caught.value) and "allow_pickle" not in str(caught.value)


def test_a_model_is_found_by_its_name_without_zip(saved, tmp_path):
    path = saved("a2c")[1]
    assert path.suffix == ".zip"
    imported = import_sb3(path.with_suffix(""), "CartPole-v1", run_dir=tmp_path / "run")
    assert imported.algo == "a2c"
    with pytest.raises(CheckpointError, match=r"nowhere\.zip cannot be read"):
        import_sb3(tmp_path / "nowhere", "CartPole-v1", run_dir=tmp_path / "other")


def test_the_card_of_an_imported_run_says_who_trained_it(saved, tmp_path):
    model, path = saved("ppo choices")
    before, run_dir = model.num_timesteps, tmp_path / "run"
    import_sb3(path, "CartPole-v1", run_dir=run_dir)
    assert load_runs(run_dir)[0].state == "imported"
    push(run_dir, str(tmp_path / "a"), RunRequest({}), episodes=1)
    pull(str(tmp_path / "a"), tmp_path / "pulled")
    push(tmp_path / "pulled", str(tmp_path / "again"), RunRequest({}), episodes=1)
    for name in ("a", "again"):
        card = (tmp_path / name / "README.md").read_text()
        assert f"Imported from Stable-Baselines3 after {before:,} env steps, by Headrace" in card
    for more in (64, 128):
        headrace.resume(run_dir, total_env_steps=before + more, quiet=True)
    assert load_runs(run_dir)[0].state == "done"
    push(run_dir, str(tmp_path / "b"), RunRequest({}), episodes=1)
    card = (tmp_path / "b/README.md").read_text()
    own = checkpoint.newest(run_dir).env_steps - before
    assert f"after {before:,} env steps, then trained on with Headrace" in card
    assert f" for {own:,}.\n" in card and own >= 128
    rows = dict(re.findall(r"\| `(\w+)` \| `(.*?)` \| import \|", card))
    assert rows["num_steps"] == "32" and "gamma" not in rows and len(rows) < 15


@repeats("name", ["ppo choices", "sac", "dqn", "ppo pictures"], keep=2)
def test_an_imported_run_trains_on(name, saved, tmp_path, capsys):
    model, path = saved(name)
    run_dir, env = tmp_path / "run", CASES[name][2]
    import_sb3(path, env, run_dir=run_dir)
    before = headrace.load_policy(run_dir).module.state_dict()
    goal = model.num_timesteps + 64
    run = headrace.resume(run_dir, total_env_steps=goal, env=env if ":" in env else None)
    said = capsys.readouterr().out
    assert "imported from Stable-Baselines3: optimizers begin anew" in said
    assert f"Resumed from step_{model.num_timesteps:012d}" in said
    assert ("collects learning_starts=20 env steps" in said) == (name in ("sac", "dqn"))
    assert run.summary["env_steps"] >= goal
    assert run.summary["learner_steps"] > 0
    after = run.policy.module.state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert any("weight" in key for key in moved)
    check = observations(env, 8)
    assert run.policy(check).shape[0] == 8
    assert import_is_refused(path, env, run_dir)


def import_is_refused(path, env, run_dir):
    with pytest.raises(RunDirError, match="holds a run already"):
        import_sb3(path, env, run_dir=run_dir)
    return True


def test_no_preset_decides_what_an_imported_run_learns(saved, tmp_path):
    """CartPole-v1 has presets for PPO and for all algorithms."""
    for name in ("ppo choices", "dqn"):
        import_sb3(saved(name)[1], "CartPole-v1", run_dir=tmp_path / name)
        config = rundir.read_config(tmp_path / name)
        groups = (Network, ALGORITHMS[config["settings"]["algo"]].Config)
        fields = {field for group in groups for field in group.__dataclass_fields__}
        origins = {field: config["origin"][field] for field in fields}
        assert [f for f, of in origins.items() if of.startswith(("preset", "defaults"))] == []
    settings = rundir.read_config(tmp_path / "ppo choices")["settings"]
    assert settings["lr"] == 3e-4 and settings["clip_coef"] == 0.2
    assert settings["vf_coef"] == 1.0 and settings["num_steps"] == 32


def test_a_full_disk_leaves_no_run(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    write, run_dir = checkpoint.write, tmp_path / "run"
    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(RunDirError, match=r"run cannot be used: No space left.*\n.*--run-dir"):
        import_sb3(saved("a2c")[1], "CartPole-v1", run_dir=run_dir)
    assert not (run_dir / "config.json").exists()
    monkeypatch.setattr(checkpoint, "write", write)
    assert import_sb3(saved("a2c")[1], "CartPole-v1", run_dir=run_dir).algo == "a2c"


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def rewritten(source, path, **members):
    """Copy a zip with other members."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, members.get(name, old.read(name)))
    return path


def with_data(source, path, **changes):
    """Copy a model with other entries in its data."""
    with zipfile.ZipFile(source) as old:
        data = json.loads(old.read("data")) | changes
    return rewritten(source, path, data=json.dumps(data))


def pickled(payload):
    return {
        ":type:": "<class 'x'>",
        ":serialized:": base64.b64encode(pickle.dumps(payload)).decode(),
    }


@pytest.mark.parametrize("member", ["policy.pth", "pytorch_variables.pth"])
def test_a_pickle_in_place_of_tensors_is_refused_and_does_not_run(member, saved, tmp_path):
    trap = tmp_path / "trap"
    torch.save({"mlp_extractor.policy_net.0.weight": Payload(trap)}, buffer := io.BytesIO())
    path = rewritten(saved("sac")[1], tmp_path / "bad.zip", **{member: buffer.getvalue()})
    with pytest.raises(CheckpointError, match=f"{member} cannot be read as tensors"):
        import_sb3(path, f"{HERE}:steering", run_dir=tmp_path / "run")
    assert not trap.exists()
    assert not (tmp_path / "run").exists()
    buffer.seek(0)
    with open(os.devnull, "w"):
        torch.load(buffer, weights_only=False)["mlp_extractor.policy_net.0.weight"].close()
    assert trap.exists()  # the payload works


def test_a_plain_pickle_in_place_of_tensors_is_refused_and_does_not_run(saved, tmp_path):
    trap = tmp_path / "trap"
    path = rewritten(
        saved("a2c")[1], tmp_path / "bad.zip", **{"policy.pth": pickle.dumps(Payload(trap))}
    )
    with pytest.raises(CheckpointError, match=r"policy\.pth cannot be read as tensors"):
        import_sb3(path, "CartPole-v1", run_dir=tmp_path / "run")
    assert not trap.exists()


def test_pickles_in_data_are_left_alone(saved, tmp_path):
    trap = tmp_path / "trap"
    names = ("policy_kwargs", "learning_rate", "clip_range", "observation_space", "_last_obs")
    path = with_data(
        saved("ppo choices")[1], tmp_path / "bad.zip",
        **{name: pickled(Payload(trap)) for name in names},
    )  # fmt: skip
    imported = import_sb3(path, "CartPole-v1", run_dir=tmp_path / "run")
    assert not trap.exists()
    assert [note.split(":")[0] for note in imported.notes] == ["learning_rate", "clip_range"]


def kwargs_of(**of):
    return {"policy_kwargs": {":type:": "<class 'dict'>", **of}}


@pytest.mark.parametrize(
    ("name", "env", "changes", "message"),
    [
        ("ppo continuous", f"{HERE}:steering", {"use_sde": True}, "gSDE"),
        ("ppo gears", f"{HERE}:as_many_logits", {}, "its action space is MultiDiscrete"),
        ("ppo choices", "Acrobot-v1", {}, r"observation space is Box\(4,\).*Acrobot-v1 is Box\(6,"),
        ("ppo choices", f"{HERE}:gears", {}, "its action space is Discrete"),
        ("ppo gears", f"{HERE}:other_gears", {}, r"with choices \[3 2 4\] \(here 4 3 2\)"),
        ("sac", f"{HERE}:wide_steering", {}, r"with low \[-2\. 0\.\] \(here -4 0\)"),
        ("sac goals", f"{HERE}:other_goals", {}, "observation space is Dict.*'observation': '4'"),
        (
            "ppo choices", "CartPole-v1", kwargs_of(activation_fn="<class 'mine.Tanh'>"),
            r"activation_fn=mine\.Tanh: expected one of Tanh",
        ),
        (
            "ppo choices", "CartPole-v1",
            kwargs_of(features_extractor_class="<class '__main__.FlattenExtractor'>"),
            r"features extractor of its own \(__main__\.FlattenExtractor\)",
        ),
        (
            "ppo choices", "Acrobot-v1", {"observation_space": None, "action_space": None},
            r"do not fit Acrobot-v1.*\n.*actor.bias: model \(2,\), here \(3,\)",
        ),
        (
            "ppo choices", "CartPole-v1",
            kwargs_of(activation_fn="<class 'torch.nn.modules.activation.GELU'>"),
            "activation_fn=GELU: expected one of Tanh",
        ),
        (
            "ppo choices", "CartPole-v1", kwargs_of(features_extractor_class="<class 'x.Own'>"),
            "features extractor of its own",
        ),
        ("ppo pictures", f"{HERE}:pictures", kwargs_of(normalize_images=False), "divides pixels"),
        (
            "dqn", "CartPole-v1",
            {"policy_class": {"__module__": "stable_baselines3.td3.policies"}},
            "a model of TD3 or DDPG, which is not read",
        ),
        (
            "a2c", "CartPole-v1",
            {"policy_class": {"__module__": "sb3_contrib.common.recurrent.policies"}},
            "a model of RecurrentPPO",
        ),
        (
            "a2c", "CartPole-v1", {"policy_class": {"__module__": "mine"}},
            "does not say which algorithm.*of mine",
        ),
    ],
)  # fmt: skip
def test_what_would_act_otherwise_is_refused(name, env, changes, message, saved, tmp_path):
    path = with_data(saved(name)[1], tmp_path / "model.zip", **changes)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        import_sb3(path, env, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"net_arch": {"pi": [8], "vf": [16]}}, r"different layers.*\(8,\).*\(16,\)"),
        ({"features_extractor_kwargs": {"features_dim": 64}}, r"here \(512, "),
        ({"share_features_extractor": False}, "an image network each"),
    ],
    ids=["layers", "features", "extractors"],
)
def test_networks_that_headrace_has_not_are_refused(kwargs, message, tmp_path):
    model = sb3.PPO("CnnPolicy", support.pictures(), policy_kwargs=kwargs, device="cpu")
    model.save(tmp_path / "model.zip")
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        import_sb3(tmp_path / "model.zip", f"{HERE}:pictures", run_dir=tmp_path / "run")


def test_parts_that_headrace_has_not_are_refused(saved, tmp_path):
    policy = saved("a2c")[0].policy.state_dict() | {"memory.weight": torch.zeros(2, 2)}
    torch.save(policy, buffer := io.BytesIO())
    path = rewritten(saved("a2c")[1], tmp_path / "m.zip", **{"policy.pth": buffer.getvalue()})
    with pytest.raises(CheckpointError, match=r"have not: memory\.weight"):
        import_sb3(path, "CartPole-v1", run_dir=tmp_path / "run")


def test_gsde_of_real_models_is_refused(tmp_path):
    model = sb3.SAC("MlpPolicy", support.steering(), use_sde=True, buffer_size=9, device="cpu")
    model.save(tmp_path / "model.zip")
    with pytest.raises(CheckpointError, match="gSDE"):
        import_sb3(tmp_path / "model.zip", f"{HERE}:steering", run_dir=tmp_path / "run")


def test_an_activation_is_that_of_the_model(saved):
    path = saved("ppo continuous")[1]
    assert read_model(path).object("policy_kwargs")["activation_fn"].endswith("ELU'>")


@pytest.mark.parametrize("damage", ["no tensors", "compressed"])
def test_a_damaged_member_is_refused(damage, saved, tmp_path):
    path = rewritten(saved("a2c")[1], tmp_path / "m.zip", **{"policy.pth": b""})
    if damage == "compressed":
        text = os.urandom(9).hex().encode() * 99
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("data", text)
        whole = bytearray(path.read_bytes())
        whole[34] = 0xFF  # no kind of block
        path.write_bytes(whole)
    with pytest.raises(CheckpointError):
        read_model(path)


@pytest.mark.parametrize("content", [b"", b"PK", None], ids=["empty", "cut off", "another zip"])
def test_a_file_that_is_no_model_is_refused(content, tmp_path):
    path = tmp_path / "model.zip"
    if content is None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("readme.txt", "hello")
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="Stable-Baselines3"):
        import_sb3(path, "CartPole-v1", run_dir=tmp_path / "run")


def test_the_command_imports_and_says_what_follows(saved, tmp_path):
    path = saved("ppo choices")[1]
    wrapper = "--wrapper", "gymnasium.wrappers:FlattenObservation"
    words = "import-sb3", path, "--env", "CartPole-v1", *wrapper, "--run-dir", "run"
    words += "--env-kwargs", "sutton_barto_reward=True"
    done = python.run(python.command(*words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Optimizers begin anew" in done.stdout
    assert "headrace eval run" in done.stdout
    settings = rundir.read_config(tmp_path / "run")["settings"]
    assert settings["env_kwargs"] == {"sutton_barto_reward": True}
    assert settings["wrapper"] == [wrapper[1]]
    words_of_eval = "eval", "run", *wrapper, "--episodes", 2, "--json"
    done = python.run(python.command(*words_of_eval), cwd=tmp_path)
    assert json.loads(done.stdout)["episodes"] == 2
    refused = python.run(python.command(*words[:4], "--algo", "dqn"), cwd=tmp_path)
    assert (refused.returncode, "is a model of ppo" in refused.stderr) == (1, True)
