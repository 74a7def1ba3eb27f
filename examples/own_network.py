"""A network of your own: any torch.nn.Module whose forward(obs) gives (params, value).

    python examples/own_network.py
    headrace train CartPole-v1 --model examples.own_network:Residual

`params` are what the distribution over actions takes: logits for Discrete actions (one per choice,
for MultiDiscrete side by side), means for a Box. `num_params(spec)` says how many. Observations
come as they are stored (`spec.seen`): for a Dict space a dict of tensors, images as uint8; for a
Tuple a dict of its indices, so that `obs[0]` is its first part.
"""

import torch
from torch import Tensor, nn

import headrace
from headrace import EnvSpec, num_params


class Residual(nn.Module):
    """Two blocks with skip connections, under both the policy and the value."""

    def __init__(self, spec: EnvSpec, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(spec.seen.size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.params = nn.Linear(width, num_params(spec))
        self.value = nn.Linear(width, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations `[n, ...]` to parameters `[n, num_params]` and values `[n]`."""
        hidden = self.enter(obs.flatten(1))
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.params(hidden), self.value(hidden).squeeze(-1)


def main(total_env_steps: int = 50_000) -> None:
    """Train it, and load it again."""
    run = headrace.train("CartPole-v1", model=Residual, total_env_steps=total_env_steps, seed=1)
    policy = headrace.load_policy(run.dir, model=Residual)
    print("Action:", policy([0.0, 0.1, 0.0, -0.1]), "Return:", run.evaluate(episodes=5).returns)


if __name__ == "__main__":
    main()
