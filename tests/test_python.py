"""What tests start by a fork is as what they would start with `subprocess`."""

import os
import signal
import subprocess
import sys

import pytest

from tests import python
from tests.support import children, still_alive

LOOK = """
import os, pathlib, signal, sys, tempfile
print(sys.argv, __name__, sys.modules["__main__"].__dict__ is globals(), pathlib.Path().resolve())
print(os.environ.get("WORD"), os.environ.get("HOME"), tempfile.gettempdir(), sys.path)
print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), sys.stdin.read())
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), sys.stdout.line_buffering, file=sys.stderr)
print(sys.stderr.errors, sys.stdout.encoding, os.getpid() == os.getsid(0), file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_forked_program_sees_what_a_fresh_one_sees(tmp_path, kind):
    (tmp_path / "look.py").write_text(LOOK)
    words = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "script": ["look.py"]}[kind]
    seen = []
    for start in (python.Python, subprocess.Popen):
        process = start(
            [sys.executable, *words, "a", "b c"], cwd=tmp_path, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"WORD": "x", "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        seen.append((*process.communicate("from us", timeout=50), process.returncode))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('words')", 1),
        ("raise KeyError('words')", 1),
        ("import atexit, os; atexit.register(print, 'at its end')", 0),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0),
    ],
)
def test_forked_program_ends_as_a_fresh_one(code, status):
    words = [sys.executable, "-c", code]
    forked, fresh = python.run(words), subprocess.run(words, capture_output=True, text=True)
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout == fresh.stdout
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_forked_program_takes_signals_and_time_limits():
    code = "import threading; print('here', flush=True); threading.Event().wait()"
    before = children()
    with python.Python([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        assert children() - before == {process.pid}
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        python.run([sys.executable, "-c", code], timeout=0.2)
    assert children() == before
    with pytest.raises(subprocess.CalledProcessError):
        python.run([sys.executable, "-c", "1 / 0"], check=True)


def test_forked_program_has_imported_nothing_optional():
    """So that a test can have it without them."""
    code = (
        "import sys; print({'ale_py', 'matplotlib', 'mujoco', 'numba', 'pettingzoo', 'ray', "
        "'scipy', 'pytest'} & set(sys.modules), 'torch' in sys.modules)"
    )
    assert python.run([sys.executable, "-c", code]).stdout == "set() True\n"


SESSION = """
import subprocess
from tests import python
program = python.Python(
    python.command("train", "CartPole-v1", "--num-envs", "4", "--envs-per-vector", "2",
                   "--num-workers", "2", "--total-env-steps", str(10**9), "--json"),
    stderr=subprocess.PIPE, text=True, start_new_session=True,
)
while "env steps" not in program.stderr.readline():
    assert program.poll() is None
print("trains", flush=True)
program.wait()
"""


def test_killed_session_leaves_no_process(tmp_path):
    """Neither the process that forks, nor a program in a session of its own, nor its workers."""
    before = children()
    with subprocess.Popen(
        [sys.executable, "-c", SESSION], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as session:  # fmt: skip
        assert session.stdout.readline() == "trains\n"
        started = children() - before
        session.kill()
    assert len(started) >= 6
    assert still_alive(started, within_s=20) == []
