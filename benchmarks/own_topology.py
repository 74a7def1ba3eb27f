"""Env steps per second in five environments of one's own: no flag at all, and topologies by hand.

    headrace train benchmarks.own_envs:Ferry

The environments are those of `own_envs.py`. As in `topology.py`, a run is stopped after some
seconds, and the rate is that from the end of the first update to the end of the last.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.topology import tables, topologies

__all__ = ["NAME", "tables"]
NAME = "own_topology"
SECONDS = 12
NUM_ENVS = 8  # of the defaults for one agent
ENVS = ("Ferry", "Courier", "Crane", "House", "Orchard")


def comparison(env):
    """Build the table of one environment."""
    name = f"benchmarks.own_envs:{env}"
    forms = {"no flags": "", **dict(topologies(NUM_ENVS, [cores()]))}
    common = [name, "--stop-after-s", str(SECONDS)]
    return turns.Comparison(
        f"{env}, of one's own",
        [
            contestants.headrace(f"Headrace, {form}", [*common, *flags.split()])
            for form, flags in forms.items()
        ],
        Work(None),
        ratios={
            f"no flags / {form}": ("Headrace, no flags", f"Headrace, {form}")
            for form in forms
            if form != "no flags"
        },
    )


if __name__ == "__main__":
    sys.exit(turns.run(NAME, __doc__, [comparison(env) for env in ENVS], turns=3))
