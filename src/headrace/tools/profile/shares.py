"""Where the seconds of a run went: by process and span, and what samplers waited for.

Left out: keeping laps (`meter.py`), pictures of them (`timeline.py`).
"""

import numpy as np

from headrace.meter import SPANS, Laps
from headrace.tools.profile.timeline_plots import arrays, is_learner, seconds

FOR_SAMPLERS, FOR_LEARNER = "wait for samplers", "wait for learner"
"""What the `wait` of a sampler is parted in: the first one is lock-step waste, or a queue that was
empty; the second one is a learner that learns."""

_WAIT = SPANS.index("wait")


def by_process(tracks: dict[str, Laps], begin: float = 0.0) -> dict[str, dict[str, float]]:
    """Seconds by span of each process, `wait` of samplers in two parts.

    Args:
        tracks: what each process did when.
        begin: what ended before is left out (seconds since 1970).
    """
    tracks = {name: since(laps, begin) for name, laps in tracks.items()}
    found = {}
    for name, laps in tracks.items():
        found[name] = seconds(laps)
        if not is_learner(name) and "wait" in found[name]:
            rank = name.partition(",")[0] if "," in name else "learner"
            waited = found[name].pop("wait")
            both = _both_wait(laps, tracks[rank]) if rank in tracks else 0.0
            found[name] |= {FOR_SAMPLERS: both, FOR_LEARNER: max(0.0, waited - both)}
    return found


def since(laps: Laps, begin: float) -> Laps:
    """What was done later."""
    first = int(np.searchsorted(np.array(laps.ends), begin, "right"))
    later = Laps(max(laps.begin, begin))
    later.spans, later.ends = laps.spans[first:], laps.ends[first:]
    return later


def _both_wait(sampler: Laps, learner: Laps) -> float:
    """Seconds in which a sampler waits, and the learner as well: for other samplers."""
    span, took = arrays(learner)
    moments = np.concatenate([[learner.begin], learner.ends])
    waited = np.concatenate([[0.0], np.cumsum(np.where(span == _WAIT, took, 0.0))])
    span, took = arrays(sampler)
    ends = np.array(sampler.ends)[span == _WAIT]
    begins = ends - took[span == _WAIT]
    return float((np.interp(ends, moments, waited) - np.interp(begins, moments, waited)).sum())
