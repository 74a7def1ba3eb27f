"""Seconds of a Python that imports torch and ends there, from starting it (`start.py`)."""

import json
import subprocess
import sys
import time

PROGRAM = "import time, torch; print(time.time())"

began = time.time()
done = subprocess.run(
    [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True
)
print("RESULT " + json.dumps({"start_s": float(done.stdout) - began}))
