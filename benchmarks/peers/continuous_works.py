"""The settings of SAC and TD3 that all contestants share. It imports nothing: any peer reads it.

Everything else is the same in all of them: HalfCheetah-v5, gamma 0.99, one step ahead, two critics,
2 × 256 ReLU, Adam, tau 0.005, a policy step for each gradient step (TD3: for every second one), and
no clipping of gradients.
"""

ENV = "HalfCheetah-v5"
NUM_ENVS = 8
NUM_STEPS = 8
BLOCK = NUM_ENVS * NUM_STEPS
"""Env steps between blocks of gradient steps, of which each env step has one."""
BATCH_SIZE = 256
REPLAY_SIZE = 100_000
LEARNING_STARTS = BLOCK  # so that rates count no env steps without a gradient step
LR = 3e-4


def headrace_flags(algo, env_steps):
    """What makes `headrace train` do the same, whatever its presets say."""
    return (
        f"{ENV} --algo {algo} --num-envs {NUM_ENVS} --num-steps {NUM_STEPS} --replay-ratio 1 "
        f"--batch-size {BATCH_SIZE} --replay-size {REPLAY_SIZE} --n-step 1 --num-critics 2 "
        f"--learning-starts {LEARNING_STARTS} --lr {LR:g} --lr-schedule constant --gamma 0.99 "
        f"--tau 0.005 --policy-delay {1 if algo == 'sac' else 2} --max-grad-norm 0 "
        "--no-layer-norm --no-normalize-obs --no-normalize-reward --hidden-sizes 256 256 "
        f"--activation relu --total-env-steps {env_steps}"
    ).split()
