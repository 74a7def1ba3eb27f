"""One torch thread everywhere: these nets are small, and the suite shares two cores."""

import os

# Two processes of this suite share two cores; idle threads of the math libraries would spin.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
