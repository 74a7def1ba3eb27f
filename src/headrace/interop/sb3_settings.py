"""Settings of Stable-Baselines3's algorithms, as the settings of Headrace with the same meaning.

A model file and RL Zoo's files both have the arguments of these algorithms by name. Left out:
reading the files (`sb3_zip.py`, `zoo_file.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError

LINEAR = "lin_"
"""The beginning of the text of a value that falls linearly to 0 (RL Zoo's spelling)."""

_OFF_POLICY = {
    "buffer_size": 1_000_000, "learning_starts": 100, "gamma": 0.99, "gradient_steps": 1,
    "replay_buffer_class": None, "n_steps": 1,
}  # fmt: skip
_ON_POLICY = {
    "gamma": 0.99, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "use_sde": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": _ON_POLICY | {
        "learning_rate": 3e-4, "n_steps": 2048, "batch_size": 64, "n_epochs": 10,
        "gae_lambda": 0.95, "clip_range": 0.2, "clip_range_vf": None, "normalize_advantage": True,
        "target_kl": None,
    },
    "a2c": _ON_POLICY | {
        "learning_rate": 7e-4, "n_steps": 5, "gae_lambda": 1.0, "normalize_advantage": False,
        "use_rms_prop": True,
    },
    "dqn": _OFF_POLICY | {
        "learning_rate": 1e-4, "batch_size": 32, "tau": 1.0, "train_freq": 4,
        "target_update_interval": 10_000, "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0, "exploration_final_eps": 0.05, "max_grad_norm": 10,
    },
    "sac": _OFF_POLICY | {
        "learning_rate": 3e-4, "batch_size": 256, "tau": 0.005, "train_freq": 1,
        "ent_coef": "auto", "target_entropy": "auto", "target_update_interval": 1,
        "use_sde": False,
    },
    "td3": _OFF_POLICY | {
        "learning_rate": 1e-3, "batch_size": 256, "tau": 0.005, "train_freq": 1,
        "action_noise": None, "policy_delay": 2, "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
}  # fmt: skip
"""Default arguments of Stable-Baselines3 2.9's constructors, as far as they decide what is learned:
the algorithms whose settings are translated."""
WITHOUT_EFFECT = {
    "verbose", "tensorboard_log", "device", "stats_window_size", "optimize_memory_usage",
    "_init_setup_model", "rollout_buffer_kwargs", "monitor_wrapper",
}  # fmt: skip
"""Arguments that do not decide what is learned."""

_WITHOUT_REPLAY = {"lr_schedule": "constant", "gamma_schedule": "constant"}
_WITHOUT_REPLAY |= {"gae_lambda_schedule": "constant", "ent_schedule": "constant"}
_WITH_REPLAY = {"adam_eps": 1e-8, "layer_norm": False, "priority_alpha": 0.0, "hindsight": 0.0}
_NETWORK = {
    "shared_trunk": False, "core": "none", "image_net": "nature", "normalize_obs": False,
    "normalize_reward": False, "clip_reward": 0.0, "precision": "fp32", "initial_log_std": 0.0,
}  # fmt: skip
_WITHOUT_MORE: dict[str, dict[str, Any]] = {
    "ppo": _WITHOUT_REPLAY | {"adam_eps": 1e-5, "clip_schedule": "constant"},
    "a2c": _WITHOUT_REPLAY | {"adam_eps": 1e-5},
    "dqn": _WITH_REPLAY | {
        "lr_schedule": "constant", "double_q": False, "dueling": False, "noisy": False,
        "distribution": "none",
    },
    "sac": _WITH_REPLAY | {
        "lr_schedule": "constant", "max_grad_norm": 0.0, "num_critics": 2, "policy_delay": 1,
        "critics_in_target": 0, "num_quantiles": 1, "dropout": 0.0,
    },
    "td3": _WITH_REPLAY | {"lr_schedule": "constant", "max_grad_norm": 0.0, "num_critics": 2},
}  # fmt: skip
"""What Headrace could do besides, and its presets may ask for: given as off."""

_SAME = {
    "gamma", "gae_lambda", "normalize_advantage", "max_grad_norm", "learning_starts", "tau",
    "exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "policy_delay",
    "target_noise_clip",
}  # fmt: skip
_RENAMED = {
    "n_epochs": "num_epochs", "buffer_size": "replay_size", "target_policy_noise": "target_noise",
    "n_envs": "num_envs", "seed": "seed",
}  # fmt: skip
_LAYERS = {"ppo": (64, 64), "a2c": (64, 64), "dqn": (64, 64), "sac": (256, 256), "td3": (400, 300)}
ACTIVATION = {"ppo": "tanh", "a2c": "tanh", "dqn": "relu", "sac": "relu", "td3": "relu"}
"""The activation of a network that names none."""
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu"}
"""torch's class -> the activation."""


@dataclass
class Translation:
    """Settings of Headrace, and what could not be translated.

    Attributes:
        notes: each says which argument has no counterpart, and what holds in its place.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(algo: str, given: Mapping[str, Any]) -> Translation:
    """Return the settings of an algorithm of Stable-Baselines3.

    What was not given has the defaults there, and what Headrace could do besides is off, so that no
    preset decides.

    Args:
        algo: one of `DEFAULTS`.
        given: the constructor's arguments, as plain data: a value that falls to 0 is a text such as
            `lin_3e-4`, a class its name, `action_noise` the deviation of Gaussian noise. Besides
            them `n_envs` and `policy`.

    Raises:
        ConfigError: a value is of another kind than the argument there takes.
    """
    try:
        return _translate(algo, given)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"A value of these settings is not of the kind that {algo.upper()} takes: {error}.\n"
            f"{dict(given)}"
        ) from None


def _translate(algo: str, given: Mapping[str, Any]) -> Translation:
    args = {"n_envs": 1, "policy": "MlpPolicy", **DEFAULTS[algo], **given}
    args = {name: value for name, value in args.items() if name not in WITHOUT_EFFECT}
    result = Translation({"algo": algo} | _NETWORK | _WITHOUT_MORE[algo])
    for name in [*args]:
        if name in _SAME or (name in _RENAMED and args[name] is not None):
            result.settings[_RENAMED.get(name, name)] = args.pop(name)
    _schedule(result, args, "learning_rate", "lr")
    if algo in ("ppo", "a2c"):
        _on_policy(result, algo, args)
    else:
        _off_policy(result, algo, args)
    kwargs = dict(args.pop("policy_kwargs", None) or {})
    if args.pop("use_sde", False):
        result.notes.append(
            "use_sde=True: gSDE has no counterpart; actions are explored by Gaussian noise"
        )
        if "log_std_init" in kwargs:
            result.notes.append(f"log_std_init={kwargs.pop('log_std_init')}: it is of gSDE")
    _network(result, algo, str(args.pop("policy")), kwargs)
    for name in ("sde_sample_freq", "use_sde_at_warmup"):
        args.pop(name, None)  # they say how use_sde does it
    result.notes += [
        f"{name}={value!r}: no counterpart" for name, value in args.items() if value is not None
    ]
    return result


def _schedule(result: Translation, args: dict[str, Any], name: str, ours: str) -> None:
    """Translate a number that may fall linearly to 0."""
    value = args.pop(name)
    if isinstance(value, str) and value.startswith(LINEAR):
        schedule = {"lr": "lr_schedule", "clip_coef": "clip_schedule"}[ours]
        result.settings |= {ours: float(value.removeprefix(LINEAR)), schedule: "linear"}
    else:
        result.settings[ours] = value


def _on_policy(result: Translation, algo: str, args: dict[str, Any]) -> None:
    settings, notes = result.settings, result.notes
    settings |= {"num_steps": args.pop("n_steps"), "ent_coef": args.pop("ent_coef")}
    settings["vf_coef"] = 2.0 * args.pop("vf_coef")  # our value loss has a factor of 1/2
    if algo == "a2c":
        if args.pop("use_rms_prop"):
            notes.append("use_rms_prop=True: Adam is used in place of RMSprop")
        args.pop("rms_prop_eps", None)
        return
    settings["minibatch_size"] = args.pop("batch_size")
    _schedule(result, args, "clip_range", "clip_coef")
    of_value = args.pop("clip_range_vf")
    settings["clip_value_loss"] = of_value is not None
    if of_value not in (None, settings["clip_coef"]):
        notes.append(
            f"clip_range_vf={of_value!r}: values are clipped by clip_coef={settings['clip_coef']}"
        )
    # There an update stops at 1.5 times the value, after a minibatch; here after an epoch.
    settings["target_kl"] = 1.5 * (args.pop("target_kl") or 0.0)


def _off_policy(result: Translation, algo: str, args: dict[str, Any]) -> None:
    settings, notes = result.settings, result.notes
    settings |= {"batch_size": args.pop("batch_size"), "n_step": args.pop("n_steps")}
    freq, steps = args.pop("train_freq"), args.pop("gradient_steps")
    amount, unit = freq if isinstance(freq, list | tuple) else (freq, "step")
    if unit == "step":
        settings["num_steps"] = amount
    else:
        notes.append(
            f"train_freq={freq!r}, gradient_steps={steps}: one gradient step for each env step"
        )
    is_each = unit != "step" or steps < 0
    ratio = 1.0 if is_each else steps / (amount * settings["num_envs"])
    settings["replay_ratio"] = ratio
    _hindsight(result, args)
    if algo == "dqn":
        # There in env steps, here in gradient steps
        interval = args.pop("target_update_interval")
        settings["target_update_interval"] = max(1, round(interval * ratio))
    elif algo == "sac":
        if (every := args.pop("target_update_interval")) != 1:
            notes.append(f"target_update_interval={every}: targets move at each gradient step")
        _entropy(result, args)
    else:
        settings["exploration_noise"] = args.pop("action_noise") or 0.0


def _entropy(result: Translation, args: dict[str, Any]) -> None:
    """Translate the weight of SAC's entropy, and the entropy to aim at."""
    weight, target = args.pop("ent_coef"), args.pop("target_entropy")
    first = 1.0
    if isinstance(weight, str):
        first, weight = float(weight.removeprefix("auto").removeprefix("_") or 1.0), 0.0
    result.settings["ent_coef"] = weight
    if not weight:
        result.settings |= {"initial_ent_coef": first, "target_entropy": -1.0}
    if target != "auto":
        result.notes.append(
            f"target_entropy={target}: here it is of each component of an action (-1)"
        )


def _hindsight(result: Translation, args: dict[str, Any]) -> None:
    """Translate hindsight: k replaced goals for each one that was pursued."""
    kind, kwargs = str(args.pop("replay_buffer_class")), args.pop("replay_buffer_kwargs", {}) or {}
    if kind.endswith("HerReplayBuffer"):
        count, way = kwargs.pop("n_sampled_goal", 4), kwargs.pop("goal_selection_strategy", "")
        result.settings["hindsight"] = count / (count + 1)
        if str(way or "future").lower().rpartition(".")[2] != "future":
            result.notes.append(f"goal_selection_strategy={way!r}: goals are of the future")
    elif kind not in ("None", "ReplayBuffer", "DictReplayBuffer"):
        result.notes.append(f"replay_buffer_class={kind}: no counterpart")
    result.notes += [f"replay_buffer_kwargs: {name}={kwargs[name]!r}" for name in kwargs]


def _network(result: Translation, algo: str, policy: str, given: Mapping[str, Any]) -> None:
    """Translate `policy_kwargs`."""
    settings, notes, kwargs = result.settings, result.notes, dict(given)
    layers = kwargs.pop("net_arch", None)
    if layers is None:
        layers = () if policy == "CnnPolicy" else _LAYERS[algo]
    settings["hidden_sizes"] = _hidden_sizes(layers, notes)
    activation = kwargs.pop("activation_fn", None)
    settings["activation"] = ACTIVATION[algo]
    if activation is not None:
        name = str(activation).rpartition(".")[2].strip("'>")
        settings["activation"] = ACTIVATIONS.get(name, ACTIVATION[algo])
        if name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            notes.append(f"activation_fn={name}: {settings['activation']} is used (of {known})")
    log_std = kwargs.pop("log_std_init", None)
    if log_std is not None and algo in ("ppo", "a2c"):
        settings["initial_log_std"] = log_std
        if log_std:
            notes.append(
                f"log_std_init={log_std}: in the action's own unit there; here the range of a "
                "bounded action is 2"
            )
    if not kwargs.pop("ortho_init", True):
        notes.append("ortho_init=False: initial weights are orthogonal")
    if algo in ("sac", "td3"):
        settings["num_critics"] = kwargs.pop("n_critics", 2)
    optimizer = dict(kwargs.pop("optimizer_kwargs", None) or {})
    of_optimizer = str(kwargs.pop("optimizer_class", "Adam")).rpartition(".")[2].strip("'>")
    if of_optimizer == "Adam" and "eps" in optimizer:
        settings["adam_eps"] = optimizer.pop("eps")
    elif of_optimizer not in ("Adam", "RMSprop"):
        notes.append(f"optimizer_class={of_optimizer}: Adam is used")
    if of_optimizer == "Adam" and optimizer:
        notes.append(f"optimizer_kwargs={optimizer}: no counterpart")
    kwargs.pop("use_sde", None)  # SAC repeats it here
    notes += [f"policy_kwargs: {name}={value!r}: no counterpart" for name, value in kwargs.items()]


def _hidden_sizes(layers: Any, notes: list[str]) -> tuple[int, ...]:
    """Return the sizes of hidden layers, from a list, or a dict of those of policy and values."""
    whole = layers
    if isinstance(layers, list | tuple) and len(layers) == 1 and isinstance(layers[0], Mapping):
        layers = layers[0]  # as it was written until version 1.7
    if isinstance(layers, Mapping):
        sizes = [tuple(of) for of in layers.values()]
        if len(set(sizes)) > 1:
            notes.append(f"net_arch={whole!r}: all networks have the layers of the policy")
        layers = layers.get("pi", sizes[0] if sizes else ())
    if not all(isinstance(size, int) for size in layers):
        notes.append(f"net_arch={whole!r}: layers that policy and values share; there are none")
        layers = [size for size in layers if isinstance(size, int)]
    return tuple(layers)
