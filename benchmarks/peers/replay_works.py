"""The settings of DQN that all contestants share, by the name of the work.

Everything else is the same in all of them: gamma 0.99, one step ahead, no double target, Huber's
loss, gradients cut at 10, Adam, epsilon 0.05 after a tenth of the run, 2 × 256 ReLU, or NatureCNN
for images. Imports nothing, so that every peer can read it.
"""

from dataclasses import dataclass

TRAINING_STEPS = 32
"""Steps of each environment between blocks of gradient steps."""


@dataclass(frozen=True)
class ReplaySettings:
    """Of one work.

    Attributes:
        env: its id in Headrace and Gymnasium.
        num_envs: N.
        ratio: gradient steps for each env step.
        batch_size: rows of a gradient step.
        replay_size: rows that are kept.
        learning_starts: env steps before the first gradient step.
        target_interval: gradient steps between copies to the target network.
        lr: of Adam, constant.
    """

    env: str
    num_envs: int
    ratio: float
    batch_size: int
    replay_size: int
    learning_starts: int = 256
    target_interval: int = 250
    lr: float = 3e-4

    @property
    def block(self):
        """Env steps between blocks of gradient steps."""
        return self.num_envs * TRAINING_STEPS

    def headrace_flags(self, env_steps):
        """What makes `headrace train` do the same, whatever its presets say."""
        network = "" if self.env.startswith("ALE/") else "--hidden-sizes 256 256 --activation relu"
        network += " --no-layer-norm"
        return (
            f"{self.env} --algo dqn --num-envs {self.num_envs} --num-steps {TRAINING_STEPS} "
            f"--replay-ratio {self.ratio:g} --batch-size {self.batch_size} --n-step 1 "
            f"--replay-size {self.replay_size} --learning-starts {self.learning_starts} "
            f"--target-update-interval {self.target_interval} --tau 1 --lr {self.lr:g} "
            "--lr-schedule constant --gamma 0.99 --max-grad-norm 10 --no-double-q "
            "--exploration-fraction 0.1 --exploration-final-eps 0.05 --no-normalize-obs "
            f"--no-normalize-reward --total-env-steps {env_steps} {network}"
        ).split()


REPLAY_SETTINGS = {
    "cartpole": ReplaySettings("CartPole-v1", 8, 1.0, 64, 100_000),
    "cartpole_half": ReplaySettings("CartPole-v1", 8, 0.5, 64, 100_000),
    "breakout": ReplaySettings("ALE/Breakout-v5", 8, 0.25, 32, 10_000, lr=1e-4),
}
