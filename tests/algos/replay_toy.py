"""A replay algorithm in one file: Q-learning whose policy is softmax(Q / temperature)."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algos.base import Algorithm, AlgorithmConfig, LossSpec
from headrace.configclass import NonNegative, PositiveInt, configclass


@configclass
class ToyReplayConfig(AlgorithmConfig):
    """Settings of the toy."""

    lr: NonNegative = 1e-3
    gamma: NonNegative = 0.98
    max_grad_norm: NonNegative = 10.0
    replay_size: PositiveInt = 10_000
    """Transitions that are kept."""
    batch_size: PositiveInt = 64
    """Transitions of one gradient step."""
    replay_ratio: NonNegative = 0.25
    """Gradient steps for each env step."""
    learning_starts: PositiveInt = 500
    """Env steps before the first gradient step."""
    target_every: PositiveInt = 50
    """Gradient steps between copies to the target network."""


class Ring(nn.Module):
    """The newest transitions. Its buffers are saved with the learner, and resumed."""

    def __init__(self, size, obs_shape):
        super().__init__()
        for name, shape, dtype in (
            ("obs", obs_shape, torch.float32), ("next_obs", obs_shape, torch.float32),
            ("action", (), torch.int64), ("reward", (), torch.float32),
            ("terminated", (), torch.bool),
        ):  # fmt: skip
            self.register_buffer(name, torch.zeros((size, *shape), dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def insert(self, fragment):
        """Append the valid transitions of a fragment."""
        final_obs, step, env = fragment.finals()
        next_obs = torch.cat([fragment.obs[1:], fragment.obs[:1]])  # unused places have step T
        next_obs[step, env] = final_obs
        next_obs = next_obs[:-1]
        keep = fragment.valid.flatten()
        rows = {"obs": fragment.obs[:-1], "next_obs": next_obs, "action": fragment.action}
        rows |= {"reward": fragment.reward, "terminated": fragment.terminated}
        at = (torch.arange(int(keep.sum())) + self.count) % len(self.reward)
        for name, column in rows.items():
            getattr(self, name)[at] = column.flatten(0, 1)[keep]
        self.count += len(at)

    def draw(self, rng, num_rows):
        """Draw transitions, each as likely as the others."""
        size = min(int(self.count), len(self.reward))
        index = torch.from_numpy(rng.integers(size, size=num_rows))
        return {name: column[index] for name, column in self.named_buffers() if name != "count"}


def loss(policy: nn.Module, minibatch, cfg) -> tuple[Tensor, dict[str, Tensor]]:
    """The squared temporal difference: the policy's logits are its Q-values."""
    q, _ = policy(minibatch["obs"])
    error = q.gather(1, minibatch["action"].unsqueeze(1)).squeeze(1) - minibatch["target"]
    weight = minibatch["weight"]
    td_error = (error.abs() * weight).sum().detach()
    return (error.square() * weight).sum(), {"td_error": td_error}


class ToyReplay(Algorithm[ToyReplayConfig]):
    """Acts by softmax(Q), learns from a replay buffer in this file."""

    name, Config, data = "toy_replay", ToyReplayConfig, "replay"

    def build(self, policy, spec, network, config, num_rows, ranks):
        """Beside the policy: its target network, and the buffer."""
        target = copy.deepcopy(policy).requires_grad_(False)
        ring = Ring(config.replay_size, spec.observation.shape)
        return {"policy": policy, "target": target, "ring": ring}

    def losses(self, modules, config):
        """One loss; the critic of the network takes no part in it."""
        policy = modules["policy"]
        spec = LossSpec(loss, policy, config.max_grad_norm, config.adam_eps, may_skip=True)
        return {"q": spec}

    def update(self, source, ctx):
        """Insert the batch, then take as many gradient steps as the ratio asks for."""
        cfg, ring, target = ctx.config, ctx.modules["ring"], ctx.modules["target"]
        ring.insert(source)
        env_steps = int(ring.count)  # those of this rank
        due = int(cfg.replay_ratio * max(0, env_steps - cfg.learning_starts)) - ctx.learner_steps
        metrics = {"td_error": torch.zeros(()), "grad_norm": torch.zeros(())}
        for step in range(ctx.learner_steps, ctx.learner_steps + due):
            if step % cfg.target_every == 0:
                target.load_state_dict(ctx.policy.state_dict())
            rng = np.random.default_rng((ctx.seed, step))  # no state to save
            rows = ring.draw(rng, cfg.batch_size)
            with torch.no_grad():
                future = target(rows["next_obs"])[0].amax(1)
            rows["weight"] = torch.full((cfg.batch_size,), 1 / cfg.batch_size)
            rows["target"] = rows["reward"] + cfg.gamma * future * ~rows["terminated"]
            metrics = ctx.step("q", rows, ctx.config.lr)
        return metrics
