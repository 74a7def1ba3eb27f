"""The limits of a container: files as Linux has them for control groups of both versions."""

import os

import pytest

from headrace.machine import limits

OWN_CORES = len(os.sched_getaffinity(0))
NO_LIMIT = 9223372036854771712  # what version 1 has in place of none


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write the files of a machine: its free memory, our control group, and files of groups."""

    def write(own_group, files):
        paths = {"own": own_group, "meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n"}
        for name, text in (paths | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
        monkeypatch.setattr(limits, "_OWN_GROUP", tmp_path / "own")
        monkeypatch.setattr(limits, "_MEMORY", tmp_path / "meminfo")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    return write


@pytest.mark.parametrize(
    ("own_group", "files", "cores", "gib"),
    [
        # In a container, whose own group is the top of what it sees
        ("0::/", {"cpu.max": "400000 100000", "memory.max": 4 << 30, "memory.current": 1 << 30},
         4, 3),
        # Part of a core is one more; files that are kept in memory are given up when it is needed.
        ("0::/", {"cpu.max": "250000 100000", "memory.max": 4 << 30, "memory.current": 3 << 30,
                  "memory.stat": f"anon 5\ninactive_file {1 << 30}\n"}, 3, 2),
        # The limits of groups around ours hold as well, where ours has none.
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "200000 100000",
                          "job/step/memory.max": "max", "job/step/memory.current": 1 << 30,
                          "job/memory.max": 6 << 30, "job/memory.current": 1 << 30}, 2, 5),
        # A container's group by its name on the host, which the container does not see
        ("0::/docker/1f", {"cpu.max": "100000 100000", "memory.max": "max"}, 1, 8),
        # Version 1: a tree for each controller
        ("4:memory:/job\n2:cpu,cpuacct:/job\n0::/",
         {"cpu/job/cpu.cfs_quota_us": 300_000, "cpu/job/cpu.cfs_period_us": 100_000,
          "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100_000,
          "memory/job/memory.limit_in_bytes": 5 << 30, "memory/memory.limit_in_bytes": NO_LIMIT,
          "memory/job/memory.usage_in_bytes": 3 << 30, "memory/memory.usage_in_bytes": 3 << 30,
          "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {1 << 30}"}, 3, 3),
        ("", {}, 64, 8),
    ],
    ids=["container", "part of a core", "groups around", "a name of the host", "version 1", "none"],
)  # fmt: skip
def test_a_containers_limits_count(machine, own_group, files, cores, gib):
    machine(own_group, {f"groups/{name}": str(text) for name, text in files.items()})
    assert limits.cpu_cores() == cores
    assert limits.available_bytes() == gib << 30


def test_more_than_the_limit_in_use_leaves_nothing(machine):
    machine("0::/", {"groups/memory.max": "100", "groups/memory.current": "200"})
    assert limits.available_bytes() == 0


def test_the_cores_of_this_machine_are_those_that_this_process_may_use():
    assert 1 <= limits.cpu_cores() <= OWN_CORES
    assert limits.available_bytes() > 1 << 20
