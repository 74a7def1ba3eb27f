"""What is learned of mpe2's simple_spread, with a shared critic and without, beside RLlib's PPO.

Three agents share a policy and are to cover three landmarks; the settings are those of `speed.py`
(24 games × 64 steps, 4 epochs of 4 minibatches, 2 × 64 tanh, lr 7e-4, entropy bonus 0.01) for all:
Headrace's PPO; the same with `--critic shared`, whose critic sees the state of the game; RLlib's
PPO (`peers/rllib_games.py`). Three seeds, 1,000,000 env steps each; Headrace in one process, as
many runs at a time as there are cores, RLlib with two env runners. How fast they are is in
`speed.py`. Then 100 games by the newest policy, always its likeliest action: the figure is the
undiscounted return of a game (25 steps), in the mean over its three agents and over the games.
Beside it is the same of random actions.

RLlib may be given a limit of seconds (`--rllib-limit-s`): a run then ends with the update that ends
later, and the table has the env steps that it made. All of it takes two hours; `--go-on` keeps the
runs that the results' file has.
"""

import json
import threading
from functools import partial

import numpy as np

from benchmarks.games import runs
from benchmarks.harness import contestants
from benchmarks.harness.one_turn import TurnError, Work, take_turn
from benchmarks.harness.result import read_result
from benchmarks.peers.works import SETTINGS
from benchmarks.tune.commands import HEADRACE, run
from headrace.envs.factory import EnvMaker

NAME = "games_spread"
ENV_STEPS, EPISODES, SEEDS = 1_000_000, 100, 3
RLLIB_LIMIT_S = 1800.0
MORE_S = 300.0  # for RLlib's start, its last update and its games
LEAST_UPDATES = 2
SETTING = SETTINGS["spread"]
FORMS = {"Headrace": (), "Headrace, shared critic": ("--critic", "shared")}
RLLIB = "RLlib, 2 env runners"


def add_flags(parser):
    """Those of this part."""
    runs.add_flags(parser, SEEDS)
    parser.add_argument(
        "--rllib-limit-s", type=float, default=RLLIB_LIMIT_S, metavar="S",
        help=f"of training, for each seed; default: {RLLIB_LIMIT_S:g}",
    )  # fmt: skip
    parser.add_argument("--go-on", action="store_true", help="keep the runs of the results' file")


def ours(form, seed, env_steps, episodes, folder):
    """Train and evaluate one run."""
    name = f"{form}, seed {seed}".replace(", ", "-").replace(" ", "_")
    env, *flags = SETTING.headrace_flags(env_steps)
    trained = runs.train(folder, name, env, *flags, *FORMS[form], *runs.ONE_PROCESS, "--seed", seed)
    played = ["eval", name, "--env", env, "--episodes", episodes, "--json"]
    _, lines = run([*HEADRACE, *played], folder, f"{name}-eval")
    found = read_result(lines[-1][1])
    more = {"eval_return": found["mean_return"], "eval_std": found["std_return"]}
    return trained | {"seed": seed, **more}


def theirs(seed, env_steps, episodes, limit_s):
    """The same of RLlib."""
    words = ["--work", "spread", "--env-steps", env_steps, "--seed", seed, "--episodes", episodes]
    words += ["--limit-s", limit_s]
    peer = contestants.driver(RLLIB, "rllib", "rllib_games", list(map(str, words)), package="ray")
    about = peer.describe()
    try:
        if peer.missing:
            raise TurnError(peer.missing)
        found = take_turn(peer, Work(None, limit_s=limit_s + MORE_S))
    except TurnError as error:
        print(f"{RLLIB}, seed {seed}: {error}", flush=True)
        return {"seed": seed, "failed": str(error)}
    names = ("env_steps", "env_steps_per_s", "mean_return", "eval_return", "eval_std")
    told = {name: found[name] for name in names}
    print(f"{RLLIB}, seed {seed}: {found['env_steps']:,} env steps", flush=True)
    about = {name: about[name] for name in ("command", "versions")}
    return {"seed": seed, **told, **about}


def random_play(episodes):
    """The same figure of random actions."""
    env, means = EnvMaker(SETTING.env)(), []
    for episode in range(episodes):
        env.reset(seed=episode)
        for agent in env.possible_agents:
            env.action_space(agent).seed(episode)
        total = dict.fromkeys(env.possible_agents, 0.0)
        while env.agents:
            actions = {agent: env.action_space(agent).sample() for agent in env.agents}
            for agent, reward in env.step(actions)[1].items():
                total[agent] += float(reward)
        means.append(np.mean(list(total.values())))
    env.close()
    return {"eval_return": float(np.mean(means)), "eval_std": float(np.std(means))}


def main(flags, parser):
    """Train and play, and write what came out; the exit code."""
    folder = runs.fresh(NAME)
    updates = max(LEAST_UPDATES, round(ENV_STEPS * flags.share / SETTING.batch))
    env_steps, episodes = updates * SETTING.batch, max(1, round(EPISODES * flags.share))
    path = runs.path_of(NAME, flags)
    forms = {form: [] for form in (*FORMS, RLLIB)}
    if flags.go_on and path.exists():
        forms |= json.loads(path.read_text())["forms"]
    result = runs.about(NAME, flags, episodes=episodes, random=random_play(episodes), forms=forms)
    one_at_a_time = threading.Lock()

    def add(form, seed, train):
        """Train one run, unless it is there."""
        if any(each["seed"] == seed and "failed" not in each for each in forms[form]):
            return
        found = train()
        with one_at_a_time:
            others = [each for each in forms[form] if each["seed"] != seed]
            forms[form] = sorted([*others, found], key=lambda each: each["seed"])
            runs.save(result, flags)

    seeds = range(flags.seeds)
    runs.side_by_side(
        lambda of: add(*of, partial(ours, *of, env_steps, episodes, folder)),
        [(form, seed) for seed in seeds for form in FORMS],
    )
    for seed in seeds:
        add(RLLIB, seed, partial(theirs, seed, env_steps, episodes, flags.rllib_limit_s))
    runs.write(result, tables, flags)
    return int(any("failed" in each for of in result["forms"].values() for each in of))


def tables(result):
    """A row for each contestant."""
    lines = [
        "| | return of an agent, mean | each seed | env steps |",
        "|---|---|---|---|",
    ]
    for form, of in result["forms"].items():
        whole = [each for each in of if "failed" not in each]
        if len(whole) < len(of):
            failed = next(each["failed"] for each in of if "failed" in each)
            lines.append(f"| {form} | {failed.partition(chr(10))[0]} | - | - |")
            continue
        returns = [each["eval_return"] for each in of]
        seeds = ", ".join(f"{each:.2f}" for each in returns)
        steps = np.mean([each["env_steps"] for each in of])
        lines.append(f"| {form} | {np.mean(returns):.2f} | {seeds} | {steps:,.0f} |")
    lines.append(f"| random actions | {result['random']['eval_return']:.2f} | - | - |")
    lines += ["", f"{result['episodes']} games of each seed, by the likeliest actions."]
    return "\n".join(lines)
