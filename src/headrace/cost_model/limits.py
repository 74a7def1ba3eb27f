"""What limits training: by predicting it with one part after the other free.

Left out: the model (`model.py`), and what to change (`tools/profile/advice.py`).
"""

from dataclasses import replace

from headrace.cost_model.costs import PARTS, Costs
from headrace.cost_model.model import Topology, simulate


def gains(
    costs: Costs, topology: Topology, now: float, *, num_updates: int = 30
) -> dict[str, float]:
    """By what factor training would be faster if one part cost nothing: the greatest is the limit.

    Args:
        costs: of the parts.
        topology: of what runs.
        now: env steps/s that are predicted of it.
        num_updates: see `simulate`.

    The parts are those of `Costs.without`; `cores` if each process had one of its own; and
    `waiting` if nobody waited for anybody.
    """

    def rate(costs: Costs, topology: Topology) -> float:
        return simulate(costs, topology, num_updates=num_updates).env_steps_per_s

    found = {part: rate(costs.without(part), topology) for part in PARTS}
    found["cores"] = rate(costs, replace(topology, cores=0.0))
    if topology.num_workers:
        nonstop = replace(topology, lag=max(2, topology.lag), first_ready=True)
        found["waiting"] = rate(costs, nonstop)
    return {part: faster / now for part, faster in found.items()}
