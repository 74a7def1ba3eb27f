"""Tests of timelines as pictures and as a trace."""

import itertools
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

import headrace
from headrace.errors import ConfigError
from headrace.meter import SPANS, Laps
from headrace.storage.timeline import read_timeline
from headrace.tools.profile import timeline_plots


def laps(begin, *lengths):
    """From (span, seconds) that follow each other."""
    made, end = Laps(begin), begin
    for span, seconds in lengths:
        end += seconds
        made.spans.append(SPANS.index(span))
        made.ends.append(end)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return headrace.train(
        "CartPole-v1", run_dir=tmp_path_factory.mktemp("trace") / "run", timeline=True, quiet=True,
        num_envs=4, envs_per_vector=2, num_steps=16, num_workers=2, total_env_steps=640,
    )  # fmt: skip


def test_trace_has_processes_and_contiguous_events(run, tmp_path):
    tracks = read_timeline(run.dir)
    timeline_plots.write_trace(tmp_path / "trace.json", tracks)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["learner", "worker 0", "worker 1"]
    slices = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in slices) == 0
    for pid, name in names.items():
        of = [e for e in slices if e["pid"] == pid]
        assert [e["name"] for e in of] == [SPANS[span] for span in tracks[name].spans]
        assert {e["cat"] for e in of} == {"learner" if name == "learner" else "worker"}
        assert all(e["dur"] >= 0 and e["name"] in SPANS for e in of)
        for before, after in itertools.pairwise(of):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-6)
        span = tracks[name].ends[-1] - tracks[name].begin
        assert sum(e["dur"] for e in of) == pytest.approx(1e6 * span, abs=1.0)


def test_unwritable_trace_leaves_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/t\.json cannot be written.*\n.*folder"):
        timeline_plots.write_trace(tmp_path / "nowhere/t.json", {})
    timeline_plots.write_trace(tmp_path / "t.json", {})
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_span_shares_of_intervals():
    of = laps(10.0, ("env_step", 1.0), ("infer", 0.5), ("env_step", 0.5), ("wait", 2.0))
    shares = timeline_plots.span_shares(of, np.array([9.0, 10.5, 12.0, 13.0, 20.0]))
    step, infer, wait = (SPANS.index(span) for span in ("env_step", "infer", "wait"))
    assert shares[:, step] == pytest.approx([0.5 / 1.5, 1.0 / 1.5, 0, 0])
    assert shares[:, infer] == pytest.approx([0, 0.5 / 1.5, 0, 0])
    assert shares[:, wait] == pytest.approx([0, 0, 1.0, 1.0 / 7.0])
    assert shares.sum() == pytest.approx(shares[:, [step, infer, wait]].sum())
    assert timeline_plots.span_shares(Laps(0.0), np.array([0.0, 1.0])).sum() == 0.0


def test_last_updates_are_those_of_the_learner():
    update = (("wait", 1.0), ("learn", 2.0), ("publish", 0.5), ("log", 0.1), ("publish", 0.1))
    tracks = {"worker 0": laps(0.0, ("env_step", 90.0)), "learner": laps(0.0, *update * 5)}
    begin, end = timeline_plots.last_updates(tracks, updates=3)
    assert end == pytest.approx(4 * 3.7 + 3.5) and begin == pytest.approx(end - 3 * 3.7)
    assert timeline_plots.last_updates({"learner": laps(2.0, *update)}) == (2.0, pytest.approx(5.5))
    assert timeline_plots.last_updates({"learner": laps(2.0, ("start", 1.0))}) == (2.0, 3.0)


def test_picture_size_is_independent_of_number_of_laps():
    short = laps(0.0, *(("env_step", 1e-5), ("infer", 3e-5)) * 50_000)
    picture = timeline_plots.render_bars({"worker 0": short}, np.linspace(0.0, 2.0, 101))
    assert picture.shape[1:] == (100, 4)
    colors, counts = np.unique(picture[picture[..., 3] > 0], axis=0, return_counts=True)
    found = {tuple(c[:3]): n / counts.sum() for c, n in zip(colors.tolist(), counts, strict=True)}
    step, infer = (
        tuple(bytes.fromhex(timeline_plots.COLORS[span][1:])) for span in ("env_step", "infer")
    )
    assert found.keys() == {step, infer}  # a quarter of each column, and the rest
    assert found[step] == pytest.approx(0.25, abs=0.02)


def test_timeline_and_shares_are_drawn(run):
    tracks = read_timeline(run.dir)
    figure = Figure()
    above, below = figure.subplots(2)
    timeline_plots.draw_timeline(above, tracks, *timeline_plots.last_updates(tracks))
    assert [t.get_text() for t in above.get_yticklabels()] == ["learner", "worker 0", "worker 1"]
    assert (above.images[0].get_array()[..., 3] > 0).any()
    timeline_plots.draw_timeline(above, tracks, 0.0, 1.0, max_bars=2)
    assert "1 more process" in above.get_xlabel()
    shares = timeline_plots.group_workers(
        {"worker 10": {"wait": 1.0}, "worker 2": {"env_step": 3.0}, "learner": {"learn": 5.0}}
    )
    assert shares == {
        "learner": {"learn": 5.0},
        "2 workers, mean": {"wait": 0.5, "env_step": 1.5},
    }
    timeline_plots.draw_shares(below, shares)
    widths = {c.get_label(): [bar.get_width() for bar in c] for c in below.containers}
    assert widths == {"env_step": [0, 75], "wait": [0, 25], "learn": [100, 0]}
    figure.canvas.draw()


def test_spans_have_distinct_colors_and_tracks_natural_order():
    assert tuple(timeline_plots.COLORS) == SPANS and len(
        set(timeline_plots.COLORS.values())
    ) == len(SPANS)
    names = ["worker 10", "inference", "worker 9", "rank 1, worker 0", "rank 1", "learner"]
    assert timeline_plots.sort_tracks(names) == [
        "learner", "rank 1", "inference", "rank 1, worker 0", "worker 9", "worker 10",
    ]  # fmt: skip
