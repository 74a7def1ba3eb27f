"""A trained policy on its own: load it, call it, measure it, film it.

Left out: training. Nothing here needs the environment, but `evaluate`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.collect.rollout import rollout
from headrace.envs.api import Episode
from headrace.envs.film import filmed
from headrace.envs.gym import GymVector
from headrace.envs.make import EnvMaker, make_all
from headrace.errors import ConfigError
from headrace.meter import Meter
from headrace.models.policy import Network, Policy
from headrace.run import checkpoint
from headrace.seeding import action_noise
from headrace.spec import ActionCodec, Array, EnvSpec

_NUM_STEPS = 64
_MOST_ENVS = 32


@dataclass(frozen=True)
class Evaluation:
    """Returns of whole episodes.

    Attributes:
        returns: undiscounted, one per episode.
        lengths: env steps, one per episode.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `headrace eval --json`."""
        return {
            "mean_return": float(np.mean(self.returns)),
            "std_return": float(np.std(self.returns)),
            "episodes": len(self.returns),
            "mean_length": float(np.mean(self.lengths)),
        }


class TrainedPolicy:
    """A policy to act with: `policy(obs) -> action`, normalizers included, on the CPU.

    Attributes:
        spec: what it was trained on.
        module: the network.
    """

    def __init__(self, spec: EnvSpec, module: Policy) -> None:
        self.spec, self.module = spec, module
        self._codec = ActionCodec(spec.action)

    @torch.no_grad()
    def __call__(self, obs: Any) -> Any:
        """The likeliest action, as the environment expects it.

        Args:
            obs: one observation, or a batch of them with one more leading dimension.

        Returns:
            One action or a batch of them: integers, or arrays of the action space's shape.

        Raises:
            ValueError: the shape is neither one observation's nor a batch's.
        """
        space = self.spec.observation
        array = np.asarray(obs, dtype=space.dtype)
        single = array.shape == space.shape
        if not single and array.shape[1:] != space.shape:
            raise ValueError(
                f"Got an observation of shape {array.shape}; expected {space.shape}, or a batch "
                f"(n, *{space.shape})."
            )
        rows = torch.from_numpy(array[None] if single else array)
        action = self._codec.to_env(self.module.act_greedily(rows).numpy())
        if not single:
            return action
        return int(action[0]) if self.spec.action.kind == "discrete" else action[0]


def load_policy(directory: str | Path) -> TrainedPolicy:
    """Load the newest whole checkpoint's policy from a run directory (or from that checkpoint).

    Needs neither the environment nor a GPU, and unpickles nothing.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    saved = checkpoint.newest(Path(directory))
    described = saved.manifest["policies"]["default"]
    spec = EnvSpec.from_json(described["spec"])
    network = described["network"]
    network["hidden_sizes"] = tuple(network["hidden_sizes"])
    module = Policy(spec, Network(**network))
    module.load_state_dict(saved.tensors("policy_default"))
    return TrainedPolicy(spec, module.eval())


@torch.no_grad()
def evaluate(
    policy: TrainedPolicy,
    maker: EnvMaker,
    *,
    episodes: int = 20,
    stochastic: bool = False,
    seed: int = 0,
    video: Path | None = None,
) -> Evaluation:
    """Play whole episodes: each env a fixed number of them, so that short ones count no more.

    Args:
        policy: acts.
        maker: makes the environments.
        episodes: how many.
        stochastic: sample actions, as in training; default: the likeliest.
        seed: of environments and sampling; evaluation's seeds differ from training's.
        video: write the first episode here (MP4).

    Raises:
        ConfigError: fewer than one episode.
        MissingExtraError: a video without the `video` extra.
        EnvError: the environment failed.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: expected at least 1.")
    num_envs = min(episodes, _MOST_ENVS)
    quota = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    module = policy.module
    played: list[list[Episode]] = [[] for _ in range(num_envs)]

    def act(obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        return module.act(obs, noise) if stochastic else {"action": module.act_greedily(obs)}

    meter = Meter()
    fragment = batch.allocate(batch.columns(policy.spec, {}, _NUM_STEPS, num_envs))
    with _vector(policy.spec, maker, num_envs, seed, meter, video) as vector:
        steps = 0
        while any(len(p) < q for p, q in zip(played, quota, strict=True)):
            noise = action_noise(seed, vector.env_id, steps, _NUM_STEPS, module.num_draws)
            rollout(vector, fragment, act, torch.from_numpy(noise), meter, lambda: False)
            for episode in vector.finish():
                played[episode.env_id].append(episode)
            vector.commit()
            steps += _NUM_STEPS
    kept = [e for p, q in zip(played, quota, strict=True) for e in p[:q]]
    return Evaluation(
        returns=tuple(e.total_reward for e in kept), lengths=tuple(e.num_steps for e in kept)
    )


@contextmanager
def _vector(
    spec: EnvSpec, maker: EnvMaker, num_envs: int, seed: int, meter: Meter, video: Path | None
) -> Iterator[GymVector]:
    """The environments of an evaluation; the first one filmed if asked for."""
    first = maker() if video is None else filmed(maker, video)
    envs = [first, *make_all(maker, num_envs - 1)]
    env_id: Array = np.arange(num_envs)
    vector = GymVector(envs, spec, env_id, seed, meter, role="eval", sampler="evaluation")
    try:
        yield vector
    finally:
        vector.close()
