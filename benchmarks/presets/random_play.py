"""The return of random actions in an environment, as its preset makes it.

    python -m benchmarks.presets.random_play ENV --episodes 100      # one line of JSON

Actions are drawn uniformly (`action_space.sample`), so that shares of the way from random to a
published return mean the same for every algorithm.
"""

import argparse
import json
import statistics

from benchmarks import own_players
from headrace.config.resolve import read_settings
from headrace.envs.factory import EnvMaker


def play(env_id, episodes):
    """Mean, standard error and number of the returns of whole episodes."""
    run = read_settings({"env": env_id}).run
    maker = EnvMaker(env_id, run.env_kwargs, run.wrapper, drop_obs_keys=run.drop_obs_keys)
    env = maker()
    returns, _ = own_players.play(env, own_players.at_random, episodes)
    env.close()
    spread = statistics.stdev(returns) / episodes**0.5 if episodes > 1 else None
    mean = statistics.fmean(returns)
    return {"mean_return": mean, "standard_error": spread, "episodes": episodes}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--episodes", type=int, default=100)
    flags = parser.parse_args()
    print(json.dumps(play(flags.env, flags.episodes)))


if __name__ == "__main__":
    main()
