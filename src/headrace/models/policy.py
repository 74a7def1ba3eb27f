"""The policy: from observations to actions and values. Workers copy it and checkpoints save it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from headrace.batch import Fragment, Obs, each
from headrace.configclass import NonNegative, PositiveInt, PositiveInts, configclass
from headrace.errors import ConfigError
from headrace.models.custom import ModelFactory, made, num_params
from headrace.models.distributions import Head, head_for
from headrace.models.networks import Encoder, ImageNet, Mlp, autocast, encoder_for, linear
from headrace.models.normalization import NormalizeObs, NormalizeReward, RunningMoments
from headrace.models.recurrent import Core, CoreKind, state_size
from headrace.spec import PLAIN, EnvSpec, nested


@configclass
class Network:
    """The shape of the policy's network, and the normalizers that live in it."""

    hidden_sizes: PositiveInts = (64, 64)
    """Width of each hidden layer (units)."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    shared_trunk: bool = False
    """One stack of hidden layers for policy and value, in place of one each. (The encoder of images
    is always shared.)"""
    core: CoreKind = "none"
    """A recurrent core between the encoder of observations and the hidden layers, for policy and
    value alike: memory within an episode. Minibatches are whole runs of envs then, or sequences of
    a replay."""
    core_size: PositiveInt = 64
    """Width of the core's output (units)."""
    image_net: ImageNet = "auto"
    """Encoder of images. nature: Mnih et al. 2015; impala: Espeholt et al. 2018; small: for grids
    of a few cells; auto: by the image's size."""
    normalize_obs: bool = False
    """Subtract the running mean of observations and divide by their running deviation: of each
    number, of each channel of an image."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return (learner only)."""
    initial_log_std: float = 0.0
    """Logarithm of the deviation of continuous actions before training; the range of a bounded
    action is 2. It is learned."""
    clip_reward: NonNegative = 0.0
    """Clip rewards to ± this before anything is learned from them (0: never); returns are reported
    unclipped."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the network's products; weights, losses and gradients are fp32 in any case."""
    arithmetic: Literal["auto", "plain"] = "auto"
    """How small networks are computed; plain: by torch's own operations, one by one; auto: where
    these take longer than the arithmetic itself, workers act by NumPy, and gradients and targets
    are written out instead of autograd's: the same but for rounding, on the CPU, in fp32, without
    images, with a network of our own; on a GPU, a gradient step is a CUDA graph. A run can be
    repeated exactly only with the same value."""

    @property
    def state_size(self) -> int:
        """Size S of the core's state of one env; 0 without a core."""
        return state_size(self.core, self.core_size)


class WithCore(nn.Module, ABC):
    """The base class of networks that have an encoder, maybe a recurrent core, and heads.

    Attributes:
        num_features: numbers that the heads get.
    """

    actor: nn.Linear
    core: Core | None

    def __init__(self, encoder: Encoder, network: Network) -> None:
        super().__init__()
        self.encoder, self.core = encoder, None
        self.num_features = encoder.num_features
        if network.core != "none":
            self.core = Core(network.core, self.num_features, network.core_size)
            self.num_features = network.core_size

    def features(self, obs: Obs) -> Tensor:
        """Return the input of the core, or of the heads: `[..., features]`."""
        features: Tensor = self.encoder(obs)
        return features.to(self.actor.weight.dtype)

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution `[..., num_params]`, and values `[...]`."""
        return self.heads(self.features(obs))

    @abstractmethod
    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of `forward` from the input of the heads."""


class ActorCritic(WithCore):
    """Headrace's network: an encoder, maybe a recurrent core, and trunks of actor and critic.

    Attributes:
        state_encoder: encodes the state of a game for the critic, where it sees one.
    """

    def __init__(self, spec: EnvSpec, network: Network) -> None:
        super().__init__(encoder_for(spec.seen, network.image_net), network)
        features = of_critic = self.num_features
        self.state_encoder: Encoder | None = None
        if spec.state_key:
            state = dict(spec.observation.parts)[spec.state_key]
            self.state_encoder = encoder_for(state, network.image_net)
            of_critic += self.state_encoder.num_features
        sizes, activation = network.hidden_sizes, network.activation
        self.actor_trunk = Mlp(features, sizes, activation)
        # Small gain: the initial policy is close to uniform for all observations (Andrychowicz et
        # al. 2021, arXiv:2006.05990, choice C57).
        self.actor = linear((features, *sizes)[-1], num_params(spec), 0.01)
        is_shared = network.shared_trunk
        self.critic_trunk = None if is_shared else Mlp(of_critic, sizes, activation)
        self.critic = linear((of_critic, *sizes)[-1], 1, 1.0)

    def forward(self, obs: Obs, game_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.heads(self.features(obs), game_state)

    def heads(self, features: Tensor, game_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.actor_trunk(features)
        if self.critic_trunk is None:
            critic_hidden = hidden
        else:
            if self.state_encoder is not None:
                state = self.state_encoder(game_state).to(features.dtype)
                features = torch.cat([features, state], -1)
            critic_hidden = self.critic_trunk(features)
        return self.actor(hidden), self.critic(critic_hidden).squeeze(-1)


class Policy(nn.Module):
    """A network, the action distribution over its outputs, and the normalizers.

    Args:
        model: makes the user's network; None: `own` makes Headrace's.
        head: the distribution; None: that of the space, `head_for`.

    Attributes:
        state_size: S, the size of the recurrent state of an env (`models/recurrent.py`), or 0. A
            recurrent policy's caller passes states in and receives the next ones.
        is_own: whether the network is Headrace's own, made from these settings.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        model: ModelFactory | None = None,
        *,
        own: Callable[[EnvSpec, Network], nn.Module] = ActorCritic,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        self.state_size = network.state_size
        self._spec, self._clip_reward = spec, network.clip_reward
        self._bf16 = network.precision == "bf16"
        self.is_own = model is None
        head = head or head_for(spec.action, network.initial_log_std)
        own_or_made = own(spec, network) if model is None else made(model, spec, head.num_params)
        self.model, self.head = own_or_made, head
        if spec.state_key and not isinstance(own_or_made, ActorCritic):
            raise ConfigError(
                f"critic='shared', but a {type(own_or_made).__name__} has no critic that sees the "
                "state of the game.\nLeave --critic out."
            )
        self.normalize_obs = NormalizeObs(spec.seen_by_critic) if network.normalize_obs else None
        self.normalize_reward = NormalizeReward() if network.normalize_reward else None

    @property
    def num_draws(self) -> int:
        """Uniform random numbers per action."""
        return self.head.num_draws

    @property
    def masks(self) -> bool:
        """Whether observations contain an action mask."""
        return bool(self._spec.mask_key)

    @property
    def has_empty_normalizers(self) -> bool:
        """Whether there are normalizers, and none of them has data."""
        moments = [part for part in self.modules() if isinstance(part, RunningMoments)]
        return bool(moments) and not any(part.count for part in moments)

    def seen(self, obs: Obs) -> Obs:
        """Return the observations without action mask and state of the game: those to act by."""
        return _without(obs, self._spec.mask_key, self._spec.state_key)

    def seen_by_critic(self, obs: Obs) -> Obs:
        """Return the observations without the action mask."""
        return _without(obs, self._spec.mask_key)

    def normalized(self, obs: Obs) -> Obs:
        """Return what `seen` returns, normalized if so configured: the actor's input."""
        seen = self.seen(obs)
        return seen if self.normalize_obs is None else self.normalize_obs(seen)

    def game_state(self, obs: Obs) -> tuple[Tensor, ...]:
        """Return the state of the game, normalized if so configured; () if no critic sees one."""
        if not (key := self._spec.state_key):
            return ()
        assert isinstance(obs, dict)
        state = {key: obs[key]}
        return ((state if self.normalize_obs is None else self.normalize_obs(state))[key],)

    def _input(self, obs: Obs) -> Any:
        """Return `normalized`; for a network of one's own, nested as the environment's own."""
        flat = self.normalized(obs)
        return flat if self.is_own else nested(self._spec.seen, flat)

    def forward(
        self, obs: Obs, state: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution `[..., num_params]`, and values `[...]`.

        Args:
            obs: `[..., *shape]`; with a core `[T, n, *shape]`, or flat: `[T * n, *shape]`.
            state: with a core: `[n, S]`, before the first row.
            reset: with a core: `[T, n]` bool, or flat: zero the state before this row.
        """
        if state is None:
            with self._precision():
                return self._masked(obs, *self.model(self._input(obs), *self.game_state(obs)))
        assert reset is not None
        hidden = self._core(*self._sequence(obs, state, reset))
        return self._from_core(obs, hidden.reshape(*reset.shape, -1))

    def one_row(
        self, obs: Obs, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute `forward` of one row `[n, ...]`; with a core also the next `{"state": ...}`."""
        if state is None:
            return *self(obs), {}
        hidden, after = self._core.one_row(self._features(obs), state)
        return *self._from_core(obs, hidden), {"state": after}

    def after_core(self, obs: Obs, state: Tensor, reset: Tensor, burn_in: int) -> Tensor:
        """Return the core's outputs for rows in sequence, `[T - burn_in, n, core_size]`.

        Args:
            obs, state, reset: as in `forward`, `[T, n, ...]`.
            burn_in: so many first rows only make the state, and get no gradient.
        """
        if burn_in:
            with torch.no_grad():
                first = each(lambda o: o[:burn_in], obs)
                inputs = self._sequence(first, state, reset[:burn_in])
                state = self._core.with_states(*inputs)[1][burn_in - 1]
        rest = each(lambda o: o[burn_in:], obs)
        hidden: Tensor = self._core(*self._sequence(rest, state, reset[burn_in:]))
        return hidden

    def values(self, obs: Obs, state: Tensor, reset: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Return values `[T, n]` of a sequence, and states by row, from `Core.with_states`."""
        hidden, after = self._core.with_states(*self._sequence(obs, state, reset))
        return self._from_core(obs, hidden)[1], after

    @property
    def _core(self) -> Core:
        assert isinstance(self.model, WithCore)
        assert self.model.core is not None
        return self.model.core

    def _features(self, obs: Obs) -> Tensor:
        assert isinstance(self.model, WithCore)
        with self._precision():
            return self.model.features(self.normalized(obs))

    def _sequence(self, obs: Obs, state: Tensor, reset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, n = self._features(obs), len(state)
        return features.reshape(-1, n, features.shape[-1]), state, reset.reshape(-1, n)

    def _from_core(self, obs: Obs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            outputs = self.model.heads(hidden, *self.game_state(obs))  # type: ignore[operator]
            return self._masked(obs, *outputs)

    def use_fp32(self) -> None:
        """Compute products in fp32 from now on, whatever the network's `precision` is."""
        self._bf16 = False

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        if not self._bf16:  # `parameters` of a core would interrupt --compile's graphs
            return contextlib.nullcontext()
        return autocast(next(self.parameters()).device, on=True)

    def _masked(self, obs: Obs, params: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._bf16:
            params, value = params.float(), value.float()
        allowed = self.allowed(obs, params.shape[:-1])
        return params if allowed is None else self.head.masked(params, allowed), value

    def allowed(self, obs: Obs, shape: Sequence[int]) -> Tensor | None:
        """Return the action mask of observations `[*shape, ...]`; None if they have none.

        It is bool, `[*shape, num_choices]`.
        """
        if not (key := self._spec.mask_key):
            return None
        assert isinstance(obs, dict)
        return obs[key].reshape(*shape, self.head.num_choices) != 0

    def act(self, obs: Obs, noise: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        """Sample actions.

        Args:
            obs: `[n, ...]`; with a core, `state` is `[n, S]`.
            noise: `[n, num_draws]`, uniform in (0, 1).

        Returns:
            `action` (as stored in a fragment), `log_prob` `[n]` and `value` `[n]`; with a core also
            the next `state`.
        """
        params, value, after = self.one_row(obs, state)
        action, log_prob = self.head.sample(params, noise)
        return {"action": action, "log_prob": log_prob, "value": value} | after

    def act_greedily(self, obs: Obs, state: Tensor | None = None) -> dict[str, Tensor]:
        """Return the likeliest `action` for observations `[n, ...]`; `state` as in `act`."""
        params, _, after = self.one_row(obs, state)
        return {"action": self.head.mode(params)} | after

    def evaluate(
        self,
        obs: Obs,
        action: Tensor,
        state: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probability, entropy and value of `action`, `[...]` each; see `forward`."""
        params, value = self(obs, state, reset)
        log_prob, entropy = self.head.evaluate(params, action)
        return log_prob, entropy, value

    def value(self, obs: Obs, state: Tensor | None = None) -> Tensor:
        """Return V of observations `[...]`; with a core `[k, ...]`, with states `[k, S]`."""
        return self.one_row(obs, state)[1]

    def act_at_random(self) -> None:
        """Have actions no longer depend on observations: they are uniform, or Gaussian."""
        assert isinstance(self.model, ActorCritic)
        nn.init.zeros_(self.model.actor.weight)

    def clipped(self, reward: Tensor) -> Tensor:
        """Clip rewards, if so configured."""
        return reward.clamp(-self._clip_reward, self._clip_reward) if self._clip_reward else reward

    def scaled(self, reward: Tensor) -> Tensor:
        """Clip and normalize rewards for the learner, if so configured."""
        clipped = self.clipped(reward)
        return clipped if self.normalize_reward is None else self.normalize_reward(clipped)

    def rescaled(self, value: Tensor) -> Tensor:
        """Return values that were learned from rewards of the last update, for those of `scaled`.

        Else all actions would look better, or worse, than expected by as much as the scale drifts.
        """
        return value if self.normalize_reward is None else value * self.normalize_reward.drift


def _without(obs: Obs, *keys: str) -> Obs:
    """Return observations without the parts of these keys; "" is the key of none."""
    left_out = set(keys) - {""}
    if not left_out:
        return obs
    assert isinstance(obs, dict)
    rest = {key: part for key, part in obs.items() if key not in left_out}
    return rest[PLAIN] if list(rest) == [PLAIN] else rest


Act = Callable[..., dict[str, Tensor]]
"""As `Policy.act`: (observations [n, ...], noise [n, draws], with a core also states [n, S]) ->
action and the other outputs."""


class Actor(Protocol):
    """The interface of acting on rows of a fragment, with the weights of its creation."""

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        """Prepare for a fragment, from any of its rows.

        Args:
            fragment: holds each row's observations when that row acts.
            noise: `[T, n, draws]`, uniform in (0, 1).

        Returns:
            A function that writes the actions of row t. Call it in the order of rows.
        """

    def finish(self, rows: slice) -> None:
        """Write the other stored outputs of these rows. Called before any weights change."""


class PolicyActor(Actor):
    """An `Actor` that computes all outputs row by row; another one may continue at any row."""

    def __init__(self, act: Act) -> None:
        self._act = act

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        # Split into rows in advance: indexing a tensor takes longer than copying a small row.
        outs = {"action": fragment.action} | fragment.stored_outputs
        rows = [(name, column.unbind()) for name, column in outs.items()]
        noise_rows = noise.unbind()
        self._fragment, current = fragment, fragment.recurrent_state[1]
        memory = [current] if current.numel() else []

        def act(t: int) -> None:
            fragment.carry(t)
            out = self._act(each(lambda o: o[t], fragment.obs), noise_rows[t], *memory)
            for name, of in rows:
                of[t].copy_(out[name])
            if memory:
                current.copy_(out["state"])

        return act

    def finish(self, rows: slice) -> None:
        self._fragment.carry(rows.stop)


@contextlib.contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside the context, without effect outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
