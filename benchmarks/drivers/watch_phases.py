"""Starts a run, and says from outside when it had come how far, up to the end of its first update.

    python -m benchmarks.drivers.watch_phases --workers 8 --reports FOLDER -- PROGRAM ARGUMENTS ...

Its environments are `peers/reporting.py`. Times are seconds since the program was started:

- `imported_s`: Ray begins to start (its first daemon is there). Without Ray: as the next.
- `ray_s`: Ray is up, and starts its first worker process. Without Ray: as the next.
- `introduced_s`: the learner has said what it is going to do: it has imported everything.
- `first_made_s`, `all_made_s`: the first and the last worker has made its environment.
- `sampling_s`: the last of them takes its first step.
- `first_update_s`: the first update has ended, and was shown.

`cpu_s` is what all processes had computed until then (those of them that had not ended),
`worker_cpu_s` what each worker's process had until its first step (median).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.harness import processes

LOOK_EVERY_S = 0.1
RAY_STARTS, RAY_IS_UP = "gcs_server", "default_worker.py"


class Marks:
    """When what was seen first, in seconds since the program was started."""

    def __init__(self, program, surroundings):
        self.began, self.at, self.cpu_s = time.time(), {}, 0.0
        self._program = subprocess.Popen(
            program, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._stdout = threading.Thread(target=self._program.stdout.read)
        self._stderr = threading.Thread(target=self._listen)

    def watch(self):
        """To its end; its exit code."""
        self._stdout.start()
        self._stderr.start()
        while "first_update_s" not in self.at and self._program.poll() is None:
            known = processes.descendants(self._program.pid)
            names = {Path(word).name for each in known.values() for word in each.words[:2]}
            if RAY_STARTS in names:
                self._mark("imported_s")
            if RAY_IS_UP in names or any(name.startswith("ray::") for name in names):
                self._mark("ray_s")
            self.cpu_s = sum(each.cpu_s for each in known.values())
            time.sleep(LOOK_EVERY_S)  # it is a sampling interval, and waits for nothing
        for thread in (self._stdout, self._stderr):
            thread.join()
        return self._program.wait()

    def _mark(self, name):
        self.at.setdefault(name, time.time() - self.began)

    def _listen(self):
        for line in self._program.stderr:
            print(line, end="", file=sys.stderr)
            if line.startswith("headrace "):
                self._mark("introduced_s")
            elif " env steps  " in line:
                self._mark("first_update_s")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--reports", type=Path, required=True, help="a folder, made anew")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    args.reports.mkdir()
    marks = Marks(args.program, os.environ | {"BENCH_REPORTS": str(args.reports.resolve())})
    if code := marks.watch():
        sys.exit(code)
    found = [json.loads(path.read_text()) for path in args.reports.glob("*.json")]
    if len(found) < args.workers:
        sys.exit(f"{len(found)} workers reported; expected {args.workers}")
    at = marks.at
    if missing := {"introduced_s", "first_update_s"} - set(at):
        sys.exit(f"Not seen in what it printed: {', '.join(sorted(missing))}")
    at.setdefault("ray_s", at["introduced_s"])
    at.setdefault("imported_s", at["ray_s"])
    made = [each["made_at"] - marks.began for each in found]
    at |= {"first_made_s": min(made), "all_made_s": max(made)}
    at["sampling_s"] = max(each["at"] for each in found) - marks.began
    cpu = {"cpu_s": marks.cpu_s, "worker_cpu_s": statistics.median(e["cpu_s"] for e in found)}
    print("RESULT " + json.dumps(at | cpu))


if __name__ == "__main__":
    main()
