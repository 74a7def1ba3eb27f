"""Runs a command of these benchmarks, as a user would, and hears what it prints.

Left out: which commands (`cartpole.py`, `helped.py`).
"""

import os
import signal
import subprocess
import sys
import threading
import time

from benchmarks.harness.machine import ROOT

HEADRACE = [sys.executable, "-m", "headrace"]


def run(command, folder, name, peer=False, cut_s=None):
    """Run it in a folder, which holds its output in NAME.txt afterwards.

    With `cut_s`, it is killed after so many seconds.

    Returns:
        Its wall time in seconds; and its lines, each with the seconds at which it came.

    Raises:
        RuntimeError: it failed before it was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if peer:  # it has Python packages of its own
        surroundings["PYTHONPATH"] = str(ROOT)
    lines, began = [], time.perf_counter()
    with (
        (folder / f"{name}.txt").open("w", buffering=1) as log,
        subprocess.Popen(
            list(map(str, command)), cwd=folder, env=surroundings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        cut = threading.Timer(cut_s or 0, process.kill)
        if cut_s:
            cut.start()
        try:
            for line in process.stdout:
                lines.append((time.perf_counter() - began, line.rstrip("\n")))
                log.write(f"{lines[-1][0]:9.2f} {line}")
            process.wait()
        except BaseException:
            process.terminate()  # Headrace ends what it has started
            raise
        finally:
            cut.cancel()
    seconds = time.perf_counter() - began
    was_cut = cut_s and process.returncode == -signal.SIGKILL
    if process.returncode and not was_cut:
        last = "\n".join(text for _, text in lines[-15:])
        raise RuntimeError(f"{folder / name}.txt: ended with {process.returncode}:\n{last}")
    return seconds, lines
