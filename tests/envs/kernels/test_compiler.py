"""Kernel environments: the same functions interpreted, compiled, and on a (simulated) GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.spec import Agents
from tests import python
from tests.envs.kernels.support import (
    Ring,
    act_at_random,
    assert_equal,
    contents,
    played,
    run,
    vector_of,
)
from tests.marks import repeats


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@repeats("parts", [(), (Agents(0, 2), Agents(2, 1)), (Agents(2, 1), Agents(0, 2))])
def test_targets_give_equal_results(target, parts):
    reference = played(Ring(), 3, 12, "python", parts=parts)
    assert_equal(played(Ring(), 3, 12, target, parts=parts), reference)
    fragments, episodes = reference[1]
    ends = torch.cat([actual["terminated"].flatten() for actual in fragments])
    cuts = torch.cat([actual["truncated"].flatten() for actual in fragments])
    assert ends.any()
    assert cuts.any()
    assert episodes


def test_constants_may_be_arrays():
    fragments, _ = played(Ring(), 200, 12, "cpu", num_fragments=1)[0]
    paid = set(fragments[0]["reward"].flatten().tolist())
    assert {1, 4, 9} < paid  # alone, two in a cell, all three
    assert paid <= {0, 1, 4, 9, 1 - 10, 4 - 10, 9 - 10}  # the bomb costs 10


def test_restored_state_continues_equally():
    first, fragments = vector_of(Ring(), 5, 12)
    act_at_random(fragments, first.spec, np.random.default_rng(1))
    run(first, fragments)
    kept = first.state() | first.obs()
    assert "crowd" not in kept
    second, others = vector_of(Ring(), 5, 12)
    for fragment, other in zip(fragments, others, strict=True):
        other.action.copy_(fragment.action)
    second.restore(kept)
    assert run(second, others) == run(first, fragments)
    assert_equal([([contents(f) for f in fragments], 0)], [([contents(f) for f in others], 0)])


def test_number_of_threads_does_not_change_results():
    alone, shared = (played(Ring(), 7, 20, "cpu", num_threads=n) for n in (1, 3))
    assert_equal(shared, alone)


@pytest.mark.more
@repeats("count", [2, 3])
def test_one_of_several_processes_compiles(tmp_path, count):
    script = (
        "import sys; from tests.envs.kernels.support import Ring, played\n"
        "print(flush=True); input()\n"
        "played(Ring(), 2, 3, 'cpu')\n"
        "(m,) = [m for n, m in sys.modules.items() if n.startswith('headrace_Ring')]\n"
        "print(*(sum(f.stats.cache_hits.values()) for f in (m.begin, m.step)))"
    )
    started = [
        python.Python(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    for process in started:
        assert process.stdout.readline() == "\n"  # ready
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    hits = [process.communicate(timeout=120)[0].split() for process in started]
    assert [sum(int(item[f]) for item in hits) for f in (0, 1)] == [count - 1] * 2


@pytest.mark.more
def test_cached_code_is_used_under_another_module_name(tmp_path):
    text = (Path(__file__).parents[3] / "examples/catch.py").read_text()
    script = (
        "import sys; from tests.envs.kernels.support import played; import importlib\n"
        "played(importlib.import_module(sys.argv[1]).Catch(), 2, 3, 'cpu')\n"
        "print(sum(sum(m.step.stats.cache_hits.values()) for n, m in sys.modules.items()\n"
        "    if n.startswith('headrace_Catch')))"
    )
    hits = []
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(text.replace("COLUMNS", "COLUMNS_HERE"))
        done = python.run(
            [sys.executable, "-c", script, name],
            env={"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)]), "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout))
        (tmp_path / f"{name}.py").unlink()
    assert hits == [0, 1]
