"""Random actions in an environment: what a trained policy has to beat.

    python -m benchmarks.random_returns ENV

Prints RESULT {json} with the mean return and its deviation.
"""

import argparse
import json
import statistics

from benchmarks.own_players import at_random, play
from benchmarks.peers.make_env import make_env


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    returns, _ = play(make_env(args.env), at_random, args.episodes)
    mean, deviation = statistics.mean(returns), statistics.stdev(returns)
    print(f"RESULT {json.dumps({'mean_return': mean, 'std_return': deviation})}")


if __name__ == "__main__":
    main()
