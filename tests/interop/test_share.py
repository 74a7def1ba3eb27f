"""Policies that are shared: what is written, what is refused, and that they act, learn and play."""

import hashlib
import http.server
import inspect
import json
import os
import shutil
import sys
import threading
import types

import numpy as np
import pytest
import torch
import yaml

import headrace
from headrace.config.resolve import resolve
from headrace.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    MissingExtraError,
    RunDirError,
    flags_of,
    install_command,
)
from headrace.interop import hub, model_card, share
from headrace.interop.export.observations import random_observations
from headrace.interop.share import pull, push
from headrace.interop.shared_policy import shareable_config
from headrace.learner.frozen import untrained_policy
from headrace.spec import EnvSpec, Space
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.manifest import digest, read_manifest
from headrace.training.api import evaluate_run
from headrace.training.job import RunRequest
from tests import python
from tests.interop.export import cases

SMALL = {"num_envs": 4, "num_steps": 32, "num_workers": 0, "quiet": True, "hidden_sizes": (16,)}
NO_CODE = RunRequest({})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with a best policy and a film."""
    path = tmp_path_factory.mktemp("share") / "run"
    run = headrace.train(
        "CartPole-v1", total_env_steps=256, eval_every=128, eval_episodes=2, run_dir=path,
        shared_trunk=True, checkpoint_every_s=0, **SMALL,
    )  # fmt: skip
    run.evaluate(1, video=path / "episode.mp4")
    return path


@pytest.fixture(scope="module")
def shared(run_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "policy"
    push(run_dir, str(folder), NO_CODE, episodes=5, seed=7)
    return folder


@pytest.fixture
def copied(shared, tmp_path):
    """A copy of the shared policy, to damage."""
    return shutil.copytree(shared, tmp_path / "copy")


def weights(folder):
    return headrace.load_policy(folder).module.state_dict()


def test_a_shared_policy_is_weights_settings_card_and_film(run_dir, shared):
    names = {path.name for path in shared.iterdir()}
    expected = {"README.md", "config.json", "manifest.json", "policy_default.safetensors"}
    assert names == expected | {"film.mp4"}
    assert (shared / "film.mp4").read_bytes() == (run_dir / "episode.mp4").read_bytes()
    ours, theirs = weights(shared), weights(run_dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_card_tells_returns_that_eval_repeats(shared):
    card = (shared / "README.md").read_text()
    _, header, text = card.split("---\n", 2)
    facts = yaml.safe_load(header)
    assert facts["library_name"] == "headrace" and "CartPole-v1" in facts["tags"]
    (result,) = facts["model-index"][0]["results"]
    done = headrace_eval(shared, "--episodes", 5, "--seed", 7)
    mean, deviation = done["mean_return"], done["std_return"]
    assert result["metrics"][0]["value"] == f"{mean:.2f} ± {deviation:.2f}"
    assert result["dataset"]["name"] == "CartPole-v1"
    assert f"| 5 | {mean:.2f} ± {deviation:.2f} |" in text
    assert "for 256 env steps" in text and "[film.mp4](film.mp4)" in text
    assert "| `hidden_sizes` | `[16]` | given |" in text


def headrace_eval(folder, *flags):
    done = python.run(python.command("eval", folder, "--json", *flags))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_best_policy_is_shared_where_it_is_asked_for(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(copy / "best")
    with pytest.raises(ConfigError, match="has no best policy"):
        push(copy, str(tmp_path / "new"), NO_CODE, best=True)
    first, *_ = sorted((copy / "checkpoints").glob("step_*"))  # others than the newest
    shutil.copytree(first, copy / "best" / first.name)
    push(copy, str(tmp_path / "best"), NO_CODE, best=True, episodes=1)
    ours, best, newest = weights(tmp_path / "best"), weights(first), weights(copy)
    assert all(torch.equal(ours[name], best[name]) for name in best)
    assert not all(torch.equal(ours[name], newest[name]) for name in best)


def test_a_pulled_policy_acts_plays_and_is_trained_on(run_dir, shared, tmp_path):
    pulled = pull(str(shared), tmp_path / "mine")
    assert pulled.env == "CartPole-v1" and pulled.policies == ["default"]
    obs = np.random.default_rng(1).normal(size=(100, 4)).astype(np.float32)
    theirs = headrace.load_policy(run_dir)
    np.testing.assert_array_equal(headrace.load_policy(tmp_path / "mine")(obs), theirs(obs))
    assert headrace_eval(tmp_path / "mine", "--episodes", 2)["episodes"] == 2
    command = next(
        line for line in (shared / "README.md").read_text().splitlines() if "--init-from" in line
    )
    words = command.split()[1:]
    words[words.index("--init-from") + 1] = "mine"
    flags = (
        "--total-env-steps",
        64,
        "--num-envs",
        4,
        "--num-steps",
        16,
        "--lr",
        0,
        "--run-dir",
        "on",
    )
    done = python.run(python.command(*words, *flags), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = weights(tmp_path / "mine"), weights(tmp_path / "on")
    names = [name for name in before if "normalize" not in name]
    assert names and all(torch.equal(before[name], after[name]) for name in names)


def test_the_checkpoint_that_was_played_is_shared_although_the_run_goes_on(
    run_dir, tmp_path, monkeypatch
):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    before = weights(copy)

    def meanwhile(*given, **options):
        played = evaluate_run(*given, **options)
        headrace.resume(copy, total_env_steps=512, quiet=True)
        return played

    monkeypatch.setattr(share, "evaluate_run", meanwhile)
    push(copy, str(tmp_path / "new"), NO_CODE, episodes=1)
    assert checkpoint.newest(copy).env_steps == 512
    after = weights(tmp_path / "new")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "for 256 env steps" in (tmp_path / "new/README.md").read_text()


def test_a_pulled_policy_is_shared_again_with_its_env_steps(shared, tmp_path):
    pull(str(shared), tmp_path / "mine")
    push(tmp_path / "mine", str(tmp_path / "again"), NO_CODE, episodes=1)
    assert "for 256 env steps" in (tmp_path / "again/README.md").read_text()


def test_the_card_names_the_atoms_of_a_distribution(run_dir, tmp_path):
    settings = rundir.read_config(run_dir)["settings"] | {"num_atoms": 7}
    assert "--num-atoms 7" in model_card._shapes(settings)


def test_the_card_s_commands_have_the_environment_s_arguments_and_the_run_s_own_code(tmp_path):
    algo, wrapper = "examples.own_algorithm:Reinforce", "gymnasium.wrappers:FlattenObservation"
    small = {name: of for name, of in SMALL.items() if name != "hidden_sizes"}
    headrace.train(
        "Pendulum-v1", total_env_steps=128, run_dir=tmp_path / "run", algo=algo, wrapper=wrapper,
        env_kwargs={"g": 5.0}, **small,
    )  # fmt: skip
    push(tmp_path / "run", str(tmp_path / "new"), RunRequest({}, None, (wrapper,), None, algo))
    card = (tmp_path / "new/README.md").read_text()
    (line,) = (line for line in card.splitlines() if line.startswith("headrace train"))
    assert line.startswith(f"headrace train Pendulum-v1 --algo {algo} --init-from my_policy ")
    assert line.endswith(f" --env-kwargs g=5.0 --wrapper {wrapper}")
    assert f"The commands name it: `--wrapper {wrapper}`, `--algo {algo}`." in card
    for verb in ("eval", "export"):
        assert f"headrace {verb} my_policy --wrapper {wrapper} --algo {algo}" in card
    assert f'load_policy("my_policy", algo="{algo}")' in card


def test_a_card_without_code_asks_for_none(shared):
    assert "code of its own" not in (shared / "README.md").read_text()


def test_policies_alone_are_no_run_to_resume(shared, tmp_path):
    pull(str(shared), tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"(?s)holds policies alone.*--init-from"):
        headrace.resume(tmp_path / "mine", total_env_steps=512, quiet=True)


@pytest.mark.parametrize(
    "name", ["policy.pkl", "code.py", "policy_default.pt", "sub/policy_x.safetensors"]
)
def test_unexpected_files_are_refused_by_name(name, copied, tmp_path):
    path = copied / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"no shared policy of Headrace has: {name[:4]}"):
        pull(str(copied), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_link_is_refused(copied, tmp_path):
    (tmp_path / "elsewhere").write_text("secret")
    (copied / "README.md").unlink()
    (copied / "README.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"README\.md \(a link\)"):
        pull(str(copied), tmp_path / "mine")


@pytest.mark.parametrize("name", ["policy_default.safetensors", "config.json", "film.mp4"])
def test_a_damaged_file_is_refused_by_name(name, copied, tmp_path):
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged") as caught:
        pull(str(copied), tmp_path / "mine")
    assert ".headrace-" not in str(caught.value)
    assert name != "policy_default.safetensors" or f"{copied}/{name}" in str(caught.value)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o027, (0o750, 0o640))])
def test_the_modes_of_shared_and_pulled_files_follow_the_umask(umask, modes, run_dir, tmp_path):
    before = os.umask(umask)
    try:
        push(run_dir, str(tmp_path / "new"), NO_CODE, episodes=1)
        pull(str(tmp_path / "new"), tmp_path / "mine")
    finally:
        os.umask(before)
    for folder in (tmp_path / "new", tmp_path / "mine"):
        assert folder.stat().st_mode & 0o777 == modes[0]
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {modes[1]}


def test_what_is_no_directory_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "policy.tgz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"(?s)policy\.tgz is a file.*unpack it first"):
        pull(str(tmp_path / "policy.tgz"))
    with pytest.raises(ConfigError, match=r"https://example\.com/pole: URLs are not read"):
        pull("https://example.com/pole")
    with pytest.raises(ConfigError, match="nowhere is no directory"):
        pull(str(tmp_path / "nowhere"))


def test_pull_says_that_the_card_was_not_checked(copied, tmp_path):
    said = pull(str(copied), tmp_path / "mine").describe()
    assert f"Its card, which has no checksum: {tmp_path}/mine/README.md" in said
    (copied / "README.md").unlink()
    assert "It has no card." in pull(str(copied), tmp_path / "other").describe()


def test_weights_that_the_manifest_does_not_name_are_refused(copied, tmp_path):
    shutil.copyfile(copied / "policy_default.safetensors", copied / "policy_more.safetensors")
    with pytest.raises(CheckpointError, match="does not name policy_more"):
        pull(str(copied), tmp_path / "mine")


def test_a_changed_manifest_is_refused(copied, tmp_path):
    text = (copied / "manifest.json").read_text()
    (copied / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        pull(str(copied), tmp_path / "mine")


def test_another_card_is_no_damage(copied, tmp_path):
    (copied / "README.md").write_text("changed on the hub")
    (copied / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert pull(str(copied), tmp_path / "mine").env == "CartPole-v1"


def test_what_exists_is_not_replaced(run_dir, shared, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        push(run_dir, str(shared), NO_CODE)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirError, match="exists already"):
        pull(str(shared), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json and no manifest\.json"):
        pull(str(tmp_path / "empty"))


def test_settings_that_name_directories_stay_here(run_dir, shared, tmp_path):
    headrace.train(
        "CartPole-v1", total_env_steps=128, run_dir=tmp_path / "run", init_from=run_dir,
        shared_trunk=True, **SMALL,
    )  # fmt: skip
    push(tmp_path / "run", str(tmp_path / "new"), NO_CODE, episodes=1)
    assert str(run_dir) not in (tmp_path / "new/config.json").read_text()
    assert str(run_dir) not in (tmp_path / "new/README.md").read_text()
    assert checkpoint.newest(tmp_path / "new").manifest["policies"]


def test_settings_that_name_directories_are_emptied(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    config = rundir.read_config(copy)
    local = {name: f"/home/me/{name}" for name in ("init_from", "data", "replay_dir")}
    several = {
        "frozen": {"a": "/home/me/a", "b": "random"},
        "league_members": ["random", "/home/me/other"],
    }
    rundir.write_config(copy, config | {"settings": config["settings"] | local | several})
    shared = shareable_config(copy)["settings"]
    assert {name: shared[name] for name in local} == dict.fromkeys(local, "")
    assert shared["frozen"] == {"a": "", "b": "random"}
    assert shared["league_members"] == ["random"]
    kept = set(config["settings"]) - set(local) - set(several)
    assert all(shared[name] == config["settings"][name] for name in kept)


def test_the_newest_film_is_shared(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    for age, name in enumerate(("b.mp4", "c.mp4", "a.mp4", "episode.mp4")):
        (copy / name).write_bytes(name.encode())
        os.utime(copy / name, (1e9 - age, 1e9 - age))
    push(copy, str(tmp_path / "new"), NO_CODE, episodes=1)
    assert (tmp_path / "new/film.mp4").read_bytes() == b"b.mp4"


def test_a_manifest_that_names_another_file_is_refused(copied, tmp_path):
    (tmp_path / "secret").write_text("mine")
    manifest = read_manifest(copied)
    manifest["beside"]["../../secret"] = hashlib.sha256(b"mine").hexdigest()
    (copied / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    with pytest.raises(CheckpointError, match=r"names a file that is none of ours: '\.\./\.\./sec"):
        pull(str(copied), tmp_path / "mine")


OF_Q = {"algo": "dqn"}
C51 = OF_Q | {"distribution": "c51", "v_min": -3.0, "v_max": 9.0, "num_atoms": 7}
SHAPES = {  # name: another value, and what else it needs
    "hidden_sizes": ((8,), {}),
    "activation": ("elu", {}),
    "shared_trunk": (True, {}),
    "core": ("lstm", {}),
    "core_size": (5, {"core": "lstm"}),
    "image_net": ("small", {}),
    "normalize_obs": (True, {}),
    "normalize_reward": (True, {}),
    "layer_norm": (True, OF_Q),
    "dueling": (True, OF_Q),
    "noisy": (True, OF_Q),
    "distribution": ("qr", OF_Q),
    "num_atoms": (9, C51),
    "v_min": (-4.0, C51),
    "v_max": (4.0, C51),
}


def built(settings):
    """The sizes of the tensors of an untrained policy for images, and what it gives for some."""
    settings = resolve({"env": "Case-v0", "seed": 1} | settings)
    spec = EnvSpec("Case-v0", Space("box", (16, 16, 3), "uint8"), cases.CHOICE)
    policy = untrained_policy(settings, spec, None, "default").eval()
    obs = random_observations(spec, policy, 3, 0)
    memory = [torch.zeros(3, policy.state_size)] if policy.state_size else []
    with torch.no_grad():
        given = policy.one_row(obs, *memory)
    tensors = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    return tensors, [each.tolist() for each in given[:2]]


@pytest.mark.parametrize("name", SHAPES)
def test_a_setting_that_makes_another_network_is_in_the_card_s_command(name):
    value, more = SHAPES[name]
    assert built(more) != built(more | {name: value})
    settings = {"core": "lstm", "core_size": 64} | {name: value}
    assert flags_of({name: value}) in model_card._shapes(settings)


@pytest.mark.parametrize("place", ["hf:", "hf:name", "hf:a/b/c", "hf:a/..", "hf:a/b c"])
def test_a_name_that_is_no_repository_is_refused(place, run_dir):
    with pytest.raises(ConfigError, match="expected hf:USER/NAME"):
        pull(place)
    with pytest.raises(ConfigError, match="expected hf:USER/NAME"):
        push(run_dir, place, NO_CODE)


def test_a_missing_client_is_named_with_its_extra(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as caught:
        push(run_dir, "hf:jane/cartpole", NO_CODE)
    assert install_command("hub") in str(caught.value)


class Hub:
    """Stands for the hub, which tests cannot reach: repositories are directories.

    It takes what the real client takes (`test_the_hub_s_client_takes_what_it_is_given`).
    """

    def __init__(self, folder):
        self.folder, self.downloads = folder, []

    def create_repo(self, *, repo_id, repo_type, exist_ok):
        path = self.folder / repo_id
        path.mkdir(parents=True, exist_ok=exist_ok)
        (path / ".gitattributes").touch()

    def list_repo_files(self, *, repo_id, repo_type, revision=None):
        assert revision in (None, "abc")
        return sorted(path.name for path in (self.folder / repo_id).iterdir())

    def model_info(self, *, repo_id):
        return types.SimpleNamespace(sha="abc")

    def hf_hub_download(self, *, repo_id, filename, repo_type, revision):
        assert revision == "abc"
        self.downloads.append(filename)
        return str(self.folder / repo_id / filename)

    def upload_folder(self, *, repo_id, folder_path, repo_type, commit_message, delete_patterns):
        path = self.folder / repo_id
        for pattern in delete_patterns:
            for old in path.glob(pattern):
                old.unlink()
        shutil.copytree(folder_path, path, dirs_exist_ok=True)


def test_the_way_over_the_hub_is_the_same(run_dir, tmp_path, monkeypatch):
    fake = Hub(tmp_path)
    monkeypatch.setattr(hub, "client", lambda place: fake)
    repository = tmp_path / "jane/cartpole"
    for _ in range(2):  # a second push replaces the first
        pushed = push(run_dir, "hf:jane/cartpole", NO_CODE, episodes=1)
        assert pushed.address == "https://huggingface.co/jane/cartpole"
        (repository / "policy_old.safetensors").touch()
    with pytest.raises(CheckpointError, match="does not name policy_old"):
        pull("hf:jane/cartpole", tmp_path / "mine")
    push(run_dir, "hf:jane/cartpole", NO_CODE, episodes=1)
    pull("hf:jane/cartpole", tmp_path / "mine")
    ours, theirs = weights(tmp_path / "mine"), weights(run_dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "headrace pull hf:jane/cartpole" in (tmp_path / "mine/README.md").read_text()
    fake.downloads.clear()
    (repository / "model.pkl").touch()
    with pytest.raises(CheckpointError, match=r"no shared policy of Headrace has: model\.pkl"):
        pull("hf:jane/cartpole", tmp_path / "other")
    assert fake.downloads == []
    with pytest.raises(CheckpointError, match=r"model\.pkl"):
        push(run_dir, "hf:jane/cartpole", NO_CODE, episodes=1)
    assert (repository / "model.pkl").exists()


def test_the_hub_s_client_takes_what_it_is_given():
    client = pytest.importorskip("huggingface_hub").HfApi
    calls = {
        "create_repo": {"repo_id", "repo_type", "exist_ok"},
        "list_repo_files": {"repo_id", "repo_type", "revision"},
        "model_info": {"repo_id"},
        "hf_hub_download": {"repo_id", "filename", "repo_type", "revision"},
        "upload_folder": {
            "repo_id", "folder_path", "repo_type", "commit_message", "delete_patterns",
        },
    }  # fmt: skip
    for name, arguments in calls.items():
        assert arguments == set(inspect.signature(getattr(Hub, name)).parameters) - {"self"}, name
        assert arguments <= set(inspect.signature(getattr(client, name)).parameters), name


def test_a_hub_that_cannot_be_reached_is_said(run_dir, tmp_path):
    client = pytest.importorskip("huggingface_hub").HfApi
    api = client(endpoint="http://127.0.0.1:9", token="none")
    with pytest.raises(HubError, match=r"cannot be reached \(hf:jane/cartpole\)") as caught:
        hub.upload(api, "jane/cartpole", tmp_path, "a policy")
    assert "log in" not in str(caught.value)
    with pytest.raises(HubError, match=r"cannot be reached \(hf:jane/cartpole\)"):
        hub.download(api, "jane/cartpole", tmp_path / "new")


class _Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(401)

    def log_message(self, *_):
        pass


def test_a_hub_that_refuses_is_said_with_how_to_log_in(tmp_path):
    client = pytest.importorskip("huggingface_hub").HfApi
    with http.server.HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            api = client(endpoint=f"http://127.0.0.1:{server.server_port}", token="none")
            with pytest.raises(HubError, match=r"(?s)did not do it.*hf auth login"):
                hub.download(api, "jane/cartpole", tmp_path / "new")
        finally:
            server.shutdown()
            thread.join()


def test_the_commands_share_and_get(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    done = python.run(
        python.command("push", "run", "--to", "shared", "--episodes", 2, "--seed", 3, "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["episodes"] == 2
    assert "--episodes 2 --seed 3`" in (tmp_path / "shared/README.md").read_text()
    shutil.rmtree(tmp_path / "run/best")
    refused = python.run(python.command("push", "run", "--to", "best", "--best"), cwd=tmp_path)
    assert (refused.returncode, "has no best policy" in refused.stderr) == (2, True)
    done = python.run(python.command("pull", "shared", "--run-dir", "mine"), cwd=tmp_path)
    assert (done.returncode, "settings and film agree" in done.stdout) == (0, True)
    refused = python.run(python.command("pull", "nowhere"), cwd=tmp_path)
    assert (refused.returncode, "nowhere is no directory" in refused.stderr) == (2, True)
