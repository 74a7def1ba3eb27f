"""Two runs that want the same directory."""

import fcntl
import os
import shutil
import threading

import pytest

from headrace.errors import RunDirError
from headrace.storage import run_dir


def test_locked_directory_survives_a_second_process(tmp_path):
    path = tmp_path / "run"
    with run_dir.locked(path):
        with pytest.raises(RunDirError, match="in use by process"), run_dir.locked(path):
            pass
        run_dir.write_config(path, {})
    assert (path / "config.json").exists()


def test_error_is_raised_when_the_directory_has_been_removed(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="the real one"), run_dir.locked(path):
        shutil.rmtree(path)
        raise ValueError("the real one")
    with run_dir.locked(path):
        pass
    assert not path.exists()


def test_whoever_looks_at_a_lock_keeps_nobody_out(tmp_path):
    path, is_in, entered = tmp_path / "run", threading.Event(), []
    with run_dir.locked(path):
        assert run_dir.is_locked(path)
        run_dir.write_config(path, {})
    assert not run_dir.is_locked(path)
    fd = os.open(path / ".lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # as `is_locked` does, for longer

    def enter():
        is_in.set()
        with run_dir.locked(path):
            entered.append(run_dir.is_locked(path))

    starter = threading.Thread(target=enter)
    starter.start()
    is_in.wait()
    os.close(fd)
    starter.join(60)
    assert entered == [True]
