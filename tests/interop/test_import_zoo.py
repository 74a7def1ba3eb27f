"""Entries of RL Zoo's files become settings of the same meaning, which train."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest

import headrace
from headrace.config.algorithms import ALGORITHMS
from headrace.config.resolve import read_config_file, read_settings
from headrace.config.run_config import RunConfig
from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.interop.import_zoo import convert, import_zoo
from headrace.interop.sb3_settings import DEFAULTS, WITHOUT_EFFECT
from headrace.interop.zoo_file import ATARI, read_entry
from headrace.models.policy import Network
from tests import python
from tests.marks import repeats

sb3 = pytest.importorskip("stable_baselines3")

PPO = """
atari:
  env_wrapper:
    - stable_baselines3.common.atari_wrappers.AtariWrapper
  frame_stack: 4
  policy: 'CnnPolicy'
  n_envs: 8
  n_steps: 128
  n_epochs: 4
  batch_size: 256
  n_timesteps: !!float 1e7
  learning_rate: lin_2.5e-4
  clip_range: lin_0.1
  vf_coef: 0.5
  ent_coef: 0.01

# Tuned
CartPole-v1:
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  gamma: 0.98
  n_epochs: 20
  ent_coef: 0.0
  learning_rate: lin_0.001
  clip_range: lin_0.2

HalfCheetah-v4: &cheetah
  normalize: true
  n_envs: 1
  policy: 'MlpPolicy'
  n_timesteps: !!float 1e6
  batch_size: 64
  n_steps: 512
  gamma: 0.98
  learning_rate: 2.0633e-05
  ent_coef: 0.000401762
  clip_range: 0.1
  n_epochs: 20
  gae_lambda: 0.92
  max_grad_norm: 0.8
  vf_coef: 0.58096
  policy_kwargs: "dict(
                    log_std_init=-2,
                    ortho_init=False,
                    activation_fn=nn.ReLU,
                    net_arch=dict(pi=[256, 256], vf=[256, 256])
                  )"

Walker2d-v4:
  <<: *cheetah
  learning_rate: 5.05041e-05

MountainCarContinuous-v0:
  normalize: true
  n_envs: 1
  n_timesteps: !!float 20000
  policy: 'MlpPolicy'
  batch_size: 256
  n_steps: 8
  gamma: 0.9999
  learning_rate: !!float 7.77e-05
  ent_coef: 0.00429
  clip_range: 0.1
  n_epochs: 10
  gae_lambda: 0.9
  max_grad_norm: 5
  vf_coef: 0.19
  use_sde: True
  policy_kwargs: "dict(log_std_init=-3.29, ortho_init=False)"
"""
A2C = """
LunarLander-v3:
  n_envs: 8
  n_timesteps: !!float 2e5
  policy: 'MlpPolicy'
  gamma: 0.995
  n_steps: 5
  learning_rate: lin_0.00083
  ent_coef: 0.00001

CartPole-v1:
  n_envs: 8
  n_timesteps: !!float 5e5
  policy: 'MlpPolicy'
  ent_coef: 0.0
  policy_kwargs: "dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-5))"
"""
DQN = """
CartPole-v1:
  n_timesteps: !!float 5e4
  policy: 'MlpPolicy'
  learning_rate: !!float 2.3e-3
  batch_size: 64
  buffer_size: 100000
  learning_starts: 1000
  gamma: 0.99
  target_update_interval: 10
  train_freq: 256
  gradient_steps: 128
  exploration_fraction: 0.16
  exploration_final_eps: 0.04
  policy_kwargs: "dict(net_arch=[256, 256])"

Acrobot-v1:
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  learning_rate: !!float 6.3e-4
  batch_size: 128
  buffer_size: 50000
  learning_starts: 0
  gamma: 0.99
  target_update_interval: 250
  train_freq: 4
  gradient_steps: -1
  exploration_fraction: 0.12
  exploration_final_eps: 0.1
  policy_kwargs: "dict(net_arch=[256, 256])"
"""
SAC = """
Pendulum-v1:
  n_timesteps: 20000
  policy: 'MlpPolicy'
  learning_rate: !!float 1e-3

BipedalWalker-v3:
  n_timesteps: !!float 5e5
  policy: 'MlpPolicy'
  learning_rate: !!float 7.3e-4
  buffer_size: 300000
  batch_size: 256
  ent_coef: 'auto_0.5'
  gamma: 0.98
  tau: 0.02
  train_freq: 64
  gradient_steps: 64
  learning_starts: 10000
  use_sde: True
  policy_kwargs: "dict(log_std_init=-3, net_arch=[400, 300])"

FetchReach-v4:
  n_timesteps: !!float 20000
  policy: 'MultiInputPolicy'
  buffer_size: 1000000
  ent_coef: 0.2
  batch_size: 256
  gamma: 0.95
  learning_rate: 0.001
  learning_starts: 1000
  normalize: "{'norm_obs': True, 'norm_reward': False}"
  replay_buffer_class: HerReplayBuffer
  replay_buffer_kwargs: "dict(goal_selection_strategy='future', n_sampled_goal=4)"
  policy_kwargs: "dict(net_arch=[64, 64], n_critics=1)"
"""
TD3 = """
Pendulum-v1:
  n_timesteps: 20000
  policy: 'MlpPolicy'
  gamma: 0.98
  buffer_size: 200000
  learning_starts: 10000
  noise_type: 'normal'
  noise_std: 0.1
  gradient_steps: 1
  train_freq: 1
  learning_rate: !!float 1e-3
  policy_kwargs: "dict(net_arch=[400, 300])"

MountainCarContinuous-v0:
  n_timesteps: 300000
  policy: 'MlpPolicy'
  noise_type: 'ornstein-uhlenbeck'
  noise_std: 0.5
  train_freq: [1, "episode"]
"""
FILES = {"ppo": PPO, "a2c": A2C, "dqn": DQN, "sac": SAC, "td3": TD3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with RL Zoo's files, in which the test runs."""
    for algo, text in FILES.items():
        (tmp_path / f"{algo}.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def converted(algo, env):
    """The settings of the new file, which is read as `--config` reads it, and the notes."""
    made = import_zoo(Path(f"{algo}.yml"), env, output=Path("new.toml"))
    read = read_config_file(made.output).settings
    assert read == json.loads(json.dumps(made.settings))
    return read, made.notes


def test_ppo_of_cheetah_has_the_published_settings(folder):
    settings, notes = converted("ppo", "HalfCheetah-v4")
    expected = {
        "env": "HalfCheetah-v4", "algo": "ppo", "total_env_steps": 1_000_000, "num_envs": 1,
        "num_steps": 512, "minibatch_size": 64, "num_epochs": 20, "gamma": 0.98,
        "gae_lambda": 0.92, "lr": 2.0633e-05, "lr_schedule": "constant", "ent_coef": 0.000401762,
        "clip_coef": 0.1, "clip_schedule": "constant", "max_grad_norm": 0.8,
        "vf_coef": 2 * 0.58096, "hidden_sizes": [256, 256], "activation": "relu",
        "initial_log_std": -2, "normalize_obs": True, "normalize_reward": True,
        "clip_value_loss": False, "target_kl": 0.0, "adam_eps": 1e-5, "shared_trunk": False,
        "normalize_advantage": True,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert [note.split(":")[0] for note in notes] == ["log_std_init=-2", "ortho_init=False"]


def test_a_merged_entry_has_its_own_value(folder):
    settings, _ = converted("ppo", "Walker2d-v4")
    assert (settings["lr"], settings["gae_lambda"]) == (5.05041e-05, 0.92)


def test_the_limit_of_kl_is_the_one_that_is_looked_at_there():
    assert convert("ppo", "X-v0", {"target_kl": 0.02})[0]["target_kl"] == pytest.approx(0.03)


def test_frames_that_are_not_stacked_are_listed():
    note = "frame_stack={}: stack frames by a wrapper (--wrapper)"
    assert convert("ppo", "X-v0", {"frame_stack": 4})[1] == [note.format(4)]
    given = {"env_wrapper": ["x.AtariWrapper"], "frame_stack": 3}
    assert convert("ppo", "BreakoutNoFrameskip-v4", given)[1] == [note.format(3)]


def test_a_normalizer_of_another_kind_is_listed():
    given = {"clip_obs": 5.0, "clip_reward": 10.0, "gamma": 0.9, "norm_reward": False}
    of_zoo = {"normalize": True, "normalize_kwargs": given, "gamma": 0.98}
    settings, notes = convert("ppo", "X-v0", of_zoo)
    assert (settings["normalize_obs"], settings["normalize_reward"]) == (True, False)
    assert notes == [f"normalize: {each}: no counterpart" for each in ("clip_obs=5.0", "gamma=0.9")]


def test_linear_schedules_end_with_the_run(folder):
    settings, notes = converted("ppo", "CartPole-v1")
    assert (settings["lr"], settings["lr_schedule"]) == (0.001, "linear")
    assert (settings["clip_coef"], settings["clip_schedule"]) == (0.2, "linear")
    assert (settings["num_envs"], settings["minibatch_size"], settings["vf_coef"]) == (8, 256, 1.0)
    assert notes == []


def test_an_atari_game_has_the_entry_of_all(folder):
    settings, notes = converted("ppo", "BreakoutNoFrameskip-v4")
    assert settings["env"] == "ALE/Breakout-v5" and settings["clip_reward"] == 1.0
    assert settings["env_kwargs"] == {"repeat_action_probability": 0.0, "episodic_life": True}
    assert settings["eval_env_kwargs"] == {"episodic_life": False}
    assert (settings["hidden_sizes"], settings["image_net"], notes) == ([], "nature", [])
    assert ATARI.fullmatch("ALE/MsPacman-v5")[1] == "MsPacman"
    assert not ATARI.fullmatch("Acrobot-v1")


def test_a_game_keeps_its_own_arguments_and_the_sticky_actions_of_its_id():
    wrapper = {"env_wrapper": ["x.AtariWrapper"], "frame_stack": 4}
    given = wrapper | {"env_kwargs": {"full_action_space": True}}
    for env, sticky in {
        "BreakoutNoFrameskip-v4": {"repeat_action_probability": 0.0},
        "BreakoutNoFrameskip-v0": {}, "ALE/Breakout-v5": {},
    }.items():  # fmt: skip
        settings, _ = convert("ppo", env, given)
        expected = sticky | {"episodic_life": True, "full_action_space": True}
        assert settings["env_kwargs"] == expected, env


def test_gsde_is_listed_with_what_belongs_to_it(folder):
    settings, notes = converted("ppo", "MountainCarContinuous-v0")
    words = [note.split(":")[0] for note in notes]
    assert words == ["use_sde=True", "log_std_init=-3.29", "ortho_init=False"]
    assert settings["initial_log_std"] == 0.0


def test_a2c_learns_with_adam_in_place_of_rmsprop(folder):
    settings, notes = converted("a2c", "LunarLander-v3")
    assert (settings["num_steps"], settings["gae_lambda"], settings["lr"]) == (5, 1.0, 0.00083)
    assert notes == ["use_rms_prop=True: Adam is used in place of RMSprop"]
    folder.joinpath("new.toml").unlink()
    _, notes = converted("a2c", "CartPole-v1")
    assert "optimizer_class=RMSpropTFLike: Adam is used" in notes


def test_dqn_counts_gradient_steps_where_the_zoo_counts_env_steps(folder):
    settings, notes = converted("dqn", "CartPole-v1")
    assert (settings["num_envs"], settings["num_steps"]) == (1, 256)
    assert settings["replay_ratio"] == 0.5  # 128 gradient steps for 256 env steps
    assert settings["target_update_interval"] == 5
    assert (settings["replay_size"], settings["learning_starts"]) == (100_000, 1_000)
    assert (settings["double_q"], settings["layer_norm"], settings["n_step"]) == (False, False, 1)
    assert (settings["exploration_fraction"], settings["exploration_final_eps"]) == (0.16, 0.04)
    assert (settings["activation"], settings["adam_eps"], notes) == ("relu", 1e-8, [])
    folder.joinpath("new.toml").unlink()
    settings, _ = converted("dqn", "Acrobot-v1")  # gradient_steps: -1
    assert (settings["replay_ratio"], settings["target_update_interval"]) == (1.0, 250)


def test_sac_of_walker_and_of_goals(folder):
    settings, notes = converted("sac", "BipedalWalker-v3")
    assert (settings["ent_coef"], settings["initial_ent_coef"]) == (0.0, 0.5)
    assert (settings["target_entropy"], settings["replay_ratio"], settings["tau"]) == (-1, 1, 0.02)
    assert [note.split(":")[0] for note in notes] == ["use_sde=True", "log_std_init=-3"]
    folder.joinpath("new.toml").unlink()
    settings, notes = converted("sac", "FetchReach-v4")
    assert (settings["hindsight"], settings["num_critics"], settings["ent_coef"]) == (0.8, 1, 0.2)
    assert (settings["normalize_obs"], settings["normalize_reward"], notes) == (True, False, [])


def test_td3_of_pendulum_and_of_episodes(folder):
    settings, notes = converted("td3", "Pendulum-v1")
    assert (settings["exploration_noise"], settings["target_noise"]) == (0.1, 0.2)
    assert (settings["hidden_sizes"], settings["policy_delay"], notes) == ([400, 300], 2, [])
    folder.joinpath("new.toml").unlink()
    _, notes = converted("td3", "MountainCarContinuous-v0")
    assert [note.split(":")[0] for note in notes] == [
        "noise_type=ornstein-uhlenbeck", "train_freq=[1, 'episode'], gradient_steps=1",
    ]  # fmt: skip


TRAINED = [
    ("ppo", "CartPole-v1", {}),
    ("sac", "Pendulum-v1", {}),
    ("dqn", "CartPole-v1", {"learning_starts": 100}),
    ("a2c", "CartPole-v1", {}),
    ("td3", "Pendulum-v1", {"learning_starts": 100}),
    ("ppo", "MountainCarContinuous-v0", {}),
    ("ppo", "BreakoutNoFrameskip-v4", {"num_steps": 32}),
]


@repeats("algo, env, changes", TRAINED, keep=2)
def test_converted_settings_train(algo, env, changes, folder):
    made = import_zoo(Path(f"{algo}.yml"), env)
    assert made.output.name == f"{made.settings['env'].rpartition('/')[2]}_{algo}.toml"
    run = headrace.train(
        made.settings["env"], config=made.output, total_env_steps=140, run_dir="run", quiet=True,
        num_workers=0, **changes,
    )  # fmt: skip
    assert run.summary["learner_steps"] > 0
    if "NoFrameskip" not in env:  # without FIRE, a whole game takes minutes
        assert run.evaluate(episodes=1).to_json()["episodes"] == 1


def test_no_preset_decides_what_is_learned(folder):
    made = import_zoo(Path("ppo.yml"), "CartPole-v1")
    file = read_config_file(made.output)
    settings = read_settings({}, file)
    presets = {name for name, of in settings.source.items() if of.startswith("preset")}
    assert presets == set()


@pytest.mark.parametrize("algo", DEFAULTS)
def test_defaults_are_those_of_stable_baselines3(algo):
    parameters = inspect.signature(getattr(sb3, algo.upper())).parameters
    theirs = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert {name: theirs[name] for name in DEFAULTS[algo]} == DEFAULTS[algo]
    rest = {
        "sde_sample_freq", "use_sde_at_warmup", "policy_kwargs", "seed", "rms_prop_eps",
        "replay_buffer_kwargs", "rollout_buffer_class", "action_noise",
    }  # fmt: skip
    assert set(theirs) - set(DEFAULTS[algo]) <= WITHOUT_EFFECT | rest


def test_the_table_of_the_page_names_settings_that_exist():
    page = (Path(__file__).parents[2] / "docs/import.md").read_text().split("## Settings")[1]
    ours = {field for of in (RunConfig, Network) for field in of.__dataclass_fields__}
    ours |= {field for algo in DEFAULTS for field in ALGORITHMS[algo].Config.__dataclass_fields__}
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page, re.M)
    known = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert {name for algo in DEFAULTS.values() for name in algo} <= known
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[1])} <= ours


def test_python_text_is_not_evaluated(folder):
    trap = folder / "trap"
    text = f"dict(net_arch=[32, 32], log_std_init=open({str(trap)!r}, 'w'), n=[1, 2 + 3])"
    (folder / "ppo.yml").write_text(
        f'X-v0:\n  n_timesteps: 1e4\n  policy_kwargs: "{text}"\n'
        "  learning_rate: !!python/object/apply:os.system ['touch trap']\n"
        "  env_wrapper: !!python/name:os.system\n"
        "  gamma: !!python/tuple [1, 2]\n"
        "  clip_range: !mine 3\n"
    )
    entry = read_entry(Path("ppo.yml"), "X-v0")
    assert entry["n_timesteps"] == 10_000
    with pytest.raises(ConfigError, match="gamma"):
        convert("ppo", "X-v0", entry)
    del entry["gamma"]
    settings, notes = convert("ppo", "X-v0", entry)
    assert not trap.exists()
    assert (settings["hidden_sizes"], settings["lr"]) == ((32, 32), 3e-4)
    assert [note for note in notes if "not understood" in note] == [
        f"policy_kwargs: not understood: log_std_init=open({str(trap)!r}, 'w')",
        "policy_kwargs: not understood: n=[1, 2 + 3]",
        "learning_rate: not understood: tag:yaml.org,2002:python/object/apply:os.system "
        "['touch trap']",
        "clip_range: not understood: !mine 3",
    ]
    assert "env_wrapper=os.system" in " ".join(notes)


@pytest.mark.parametrize("text", ["dict(**base, net_arch=[8])", "{**base, 'net_arch': [8]}"])
def test_what_is_spread_into_a_dict_is_listed(text, folder):
    (folder / "ppo.yml").write_text(f'X-v0:\n  policy_kwargs: "{text}"\n')
    settings, notes = convert("ppo", "X-v0", read_entry(Path("ppo.yml"), "X-v0"))
    assert settings["hidden_sizes"] == (8,)
    assert notes == ["policy_kwargs: not understood: **=base"]


@pytest.mark.parametrize(
    "line", ["env_wrapper: 5", "normalize_kwargs: '5'", "policy_kwargs: '{(1, 2): [3 + 4]}'"]
)
def test_values_of_no_known_form_are_said_not_raised(line, folder):
    (folder / "ppo.yml").write_text(f"X-v0:\n  gamma: '1__0'\n  normalize: true\n  {line}\n")
    entry = read_entry(Path("ppo.yml"), "X-v0")
    with pytest.raises(ConfigError, match=r"X-v0 is not of the kind|gamma='1__0'"):
        convert("ppo", "X-v0", entry)


def test_a_file_that_cannot_be_written_is_named_with_its_flag(folder):
    with pytest.raises(ConfigError, match=r"(?s)/proc/none/new\.toml cannot be .*--output"):
        import_zoo(Path("ppo.yml"), "CartPole-v1", output=Path("/proc/none/new.toml"))


def test_the_settings_of_one_run_are_read(folder):
    (folder / "config.yml").write_text(
        "!!python/object/apply:collections.OrderedDict\n"
        "- - - batch_size\n    - 256\n  - - n_timesteps\n    - 100000.0\n"
        "  - - learning_rate\n    - lin_0.001\n  - - policy\n    - MlpPolicy\n"
    )
    made = import_zoo(Path("config.yml"), "CartPole-v1", algo="ppo", output=Path("new.toml"))
    assert (made.settings["minibatch_size"], made.settings["lr_schedule"]) == (256, "linear")
    assert made.settings["total_env_steps"] == 100_000


def test_what_differs_stands_in_the_file(folder):
    made = import_zoo(Path("ppo.yml"), "MountainCarContinuous-v0")
    lines = made.output.read_text().splitlines()
    assert lines[0].startswith("# Settings of RL Zoo for MountainCarContinuous-v0, from ppo.yml")
    assert [f"#   {note}" for note in made.notes] == lines[2 : 2 + len(made.notes)]
    assert tomllib.loads(made.output.read_text())["gamma"] == 0.9999


@pytest.mark.parametrize(
    ("file", "env", "message"),
    [
        ("ppo.yml", "HalfCheetah-v9", "no entry HalfCheetah-v9. Did you mean HalfCheetah-v4"),
        ("none.yml", "CartPole-v1", "of none: expected ppo, a2c"),
        ("bad.yml", "CartPole-v1", "not valid YAML"),
        ("list.yml", "CartPole-v1", "has no entries"),
        ("own.yml", "X-v0", "not valid YAML: found unconstructable recursive node"),
        ("ppo2.yml", "CartPole-v1", "cannot be read"),
    ],
)
def test_what_cannot_be_converted_is_refused(file, env, message, folder):
    (folder / "bad.yml").write_text("a: [")
    (folder / "list.yml").write_text("- 1")
    (folder / "own.yml").write_text("X-v0:\n  policy_kwargs: &a {b: *a}\n")
    algo = "" if file in ("ppo.yml", "none.yml") else "ppo"
    with pytest.raises(ConfigError, match=message):
        import_zoo(Path(file), env, algo=algo)


def test_a_value_of_another_kind_is_refused(folder):
    (folder / "ppo.yml").write_text("X-v0:\n  vf_coef: [1]\n")
    with pytest.raises(ConfigError, match="not of the kind that PPO takes"):
        import_zoo(Path("ppo.yml"), "X-v0")


def test_the_command_lists_what_differs(folder):
    words = "import-zoo", "ppo.yml", "HalfCheetah-v4", "-o", "mine.toml"
    done = python.run(python.command(*words), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ortho_init=False: initial weights are orthogonal" in done.stdout
    assert "headrace train HalfCheetah-v4 --config mine.toml" in done.stdout
    again = python.run(python.command(*words), cwd=folder)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_missing_yaml_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingExtraError) as caught:
        import_zoo(Path("ppo.yml"), "CartPole-v1")
    assert install_command("zoo") in str(caught.value)
