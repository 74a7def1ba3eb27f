"""The command line as a user meets it: real processes, exit codes, output, signals."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.catalog import extras
from headrace.cli.main import VERBS, _main
from headrace.cli.verbs import whole_number
from headrace.distributed.process import SAME_WITHIN_S
from headrace.errors import install_command
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from headrace.tools import doctor
from headrace.tools.trackers.api import TRACKERS
from tests import python
from tests.marks import repeats
from tests.support import still_alive

TINY = ["--num-envs", "4", "--num-steps", "16", "--envs-per-vector", "2", "--num-minibatches", "4"]


def headrace(*args, cwd, **kwargs):
    return python.run(
        python.command(*args),
        cwd=cwd,
        timeout=110,
        **kwargs,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One small run, made by the command line."""
    folder = tmp_path_factory.mktemp("trained")
    args = ["train", "CartPole-v1", *TINY, "--total-env-steps", 640, "--run-dir", "run", "--json"]
    # A true start: all others are forks of a process that has imported most already.
    done = subprocess.run(python.command(*args), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


def test_train_prints_one_json_object_last(trained):
    run_dir, done = trained
    summary = json.loads(done.stdout.splitlines()[-1])
    expected = {
        "run_dir", "env", "algo", "env_steps", "learner_steps", "wall_s", "env_steps_per_s",
        "mean_return", "episodes", "restarts", "lost_env_steps", "ledger", "meter",
    }  # fmt: skip
    assert expected <= set(summary)
    assert summary["env_steps"] == 640
    # 10 updates of 5 epochs (the preset's) of 4 minibatches
    assert summary["learner_steps"] == 10 * 5 * 4
    ledger = dict(summary["ledger"])
    assert ledger.pop("collected") == ledger.pop("learned") == summary["env_steps"]
    assert ledger == {"remade": 0, "dropped_episodes": 0}
    assert (summary["restarts"], summary["lost_env_steps"]) == (0, 0)
    assert summary["wall_s"] == pytest.approx(sum(summary["meter"].values()))
    assert 0 < summary["meter"]["start"] < summary["wall_s"]
    assert os.path.samefile(run_dir, run_dir.parent / summary["run_dir"])
    assert "preset classic_control: " in done.stderr
    assert "lr=0.001" in done.stderr
    origins = [done.stderr.index(each) for each in ("given: ", "preset ", "follows ")]
    assert origins == sorted(origins)


def test_resume_goes_on(trained):
    run_dir, _ = trained
    done = headrace("resume", run_dir, "--total-env-steps", 960, "--json", cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 960
    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["schedule_env_steps"] == 640
    # The schedule is that of the first total: past it the preset's linear learning rate is 0.
    assert [row["lr"] for row in read_metrics(run_dir)][-1] == 0.0
    assert "and 0 from 640 env steps on" in done.stderr


def test_eval_reports_and_films(trained):
    run_dir, _ = trained
    done = headrace(
        "eval", run_dir, "--episodes", 3, "--json", "--video", "film/a.mp4", cwd=run_dir.parent
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"mean_return", "std_return", "episodes", "mean_length"} <= set(result)
    assert result["episodes"] == 3
    film = run_dir.parent / "film/a.mp4"
    assert film.read_bytes()[4:8] == b"ftyp"  # MP4's first box
    assert film.stat().st_size > 2000


def test_plot_draws(trained):
    run_dir, _ = trained
    done = headrace("plot", run_dir, cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    assert (run_dir / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_doctor_examines(trained):
    script = Path(sys.executable).with_name("headrace")  # another true start
    done = subprocess.run([script, "doctor", "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert 1 <= found["cpu_cores"] <= len(os.sched_getaffinity(0))
    assert 0 < found["available_bytes"] <= found["memory_bytes"]
    assert found["packages"]["torch"]
    assert found["missing_for_extra"]["video"] == []
    said = headrace("doctor", cwd=trained[0]).stdout
    assert "ready" in said and "gloo, shared memory" in said


def test_doctor_finds_what_an_extra_of_an_extra_asks_for(monkeypatch):
    have = extras.version
    monkeypatch.setattr(extras, "version", lambda name: None if name == "mujoco" else have(name))
    missing = doctor.examine()["missing_for_extra"]
    # Ours ask for gymnasium[mujoco], and dev for ours; what is for other Pythons is not missing.
    # Whether trackers are installed is the machine's matter: dev asks for none.
    lacking = {extra for extra, names in missing.items() if names}
    assert lacking - set(TRACKERS) == {"mujoco", "dev"}
    assert missing["mujoco"] == ["mujoco"]


def test_a_misspelled_verb_is_answered_with_the_nearest(capsys):
    assert _main(["traim", "CartPole-v1"]) == 2
    assert "Did you mean train or track?" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path):
    code = (
        "import sys; sys.modules['ale_py'] = None; from headrace.cli.main import main;"
        "main(['train', 'ALE/Pong-v5'])"
    )
    done = python.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 2
    assert install_command("atari") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_types_and_defaults(verb, tmp_path):
    done = headrace(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--json" in done.stdout or verb in ("plot", "report")
    if verb == "train":
        for flag in ("--num-envs INT", "--lr FLOAT", "--clip-coef FLOAT", "--hidden-sizes"):
            assert flag in done.stdout
        assert "(default: 0.0003)" in done.stdout


def test_help_and_list_import_nothing_heavy():
    code = (
        "import sys; from headrace.cli.main import _main; _main(['--help']); _main(['train']);"
        "assert 'tyro' not in sys.modules;"
        "_main(['list', 'mujoco']); _main(['list', '--json']);"
        "print(sorted({'torch', 'ray', 'numba', 'numpy', 'gymnasium'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
    assert all(verb in out.stdout for verb in VERBS)


def test_flags_of_every_kind_reach_the_run(tmp_path):
    (tmp_path / "mine.toml").write_text("gamma = 0.5\nnum_epochs = 2")
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium as gym\n"
        "def make(limit=10, word=''):\n"
        "    assert word == 'a b'\n"
        "    return gym.make('CartPole-v1', max_episode_steps=limit)\n"
    )
    flags = (
        "--total-env-steps=128 --run-dir run --config mine.toml --num-epochs 1 --hidden-sizes 8 8 "
        "--shared-trunk --normalize-obs --seed 5 --keep 1 --checkpoint-every-s 0 --num-workers 2"
    )
    kwargs = ["--env-kwargs", "limit=7", "word=a b"]
    done = headrace("train", "my_envs:make", *TINY, *flags.split(), *kwargs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert settings["env_kwargs"] == {"limit": 7, "word": "a b"}
    assert (settings["gamma"], settings["num_epochs"]) == (0.5, 1)
    assert (settings["hidden_sizes"], settings["shared_trunk"]) == ([8, 8], True)
    assert len(list((tmp_path / "run/checkpoints").glob("step_*"))) == 1
    # The environment is code: it must be named again.
    refused = headrace("eval", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--env my_envs:make" in refused.stderr
    again = headrace(
        "eval", "run", "--env", "my_envs:make", "--json", "--episodes", 2, cwd=tmp_path
    )
    assert json.loads(again.stdout)["mean_length"] <= 7


def test_whole_numbers_may_be_short():
    texts = ("7", "-1", "1_000", "1e6", "2E+3", "20k", "1.5M", "1G")
    numbers = [7, -1, 1_000, 1_000_000, 2_000, 20_000, 1_500_000, 10**9]
    assert [whole_number(text) for text in texts] == numbers
    for text in ("", "x", "1.5", "1e-3", "2K5", "1e5x", "nan", "k", "1__0", "1e999", "\uff11"):
        with pytest.raises(ValueError, match="expected a whole number, such as"):
            whole_number(text)


def test_an_id_without_a_version_gets_the_newest_and_its_preset(tmp_path):
    done = headrace(
        "train", "CartPole", "--total-env-steps", "1e3", "--run-dir", "run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "ppo on CartPole-v1 " in done.stdout
    assert "preset classic_control: num_steps=64" in done.stdout
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert (settings["env"], settings["total_env_steps"]) == ("CartPole-v1", 1_000)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["fly"], 2, ["no verb 'fly'"]),
        ([], 2, []),
        (["train"], 2, ["No environment", "mujoco ", "headrace train CartPole-v1", "my_module:"]),
        (["list", "mujocco"], 2, ["no family 'mujocco'", "Did you mean mujoco?"]),
        (["list", "Walker2d"], 2, ["Did you mean Walker2d-v5?"]),
        (["train", "--wrapper", "a:b", "CartPole-v1"], 2, ["comes first: headrace train ENV"]),
        (
            ["train", "CartPole-v1", "--wrapper", "a:b", "--wrapper=c:d"],
            2,
            ["--wrapper is there 2 times", "--wrapper A B"],
        ),
        (
            ["train", "CartPole-v1", "--hidden-sizes", "8", "--hidden_sizes", "9"],
            2,
            ["--hidden-sizes A B"],
        ),
        (["eval", "x", "--wrapper", "a:b", "--wrapper", "c:d"], 2, ["--wrapper is there 2 times"]),
        (["train", "Cartpole-v1"], 2, ["Did you mean CartPole-v1"]),
        (["train", "CartPole-v1", "--num-env", "3"], 2, ["--num-env"]),
        (["train", "CartPole-v1", "--lr", "fast"], 2, ["fast"]),
        (
            ["train", "CartPole-v1", "--num-envs", "10", "--envs-per-vector", "4"],
            2,
            ["10 = 2 x 4 + 2"],
        ),
        (["train", "CartPole-v1", "--env-kwargs", "nonsense"], 2, ["nonsense"]),
        (["train", "CartPole-v1", "--device", "cuda"], 2, ["no CUDA device", "--device cpu"]),
        (["train", "tests.envs.test_spaces:texts"], 2, ["observation", "Text", "FlattenObs"]),
        (["train", "CartPole-v1", "--run-dir", "/proc/nowhere"], 1, ["/proc/nowhere", "--run-dir"]),
        (["resume", "nowhere"], 1, ["not a run directory"]),
        (["eval", "nowhere"], 1, ["not a run directory"]),
        (["plot", "nowhere"], 1, ["not a run directory"]),
        (["plot"], 2, ["No run directory"]),
        (["report", "nowhere"], 1, ["not a run directory"]),
        (
            ["train", "CartPole-v1", "--lr", "-1"],
            2,
            ["--lr -1.0 (PPO): expected at least 0."],
        ),
        (["train", "CartPole-v1", "--lr", "nan"], 2, ["--lr nan"]),
        (["train", "CartPole-v1", "--seed", "-1"], 2, ["--seed -1: expected at least 0"]),
        (["train", "CartPole-v1", "--num-envs", "0"], 2, ["--num-envs 0: expected at least 1"]),
        (["train", "CartPole-v1", "--num-envs", "1e5x"], 2, ["'1e5x': expected a whole number"]),
        (["train", "CartPole-v1", "--algo=PPO"], 2, ["Did you mean ppo"]),
        (["train", "Pong-v5"], 2, ["Did you mean ALE/Pong-v5"]),
        (["train", "--env", "CartPole-v1"], 2, ["Did you mean headrace train CartPole-v1?"]),
        (["CartPole-v1"], 2, ["Did you mean headrace train CartPole-v1?"]),
        (["eval", "nowhere", "--n-eval-episodes", "5"], 2, ["Did you mean --episodes?"]),
        (["train", "nothing-like-it"], 2, ["headrace list"]),
        (["train", "tests.support:Counting", "--env-kwargs", "cells=4"], 2, ["cells"]),
    ],
)
def test_bad_input_gets_a_few_lines_and_an_exit_code(args, code, words, tmp_path, capfd):
    old = os.getcwd()
    os.chdir(tmp_path)
    try:
        actual = _main(args)
    except SystemExit as error:  # tyro's own usage errors
        actual = error.code
    finally:
        os.chdir(old)
    out, err = capfd.readouterr()
    assert actual == code, err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= len(VERBS) + 8  # the longest names all verbs
    for word in words:
        assert word in err + out
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_raising_environment_shows_its_traceback_first_and_exits_1(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import gymnasium as gym\n"
        "class Broken(gym.Wrapper):\n"
        "    def step(self, action):\n"
        "        raise KeyError('the user own num_envs=4')\n"
        "def make(): return Broken(gym.make('CartPole-v1'))\n"
    )
    for workers in (0, 2):
        done = headrace("train", "broken:make", "--num-workers", workers, *TINY, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("headrace train: Traceback")
        assert 'broken.py", line 4, in step' in done.stderr
        assert "KeyError: 'the user own num_envs=4'" in done.stderr
        assert "collect" not in done.stderr.replace("headrace/collect", "")


def start(tmp_path, *more, process=python.Python):
    return process(
        python.command("train", "CartPole-v1", *TINY, "--run-dir", "run",
         "--total-env-steps", "100000000", *more),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.more),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits_with_its_code(tmp_path, workers, number, code):
    with start(tmp_path, "--num-workers", workers) as process:
        while "/s  return" not in process.stdout.readline():  # the first update is shown at once
            assert process.poll() is None, process.stderr.read()
        group = pids_of(process.pid)
        os.killpg(process.pid, number)  # as a terminal or `timeout` does: to every process
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == code, err
    assert err == "\nStopping: saving after this step. Again: stop without saving.\n"
    assert f"Stopped by {number.name}" in out
    assert "To go on: headrace resume run\n" in out
    assert checkpoint.newest(tmp_path / "run").manifest["counters"]["env_steps"] > 0
    assert len(group) >= (4 if workers == "2" else 1)
    assert still_alive(group, within_s=25) == []
    assert pids_of(process.pid) == []


def pids_of(group):
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


@repeats("workers", ["0", "2"])
@pytest.mark.parametrize(
    "at_s", [0.5, *(pytest.param(at_s, marks=pytest.mark.slow) for at_s in (1.3, 1.9, 2.4))]
)
def test_an_interrupt_while_it_starts_ends_it_in_words(tmp_path, workers, at_s):
    """At any moment: imports, environments, workers, the first batch; then it goes on."""
    # With its imports: a true start.
    process = start(tmp_path, "--num-workers", workers, process=subprocess.Popen)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=at_s)
    group = pids_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert "Traceback" not in err
    assert process.returncode in (130, -signal.SIGINT), err  # the latter: before our first line
    if (tmp_path / "run/config.json").exists():
        done = headrace("resume", "run", "--stop-after-s", 0.01, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["env_steps"] >= 64
    assert still_alive([*group, *pids_of(process.pid)], within_s=25) == []


def test_a_second_interrupt_does_not_wait_for_the_save(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import threading, gymnasium as gym\n"
        "class Slow(gym.Wrapper):\n"
        "    def step(self, action):\n"
        "        print('stepping', flush=True)\n"
        "        threading.Event().wait()\n"  # for ever; a signal is handled meanwhile
        "def make(): return Slow(gym.make('CartPole-v1'))\n"
    )
    process = python.Python(
        python.command("train", "slow:make", *TINY, "--run-dir", "run", "--num-workers", 0),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "stepping" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    while "Again: stop without saving" not in process.stderr.readline():
        pass
    time.sleep(SAME_WITHIN_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130
    assert err == "Interrupted.\nNothing was saved: run has no checkpoint.\n"


def test_on_a_terminal_progress_is_live(tmp_path):
    """A real pseudo-terminal: the display redraws itself, and ends with a full bar."""
    primary, secondary = pty.openpty()
    process = python.Python(
        python.command("train", "CartPole-v1", *TINY, "--total-env-steps",
         "6400", "--run-dir", "run"),
        cwd=tmp_path, stdout=secondary, stderr=secondary, env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(secondary)
    shown = b""
    while select.select([primary], [], [], 60)[0]:
        try:
            data = os.read(primary, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    process.wait(timeout=10)
    os.close(primary)
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    for word in ("env steps/s", "mean return", "ETA", "learn", "6,400 env steps", "100%", "Done:"):
        assert word in text, text[-2000:]
    assert b"\x1b[1A" in shown or b"\x1b[2K" in shown  # lines are drawn over
