"""Ends this process from one of its threads, when another thread is stuck for good."""

import faulthandler
import os
import sys
from collections.abc import Callable
from typing import NoReturn

before_end: list[Callable[[], None]] = []
"""What `end_stuck` calls, since nothing that is open in the stuck thread is closed."""


def end_stuck(text: str) -> NoReturn:
    """Print `text` and the stacks of all threads to stderr; end with exit code 1."""
    print(text, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)
    for call in before_end:
        call()
    os._exit(1)
