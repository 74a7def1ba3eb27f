"""`headrace report`: one page of a run, read as HTML, and seen in a browser."""

import fcntl
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import headrace
from headrace.errors import ConfigError, EnvError, RunDirError
from headrace.tools.report.history import read_history
from headrace.tools.report.page import write_report
from tests import python
from tests.tools.report import browser

SMALL = {"num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "quiet": True}
VOID = {"meta", "input", "wbr"}


class Reader(HTMLParser):
    """The elements of a page: fails where one is not closed, or where a name is there twice."""

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.elements = [], [], []
        self.feed(path.read_text())
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(text)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """With workers, a timeline and evaluations."""
    return headrace.train(
        "CartPole-v1", run_dir=tmp_path_factory.mktemp("report") / "run", timeline=True,
        num_workers=2, total_env_steps=1280, eval_every=640, eval_episodes=1, **SMALL,
    ).dir  # fmt: skip


def copied(run_dir, to):
    shutil.copytree(run_dir, to)
    return to


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def write_rows(run_dir, rows):
    text = "".join(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text)


def test_command_writes_one_page_without_network(workers, tmp_path):
    output = tmp_path / "page.html"
    command = python.command("report", workers, "--output", output)
    done = python.run([*command, "--usd-per-hour", "3600"], timeout=100)
    assert (done.returncode, done.stdout) == (0, f"Report: {output}\n"), done.stderr
    page = Reader(output)
    for name, attributes in page.elements:
        assert "src" not in attributes and name not in ("link", "iframe", "img")
        for value in (attributes.get("href", ""), attributes.get("xlink:href", "")):
            assert value.startswith(("#", "data:image/png;base64,")) or not value
    text = output.read_text()
    assert "://" not in text and "@import" not in text and not re.search(r"url\((?!#)", text)
    for words in (
        "finished", "CartPole-v1 ppo", "env steps 1,280", "mean_return", "approx_kl",
        "learner over wall time", "workers over wall time", "worker 1", "workers replaced 0",
        f"headrace resume {workers}", "num_workers 2 given", "gae_lambda", f"torch {_torch()}",
    ):  # fmt: skip
        assert words in page.words, words
    history = read_history(workers)
    assert f"cost so far {history.wall_s[-1]:,.2f} USD" in page.words
    assert "Lag" not in page.words  # this run has none


def _torch():
    import torch

    return torch.__version__


@pytest.mark.more
def test_chosen_settings_come_before_defaults(workers):
    words = Reader(write_report(workers)).words
    assert words.index("num_workers 2 given") < words.index("settings at their defaults")
    assert words.index("settings at their defaults") < words.index("clip_coef 0.2 default")
    names = json.loads((workers / "config.json").read_text())["settings"]
    assert all(name in words for name in names)


def test_names_of_a_run_are_escaped(workers, tmp_path):
    run_dir, evil = copied(workers, tmp_path / "r"), "</style><script>alert('$1$')</script>\"&"
    config = json.loads((run_dir / "config.json").read_text())
    config["settings"] |= {"env": evil, "algo": evil, "model": evil, "wrapper": [evil]}
    config["origin"]["lr"] = config["versions"][evil] = evil
    (run_dir / "config.json").write_text(json.dumps(config))
    rows = rows_of(run_dir)
    write_rows(run_dir, [row | {evil: i, f"{evil}/mean_return": i} for i, row in enumerate(rows)])
    page = Reader(write_report(run_dir))
    assert [name for name, _ in page.elements].count("script") == 1
    assert "alert(1)" not in page.words and page.words.count("alert('$1$')") >= 6


@pytest.mark.more
def test_asynchronous_run_shows_its_lag(tmp_path):
    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", algo="appo", num_workers=2, lag=2,
        total_env_steps=960, **SMALL,
    )  # fmt: skip
    words = Reader(write_report(run.dir)).words
    for name in ("lag_acting", "lag_learning", "queue_depth", "workers_wait_s", "rho_clip"):
        assert name in words
    assert "This run has no timeline. To record one: headrace train ... --timeline" in words


@pytest.mark.more
def test_replaced_worker_is_shown_as_fault(tmp_path):
    once = tmp_path / "once"
    once.mkdir()
    run = headrace.train(
        "headrace.envs.faulty:Faulty", env_kwargs={"faults": "kill@30", "once": str(once)},
        run_dir=tmp_path / "run", num_workers=2, total_env_steps=6400, **SMALL,
    )  # fmt: skip
    assert run.summary["restarts"] == 1
    history = read_history(run.dir)
    assert history.ledger["restarts"] == 1
    words = Reader(write_report(run.dir)).words
    assert "workers replaced 1" in words and "No worker was replaced" not in words
    assert f"headrace eval {run.dir} --episodes 20 --env headrace.envs.faulty:Faulty" in words


@pytest.mark.parametrize("is_saved", [False, True])
def test_error_that_ended_a_run_is_shown_until_the_run_goes_on(tmp_path, is_saved):
    env, run_dir, once = "headrace.envs.faulty:Faulty", tmp_path / "run", tmp_path / "once"
    once.mkdir()
    faults = {"faults": "crash@40" if is_saved else "crash@2", "once": str(once)}
    with pytest.raises(EnvError):
        headrace.train(
            env, env_kwargs=faults, run_dir=run_dir, checkpoint_every_s=0, total_env_steps=640,
            **SMALL,
        )  # fmt: skip
    words = Reader(write_report(run_dir)).words
    assert re.search(r"failed at \d+% of 640 env steps", words)
    assert "FaultyError: told to crash at" in words
    assert ("headrace resume" in words) == is_saved == ("Commands" in words)
    if is_saved:
        headrace.resume(run_dir, env=env, quiet=True)
        words = Reader(write_report(run_dir)).words
        assert "finished" in words and "FaultyError" not in words


def test_each_policy_has_a_curve(tmp_path):
    run = headrace.train(
        "mpe2.simple_tag_v3:parallel_env", run_dir=tmp_path / "run", num_envs=2, num_steps=16,
        total_env_steps=128, quiet=True,
    )  # fmt: skip
    history = read_history(run.dir)
    assert len(history.policies) == 2
    page = Reader(write_report(run.dir))
    assert all(policy in page.words for policy in history.policies)
    # One panel of a metric, however many policies: the last value of each stands in it.
    assert page.words.count(" approx_kl ") == 1
    assert re.search(r"mean_return \S+ / \S+ ", page.words)


@pytest.mark.more
def test_time_of_resumed_run_is_that_of_all_processes(workers, tmp_path):
    run_dir = copied(workers, tmp_path / "r")
    before = read_history(run_dir)
    headrace.resume(run_dir, total_env_steps=1920, quiet=True)
    history = read_history(run_dir)
    assert history.is_start.tolist() == [i in (0, 20) for i in range(30)]
    last = rows_of(run_dir)[-1]["wall_s"]
    assert history.wall_s[-1] == pytest.approx(before.wall_s[-1] + last)
    words = Reader(write_report(run_dir)).words
    assert "started 2 times" in words and "env steps 1,920" in words


@pytest.mark.more
def test_running_run_without_episodes_has_a_page(workers, tmp_path):
    run_dir = copied(workers, tmp_path / "r")
    none = {"mean_return": None, "mean_length": None, "episodes": 0}
    rows = [{**row, **none} for row in rows_of(run_dir)[:3]]
    for row in rows:
        row.pop("eval_return", None)
    write_rows(run_dir, rows)
    (run_dir / "timeline.npz").unlink()
    shutil.rmtree(run_dir / "checkpoints")
    with (run_dir / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = Reader(write_report(run_dir)).words
    assert "running, 15% of 1,280 env steps" in words and "No episode has ended yet." in words
    assert "The timeline is written when the run ends." in words
    assert "stopped at 15% of 1,280 env steps" in Reader(write_report(run_dir)).words
    write_rows(run_dir, [])
    assert "No update has been made yet." in Reader(write_report(run_dir)).words


def test_damaged_timeline_is_left_out_with_reason(workers, tmp_path):
    run_dir = copied(workers, tmp_path / "r")
    rows = rows_of(run_dir)
    rows[2:2] = ["{torn\n", rows[1] | {"loss": "much", "ledger/restarts": None}]
    write_rows(run_dir, [*rows, '{"iteration": 99, "env_'])
    (run_dir / "timeline.npz").write_bytes(b"PK no")
    with pytest.warns(UserWarning, match=r"line 3\.|timeline\.npz is damaged"):
        page = Reader(write_report(run_dir))
    assert "timeline.npz is damaged" in page.words and "env steps 1,280" in page.words


@pytest.mark.more
def test_page_of_many_updates_stays_small(workers, tmp_path):
    run_dir = copied(workers, tmp_path / "r")
    usual = write_report(run_dir).stat().st_size
    line = rows_of(run_dir)[-1]
    line = {name: line[name] for name in ("loss", "mean_return", "wall_s", "env_steps_per_s")}
    rows = [line | {"iteration": i, "env_steps": 64 * i} for i in range(1, 100_001)]
    rows[50_000]["loss"] = 1e6
    write_rows(run_dir, rows)
    history = read_history(run_dir)
    curve = history.curve("loss")
    assert len(curve.mean) == 1000 and curve.env_steps[-1] == 6_400_000
    assert curve.high.max() == 1e6 and curve.mean.max() < 1.1e4  # the range keeps what stands out
    assert history.speed().mean == pytest.approx(line["env_steps_per_s"])
    assert write_report(run_dir).stat().st_size < usual + 200_000


def test_invalid_price_output_and_run_are_refused(workers, tmp_path):
    with pytest.raises(RunDirError, match="not a run directory"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="a price of 0 or more"):
        write_report(workers, usd_per_hour=-1.0)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(workers, tmp_path / "nowhere/page.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    command = browser.found()
    if command is None:
        pytest.skip(f"no Chromium on the PATH or in {browser.FETCHED}; `make browser` fetches one")
    with browser.browser(command, tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_browser_shows_page_without_requests_or_errors(workers, page, tmp_path):
    report = write_report(workers, tmp_path / "page.html", usd_per_hour=1.0)
    for width, dark in ((1200, False), (390, True)):
        page.open(report, width=width, dark=dark)
        assert page.said == []
        asked = {address for address in page.asked if not address.startswith("data:")}
        assert asked == {report.as_uri()}
        assert page.value("document.documentElement.scrollWidth") <= width  # nothing sticks out
        heights = page.value("[...document.querySelectorAll('svg')].map(e => e.clientHeight)")
        assert len(heights) >= 12 and min(heights) > 60
        line = "getComputedStyle(document.querySelector('figure path[style*=line-0]')).stroke"
        assert page.value(line) == ("rgb(98, 168, 229)" if dark else "rgb(31, 111, 180)")
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000


def test_browser_searches_settings(workers, page, tmp_path):
    page.open(write_report(workers, tmp_path / "page.html"))
    shown = "[...document.querySelectorAll('.setting')].filter(e => e.checkVisibility()).length"
    before = page.value(shown)
    search = "e = document.querySelector('input'); e.value = 'GAE'; "
    page.value(search + "e.dispatchEvent(new Event('input'))")
    assert page.value(shown) == 2 < before  # gae_lambda, and its schedule
    page.value("e.value = ''; e.dispatchEvent(new Event('input'))")
    assert page.value(shown) == before
    assert page.said == []


def test_browser_errors_are_recorded(page, tmp_path):
    """What the tests above would miss if the pipe were deaf."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('no'); nothing();</script><img src='gone.png'>")
    page.open(bad)
    assert len(page.said) >= 2 and (Path(tmp_path) / "gone.png").as_uri() in page.asked
    page.said.clear(), page.asked.clear()
