"""Two runs that want the same directory."""

import fcntl
import os
import shutil

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


def test_whoever_looks_at_a_lock_keeps_nobody_out(tmp_path, monkeypatch):
    path, takes, refused = tmp_path / "run", run_dir._takes, []
    with run_dir.locked(path):
        assert run_dir.is_locked(path)
        run_dir.write_config(path, {})
    assert not run_dir.is_locked(path)
    looking = os.open(path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_locked` does

    def until_refused(fd, kind):
        took = takes(fd, kind)
        if not took and not refused:
            refused.append(kind)
            os.close(looking)
        return took

    monkeypatch.setattr(run_dir, "_takes", until_refused)
    with run_dir.locked(path):
        assert refused == [fcntl.LOCK_EX]
        assert run_dir.is_locked(path)


def test_a_damaged_config_is_refused_without_all_that_is_in_it(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\x08\xb5" * 20_000)
    with pytest.raises(RunDirError, match="is damaged: UnicodeDecodeError") as refused:
        run_dir.read_config(tmp_path)
    assert len(str(refused.value)) < 300 + len(str(tmp_path))
