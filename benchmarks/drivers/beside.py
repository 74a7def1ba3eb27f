"""Runs a command beside a process that keeps a core busy, and ends that one after it.

python -m benchmarks.drivers.beside COMMAND...
"""

import subprocess
import sys


def main(command):
    """Run the command, whose output is this one's. Return its exit code."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return subprocess.run(command).returncode
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
