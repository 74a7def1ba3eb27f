"""The model card: its commands and its Python work for whoever has the shared directory alone."""

import re
import shlex

import pytest

import headrace
from headrace.interop.share import push
from headrace.storage import run_dir as rundir
from headrace.training.job import RunRequest
from tests import python

SMALL = {"num_envs": 4, "num_steps": 8, "num_workers": 0, "quiet": True, "hidden_sizes": (8,)}
LOCKED = "tests.interop.support:locked_rooms"
TAG = {
    "env_kwargs": {"num_taggers": 2, "length": 4, "max_episode_steps": 5},
    "frozen": {"runner": "random"},
}


def card_of(folder, env, *, code=None, **settings):
    """Train, share as `folder`/shared, and return the card."""
    headrace.train(env, total_env_steps=64, run_dir=folder / "run", **SMALL | settings)
    push(folder / "run", str(folder / "shared"), code or RunRequest({}), episodes=4, seed=5)
    return (folder / "shared/README.md").read_text()


def commands(card):
    """The commands of the card, as words after `headrace`, by verb."""
    block = re.search("```\n(headrace pull.*?)```", card, re.DOTALL)[1]
    words = [shlex.split(line)[1:] for line in block.splitlines()]
    return {verb: [each for each in words if each[0] == verb] for verb, *_ in words}


def run_all(card, folder, *more):
    """Run what the card says, in another directory; what `headrace eval` prints."""
    found = commands(card)
    assert found["pull"][0][1] == "THIS_DIRECTORY"
    pulled = python.run(
        python.command("pull", "shared", *found["pull"][0][2:]), cwd=folder, check=True
    )
    evaluation = shlex.join(["headrace", *found["eval"][0]]).partition(" --episodes")[0]
    assert f"To evaluate: {evaluation}\n" in pulled.stdout
    played = python.run(python.command(*found["eval"][0]), cwd=folder)
    assert played.returncode == 0, played.stderr
    for words in found["export"]:
        words += ["--format", "torch-export"]
        done = python.run(python.command(*words), cwd=folder)
        assert done.returncode == 0, done.stderr
    begun = "--total-env-steps", 64, "--num-envs", 4, "--num-steps", 8, "--run-dir", "on", *more
    done = python.run(python.command(*found["train"][0], *begun), cwd=folder)
    assert done.returncode == 0, done.stderr
    return played.stdout


def acts(card, folder, monkeypatch, **given):
    """Run the card's Python, beside observations; its variables."""
    monkeypatch.chdir(folder)
    variables = dict(given)
    exec(re.search("```python\n(.*?)```", card, re.DOTALL)[1], variables)
    return variables


def test_a_card_s_commands_name_code_and_masks(tmp_path, monkeypatch):
    card = card_of(tmp_path, LOCKED, code=RunRequest({}, LOCKED))
    mean = re.search(r"\| 4 \| (\S+) ±", card)[1]
    assert f"{float(mean):.1f}" in run_all(card, tmp_path)
    assert f"headrace eval my_policy --env {LOCKED} --episodes 4 --seed 5" in card
    given = {"obs": 3, "info": {"action_mask": [False, False, True]}}
    assert acts(card, tmp_path, monkeypatch, **given)["action"] == 2
    allowed = r"Discrete\(6\); `action_mask`: \S.*, 1 where an action is allowed \| Discrete\(3\)"
    assert re.search(allowed, card)
    assert "pip install headrace" not in card and "pypi" not in card


@pytest.mark.filterwarnings("ignore:.*Low occupancy.*")
def test_a_card_names_each_of_several_policies(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    card = card_of(tmp_path, "headrace/TagGridWorld-v0", **TAG)
    assert "--frozen runner=random" in card and len(commands(card)["export"]) == 1
    run_all(card, tmp_path)
    assert rundir.read_config(tmp_path / "on")["settings"]["frozen"] == TAG["frozen"]
    shape = headrace.load_policy(tmp_path / "run", policy="tagger").spec.given.shape
    made = acts(card, tmp_path, monkeypatch, obs=[0.0] * shape[0])
    assert made["action"] in range(made["tagger"].spec.action.nvec[0])
    assert re.search(r"\| `tagger` \| -?\d+\.\d\d ± ", card)
    assert re.search(r"\| `runner`, acts at random \| -?\d+\.\d\d ± ", card)


def test_a_card_freezes_what_another_run_had_trained(tmp_path):
    pytest.importorskip("numba")
    card_of(tmp_path, "headrace/TagGridWorld-v0", **TAG)
    (tmp_path / "b").mkdir()
    frozen = {"tagger": str(tmp_path / "run")}
    card = card_of(tmp_path / "b", "headrace/TagGridWorld-v0", **TAG | {"frozen": frozen})
    assert [each[-1] for each in commands(card)["export"]] == ["tagger", "runner"]
    assert "--frozen tagger=my_policy" in card and "| `tagger`, frozen |" in card
    run_all(card, tmp_path / "b")


def test_a_card_tells_the_env_steps_that_were_made_and_planned_in_one_place(tmp_path):
    headrace.train(
        "CartPole-v1", total_env_steps=10_000, stop_after_s=0.01, run_dir=tmp_path / "run",
        gamma=0.99, gae_lambda=0.9, **SMALL,
    )  # fmt: skip
    push(tmp_path / "run", str(tmp_path / "new"), RunRequest({}), episodes=1)
    card = (tmp_path / "new/README.md").read_text()
    assert re.search(r"for \d\d env steps of 10,000 that were planned\.", card)
    assert "total_env_steps" not in card.partition("## Settings")[2]
    assert "| `gae_lambda` | `0.9` | given |" in card and "| `gamma` |" not in card


def test_an_environment_of_evaluations_is_the_one_that_is_named(tmp_path):
    rooms = "tests.interop.support:rooms"
    code = RunRequest({}, eval_env=rooms)
    card = card_of(tmp_path, rooms, eval_env=rooms, code=code)
    (words,) = commands(card)["eval"]
    assert words[:4] == ["eval", "my_policy", "--eval-env", rooms] and "--env" not in words
    run_all(card, tmp_path, "--eval-env", rooms)
