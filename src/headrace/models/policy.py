"""The policy: from observations to actions and values. What samplers copy and what files hold.

Left out: where observations come from (`collect/`), and losses (`algos/`).
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from headrace.batch import Fragment, Obs, each
from headrace.errors import UsageError
from headrace.models.dists import head_for
from headrace.models.encoders import ImageNet, encoder_for
from headrace.models.nets import Mlp, linear
from headrace.models.normalize import NormalizeObs, NormalizeReward
from headrace.settings import settings
from headrace.spec import PLAIN, EnvSpec

ModelFactory = Callable[[EnvSpec], nn.Module]
"""Makes a network of the user's own: a module whose `forward(obs)` gives `(params, value)`, see
`ActorCritic.forward`. It gets `spec.seen` observations, and must make as many params as
`num_params(spec)` says."""


@settings
class Network:
    """The shape of the policy's network, and the normalizers that live in it."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    """Width of each hidden layer (units)."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    shared_trunk: bool = False
    """One stack of hidden layers for policy and value, in place of one each. (What sees images is
    always shared.)"""
    image_net: ImageNet = "auto"
    """What sees images: nature and impala are convolutional networks of those papers, small is for
    grids of a few cells; auto: by the image's size."""
    normalize_obs: bool = False
    """Subtract the running mean of observations and divide by their running deviation: of each
    number, of each channel of an image."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return (learner only)."""
    clip_reward: float = 0.0
    """Clip rewards to ± this before anything is learned from them (0: never); returns are reported
    unclipped."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the network's products; weights, losses and gradients are fp32 in any case."""
    arithmetic: Literal["auto", "plain"] = "auto"
    """How small networks are computed on the CPU; plain: by torch's own operations; auto: where
    these take longer than the arithmetic itself, samplers act by NumPy, and PPO's loss has a
    gradient of its own: the same but for rounding (fp32, a network of our own, Box observations
    without image or mask). A run can be repeated exactly only with the same value."""


class ActorCritic(nn.Module):
    """Our own network: an encoder, and over it an actor and a critic with a trunk each."""

    def __init__(self, spec: EnvSpec, network: Network) -> None:
        super().__init__()
        self.encoder = encoder_for(spec.seen, network.image_net)
        features = self.encoder.num_features

        def trunk() -> Mlp:
            return Mlp(features, network.hidden_sizes, network.activation)

        width = (features, *network.hidden_sizes)[-1]
        self.actor_trunk = trunk()
        # Small gain: the first policy is close to uniform whatever it sees (Andrychowicz et al.
        # 2021, arXiv:2006.05990, choice C57).
        self.actor = linear(width, num_params(spec), 0.01)
        self.critic_trunk = None if network.shared_trunk else trunk()
        self.critic = linear(width, 1, 1.0)

    def features(self, obs: Obs) -> Tensor:
        """What the trunks see: `[..., features]`."""
        features: Tensor = self.encoder(obs)
        return features.to(self.actor.weight.dtype)

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution `[..., num_params]`, and values `[...]`."""
        features = self.features(obs)
        hidden = self.actor_trunk(features)
        critic_hidden = hidden if self.critic_trunk is None else self.critic_trunk(features)
        return self.actor(hidden), self.critic(critic_hidden).squeeze(-1)


class Policy(nn.Module):
    """A network, the distribution over actions that its output means, and the normalizers."""

    def __init__(self, spec: EnvSpec, network: Network, model: ModelFactory | None = None) -> None:
        super().__init__()
        self._spec, self._clip_reward = spec, network.clip_reward
        self._bf16 = network.precision == "bf16"
        self.model = ActorCritic(spec, network) if model is None else _made(model, spec)
        self.head = head_for(spec.action)
        self.normalize_obs = NormalizeObs(spec.seen) if network.normalize_obs else None
        self.normalize_reward = NormalizeReward() if network.normalize_reward else None

    @property
    def num_draws(self) -> int:
        """Numbers of uniform noise that one action takes."""
        return self.head.num_draws

    @property
    def masks(self) -> bool:
        """Whether observations say which actions are allowed."""
        return bool(self._spec.mask_key)

    def seen(self, obs: Obs) -> Obs:
        """Observations without the action mask."""
        if not self._spec.mask_key:
            return obs
        assert isinstance(obs, dict)
        rest = {key: part for key, part in obs.items() if key != self._spec.mask_key}
        return rest[PLAIN] if list(rest) == [PLAIN] else rest

    def normalized(self, obs: Obs) -> Obs:
        """What the network sees: without the action mask, and normalized if that was asked for."""
        seen = self.seen(obs)
        return seen if self.normalize_obs is None else self.normalize_obs(seen)

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution `[..., num_params]`, and values `[...]`."""
        seen = self.normalized(obs)
        if self._bf16:
            device = next(self.parameters()).device.type
            with torch.autocast(device, torch.bfloat16):
                params, value = self.model(seen)
            params, value = params.float(), value.float()
        else:
            params, value = self.model(seen)
        if self._spec.mask_key:
            allowed = obs[self._spec.mask_key].reshape(params.shape) != 0  # type: ignore[index]
            # The least finite number, not -inf: its share of the entropy is 0 * log 0.
            params = params.masked_fill(~allowed, torch.finfo(params.dtype).min)
        return params, value

    def act(self, obs: Obs, noise: Tensor) -> dict[str, Tensor]:
        """Sample actions.

        Args:
            obs: `[n, ...]`.
            noise: `[n, num_draws]`, uniform in (0, 1).

        Returns:
            `action` (as stored in a fragment), `log_prob` `[n]` and `value` `[n]`.
        """
        params, value = self(obs)
        action, log_prob = self.head.sample(params, noise)
        return {"action": action, "log_prob": log_prob, "value": value}

    def act_greedily(self, obs: Obs) -> Tensor:
        """The likeliest action for each of `[n, ...]` observations."""
        return self.head.mode(self(obs)[0])

    def evaluate(self, obs: Obs, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value of `action` in `obs`: `[...]` each."""
        params, value = self(obs)
        log_prob, entropy = self.head.evaluate(params, action)
        return log_prob, entropy, value

    def value(self, obs: Obs) -> Tensor:
        """V(s) for `[..., ]` observations."""
        value: Tensor = self(obs)[1]
        return value

    def clipped(self, reward: Tensor) -> Tensor:
        """The reward clipped, where that was asked for."""
        return reward.clamp(-self._clip_reward, self._clip_reward) if self._clip_reward else reward

    def scaled(self, reward: Tensor) -> Tensor:
        """The reward as the learner sees it: clipped, normalized, where that was asked for."""
        clipped = self.clipped(reward)
        return clipped if self.normalize_reward is None else self.normalize_reward(clipped)


Act = Callable[[Obs, Tensor], dict[str, Tensor]]
"""As `Policy.act`: (observations [n, ...], noise [n, draws]) -> action and the other outputs."""


class Actor(Protocol):
    """Acts through rows of a fragment, with the weights as they were when it was made."""

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        """Get ready for a fragment, at whichever of its rows.

        Args:
            fragment: its rows of observations are read as they come.
            noise: `[T, n, draws]`, uniform in (0, 1).

        Returns:
            What writes the actions of row t; rows come in order.
        """

    def finish(self, rows: slice) -> None:
        """These rows are done: write what else the algorithm asked the policy to emit for them.

        Called before any weights change.
        """


class PolicyActor:
    """An `Actor` that gets all of a row at once, from `Policy.act` or what is like it."""

    def __init__(self, act: Act) -> None:
        self._act = act

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        """See `Actor`."""
        # Cut into rows beforehand: indexing a tensor takes longer than copying a small row.
        outs = {"action": fragment.action} | fragment.policy_out
        rows = [(name, column.unbind()) for name, column in outs.items()]
        noise_rows = noise.unbind()

        def act(t: int) -> None:
            out = self._act(each(lambda o: o[t], fragment.obs), noise_rows[t])
            for name, of in rows:
                of[t].copy_(out[name])

        return act

    def finish(self, rows: slice) -> None:
        """See `Actor`: nothing is left."""


def num_params(spec: EnvSpec) -> int:
    """How many numbers the distribution over actions takes: logits, or means."""
    return head_for(spec.action).num_params


def _made(factory: ModelFactory, spec: EnvSpec) -> nn.Module:
    """A model of the user's own."""
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(
            f"model={name}: expected what makes a torch.nn.Module from the environment's spec, "
            "such as its class; not the module itself."
        )
    try:
        inspect.signature(factory).bind(spec)
    except TypeError as error:
        raise UsageError(
            f"The model {name} cannot be made: {error}.\nExpected a class or function that takes "
            "the environment's spec, as in examples/own_network.py."
        ) from None
    except ValueError:
        pass  # built-ins do not tell their signature
    return _checked(factory(spec), spec)


@torch.no_grad()
def _checked(model: Any, spec: EnvSpec) -> nn.Module:
    """Try a model of the user's own on two observations."""
    expected = (
        f"expected that forward(obs) gives (params, value) of shapes [n, {num_params(spec)}] and "
        f"[n], for {spec.seen.describe()} observations"
    )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is a {type(model).__name__}: expected that calling it with the "
            "environment's spec makes a torch.nn.Module."
        )
    tried = {
        # Choices may be few; of numbers, not 0, which would hide what a layer does
        key: torch.full((2, *part.shape), int(part.kind == "box"), dtype=getattr(torch, part.dtype))
        for key, part in spec.seen.leaves
    }
    obs = tried if spec.seen.kind == "dict" else tried[PLAIN]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        given, again = model(obs), model(obs)
        shapes = [tuple(part.shape) for part in given]
    except Exception as error:
        raise UsageError(
            f"The model {type(model).__name__} failed: {type(error).__name__}: {error}\n{expected}."
        ) from error
    if shapes != [(2, num_params(spec)), (2,)]:
        raise UsageError(
            f"The model {type(model).__name__} gave shapes {shapes} for n=2: {expected}."
        )
    pairs = [*zip(given, again, strict=True), *zip(before, model.buffers(), strict=True)]
    if not all(torch.equal(first, second) for first, second in pairs):
        raise UsageError(
            f"The model {type(model).__name__} gave other values for the same observations, or "
            "changed itself when it was called: what acted would not be what is learned from.\n"
            "Leave out such layers (Dropout, BatchNorm); LayerNorm is a substitute."
        )
    return model


def build(spec: EnvSpec, network: Network, seed: int, model: ModelFactory | None = None) -> Policy:
    """A fresh policy on the CPU, the same for the same seed whatever was drawn before.

    Raises:
        UsageError: the user's model does not give what `ActorCritic.forward` says.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(spec, network, model)
