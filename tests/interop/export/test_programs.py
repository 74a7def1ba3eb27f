"""What is in exported files, and what is not: source lines, examples, weights that nobody needs."""

import logging
import zipfile
from pathlib import Path

import pytest
import torch

import headrace
from tests.interop.export import cases
from tests.interop.export.test_api import Counts, of_own
from tests.marks import repeats
from tests.models.test_custom import Linear
from tests.project.test_project import ROOT

RECURRENT = ("PPO, Dict with Tuple, masked", "Dict with Tuple and image", "lstm")


def contents(path):
    """The files of an archive, or the file itself."""
    if not zipfile.is_zipfile(path):
        return [path.read_bytes()]
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


@repeats("model", [Linear, Counts, None])  # Counts is traced in another way
@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_a_file_has_no_source_lines_and_no_directories(format, model, tmp_path):
    head, spec = of_own()
    saved = cases.save_policy(tmp_path, head, spec, model, **({} if model else {"core": "gru"}))
    path = headrace.export_policy(saved, tmp_path / "file", format=format, model=model).path
    places = ROOT, Path(torch.__file__).parent, Path.home(), tmp_path
    for data in contents(path):
        assert b'File "' not in data and b"in forward" not in data
        assert not [place for place in places if bytes(place) in data]


@repeats("case", [cases.EACH, RECURRENT], ids=", ".join)
def test_a_program_has_no_example_and_a_critic_on_request_only(case, tmp_path):
    saved = cases.save(tmp_path, case)
    plain, with_value = (
        torch.export.load(
            headrace.export_policy(
                saved, tmp_path / f"{value}.pt2", format="torch-export", value=value
            ).path
        )
        for value in (False, True)
    )
    assert plain.example_inputs is None
    critic = with_value.state_dict.keys() - plain.state_dict.keys()
    assert critic and all("critic" in name for name in critic)
    assert not [name for name in plain.state_dict if "critic" in name]
    assert plain.state_dict.keys() < with_value.state_dict.keys()


def test_a_program_is_loaded_without_warnings(tmp_path, caplog):
    saved = cases.save(tmp_path, RECURRENT)
    path = headrace.export_policy(saved, format="torch-export", stochastic=True).path
    logger = logging.getLogger("torch._export.serde.serialize")
    logger.addHandler(caplog.handler)
    try:
        torch.export.load(path)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
