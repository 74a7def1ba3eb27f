"""Sections of a checkpoint: the same list saves and resumes, and old checkpoints still load."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.errors import CheckpointError
from headrace.storage import checkpoint
from headrace.storage.checkpoint import Section, gather_arrays, module_section, restore
from tests.distributed.ranks_support import on_ranks
from tests.support import Counting

OLD_RUN = Path(__file__).with_name("old_run")
"""Three updates, written before checkpoints had sections; its workers were called samplers."""


def saved_with(tmp_path, sections):
    states = {section.name: section.state() for section in sections}
    files = {name: tensors for name, (tensors, _) in states.items() if tensors}
    data = {name: data for name, (_, data) in states.items() if data}
    checkpoint.write(tmp_path / "checkpoints", 1, files, data)
    return checkpoint.newest(tmp_path)


def test_sections_load_the_state_that_they_saved(tmp_path):
    layer, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    got = []
    counts = Section("counts", lambda: ({}, {"n": 3}), lambda *state: got.append(state))
    both = Section("both", lambda: ({"a": torch.ones(1)}, {"n": 4}), lambda *s: got.append(s))
    saved = saved_with(tmp_path, [module_section("layer", layer), counts, both])
    restore([module_section("layer", other), counts, both], saved)
    assert torch.equal(layer.weight, other.weight)
    assert got == [({}, {"n": 3}), ({"a": torch.ones(1)}, {"n": 4})]


def test_a_checkpoint_without_a_section_is_refused(tmp_path):
    saved = saved_with(tmp_path, [module_section("layer", torch.nn.Linear(2, 3))])
    with pytest.raises(CheckpointError, match="replay"):
        restore([Section("replay", lambda: ({}, {}), lambda *state: None)], saved)


def gathered(ranks):
    steps = np.array([48, 32][ranks.rank])  # rank 0's workers are ahead
    own = {"steps": steps, f"vector{ranks.rank}.episode": np.full(2, ranks.rank)}
    return {name: array.tolist() for name, array in gather_arrays(ranks, own).items()}


def test_ranks_save_the_most_steps_of_any():
    whole = {"steps": 48, "vector0.episode": [0, 0], "vector1.episode": [1, 1]}
    assert on_ranks(2, gathered) == [whole, whole]


def test_a_checkpoint_of_an_old_version_is_resumed(tmp_path, capsys):
    run_dir = shutil.copytree(OLD_RUN, tmp_path / "run")
    before = checkpoint.newest(run_dir)
    assert "samplers.safetensors" in before.manifest["files"]
    run = headrace.resume(run_dir, env=lambda: Counting(truncate_at=50), total_env_steps=320)
    shown = capsys.readouterr().out
    assert "192 env steps, 3 updates. Episodes under way: 0 restored, 2 replayed" in shown
    # 160 steps of each environment: an episode of 50 ends three times.
    assert (run.summary["episodes"], run.mean_return) == (6, 50.0)
    after = checkpoint.newest(run_dir)
    assert "workers.safetensors" in after.manifest["files"]
    steps = before.manifest["learner"]["learner_steps"] * 5 // 3
    by_policy = {"learner_steps_by_policy": {"default": steps}}
    assert after.manifest["learner"] == {"version": 5, "learner_steps": steps} | by_policy
    steps = [saved.tensors("learner_default")["step"] for saved in (before, after)]
    assert steps[1] * 3 == steps[0] * 5
    headrace.load_policy(OLD_RUN)
