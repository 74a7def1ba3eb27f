"""Two runs that want the same directory."""

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
