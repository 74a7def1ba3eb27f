"""The regression guard, and the benchmark of a gradient step."""

import json
import sys
import tomllib

import pytest

from benchmarks import minibatch, regression
from benchmarks.harness import turns
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.one_turn import TurnError, Work


def printing(name, figure, code=0):
    """A contestant that prints a result, and ends with this code."""
    result = json.dumps({"figure": figure})
    return Contestant(name, [sys.executable, "-c", f"print({result!r}); exit({code})"])


def compared(*contestants, lower=False, **more):
    work = Work(None, "figure", "s", lower_is_better=lower)
    return turns.Comparison("cartpole", contestants, work, **more)


def test_a_ratio_is_of_the_same_turn_and_larger_is_better():
    pair = printing("ours", 6.0), printing("other", 2.0)
    assert regression.measure(compared(*pair), 2) == pytest.approx(3)
    assert regression.measure(compared(*pair, lower=True), 1) == pytest.approx(1 / 3)
    alone = compared(pair[0], limit=lambda result: 8.0)
    assert regression.measure(alone, 1) == pytest.approx(0.75)
    with pytest.raises(TurnError, match="cartpole"):
        regression.measure(compared(pair[0], printing("other", 1.0, code=3)), 1)


@pytest.mark.parametrize(
    ("ratio", "word"),
    [(0.79, " SLOWER"), (0.81, "not slower"), (1.3, "not slower")],
)
def test_only_what_falls_below_the_range_is_slower(ratio, word):
    assert word in regression.verdict("start", ratio, {"ratio": 1.0, "tolerance": 0.2})


@pytest.mark.parametrize("figure", [1.0, 2.0])
def test_the_exit_code_and_what_is_accepted(tmp_path, monkeypatch, figure):
    pair = printing("ours", figure), printing("other", 1.0)
    path = tmp_path / "regression.toml"
    path.write_text("cartpole = { ratio = 2.0, tolerance = 0.1 }\n")
    monkeypatch.setattr(regression, "ACCEPTED", path)
    monkeypatch.setattr(regression, "comparisons", lambda: [compared(*pair)])
    for flags, code in (([], int(figure < 2)), (["--accept"], 0), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["regression", "--turns", "1", *flags])
        assert regression.main() == code
    assert tomllib.loads(path.read_text()) == {"cartpole": {"ratio": figure, "tolerance": 0.1}}


def test_every_comparison_has_an_accepted_figure():
    accepted = tomllib.loads(regression.ACCEPTED.read_text())
    assert {each.title for each in regression.comparisons()} == accepted.keys()


def test_a_gradient_step_of_each_contestant_is_timed(monkeypatch):
    # Compiling takes half a minute, and needs a compiler
    monkeypatch.delitem(minibatch.CONTESTANTS, "plain torch, compiled")
    row = minibatch.measure(4096, 1)
    assert len(row["ms"]) == 3 and all(ms > 0 for (ms,) in row["ms"].values())
    assert "| 4,096 |" in minibatch.tables({"rows": [row]})
