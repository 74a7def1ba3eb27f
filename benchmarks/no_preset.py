"""The command line of Headrace without presets: `python -m benchmarks.no_preset train ENV ...`.

Shows what the defaults do. Settings are resolved in the process that is started, before it starts
workers or learners, and these are told the result.
"""

from headrace.cli.main import main
from headrace.config import resolve

resolve.preset = lambda env, algo: ("none", {})

if __name__ == "__main__":
    main()
