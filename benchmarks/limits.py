"""What this machine can do at best, to see each figure as a share of it.

Measured are: products of large matrices (fp32, bf16; one thread, all cores), copying of memory, and
environments alone, stepped with random actions by one process for each core (Breakout by ale-py's
own vector environment, one thread for each core), with no policy and nothing passed between
processes.

The limit of training is that of a trainer which did nothing else than step environments on all
cores, and then multiply matrices on all cores at the rate of large ones:

    limit = 1 / (1 / S + F / G)    env steps/s

S is the env steps/s of the environments alone, G the FLOP/s of products (in the precision of the
contestant), F the floating-point operations of the network's layers for one env step: one forward
pass to act, and in each epoch a forward pass and a backward one, which takes as many operations
for the gradients of the weights, and as many for those of what went in (but for the first layer).
Not in it: activations, sampling, losses, advantages, Adam, and any copy. Such limits are measured
in turns with the contestants (`training_limit`). Of DQN (`replay_limit`), F has one forward pass to
act and, for each gradient step and row, those of both networks and the backward pass of one.
"""

import sys

from benchmarks.harness import turns
from benchmarks.harness.contestants import Contestant, headrace_driver
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.peers.continuous_works import BATCH_SIZE, ENV
from benchmarks.peers.replay_works import REPLAY_SETTINGS
from benchmarks.peers.works import SETTINGS


def mlp(num_inputs, num_outputs):
    """Multiplications of each layer, for one row: 2 × 64 units."""
    return [num_inputs * 64, 64 * 64, 64 * num_outputs]


def nature_cnn(num_outputs):
    """The same of NatureCNN on 84 × 84 × 4: pixels that come out × kernel × channels."""
    convolutions = [20**2 * 32 * 8**2 * 4, 9**2 * 64 * 4**2 * 32, 7**2 * 64 * 3**2 * 64]
    return [*convolutions, 3136 * 512, 512 * num_outputs]


NETWORKS = {
    "cartpole": [mlp(4, 2), mlp(4, 1)],
    "cheetah": [mlp(17, 6), mlp(17, 1)],
    "atari": [nature_cnn(4 + 1)],
}


def passes(networks):
    """Floating-point operations of a forward pass and of a backward one, for one row."""
    forward = 2 * sum(sum(layers) for layers in networks)
    return forward, 2 * forward - 2 * sum(layers[0] for layers in networks)


def flops(work):
    """Floating-point operations of the layers for each env step of a work's training."""
    forward, backward = passes(NETWORKS[work])
    return forward + SETTINGS[work].num_epochs * (forward + backward)


def replay_flops(settings):
    """The same of DQN with NatureCNN on Breakout's 4 actions."""
    forward, backward = passes([nature_cnn(4)])
    return forward + int(settings.ratio * settings.batch_size * (2 * forward + backward))


def measured(name, what, *arguments, threads=None, is_limit=False) -> Contestant:
    """Something that `measure_limit.py` measures."""
    threads = threads or cores()
    command = [what, "--threads", str(threads), *arguments]
    return headrace_driver(name, "measure_limit", command, threads, is_limit=is_limit)


def training_limit(work, precision="fp32", name="limit of this machine") -> Contestant:
    """What training can reach at best, by the formula above."""
    return _limit(SETTINGS[work].env, flops(work), precision, name)


def replay_limit(work, precision="fp32", name="limit of this machine") -> Contestant:
    """The same of DQN."""
    settings = REPLAY_SETTINGS[work]
    assert settings.env.startswith("ALE/"), settings  # NatureCNN's
    return _limit(settings.env, replay_flops(settings), precision, name)


def continuous_flops(algo):
    """The same of SAC or TD3 on HalfCheetah, with two critics, in the fewest passes."""
    actions = 6
    policy = [17 * 256, 256 * 256, 256 * actions * (2 if algo == "sac" else 1)]
    critic = [(17 + actions) * 256, 256 * 256, 256]
    act, act_back = passes([policy])
    value, value_back = passes([critic])
    to_input = 2 * sum(critic)  # of a backward pass to the action alone
    update = act + 2 * value + 2 * (value + value_back)  # targets; both critics learn
    if algo == "sac":
        improve = act + act_back + 2 * value + to_input  # through the least critic of each row
    else:
        improve = (act + act_back + value + to_input) / 2  # every second time
    return act + BATCH_SIZE * int(update + improve)


def continuous_limit(algo, name="limit of this machine"):
    """The same of SAC or TD3."""
    return _limit(ENV, continuous_flops(algo), "fp32", name)


def _limit(env, flops_per_step, precision, name):
    arguments = ["--env", env, "--flops", str(flops_per_step), "--precision", precision]
    return measured(name, "training", *arguments, is_limit=True)


def comparisons():
    steps = [
        measured(env, "stepping", "--env", env)
        for env in ("CartPole-v1", "HalfCheetah-v5", "ALE/Breakout-v5")
    ]
    products = [
        measured(f"{precision}, {text}", "products", "--precision", precision, threads=threads)
        for precision in ("fp32", "bf16")
        for text, threads in (("one thread", 1), ("all cores", cores()))
    ]
    memory = [
        measured(text, "memory", threads=threads)
        for text, threads in (("one thread", 1), ("all cores", cores()))
    ]
    return [
        turns.Comparison("Environments alone, all cores", steps, Work(None)),
        turns.Comparison("Products of matrices", products, Work(None, "gflops_per_s", "GFLOP/s")),
        turns.Comparison("Copying memory", memory, Work(None, "gb_per_s", "GB/s")),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("limits", __doc__, comparisons(), turns=3))
