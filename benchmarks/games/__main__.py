"""Figures of games of several agents: how fast they train, and what is learned.

    python -m benchmarks.games speed    # env steps/s, beside RLlib; games that sleep
    python -m benchmarks.games league   # what a league costs
    python -m benchmarks.games classic  # tic-tac-toe and connect four: random and perfect opponents
    python -m benchmarks.games matrix   # rock-paper-scissors: how far from equilibrium
    python -m benchmarks.games taggers  # taggers of a league, and runners that they have not met
    python -m benchmarks.games spread   # simple_spread, with a shared critic, and beside RLlib

Each writes results/games_PART.json; `python -m benchmarks.table` then puts the tables into
docs/environments.md and docs/leagues.md. They need two cores that nothing else uses, and `speed`
and `spread` need RLlib (`python benchmarks/peers/install.py rllib`). `--share 0.01` does little of
all of it, to see it work; its result is in runs/games/ alone. `PART --help` has what is compared.
"""

import argparse
import sys

from benchmarks.games import classic, league, matrix, runs, speed, spread, taggers

PARTS = {
    part.__name__.rpartition(".")[2]: part
    for part in (speed, league, classic, matrix, taggers, spread)
}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    verbs = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        summary = part.__doc__.partition("\n")[0]
        verb = verbs.add_parser(name, help=summary, description=part.__doc__, formatter_class=raw)
        part.add_flags(verb)
        verb.add_argument(
            "--share", type=float, default=1.0, help="of env steps and games; default: all of them"
        )
    flags = parser.parse_args()
    if not 0 < flags.share <= 1:
        parser.error(f"--share {flags.share}: expected more than 0, and at most 1")
    if flags.share < 1 and not flags.output:
        flags.output = runs.FOLDER / f"{PARTS[flags.part].NAME}.json"
    return PARTS[flags.part].main(flags, verbs.choices[flags.part])


if __name__ == "__main__":
    sys.exit(main())
