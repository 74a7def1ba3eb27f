"""Weights of Stable-Baselines3's networks, under the names and in the units of Headrace's modules.

What would not be the same function is refused. Left out: reading the file (`sb3_zip.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algos.base import Modules
from headrace.errors import CheckpointError
from headrace.interop.sb3_settings import ACTIVATIONS
from headrace.interop.sb3_zip import Sb3Model
from headrace.models.networks import image_layout
from headrace.spec import ActionCodec, EnvSpec, Space

_EXTRACTORS = {
    f"stable_baselines3.common.torch_layers.{name}"
    for name in ("FlattenExtractor", "NatureCNN", "CombinedExtractor")
}
_ACTIVATIONS = {f"torch.nn.modules.activation.{name}" for name in ACTIVATIONS}
_NATURE = {"cnn.0": "0", "cnn.2": "2", "cnn.4": "4", "linear.0": "7"}
"""Layers of Stable-Baselines3's NatureCNN -> those of `ImageEncoder.net`."""
_KINDS = {
    "Box": "box", "Discrete": "discrete", "MultiDiscrete": "multi_discrete",
    "MultiBinary": "multi_binary", "Dict": "dict",
}  # fmt: skip


class _Layer(NamedTuple):
    weight: Tensor  # [num_out, num_in]
    bias: Tensor


class _Tensors:
    """The tensors of a model. Each is taken once, so that what is left over is noticed."""

    def __init__(self, model: Sb3Model) -> None:
        self._model, self._left = model, dict(model.policy)

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            refuse(self._model, f"its policy has no {name}")
        return self._left.pop(name).float()

    def layer(self, name: str) -> _Layer:
        weight, bias = self.take(f"{name}.weight"), self.take(f"{name}.bias")
        if weight.dim() < 2 or bias.shape != weight.shape[:1]:
            shapes = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            refuse(self._model, f"{name} has weights and biases of the shapes {shapes}")
        return _Layer(weight, bias)

    def layers(self, prefix: str) -> list[_Layer]:
        """Return the linear layers of a Sequential in which activations follow them."""
        numbers = sorted(
            int(match[1])
            for name in self._left
            if (match := re.fullmatch(re.escape(prefix) + r"\.(\d+)\.weight", name))
        )
        if numbers != list(range(0, 2 * len(numbers), 2)):
            refuse(self._model, f"{prefix} has more than linear layers and activations")
        return [self.layer(f"{prefix}.{number}") for number in numbers]

    def encoder(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of an image's encoder, by their names in Headrace; {} without one."""
        if not any(name.startswith(prefix) for name in self._left):
            return {}
        found = dict[str, Tensor]()
        for theirs, ours in _NATURE.items():
            layer = self.layer(f"{prefix}{theirs}")
            found |= _named(f"encoder.net.{ours}", layer)
        return found

    def check_all_taken(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            refuse(self._model, f"its policy has parts that Headrace's networks have not: {names}")


def refuse(model: Sb3Model, why: str, then: str = "") -> NoReturn:
    """Raise CheckpointError: the model cannot be represented."""
    raise CheckpointError(
        f"{model.path} ({model.algo.upper()}): {why}."
        + f"\n{then or 'Only networks that act exactly as there are taken over: train it anew.'}"
    )


def check_settings(model: Sb3Model) -> None:
    """Raise CheckpointError if the model's settings name what Headrace's networks cannot do."""
    kwargs = model.object("policy_kwargs")
    if model.data.get("use_sde") or kwargs.get("use_sde"):
        refuse(model, "it explores by gSDE (use_sde), which Headrace does not have")
    if not kwargs.get("normalize_images", True):
        refuse(model, "normalize_images=False, and Headrace divides pixels by 255")
    # By their whole names: a class of the user's may be called as one of these is.
    extractor = _name_of_class(kwargs.get("features_extractor_class"))
    if extractor not in ("", *_EXTRACTORS):
        refuse(model, f"it has a features extractor of its own ({extractor})")
    if kwargs.get("squash_output"):
        refuse(model, "squash_output, which goes with gSDE")
    activation = _name_of_class(kwargs.get("activation_fn"))
    if activation not in ("", *_ACTIVATIONS):
        name = activation.removeprefix("torch.nn.modules.activation.")
        refuse(model, f"activation_fn={name}: expected one of {', '.join(ACTIVATIONS)} of torch.nn")


def _name_of_class(text: Any) -> str:
    """Return the whole name of a class from its text, as in `<class 'torch.nn.ReLU'>`."""
    return str(text or "").removeprefix("<class '").removesuffix("'>")


def check_spaces(model: Sb3Model, spec: EnvSpec) -> None:
    """Raise CheckpointError if the model is of another environment, as far as its file says."""
    if spec.num_agents > 1:
        refuse(model, f"it acts for one agent, and {spec.id} has {spec.num_agents}")
    if spec.seen.parts and any(image_layout(part) is not None for _, part in spec.seen.parts):
        refuse(model, "images beside other observations: its network for them has no counterpart")
    _check_space(model, "observation", spec.seen, spec.id)
    _check_space(model, "action", spec.action, spec.id)


def _check_space(model: Sb3Model, role: str, space: Space, env_id: str) -> None:
    """Compare the kind and shape of a space with what the model says of it."""
    theirs = model.object(f"{role}_space")
    kind, shape = model.kind(f"{role}_space"), theirs.get("_shape")
    layout = image_layout(space)
    shapes = [list(space.shape)]
    if layout is not None:
        shapes = [[layout.channels, layout.height, layout.width]]  # as it is transposed there
    other_kind = kind in _KINDS and _KINDS[kind] != space.kind
    other_shape = kind == "Box" and shape is not None and shape not in shapes
    differing = "" if other_kind or other_shape else _differing_values(theirs, space)
    if other_kind or other_shape or differing:
        refuse(
            model,
            f"its {role} space is {kind}{tuple(shape or ())}{differing}, and that of {env_id} is "
            f"{space.describe()}",
            "Name the environment that it was trained in, with its wrappers (--wrapper) and "
            "arguments (--env-kwargs).",
        )


def _differing_values(theirs: Mapping[str, Any], space: Space) -> str:
    """Return which choices, bounds of actions or parts of a Dict are others there; "" if none."""
    choices = theirs.get("nvec", theirs.get("n"))
    for name, said, own in (
        ("choices", choices, space.nvec), ("start", theirs.get("start"), space.start),
        ("low", theirs.get("low"), space.low), ("high", theirs.get("high"), space.high),
    ):  # fmt: skip
        found = _numbers(said)
        if found and own and not (len(found) == len(own) and np.allclose(found, own, 1e-5)):
            here = " ".join(f"{value:g}" for value in own)
            return f" with {name} {' '.join(str(said).split())} (here {here})"
    boxes = {key: shape.strip(", ") for key, shape in _BOXES.findall(str(theirs.get("spaces")))}
    parts = [(key, part) for key, part in space.leaves if part.kind == "box"]
    ours = {key: ", ".join(map(str, part.shape)) for key, part in parts}
    differ = space.kind == "dict" and boxes and list(boxes.items()) != list(ours.items())
    return f" of {boxes}" if differ else ""


_BOXES = re.compile(r"'([^']+)'[:,] Box\([^)]*?\(([\d, ]*)\), \w+\)")
"""The key and the shape of each Box in the text of a Dict."""


def _numbers(said: Any) -> list[float]:
    """Return the numbers in the text of an array; [] if it has not all of them, or others."""
    try:
        return [float(word) for word in re.sub(r"[\[\]]", " ", str(said)).split()]
    except ValueError:
        return []


def load_weights(model: Sb3Model, modules: Modules, spec: EnvSpec) -> None:
    """Copy a model's weights into the modules of an algorithm.

    Raises:
        CheckpointError: they are not all of the model, or of other sizes than those of the modules.
    """
    tensors = _Tensors(model)
    mapped = {"ppo": _actor_critic, "a2c": _actor_critic, "dqn": _q, "sac": _sac}[model.algo]
    try:
        by_module = mapped(model, tensors, spec)
    except (RuntimeError, ValueError) as error:
        refuse(model, f"its tensors do not fit each other: {error}")
    tensors.check_all_taken()
    has_encoder = any("encoder" in name for name in by_module["policy"])
    if image_layout(spec.seen) is not None and not has_encoder:
        refuse(model, "images go into its network flat, and into an image network here")
    for name, found in by_module.items():
        _load(model, modules[name], found, spec)


def hidden_sizes(model: Sb3Model) -> tuple[int, ...]:
    """Return the sizes of the hidden layers; CheckpointError if networks have different ones."""
    names = {
        "dqn": ("q_net.q_net",),
        "sac": ("actor.latent_pi", "critic.qf0"),
    }.get(model.algo, ("mlp_extractor.policy_net", "mlp_extractor.value_net"))
    found = []
    for name in names:
        sizes = [len(layer.bias) for layer in _Tensors(model).layers(name)]
        has_output = name in ("q_net.q_net", "critic.qf0")
        found.append(tuple(sizes[:-1] if has_output else sizes))
    if len(set(found)) > 1:
        each = " and ".join(f"{name} {sizes}" for name, sizes in zip(names, found, strict=True))
        refuse(model, f"its networks have different layers ({each}), and Headrace's have the same")
    return found[0]


def num_critics(model: Sb3Model) -> int:
    """Return the number of SAC's critics."""
    return len({name.split(".")[1] for name in model.policy if name.startswith("critic.qf")})


def num_actions(model: Sb3Model) -> int:
    """Return the number of components of SAC's actions."""
    return len(_Tensors(model).layer("actor.mu").bias)


def _actor_critic(model: Sb3Model, tensors: _Tensors, spec: EnvSpec) -> dict[str, dict[str, Any]]:
    of_policy = tensors.encoder("features_extractor.")
    for role in ("pi", "vf"):  # the same module under three names, unless there are two of them
        again = tensors.encoder(f"{role}_features_extractor.")
        if any(not torch.equal(of, of_policy[name]) for name, of in again.items()):
            refuse(model, "policy and values have an image network each, and share one here")
    found = dict(of_policy)
    for theirs, ours in (("policy_net", "actor_trunk"), ("value_net", "critic_trunk")):
        for i, layer in enumerate(tensors.layers(f"mlp_extractor.{theirs}")):
            found |= _named(f"{ours}.layers.{i}", layer)
    actor, log_std = tensors.layer("action_net"), None
    if spec.action.kind == "box":
        # There the mean is the action itself; here [-1, 1] becomes the space's bounds.
        codec = ActionCodec(spec.action)
        scale = torch.from_numpy(np.where(codec.scale == 0, 1, codec.scale).astype(np.float32))
        shift = torch.from_numpy(codec.shift.astype(np.float32))
        log_std = tensors.take("log_std")
        if not actor.bias.shape == log_std.shape == scale.shape:
            refuse(
                model,
                f"its policy has {len(actor.bias)} actions and deviations of shape "
                f"{tuple(log_std.shape)}; {spec.id} takes {spec.action.describe()}",
            )
        actor = _Layer(actor.weight / scale.unsqueeze(-1), (actor.bias - shift) / scale)
        log_std = log_std - scale.log()
    found |= _named("actor", actor) | _named("critic", tensors.layer("value_net"))
    inside = {f"model.{name}": tensor for name, tensor in found.items()}
    return {"policy": inside | ({} if log_std is None else {"head.log_std": log_std})}


def _q(model: Sb3Model, tensors: _Tensors, spec: EnvSpec) -> dict[str, dict[str, Any]]:
    by_module = {}
    for module, theirs in (("policy", "q_net"), ("target", "q_net_target")):
        found = tensors.encoder(f"{theirs}.features_extractor.")
        *hidden, last = tensors.layers(f"{theirs}.q_net")
        for i, layer in enumerate(hidden):
            found |= _named(f"trunk.layers.{i}", layer)
        found |= _named("actor", last)
        by_module[module] = {f"model.{name}": tensor for name, tensor in found.items()}
    return by_module


def _sac(model: Sb3Model, tensors: _Tensors, spec: EnvSpec) -> dict[str, dict[str, Any]]:
    found = tensors.encoder("actor.features_extractor.")
    for i, layer in enumerate(tensors.layers("actor.latent_pi")):
        found |= _named(f"trunk.layers.{i}", layer)
    parts = [tensors.layer("actor.mu"), tensors.layer("actor.log_std")]
    found |= _named("actor", _Layer(*(torch.cat(each) for each in zip(*parts, strict=True))))
    by_module = {"policy": {f"model.{name}": tensor for name, tensor in found.items()}}
    count = num_critics(model)
    for module, theirs in (("critics", "critic"), ("target", "critic_target")):
        of = tensors.encoder(f"{theirs}.features_extractor.")
        networks = [tensors.layers(f"{theirs}.qf{k}") for k in range(count)]
        for i, layers in enumerate(zip(*networks, strict=True)):
            of[f"layers.{i}.weight"] = torch.stack([layer.weight.T for layer in layers])
            of[f"layers.{i}.bias"] = torch.stack([layer.bias.unsqueeze(0) for layer in layers])
        by_module[module] = of
    weight = model.variables.get("log_ent_coef")
    if weight is None:  # it is fixed
        weight = model.variables.get("ent_coef_tensor", torch.ones(1)).log()
    by_module["temperature"] = {"log_alpha": weight.float().reshape(())}
    return by_module


def _named(name: str, layer: _Layer) -> dict[str, Tensor]:
    return {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}


_OURS = ("head.", "normalize_")
"""Beginnings of the names of tensors that a model does not have."""


def _load(model: Sb3Model, module: nn.Module, found: Mapping[str, Tensor], spec: EnvSpec) -> None:
    """Load tensors by name; CheckpointError if names or shapes are others."""
    own = module.state_dict()
    here = {name: tuple(t.shape) for name, t in own.items()}
    there = {name: tuple(t.shape) for name, t in found.items()}
    kept = {name: shape for name, shape in here.items() if name.startswith(_OURS)}
    differing = [
        f"  {name}: model {there.get(name, 'has none')}, here {here.get(name, 'is none')}"
        for name in sorted(here.keys() | there.keys())
        if (kept | there).get(name) != here.get(name)
    ]
    if differing:
        refuse(
            model,
            f"its sizes do not fit {spec.id} (observation {spec.seen.describe()}, action "
            f"{spec.action.describe()}):\n" + "\n".join(differing[:6]),
            "Name the environment that it was trained in, with its wrappers (--wrapper) and "
            "arguments (--env-kwargs). Image networks need 512 features.",
        )
    module.load_state_dict(own | dict(found))
