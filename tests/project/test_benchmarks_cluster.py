"""The benchmarks of clusters: what they make of what Linux, Ray and a run's output tell them."""

import subprocess
import sys

import pytest

from benchmarks import cluster, cluster_bytes, figure
from benchmarks.drivers import measure_bytes
from benchmarks.harness import processes
from benchmarks.harness.one_turn import Work, take_turn


def test_what_a_connection_has_brought_is_told_by_who_sent_it(monkeypatch):
    line = 'ESTAB 0 0 [::ffff:127.0.0.1]:{} 127.0.0.1:{} users:(("p",pid={},fd=5)) bbr{}'
    lines = [
        line.format(100, 200, 1, " bytes_sent:7 bytes_acked:7 bytes_received:40 segs_out:3"),
        line.format(200, 100, 2, " bytes_sent:40"),
        line.format(300, 100, 9, " bytes_received:5"),  # somebody else's
    ]
    words = {1: "ray::LearnerActor.run", 2: "ray::HostActor.serve"}
    ours = {pid: processes.Process(pid, 0, (name,), 0.0) for pid, name in words.items()}
    monkeypatch.setattr(measure_bytes.subprocess, "check_output", lambda *a, **k: "\n".join(lines))
    monkeypatch.setattr(measure_bytes.processes, "descendants", lambda pid: ours)
    watch = measure_bytes.Watch({}, driver=3)
    watch.look()
    assert watch.result()["tcp"] == [["host", "learner", 40]]


def test_processes_are_told_by_who_started_them():
    code = "import subprocess, sys; subprocess.run(['cat'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as first:
        while len(found := processes.descendants(first.pid)) < 2:
            assert first.poll() is None
        first.stdin.close()
    assert found.pop(first.pid).words[1:] == ("-c", code)
    ((pid, second),) = found.items()
    assert (second.pid, second.parent) == (pid, first.pid)


def test_the_table_of_bytes_and_the_figure_of_scaling(tmp_path):
    of = {"node": "head", "num_owned_objects": 5, "object_bytes": 1000, "data_bytes": 0}
    found = {
        "processes": [of | {"name": "driver", "tcp_received": 1234567}],
        "nodes": {"head": {"cumulative_created_bytes": 20, "object_store_bytes_used": 10}},
        "tcp": [["host", "learner", 9876]],
        "counted": dict.fromkeys(measure_bytes.COUNTED, 4321),
        "env_steps": 100,
    }
    lines = cluster_bytes.tables({"runs": {"A": found}}).splitlines()
    assert "| driver | head | 5 | 1,000 | 0 | 1,234,567 |" in lines
    assert "| head | 20 | 10 |" in lines
    assert "| host | 0 | 9,876 | 0 | 0 | 0 |" in lines
    assert any("4,321 bytes of fragments" in line for line in lines)

    rows = [
        {"name": "2 workers", "median": 199.0, "min": 198.0, "max": 200.0},
        {"name": "4 workers", "median": None, "min": None, "max": None},
    ]
    results = {"tables": {cluster.SCALED: {"contestants": rows}}}
    assert figure.scaled(results) == {2: (199.0, 198.0, 200.0)}
    figure.draw_scaled(results, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert figure.scaled({"tables": {}}) == {}


@pytest.mark.slow
def test_the_phases_of_a_start_are_seen_from_outside():
    alone = cluster.starting("2 processes", 2)
    result = take_turn(alone, Work(None, "first_update_s"))
    names = ("imported_s", "introduced_s", "first_made_s", "all_made_s", "sampling_s")
    times = [result[name] for name in (*names, "first_update_s", "turn_s")]
    assert times == sorted(times)
    assert 0 < result["worker_cpu_s"] < result["cpu_s"]
