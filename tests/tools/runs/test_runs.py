"""`headrace runs` and `headrace compare`, on real runs."""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import headrace
from headrace.catalog.returns import format_return
from headrace.cli.main import _main
from headrace.collectors.api import WINDOW
from headrace.config.run_config import RunConfig
from headrace.errors import RunDirError
from headrace.interop.share import pull, push
from headrace.storage import run_dir as rundir
from headrace.storage.metrics import read_metrics
from headrace.tools.runs import listing, records
from headrace.tools.runs.comparison import EVALUATION, TRAINING, Pair, Result, _pairs, compare
from headrace.tools.runs.curves import Curve, mean_curve
from headrace.tools.runs.groups import NO_MATTER, group
from headrace.tools.runs.page import write_page
from headrace.tools.runs.records import STATES, load_runs
from headrace.tools.runs.statistics import bootstrap_interval, interquartile_mean
from headrace.training.job import RunRequest
from tests import python
from tests.tools.report import browser
from tests.tools.report.test_page import Reader

SMALL = {"num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "num_workers": 0, "quiet": True}
SHORT = "tests.support:short_cartpole"


def train(run_dir, env="CartPole-v1", **changed):
    return headrace.train(env, run_dir=run_dir, **SMALL | {"total_env_steps": 640} | changed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two learning rates with three seeds each, and one of another algorithm, with evaluations."""
    folder = tmp_path_factory.mktemp("made")
    runs = {}
    for seed in range(3):
        vectors = {"envs_per_vector": 4} if seed else {}  # another speed, and no other group
        for name, lr in (("slow", 1e-3), ("fast", 1e-2)):
            algo = headrace.PPO(lr=lr)
            runs[f"{name}/{seed}"] = train(
                folder / f"{name}/{seed}", algo=algo, seed=seed, **vectors
            )
    runs["other/deep/a2c"] = train(
        folder / "other/deep/a2c", algo="a2c", eval_every=256, eval_episodes=2
    )
    return folder, runs


@pytest.fixture
def copied(made, tmp_path):
    """A run of one's own, to change."""
    return shutil.copytree(made[0] / "slow/0", tmp_path / "copies/run")


def names(found, folder):
    return [str(record.dir.relative_to(folder)) for record in found]


def command(argv, capsys):
    """The exit code of `headrace`, and what it says."""
    try:
        code = _main([str(word) for word in argv])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def test_runs_are_found_at_any_depth_and_not_in_runs(made, copied):
    folder, runs = made
    assert names(headrace.load_runs(folder), folder) == sorted(runs)
    assert names(load_runs(folder / "slow/1"), folder) == ["slow/1"]
    top = copied.parent
    shutil.copytree(copied, top / ".hidden/run")
    shutil.copytree(copied, top / "model/run")
    shutil.copytree(copied, copied / "inside")
    (top / "model/config.json").write_text('{"hidden_size": 8}')  # of something else
    assert names(load_runs(str(top)), top) == ["model/run", "run"]
    with pytest.raises(RunDirError, match="There is no directory"):
        load_runs(top / "nowhere")


def test_a_record_says_what_the_run_said(made):
    folder, runs = made
    for record in load_runs(folder):
        run = runs[str(record.dir.relative_to(folder))]
        assert (record.env, record.algo) == ("CartPole-v1", run.summary["algo"])
        assert record.seed == run.summary["seed"]
        assert (record.env_steps, record.total_env_steps) == (640, 640)
        assert record.mean_return == run.mean_return
        assert record.best_return == run.summary["best_return"]
        assert record.env_steps_per_s == pytest.approx(run.summary["env_steps_per_s"], rel=0.01)
        assert (record.state, record.damage) == ("done", "")
        assert 0 <= time.time() - record.written_at < 600
        assert record.settings["lr"] == run._job.settings.algo.lr
    assert record.best_return is None and runs["other/deep/a2c"].summary["best_return"] is not None


def test_metrics_are_columns(made):
    folder, _ = made
    (record,) = load_runs(folder / "other/deep/a2c")
    columns, rows = record.metrics(), read_metrics(record.dir)
    assert set(columns) == {name for row in rows for name in row}
    assert {len(column) for column in columns.values()} == {len(rows)}
    assert columns["env_steps"].tolist() == [row["env_steps"] for row in rows]
    evaluated = [row["eval_return"] for row in rows if "eval_return" in row]
    column = columns["eval_return"]
    assert 0 < len(evaluated) < len(rows)
    assert column[np.isfinite(column)].tolist() == evaluated


def test_states(tmp_path):
    here, seen = tmp_path / "done", []
    train(here, on_update=lambda *_: seen.append(load_runs(here)[0].state))
    assert seen == ["running"] * 10
    too_early = {"stop_at_return": 5.0, "num_steps": 64}  # a mean of fewer than 100 episodes
    train(tmp_path / "stopped", SHORT, stop_after_s=1e-6, **too_early)
    train(tmp_path / "good", SHORT, stop_at_return=5.0, total_env_steps=4096)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "failed", on_update=lambda *_: 1 // 0)
    assert rundir.error_of(tmp_path / "failed").endswith("modulo by zero")
    shutil.copytree(tmp_path / "failed", tmp_path / "ended")
    (tmp_path / "ended/error.txt").unlink()
    code = (
        "import headrace, os; headrace.train('CartPole-v1', run_dir='vanished', num_envs=4, "
        "num_steps=16, num_workers=0, total_env_steps=640, quiet=True, "
        "on_update=lambda *_: os._exit(3))"
    )
    assert python.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 3
    found = {record.dir.name: record for record in load_runs(tmp_path)}
    states = {name: record.state for name, record in found.items()}
    assert states == {name: name for name in states} | {"good": "done"}
    assert found["good"].env_steps < found["good"].total_env_steps
    assert found["stopped"].mean_return > 5.0
    assert set(states.values()) | {"running", "damaged", "pulled", "imported"} == set(STATES)
    assert records.WINDOW == WINDOW
    with rundir.locked(here):  # by a process that has not marked it yet
        assert load_runs(here)[0].state == "running"


def test_a_shared_policy_is_listed_as_pulled_with_its_env_steps(copied, tmp_path):
    push(copied, str(tmp_path / "shared"), RunRequest({}), episodes=1)
    pull(str(tmp_path / "shared"), tmp_path / "mine/pulled")
    (record,) = load_runs(tmp_path / "mine")
    assert (record.state, record.env_steps) == ("pulled", 640)
    table = listing.describe([record], tmp_path / "mine")
    assert re.search(r" 640  .* pulled ", table) and "of 640" not in table


def test_a_damaged_run_is_listed_with_its_reason(copied, made, capsys):
    top = copied.parent
    shutil.copytree(copied, top / "no_goal")
    config = json.loads((copied / "config.json").read_text())
    config["settings"]["total_env_steps"] = "many"
    (top / "no_goal/config.json").write_text(json.dumps(config))
    shutil.copytree(made[0] / "other/deep/a2c", top / "no_best")
    (manifest,) = (top / "no_best/best").glob("*/manifest.json")
    manifest.write_text(manifest.read_text().replace("best_return", "worst_return"))
    shutil.copytree(copied, top / "unreadable")
    (top / "unreadable/metrics.jsonl").unlink()
    (top / "unreadable/metrics.jsonl").mkdir()
    (copied / "config.json").write_text('{"settings": ')
    code, out, err = command(["runs", top], capsys)
    assert (code, err) == (0, "")
    found = {record.dir.name: record for record in load_runs(top)}
    assert {record.state for record in found.values()} == {"damaged"}
    for name, reason in {
        "run": "config.json is damaged: JSONDecodeError",
        "no_goal": "no usable total_env_steps",
        "no_best": "its SHA-256 does not match",
        "unreadable": "Is a directory",
    }.items():
        assert reason in found[name].damage
        assert re.search(rf"^{name} is damaged: .*{re.escape(reason)}", out, re.MULTILINE)
    assert re.search(r"^run +- +- +- +- +- +- +- +damaged +\d+ ", out, re.MULTILINE)
    with pytest.raises(RunDirError, match="damaged"):
        compare([copied])
    with pytest.warns(UserWarning, match="Left out: .*damaged") as said:
        shutil.copytree(made[0] / "slow/1", top / "whole")
        assert compare([top]).results[0].seeds == (1,)
    assert len(said) == 4


def test_the_table_is_sorted_and_filtered(made, capsys):
    folder, runs = made
    code, out, _ = command(["runs", folder], capsys)
    assert code == 0
    heads, *rows = out.splitlines()
    assert heads.split("  ")[0] == "directory"
    assert [row.split()[0] for row in rows] == sorted(runs)
    assert re.search(
        r"slow/1 +CartPole-v1 +ppo +1 +640 of 640 +\d+\.\d +- +[\d,]+ +done +\d+ ", out
    )

    def shown(*flags):
        code, out, _ = command(["runs", folder, "--json", *flags], capsys)
        assert code == 0
        return [run["dir"].removeprefix(f"{folder}/") for run in json.loads(out)["runs"]]

    by_return = sorted(runs, key=lambda name: runs[name].mean_return)
    assert shown("--sort", "mean_return") == by_return
    assert shown("--sort", "mean_return", "--reverse") == by_return[::-1]
    for more in ([], ["--reverse"]):  # the only one with an evaluation comes first
        assert shown("--sort", "best_return", *more)[0] == "other/deep/a2c"
    assert shown("--sort", "age", "--reverse")[0] == "slow/0"  # the first that was made
    assert shown("--algo", "a2*") == ["other/deep/a2c"]
    assert shown("--env", "cartpole*") == [] == shown("--state", "running")
    ours = [name for name in sorted(runs) if name != "other/deep/a2c"]
    assert shown("--env", "CartPole-v?", "--state", "done", "--algo", "ppo") == ours
    code, out, _ = command(["runs", folder, "--state", "ended"], capsys)
    assert (code, out) == (0, f"No runs of that kind below {folder}.\n")


def test_runs_of_a_study_have_one_row(made, tmp_path, capsys):
    study = tmp_path / "lr"
    shutil.copytree(made[0] / "slow", study / "trials")
    shutil.copytree(made[0] / "other/deep", tmp_path / "deep")
    (study / rundir.STUDY).write_text("{}")
    means = [record.mean_return for record in load_runs(study)]
    means = f"{min(means):.1f} to {max(means):.1f}"
    _, out, _ = command(["runs", tmp_path], capsys)
    _, alone, of_study = out.splitlines()
    assert alone.startswith("deep/a2c ")
    assert re.match(
        rf"lr \(study, 3 runs\) +CartPole-v1 +ppo +- +640 +{means} +- +- +3 done +\d+ ",
        of_study,
    )
    for within in (study, study / "trials"):  # one looks at it
        _, out, _ = command(["runs", within], capsys)
        assert len(out.splitlines()) == 4
    _, out, _ = command(["runs", tmp_path, "--json"], capsys)
    assert len(json.loads(out)["runs"]) == 4


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["runs", "--sort", "mean_retrun"], 2, ["Did you mean mean_return", "env_steps_per_s, "]),
        (["runs", "--state", "finished"], 2, ["no such state", "vanished, done"]),
        (["runs", "nowhere"], 1, ["There is no directory nowhere"]),
        (["compare"], 2, ["No run directory was given", "headrace compare runs/A"]),
        (["compare", "nowhere"], 1, ["There is no directory nowhere"]),
        (["compare", "."], 1, ["not a run directory, and there is none below it"]),
        (["compare", ".", "--output", "a.txt"], 2, ["a.txt", "png"]),
        (["compare", ".", "--html", "no/a.html"], 2, ["--html no/a.html", "folder that exists"]),
    ],
)
def test_wrong_words_are_refused(words, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    actual, _, err = command(words, capsys)
    assert actual == code
    for text in told:
        assert text in err


def test_ages_are_words():
    ages = {0.4: "0 s", 59: "59 s", 200: "3 min", 7000: "1 h", 3 * 86400: "3 d", -5: "0 s"}
    assert {seconds: listing.format_age(seconds) for seconds in ages} == ages


def test_looking_leaves_no_trace(made):
    folder, _ = made
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    load_runs(folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_compare_groups_by_settings_that_matter(made):
    folder, runs = made
    comparison = compare([folder / "slow", folder / "fast", folder / "slow/0"])
    assert comparison.of == TRAINING
    assert [each.label for each in comparison.groups] == ["lr=0.001", "lr=0.01"]
    assert comparison.settings == {"lr": [1e-3, 1e-2]}
    for result, name in zip(comparison.results, ("slow", "fast"), strict=True):
        returns = np.array([runs[f"{name}/{seed}"].mean_return for seed in range(3)])
        assert (result.seeds, result.env_steps) == ((0, 1, 2), (640,) * 3)
        np.testing.assert_array_equal(result.returns, returns)
        assert result.mean_return == pytest.approx(returns.mean())
        assert result.interval == bootstrap_interval(returns)
        assert result.iqm == interquartile_mean(returns)
        assert result.curve.env_steps[-1] == 640
        assert result.curve.mean[-1] == pytest.approx(returns.mean())
        assert (result.curve.low[-1], result.curve.high[-1]) == pytest.approx(result.interval)
    (pair,) = comparison.pairs
    assert (pair.better, pair.than) == ("lr=0.01", "lr=0.001")
    wins = [
        np.sign(runs[f"fast/{i}"].mean_return - runs[f"slow/{j}"].mean_return) / 2 + 0.5
        for i in range(3)
        for j in range(3)
    ]
    assert pair.probability == pytest.approx(np.mean(wins))
    assert pair.interval[0] <= pair.probability <= pair.interval[1]


def test_equal_seeds_in_a_group_are_told(made, copied):
    with pytest.warns(UserWarning, match="ppo: more than one run has seed 0") as said:
        comparison = compare([made[0] / "slow", copied])
    assert len(said) == 1
    assert comparison.results[0].seeds == (0, 0, 1, 2)


def test_labels_say_environment_and_algorithm_where_these_differ(made, tmp_path):
    folder, _ = made
    train(tmp_path / "pole", SHORT, seed=9)
    comparison = compare([folder, tmp_path / "pole"])
    labels = [each.label for each in comparison.groups]
    assert labels == [
        "CartPole-v1 ppo lr=0.01", "CartPole-v1 a2c", "CartPole-v1 ppo lr=0.001",
        f"{SHORT} ppo",
    ]  # fmt: skip
    assert list(comparison.settings)[:2] == ["env", "algo"]
    assert "clip_coef" not in comparison.settings  # a2c has none
    # Returns of two environments cannot be compared.
    assert not any(SHORT in pair.better + pair.than for pair in comparison.pairs)
    assert len(comparison.pairs) == 3
    assert [env for env, _ in comparison.panels()] == [
        "CartPole-v1",
        SHORT,
    ]


def test_groups_that_differ_in_much_are_named_by_their_directories(tmp_path):
    def record(name, value, seed=0):
        names = ("lr", "gamma", "num_steps", "num_epochs", "clip_coef")
        settings = {"env": "E", "algo": "ppo", "seed": seed} | dict.fromkeys(names, value)
        return records.RunRecord(tmp_path / name, "E", "ppo", seed, settings=settings)

    found = group([record("trials/0", 0), record("trials/1", 1), record("fresh/1", 1, seed=1)])
    assert [each.label for each in found] == ["trials/0", "trials/1 and 1 more"]


def test_settings_that_do_not_matter_are_settings():
    of_algorithms = {"arithmetic", "replay_dir", "save_replay"}
    assert NO_MATTER - of_algorithms < vars(RunConfig()).keys()


def test_learners_matter_where_the_learning_rate_follows_from_them(made):
    folder, _ = made
    run, *_ = load_runs(folder)
    for scale, groups in (("none", 1), ("sqrt", 2)):
        both = [
            records.RunRecord(run.dir, settings={**run.settings, "lr_scale": scale, **more})
            for more in ({"num_learners": 1}, {"num_learners": 2, "num_workers": 5, "seed": 8})
        ]
        assert len(group(both)) == groups


def test_returns_are_of_evaluations_where_all_have_one(made, tmp_path):
    folder, _ = made
    settings = {"algo": "a2c", "eval_every": 256, "eval_episodes": 2}
    train(tmp_path / "b", seed=4, **settings)
    both = compare([folder / "other", tmp_path])
    rows = [read_metrics(d) for d in (folder / "other/deep/a2c", tmp_path / "b")]
    assert both.of == EVALUATION
    (result,) = both.results
    last = [[row["eval_return"] for row in of if "eval_return" in row][-1] for of in rows]
    assert (result.seeds, result.returns.tolist()) == ((0, 4), last)
    assert compare([folder / "other", folder / "slow"]).of == TRAINING


def test_each_policy_of_a_game_has_a_result(tmp_path):
    game = {
        "policies": {"a": "0:1", "b": "1:3"},
        "vectorization": "native",
        "total_env_steps": 64,
        "envs_per_vector": 4,
    }
    for seed in (0, 1):
        train(tmp_path / str(seed), "tests.envs.kernels.support:Ring", seed=seed, **game)
    (first, _) = load_runs(tmp_path)
    comparison = compare([tmp_path])
    assert [result.policy for result in comparison.results] == ["a", "b"]
    assert [result.returns[0] for result in comparison.results] == [
        first.mean_return_by_policy["a"], first.mean_return_by_policy["b"],
    ]  # fmt: skip
    assert comparison.pairs == []  # of two policies: no improvement of one over the other


def result(label, *returns, env="E"):
    nothing = np.empty(0)
    seeds = tuple(range(len(returns)))
    curve = Curve(nothing, nothing, nothing, nothing)
    return Result(label, env, "", seeds, seeds, np.array(returns, np.float64), curve)


def test_of_more_than_three_groups_each_is_compared_with_the_first():
    four = [result(label, i, i + 1) for i, label in enumerate("abcd")]
    three = [(pair.better, pair.than) for pair in _pairs(four[:3])]
    assert three == [("b", "a"), ("c", "a"), ("c", "b")]
    pairs = list(_pairs([*four, result("z", 1, 2, env="F"), result("empty")]))
    assert [(pair.better, pair.than) for pair in pairs] == [("b", "a"), ("c", "a"), ("d", "a")]
    assert pairs[0] == Pair("b", "a", (0.5 + 1 + 1 + 1) / 4, pairs[0].interval)


def test_curves_are_interpolated_where_all_are_known():
    first, second = np.array([0.0, 100.0]), np.array([50.0, 75.0, 200.0])
    curves = [Curve(x, y, y, y) for x, y in ((first, first), (second, 3 * second))]
    found = mean_curve(curves)
    assert (found.env_steps[0], found.env_steps[-1], len(found.env_steps)) == (50, 100, 200)
    np.testing.assert_allclose(found.mean, 2 * found.env_steps)
    np.testing.assert_allclose(found.low, found.env_steps)  # of two runs: the two
    np.testing.assert_allclose(found.high, 3 * found.env_steps)
    alone = mean_curve(curves[:1])
    np.testing.assert_allclose(alone.mean, alone.env_steps)
    np.testing.assert_array_equal(alone.low, alone.high)
    later = Curve(first + 300, first, first, first)
    assert len(mean_curve([curves[0], later]).mean) == 0


def test_compare_prints_tables_and_draws(made, tmp_path, capsys):
    folder, _ = made
    page, picture = tmp_path / "page.html", tmp_path / "all.svg"
    words = ["compare", folder / "slow", folder / "fast", folder / "other"]
    code, out, _ = command([*words, "--html", page, "--output", picture], capsys)
    assert code == 0
    comparison = compare([folder / "slow", folder / "fast", folder / "other"])
    slow = comparison.results[0]
    low, high = map(format_return, slow.interval)
    line = f"ppo lr=0.001  0, 1, 2  640  {format_return(slow.mean_return)}  [{low}, {high}]"
    assert line in re.sub("  +", "  ", out)
    for text in ("P(X > Y)", "interquartile mean", f"Page: {page}", f"Learning curves: {picture}"):
        assert text in out
    assert re.search(r"^lr +0\.001 +0\.01 +", out, re.MULTILINE)
    assert picture.read_text().count("ppo lr=0.0") >= 2
    shown = Reader(page)
    for text in (
        "3 groups of runs", "ppo lr=0.01", "0, 1, 2", "P(X > Y)", *comparison.settings,
        f"[{low}, {high}]", "env steps", str(folder / "slow/0"), comparison.legend,
    ):  # fmt: skip
        assert text in shown.words, text
    assert [name for name, _ in shown.elements].count("svg") == 1
    text = page.read_text()
    assert "--line-0: " in text  # the style sheet of the report
    assert "://" not in text and not re.search(r"url\((?!#)", text)
    json_words = ["compare", folder / "slow", folder / "fast", folder / "other", "--json"]
    code, out, _ = command(json_words, capsys)
    assert (code, json.loads(out)) == (0, json.loads(json.dumps(comparison.to_json())))


def test_browser_shows_the_page_without_requests_or_errors(made, tmp_path):
    if (found := browser.found()) is None:
        pytest.skip(f"no Chromium on the PATH or in {browser.FETCHED}; `make browser` fetches one")
    write_page(compare([made[0]]), tmp_path / "page.html")
    (tmp_path / "profile").mkdir()
    with browser.browser(found, tmp_path / "profile") as page:
        for width in (1200, 390):
            page.open(tmp_path / "page.html", width=width)
            assert page.said == []
            assert page.asked == [(tmp_path / "page.html").as_uri()] * (1 if width == 1200 else 2)
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value("document.querySelector('svg').clientHeight") > 100


def test_a_missing_library_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = command(["compare", tmp_path, "--output", tmp_path / "a.png"], capsys)
    assert code == 2
    assert "plot" in err


def test_nothing_heavy_is_imported(made):
    folder, _ = made
    code = (
        "import sys; from headrace.cli.main import _main; "
        f"_main(['runs', {str(folder)!r}]); _main(['runs', {str(folder)!r}, '--json']); "
        "print(sorted({'torch', 'numpy', 'tensorboard', 'matplotlib'} & set(sys.modules))); "
        f"_main(['compare', {str(folder)!r}]); "
        "print(sorted({'torch', 'tensorboard', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines().count("[]") == 2
