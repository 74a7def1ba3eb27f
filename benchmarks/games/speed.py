"""Env steps per second in games of several agents: an env step is one step of a game, all agents.

Two games of MPE (mpe2, parallel form, default arguments): simple_spread has three agents, who share
a policy; simple_tag has three adversaries and an agent, a policy for each role. All contestants
train by PPO, 4 epochs of 4 minibatches, 2 × 64 tanh with separate actor and critic, lr 7e-4. The
rate is that from the end of the first update to the end of the last.

What differs: "no flags" is `headrace train GAME --total-env-steps N` and nothing else, so its sizes
are Headrace's defaults (8 games × 128 steps, lr 2.5e-4), and it chooses processes by itself. All
others have 24 games × 64 steps; inline is one process, and two workers or env runners have 12 games
each. RLlib is its PPO of the new API stack, with its own wrapper of PettingZoo's games; what its
minibatches are is at the top of `peers/rllib_games.py`. Where roles have different numbers of
agents, its smaller policy takes as many gradient steps, and of the same number of rows, as the
larger one.

Then 24 games of three agents that sleep (`peers/uneven_game.py`), with a worker for each, as in
`uneven.py`: the limit is 24 / measured mean of step and reset, and Headrace learns meanwhile, at
lag 0 and asynchronously (APPO, lag 2).
"""

from benchmarks import uneven
from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.peers.step_times import DISTRIBUTIONS
from benchmarks.peers.works import SETTINGS

NAME = "games_speed"
TURNS = 3
ENV_STEPS = 76_800
"""Of a turn: some 15 to 25 s of Headrace; whole batches of all contestants."""
LEAST_ENV_STEPS = 3_072
"""Whole batches of all contestants, and two updates or more."""
LIMIT_S = 900.0
UNEVEN, UNEVEN_UPDATES = ("gaussian50", "stalls"), 24
RUNNERS = 2
TITLES = {"spread": "PPO training, simple_spread", "tag": "PPO training, simple_tag"}
NO_FLAGS, INLINE = "Headrace, no flags", "Headrace, inline"
WORKERS, RLLIB = f"Headrace, {RUNNERS} workers", f"RLlib, {RUNNERS} env runners"


def whole(env_steps, share, least):
    """So many env steps, or a share of them: a multiple of `least`, and `least` or more."""
    return max(1, round(env_steps * share / least)) * least


def mpe(work, share):
    """One of the two games, and RLlib."""
    settings, env_steps = SETTINGS[work], whole(ENV_STEPS, share, LEAST_ENV_STEPS)
    flags = [*settings.headrace_flags(env_steps), "--num-learners", "1"]
    half = str(settings.num_envs // RUNNERS)
    workers = ["--num-workers", str(RUNNERS), "--envs-per-vector", half]
    driver = ["--work", work, "--env-steps", str(env_steps), "--num-runners", str(RUNNERS)]
    return turns.Comparison(
        TITLES[work],
        [
            contestants.headrace(NO_FLAGS, [settings.env, "--total-env-steps", str(env_steps)]),
            contestants.headrace(INLINE, [*flags, "--num-workers", "0"]),
            contestants.headrace(WORKERS, [*flags, *workers]),
            contestants.driver(RLLIB, "rllib", "rllib_games", driver, package="ray"),
        ],
        Work(env_steps, limit_s=LIMIT_S),
        ratios={
            "no flags / RLlib": (NO_FLAGS, RLLIB),
            "2 workers / RLlib": (WORKERS, RLLIB),
            "2 workers / inline": (WORKERS, INLINE),
        },
    )


def sleeping(distribution, share):
    """24 games that sleep."""
    num_envs = SETTINGS["uneven_game"].num_envs
    sizes = ["--num-workers", str(num_envs), "--envs-per-vector", "1"]
    kwargs = ["--env-kwargs", f"distribution={distribution}"]
    updates = max(2, round(UNEVEN_UPDATES * share))
    of = uneven.ours("uneven_game", kwargs, sizes, updates)
    collecting = uneven.while_collecting(SETTINGS["uneven_game"], uneven.asleep)
    return turns.Comparison(
        f"24 games of three agents that sleep 7 ms: {DISTRIBUTIONS[distribution].words}",
        [uneven.watched(contestant) for contestant in of],
        Work(None, limit_s=LIMIT_S),
        also={
            "measured mean, ms": lambda result: 1000 * result["mean_s"],
            "busy": lambda result: result["busy"] / num_envs,
            "of the limit while collecting": collecting,
        },
        ratios={"asynchronous / lag 0": (uneven.ASYNCHRONOUS, uneven.LAG_0)},
        limit=uneven.asleep,
    )


def comparisons(share=1.0):
    """All tables."""
    found = [mpe(work, share) for work in TITLES]
    return found + [sleeping(distribution, share) for distribution in UNEVEN]


def add_flags(parser):
    """Those of this part."""
    turns.add_flags(parser, NAME, TURNS)


def main(flags, parser):
    """Measure, and print tables; the exit code."""
    return turns.measure(NAME, comparisons(flags.share), TURNS, flags, parser)
