"""What a search for settings costs, beside RL Baselines3 Zoo's, and whether it helps.

    python -m benchmarks.tune cartpole                    # 50 trials on CartPole, then the best
    python -m benchmarks.tune cartpole --only headrace    # one of the searches; others stay
    python -m benchmarks.tune cartpole --cut-zoo-s 1500   # kill the zoo's search then
    python -m benchmarks.tune cartpole --render           # the result of what is in runs/
    python -m benchmarks.tune helped LunarLander-v3 HalfCheetah-v5  # 20 minutes each, and more
    python -m benchmarks.tune helped LunarLander-v3 --study runs/NAME  # of a study that is there
    python -m benchmarks.tune population                  # --pbt, where fixed rates are poor

Needs two cores that nothing else uses. `--quick` does a few env steps of all of it, to see it work;
its result is in runs/ alone.
"""

import argparse
from pathlib import Path

from benchmarks.tune import cartpole, helped, population


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    searches = verbs.add_parser("cartpole", help="seconds of 50 trials, and what came out")
    searches.add_argument("--only", action="append", choices=list(cartpole.SEARCHES))
    searches.add_argument("--render", action="store_true", help="search and train nothing")
    searches.add_argument("--cut-zoo-s", type=float, metavar="S", help="end the zoo's search then")
    gains = verbs.add_parser("helped", help="tuned against preset")
    gains.add_argument("envs", nargs="+", metavar="ENV")
    gains.add_argument("--study", type=Path, help="of the one environment, in place of searching")
    members = verbs.add_parser("population", help="members of a population, and the same alone")
    for each in (searches, gains, members):
        each.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.verb == "cartpole":
        size = cartpole.QUICK if args.quick else cartpole.Size()
        cartpole.main(size, args.only, args.render, args.cut_zoo_s)
        return
    if args.verb == "population":
        population.main(args.quick)
        return
    if args.study and len(args.envs) > 1:
        parser.error("--study is of one environment")
    helped.main(args.envs, args.study and args.study.absolute(), args.quick)


if __name__ == "__main__":
    main()
