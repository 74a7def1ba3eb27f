"""Where `headrace export` writes, in which format, and what it leaves as it is."""

import os
import shutil
import zipfile
from types import SimpleNamespace

import onnx
import pytest

import headrace
from headrace.cli.main import _main
from headrace.errors import ConfigError
from headrace.interop.export.output import format_of
from headrace.interop.share import pull
from headrace.storage import checkpoint
from tests.interop.export import cases


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps, and an export of it in each format."""
    folder = tmp_path_factory.mktemp("output")
    dir = headrace.train(
        "CartPole-v1", run_dir=folder / "run", total_env_steps=64, num_envs=4, num_steps=16,
        envs_per_vector=4, num_minibatches=2, quiet=True, seed=1,
    ).dir  # fmt: skip
    files = {
        format: headrace.export_policy(dir, folder / name, format=format).path
        for format, name in (("onnx", "a.onnx"), ("torch-export", "a.pt2"))
    }
    return SimpleNamespace(dir=dir, files=files)


def test_only_an_earlier_export_of_the_same_format_is_overwritten(run, tmp_path):
    config = run.dir / "config.json"
    other = onnx.helper.make_model(onnx.helper.make_graph([], "another", [], []))
    onnx.save(other, tmp_path / "another.onnx")
    with zipfile.ZipFile(tmp_path / "another.pt2", "w") as archive:
        archive.writestr("archive/models/model.json", "{}")
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "cut.pt2").write_bytes(run.files["torch-export"].read_bytes()[:1000])
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "nowhere")
    given = [(path, None) for path in sorted(tmp_path.iterdir())]
    shutil.copy(run.files["onnx"], tmp_path / "onnx")
    shutil.copy(run.files["torch-export"], tmp_path / "program")
    given += [(tmp_path / "onnx", "torch-export"), (tmp_path / "program", "onnx"), (config, None)]
    before = config.read_bytes()
    for path, format in given:
        with pytest.raises(ConfigError, match=r"exists already, and is no .*\n.*--output FILE"):
            headrace.export_policy(run.dir, path, format=format)
    assert config.read_bytes() == before
    for format, path in run.files.items():
        written = path.stat().st_ino
        assert headrace.export_policy(run.dir, path, stochastic=True).format == format
        assert path.stat().st_ino != written


def test_the_suffix_of_the_file_is_its_format_and_may_not_contradict_it(run, tmp_path, capsys):
    path = tmp_path / "agent.pt2"
    assert _main(["export", str(run.dir), "-o", str(path)]) == 0
    assert "by torch 2" in capsys.readouterr().out and zipfile.is_zipfile(path)
    assert _main(["export", str(run.dir), "-o", str(path), "--format", "onnx"]) == 2
    assert "ends in .onnx, or choose --format torch-export" in capsys.readouterr().err
    assert _main(["export", str(run.dir), "--format", "None"]) == 2
    assert "expected one of onnx, torch-export." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"ends in \.pt2, or choose --format onnx"):
        format_of("torch-export", tmp_path / "a.ONNX")
    for named, format in (("a", "onnx"), ("a.b", "onnx"), ("a.PT2", "torch-export")):
        assert format_of(None, tmp_path / named) == format
    (tmp_path / "folder.pt2").mkdir()
    assert format_of(None, tmp_path / "folder.pt2") == format_of(None, None) == "onnx"


def test_a_directory_is_where_the_file_goes(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _main(["export", str(run.dir), "-o", "."]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]
    result = headrace.export_policy(run.dir, tmp_path, format="torch-export", stochastic=True)
    assert result.path == tmp_path / "policy_stochastic.pt2"


def test_of_a_checkpoint_the_file_goes_into_the_current_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = checkpoint.newest(run.dir)
    before = sorted(saved.path.iterdir())
    for place in (saved.path, run.dir / "checkpoints/latest"):
        assert _main(["export", str(place)]) == 0
        (tmp_path / "policy.onnx").unlink()
    assert sorted(saved.path.iterdir()) == before


def test_a_pulled_policy_can_be_pulled_again_after_an_export(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _main(["push", str(run.dir), "--to", "shared", "--episodes", "1"]) == 0
    assert _main(["pull", "shared", "--run-dir", "pulled"]) == 0
    assert _main(["export", "pulled"]) == 0
    assert (tmp_path / "policy.onnx").is_file()
    assert pull("pulled", tmp_path / "again").run_dir == tmp_path / "again"


def test_the_file_latest_stands_for_the_checkpoint_that_it_names(tmp_path):
    saved = cases.save(tmp_path, cases.EACH)
    newest = checkpoint.newest(saved)
    assert checkpoint.newest(saved / "latest") == newest
    assert checkpoint.followed(newest.path) == newest.path
    for wrong in (b"", b"../secret", b"\xb5", b"step_000000004096/.."):
        (saved / "latest").write_bytes(wrong)
        with pytest.raises(headrace.errors.CheckpointError, match="There is no directory"):
            checkpoint.newest(saved / "latest")
