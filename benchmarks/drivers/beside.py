"""Runs a command while another process keeps a core busy, and then ends that process.

python -m benchmarks.drivers.beside COMMAND...
"""

import subprocess
import sys

_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main(command):
    """Run the command, whose output is this one's. Return its exit code."""
    busy = subprocess.Popen([sys.executable, "-c", _BUSY])
    try:
        return subprocess.run(command).returncode
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
