"""What every driver prints: one line `RESULT {json}` with its throughput."""

import json
import time


class Stopwatch:
    """Env steps per second from the end of the first update to the end of the last.

    That is how Headrace reports its own rate: start-up and whatever the first update warms up are
    left out.
    """

    def __init__(self):
        self._marks = []

    def mark(self, env_steps):
        """An update has ended, after so many env steps in all."""
        self._marks.append((time.perf_counter(), env_steps))

    def rate(self):
        """Env steps per second; SystemExit if there were not enough updates."""
        if len(self._marks) < 2:
            raise SystemExit(
                f"{len(self._marks)} updates: expected 2 or more, since the first is not counted. "
                "Give more --env-steps."
            )
        (started, first), (ended, last) = self._marks[0], self._marks[-1]
        return (last - first) / (ended - started)

    def print_result(self, mean_return=None, collecting_s=None, **more):
        """The line.

        `mean_return` (of the last training episodes) shows that it has learned; `collecting_s` is
        the time in which all of its experience was made; `more` is printed as it is.
        """
        result = {
            "env_steps": self._marks[-1][1] if self._marks else 0,
            "env_steps_per_s": self.rate(),
            "mean_return": None if mean_return is None else float(mean_return),
            "collecting_s": collecting_s,
        }
        print(f"RESULT {json.dumps(result | more)}", flush=True)
