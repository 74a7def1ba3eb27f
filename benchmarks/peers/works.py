"""The settings of PPO that all contestants share, by the name of the work.

Everything else is the same in all of them: gamma 0.99, lambda 0.95, clip 0.2, value loss 0.5,
gradients cut at 0.5, Adam, nothing normalized but advantages, and 2 × 64 tanh with separate actor
and critic, or NatureCNN for images. Imports nothing, so that every peer can read it.
"""

from dataclasses import dataclass

EVALUATED_EPISODES = 10
"""Of each evaluation while it is trained, where evaluations are compared."""


@dataclass(frozen=True)
class Settings:
    """Of one work.

    Attributes:
        env: its id in Headrace and Gymnasium, or `module:callable`.
        num_envs: N.
        num_steps: T, of each env and batch.
        num_epochs: passes over each batch.
        num_minibatches: of each epoch.
        lr: of Adam, constant.
        ent_coef: weight of the entropy bonus.
    """

    env: str
    num_envs: int
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 4
    lr: float = 2.5e-4
    ent_coef: float = 0.01

    @property
    def batch(self):
        """Env steps of an update."""
        return self.num_envs * self.num_steps

    def headrace_flags(self, env_steps):
        """What makes `headrace train` do the same, whatever its presets say."""
        return (
            f"{self.env} --num-envs {self.num_envs} --num-steps {self.num_steps} "
            f"--num-epochs {self.num_epochs} --num-minibatches {self.num_minibatches} "
            f"--lr {self.lr:g} --ent-coef {self.ent_coef:g} --lr-schedule constant "
            "--clip-schedule constant --clip-coef 0.2 --gamma 0.99 --gae-lambda 0.95 "
            "--vf-coef 0.5 --max-grad-norm 0.5 --no-normalize-obs --no-normalize-reward "
            f"--total-env-steps {env_steps}"
        ).split()


SETTINGS = {
    "cartpole": Settings("CartPole-v1", 64),
    "cartpole8": Settings("CartPole-v1", 8, 64),
    "cartpole1024": Settings("CartPole-v1", 1024, 32),
    "millisecond": Settings("benchmarks.peers.even:millisecond", 8),
    "atari": Settings("ALE/Breakout-v5", 8),
    "cheetah": Settings("HalfCheetah-v5", 8, 512, 10, 8, lr=3e-4, ent_coef=0.0),
    "uneven": Settings("benchmarks.peers.uneven:Uneven", 24),
    "highway": Settings("benchmarks.peers.real:highway", 8, 32),
    "minigrid": Settings("benchmarks.peers.real:minigrid", 8, 256),
    "reporting": Settings("benchmarks.peers.reporting:Reporting", 24),
    "reporting2": Settings("benchmarks.peers.reporting:Reporting", 2),
    "spread": Settings("mpe2.simple_spread_v3:parallel_env", 24, 64, lr=7e-4),
    "tag": Settings("mpe2.simple_tag_v3:parallel_env", 24, 64, lr=7e-4),
    "uneven_game": Settings("benchmarks.peers.uneven_game:UnevenGame", 24),
}
