"""Timelines: what each process did when, kept, written, read."""

import json
import shutil
import time

import pytest

import headrace
from headrace import meter
from headrace.errors import RunDirError
from headrace.meter import SPANS, Laps, Meter
from headrace.storage.timeline import read_timeline

SMALL = {"num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "quiet": True}


def seconds(laps):
    """By span, from a timeline."""
    found, before = {}, laps.begin
    for span, end in zip(laps.spans, laps.ends, strict=True):
        found[SPANS[span]] = found.get(SPANS[span], 0.0) + end - before
        before = end
    return found


def test_laps_add_up_to_the_seconds_of_the_meter():
    own = Meter(keeps_laps=True)
    for span in ("start", "env_step", "env_step", "infer", "env_step"):
        own.lap(span)
    readings = own.readings()  # laps "other" for what is left
    kept = [SPANS[span] for span in readings.laps.spans]
    assert kept == ["start", "env_step", "infer", "env_step", "other"]  # two of a kind are one
    # Seconds since 1970 have less than a microsecond's precision in 64 bits.
    assert seconds(readings.laps) == pytest.approx(readings.seconds, abs=2e-6)
    own.lap("learn")
    assert [SPANS[span] for span in own.take_laps().spans] == ["learn"]  # since the last time
    assert Meter().readings().laps is None


def test_newest_laps_are_kept(monkeypatch):
    monkeypatch.setattr(meter, "MOST_LAPS", 10)
    laps = Laps(0.0)
    for end in range(1, 100):
        laps.add(end % 2, float(end))
    assert 10 <= len(laps.spans) <= 20 and laps.ends[-1] == 99.0
    assert laps.begin == laps.ends[0] - 1.0
    for begin in range(99, 200, 5):
        later = Laps(float(begin))
        for end in range(begin, begin + 5):
            later.add(end % 2, end + 1.0)
        laps.join(later)
    assert len(laps.spans) == 20 and laps.begin == laps.ends[0] - 1.0 and laps.ends[-1] == 204.0


def test_time_between_two_workers_is_other():
    laps, later = Laps(1.0), Laps(5.0)
    laps.add(SPANS.index("infer"), 2.0)
    later.add(SPANS.index("infer"), 6.0)
    laps.join(later)
    assert seconds(laps) == {"infer": 2.0, "other": 3.0}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({}, ["learner"]),
        ({"num_workers": 2}, ["learner", "worker 0", "worker 1"]),
        (
            {"num_workers": 1, "inference": "learner", "algo": "appo"},
            ["learner", "worker 0", "inference"],
        ),
        (
            {"num_workers": 2, "num_learners": 2},
            ["rank 0", "rank 0, worker 0", "rank 1", "rank 1, worker 0"],
        ),
    ],
    ids=["inline", "workers", "inference", "learners"],
)
def test_timeline_holds_every_process(tmp_path, sizes, names):
    began = time.time()
    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", timeline=True, total_env_steps=640, **SMALL | sizes
    )
    tracks = read_timeline(run.dir)
    assert sorted(tracks) == sorted(names)
    first = tracks[names[0]]
    meters = run.summary["worker_meters"] | {names[0]: run.summary["meter"]}
    for name, laps in tracks.items():
        assert list(laps.ends) == sorted(laps.ends) and laps.begin <= laps.ends[0]
        assert began <= laps.begin <= laps.ends[-1] <= time.time()  # of all machines
        assert first.begin <= laps.ends[-1] <= first.ends[-1] + 1.0
        found = seconds(laps)
        for span in ("env_step", "infer", "learn"):  # "other" goes on after the last reading
            assert found.get(span, 0.0) == pytest.approx(meters[name].get(span, 0.0), abs=1e-3)


def test_resume_with_fewer_learners_removes_timelines_of_the_others(tmp_path):
    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", timeline=True, total_env_steps=64,
        num_learners=2, **SMALL,
    )  # fmt: skip
    assert sorted(read_timeline(run.dir)) == ["rank 0", "rank 1"]
    shutil.copy(run.dir / "timeline_rank1.npz", run.dir / "timeline_rank2.npz")
    run.resume(num_learners=1, total_env_steps=128, quiet=True)
    assert list(read_timeline(run.dir)) == ["learner"]
    assert [path.name for path in run.dir.glob("timeline*")] == ["timeline.npz"]


def test_no_timeline_by_default(tmp_path):
    run = headrace.train("CartPole-v1", run_dir=tmp_path / "run", total_env_steps=128, **SMALL)
    assert read_timeline(run.dir) == {}


def test_damaged_timeline_raises_run_dir_error(tmp_path):
    (tmp_path / "timeline.npz").write_bytes(b"PK no")
    with pytest.raises(RunDirError, match=r"timeline\.npz is damaged.*Remove it"):
        read_timeline(tmp_path)


def test_metrics_say_where_time_and_steps_went(tmp_path):
    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", num_workers=2, total_env_steps=128, **SMALL
    )
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["seconds/learner/learn"] > 0.0 and rows[0]["seconds/workers/env_step"] > 0.0
    assert rows[0]["ledger/collected"] == 64 and rows[0]["ledger/restarts"] == 0
