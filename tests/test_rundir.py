"""Two runs that want the same directory."""

import pytest

from headrace.errors import RunDirError
from headrace.run import rundir


def test_who_comes_second_leaves_the_directory_to_the_first(tmp_path):
    path = tmp_path / "run"
    with rundir.locked(path):
        with pytest.raises(RunDirError, match="in use by process"), rundir.locked(path):
            pass
        rundir.write_config(path, {})
    assert (path / "config.json").exists()
