"""The benchmark of uneven step times: what is drawn, what is slept, what is said of it."""

import dataclasses
import json
import random
import statistics
import sys

import pytest

from benchmarks import figure, uneven
from benchmarks.drivers import measure_busy
from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.one_turn import TurnError, Work, take_turn
from benchmarks.peers import busy, real
from benchmarks.peers.step_times import DISTRIBUTIONS, SHORT_S
from benchmarks.peers.uneven import Uneven

SPREAD = {
    "constant": 0.0,
    "gaussian10": 0.1,
    "gaussian50": 0.49,
    "exponential": 1.0,
    "lognormal": 1.31,
    "stalls": 2.75,
    "slow-resets": 0.0,
}
"""Standard deviation of a step, over its mean."""


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_each_distribution_has_a_mean_of_7_ms_of_step_and_reset(name):
    times, rng = DISTRIBUTIONS[name], random.Random(1)
    steps = [times.draw(rng) for _ in range(400_000)]
    mean = statistics.fmean(steps)
    per_step = mean + times.reset_s / statistics.fmean(times.episode_steps)
    four_standard_errors = 4 * SPREAD[name] / len(steps) ** 0.5
    assert per_step == pytest.approx(times.mean_s, rel=max(four_standard_errors, 1e-6))
    assert times.mean_s == pytest.approx(0.007, rel=0.01)
    assert min(steps) >= 0
    assert statistics.pstdev(steps) / mean == pytest.approx(SPREAD[name], rel=0.03, abs=1e-6)


def test_environments_write_down_what_they_slept(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setenv(busy.FOLDER, str(tmp_path))
    monkeypatch.setattr("benchmarks.peers.uneven.time.sleep", slept.append)
    env = Uneven("stalls")
    env.reset(seed=3)
    for _ in range(50):
        env.step(0)
    assert busy.totals(tmp_path)["step_s"] < SHORT_S  # nobody slept
    monkeypatch.undo()
    monkeypatch.setenv(busy.FOLDER, str(tmp_path))
    env = Uneven("constant")
    env.reset(seed=3)
    for _ in range(20):
        env.step(0)
    sums = busy.totals(tmp_path)
    assert (len(slept), sums["steps"], sums["resets"]) == (50, 70, 0)
    assert sums["step_s"] >= 20 * 0.007
    assert sums["cpu_s"] < sums["step_s"]
    with pytest.raises(ValueError, match="distribution 'even': expected constant, "):
        Uneven("even")


def test_a_reset_counts_unless_it_is_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv(busy.FOLDER, str(tmp_path))
    env = Uneven("slow-resets")
    env.reset(seed=1)
    (tmp_path / "another").touch()  # whose environment is just being made
    assert busy.totals(tmp_path) == dict.fromkeys(busy.SUMS, 0.0)
    env.step(0)
    env.reset()
    sums = busy.totals(tmp_path)
    assert (sums["steps"], sums["resets"]) == (1, 1)
    assert sums["reset_s"] >= 0.2


def test_first_episodes_begin_in_the_middle_and_later_ones_have_their_length():
    first, later = [], []
    for seed in range(40):
        env = Uneven("slow-resets")
        env.times = dataclasses.replace(env.times, draw=lambda rng: 0.0, reset_s=0.0)
        for lengths in (first, later):
            env.reset(seed=seed)
            lengths.append(1)
            while not env.step(0)[3]:
                lengths[-1] += 1
    assert min(first) < 50 <= min(later) <= max(later) <= 150
    assert 30 < statistics.fmean(first) < 75 < statistics.fmean(later) < 120


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(real.highway, 25), (real.minigrid, 147)])
def test_real_environments_give_flat_vectors_and_measure_themselves(
    make, size, tmp_path, monkeypatch
):
    pytest.importorskip("highway_env" if make is real.highway else "minigrid")
    monkeypatch.setenv(busy.FOLDER, str(tmp_path))
    env = make()
    obs, _ = env.reset(seed=1)
    assert (obs.shape, obs.dtype) == ((size,), "float32")
    env.step(env.action_space.sample())
    env.reset()
    sums = busy.totals(tmp_path)
    assert (sums["steps"], sums["resets"]) == (1, 1)
    assert 0 < sums["cpu_s"] <= 1.1 * (sums["step_s"] + sums["reset_s"])
    env.close()


KILLED = """
import os, signal
from benchmarks.peers.uneven import Uneven
child = os.fork()
if not child:
    env = Uneven("constant")
    env.reset()
    for _ in range(10):
        env.step(0)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
print('RESULT {"env_steps_per_s": 5}')
print("(somebody) says more")
"""


def test_what_a_killed_process_slept_is_in_the_result():
    contestant = uneven.watched(Contestant("A", [sys.executable, "-c", KILLED]))
    result = take_turn(contestant, Work(None))
    assert result["in_environments"]["steps"] == 10
    assert 0.007 <= result["mean_s"] < 0.1
    assert uneven.asleep(result) == 24 / result["mean_s"]
    with pytest.raises(TurnError, match="No environment wrote down a step"):
        take_turn(
            uneven.watched(Contestant("B", [sys.executable, "-c", "print('{}')"])), Work(None)
        )
    with pytest.raises(TurnError, match="ended with 3"):
        exits = Contestant("C", [sys.executable, "-c", "raise SystemExit(3)"])
        take_turn(uneven.watched(exits), Work(None))


def test_the_steady_state_leaves_out_the_start():
    def sums(steps, step_s):
        return dict.fromkeys(busy.SUMS, 0.0) | {"steps": steps, "step_s": step_s, "cpu_s": steps}

    # slow at first, as processes start; then 2 environments that sleep 10 ms and wait as long
    points = [(0.0, sums(0, 0)), (5.0, sums(100, 9)), (6.0, sums(200, 10)), (7.0, sums(300, 11))]
    points += [(9.0, sums(500, 13)), (30.0, sums(501, 33))]
    found = measure_busy.steady(points)
    assert found == pytest.approx({"mean_s": 0.01, "mean_cpu_s": 1, "busy": 1, "busy_cpu": 100})
    short = measure_busy.steady([(0.0, sums(0, 0)), (2.0, sums(10, 1))])
    assert (short["mean_s"], short["busy"]) == (0.1, 0.5)


@pytest.mark.more
def test_headrace_at_lag_0_is_measured_beside_the_limit():
    flags = "benchmarks.peers.uneven:Uneven --num-envs 2 --num-steps 16 --total-env-steps 128"
    flags += " --env-kwargs distribution=exponential --num-workers 2 --envs-per-vector 1"
    ours = uneven.watched(contestants.headrace("Headrace", flags.split()))
    result = take_turn(ours, Work(128))
    assert result["in_environments"]["steps"] >= 128
    assert result["mean_s"] > 0.003


SLOW_TO_START = pytest.param(3, marks=pytest.mark.slow)  # RLlib: most of a minute


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", [0, 1, 2, SLOW_TO_START])
def test_a_peer_s_driver_samples(place):
    comparison = uneven.comparisons()[0]
    peer = [contestant for contestant in comparison.contestants if contestant.is_peer][place]
    if peer.missing:
        pytest.skip(f"{peer.name}: {peer.missing}")
    small = {"24": "4", "6": "2", "128": "16", "distribution=constant": "distribution=slow-resets"}
    command = [small.get(word, word) for word in peer.command] + ["--seconds", "2"]
    result = take_turn(dataclasses.replace(peer, command=command), comparison.work)
    made = result["in_environments"]
    assert made["resets"] >= 1
    # the driver's count and the environments' own: but for what is under way at the end
    assert result["env_steps"] == pytest.approx(made["steps"], abs=4 * 3 * 16)
    assert 0 < result["env_steps_per_s"] < 1.1 * 4 / result["mean_s"]


def test_the_share_of_the_limit_while_collecting():
    settings, limit = uneven.SETTINGS["uneven"], 3000.0
    share = uneven.while_collecting(settings, lambda result: limit)
    seconds = settings.batch / limit * 2  # of an update, of which a quarter is not collecting
    meter = {"wait": 1.0, "learn": seconds / 2, "publish": 0.0}
    ours = {"env_steps": 2 * settings.batch, "env_steps_per_s": settings.batch / seconds}
    ours |= {"meter": meter, "algo": "ppo"}
    assert share(ours) == pytest.approx(2 / 3)
    assert share(ours | {"algo": "appo"}) is None
    assert share({"env_steps_per_s": 3}) is None


def test_the_figure_is_drawn_from_results(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = [
        {"name": "Headrace, lag 0", "of_limit": 0.9},
        {"name": "Tianshou, first 6 ready", "of_limit": 0.5},
        {"name": "RLlib, 24 runners", "of_limit": None},
    ]
    results = tmp_path / "uneven.json"
    table = {"contestants": rows}
    tables = {uneven.title_of(name): table for name in ("constant", "stalls")}
    tables[f"{uneven.COMPUTING}: MiniGrid"] = table
    results.write_text(json.dumps({"tables": tables | {"Another": table}}))
    monkeypatch.setattr(sys, "argv", ["figure", "--results", str(results)])
    figure.main()
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = figure.panels(json.loads(results.read_text()))
    assert [list(panel) for panel in found.values()] == [["constant", "rare stalls"], ["MiniGrid"]]
    assert figure.bars(found[uneven.SLEEPING]) == {
        "Headrace, lag 0": [(0, 0.9), (1, 0.9)],
        "Tianshou": [(0, 0.5), (1, 0.5)],
        "RLlib": [],
    }
    results.write_text('{"tables": {"Another": {}}}')
    with pytest.raises(SystemExit, match="no table begins with '24 environments that sleep"):
        figure.main()


def test_every_contestant_has_a_color_and_every_table_its_place():
    for comparison in uneven.comparisons():
        assert comparison.title.startswith((f"{uneven.SLEEPING}: ", f"{uneven.COMPUTING}: "))
        rows = [{"name": c.name, "of_limit": None} for c in comparison.contestants]
        assert set(figure.bars({"": {"contestants": rows}})) == set(figure.COLORS)
    titles = [comparison.title for comparison in uneven.comparisons()]
    assert len(set(titles)) == len(DISTRIBUTIONS) + len(uneven.REAL)


def test_only_takes_titles_too():
    stalls = uneven.sleeping("stalls")
    assert len(turns._only(stalls, ["rare stalls"]).contestants) == len(stalls.contestants)
    (gymnasium,) = turns._only(stalls, ["stalls: Gymnasium"]).contestants
    assert gymnasium.name == uneven.LOCK_STEP
    assert not turns._only(stalls, ["log-normal"]).contestants
