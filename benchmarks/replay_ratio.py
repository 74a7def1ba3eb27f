"""DQN beside environments of very different step times: workers that never stop, or wait.

Their lag is 2, or 1, which workers have by default, or 0.

24 environments sleep 7 ms a step, with rare stalls, each in a worker of its own; one gradient step
follows from each env step. Beside it is the learner alone: CartPole-v1, whose observations and
actions have the same shapes, in the learner's process. That is the speed which this ratio allows.
`missing gradient steps` are those that the ratio asks for, less those that were made.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work

ENV_STEPS = 19_200
LEARNING_STARTS = 960
FLAGS = (
    f"--algo dqn --num-envs 24 --num-steps 8 --total-env-steps {ENV_STEPS} --replay-ratio 1 "
    f"--batch-size 64 --learning-starts {LEARNING_STARTS} --hidden-sizes 256 256 --activation relu "
    "--lr 3e-4 --n-step 1 --no-layer-norm --no-normalize-obs --no-normalize-reward"
).split()
TOPOLOGIES = {
    "24 workers that never stop": "benchmarks.peers.uneven:Uneven --num-workers 24 --lag 2",
    "24 workers": "benchmarks.peers.uneven:Uneven --num-workers 24",
    "24 workers, lag 0": "benchmarks.peers.uneven:Uneven --num-workers 24 --lag 0",
    "no flags of topology": "benchmarks.peers.uneven:Uneven",
    "the learner alone": "CartPole-v1 --num-workers 0",
}


TITLE = "DQN beside uneven environments, one gradient step per env step"


def missing(result):
    """Gradient steps that the ratio asks for, less those that were made."""
    return result["env_steps"] - LEARNING_STARTS - result["learner_steps"]


def comparison():
    """Build the only table."""
    return turns.Comparison(
        TITLE,
        [
            contestants.headrace(name, [*flags.split(), *FLAGS])
            for name, flags in TOPOLOGIES.items()
        ],
        Work(ENV_STEPS),
        also={"missing gradient steps": missing},
        ratios={
            f"{name} / the learner alone": (name, "the learner alone")
            for name in TOPOLOGIES
            if name != "the learner alone"
        },
    )


if __name__ == "__main__":
    sys.exit(turns.run("replay_ratio", __doc__, [comparison()], turns=3))
