"""Exported policies of every kind, computed by onnxruntime, beside the policies themselves."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import headrace
from headrace.interop.export.module import ExportedPolicy
from headrace.interop.export.to_onnx import OnnxSession
from headrace.models.policy import torch_seed
from headrace.spec import ActionCodec, nested
from tests.interop.export import cases
from tests.marks import repeats

ROWS = 64


def flat(action, prefix="action"):
    """The arrays of a nested action, by the names that outputs have."""
    if isinstance(action, dict | tuple):
        items = action.items() if isinstance(action, dict) else enumerate(action)
        return {name: a for key, of in items for name, a in flat(of, f"{prefix}.{key}").items()}
    return {prefix: np.asarray(action)}


def inputs_of(obs):
    """Stored observations, by the names of inputs."""
    if not isinstance(obs, dict):
        return {"obs": obs.numpy()}
    names = {"": "obs", "action_mask": "action_mask"}
    return {names.get(key, f"obs.{key}"): part.numpy() for key, part in obs.items()}


def assert_same(given, own):
    assert given.dtype == own.dtype and given.shape == own.shape
    if given.dtype.kind == "f":
        np.testing.assert_allclose(given, own, rtol=1e-4, atol=1e-4)
    else:
        np.testing.assert_array_equal(given, own)


def as_env_gives(policy, obs):
    """Stored observations, nested as the environment nests them, and the mask."""
    if not isinstance(obs, dict):
        return obs.numpy(), None
    arrays = {key: part.numpy() for key, part in obs.items()}
    mask = arrays.get("action_mask")
    return arrays[""] if "" in arrays else nested(policy.spec.observation, arrays), mask


@repeats("case", cases.cases(), keep=len(cases.SOME), few=60, ids=lambda case: ", ".join(case))
def test_a_file_acts_as_the_policy_step_by_step(case, tmp_path):
    saved = cases.save(tmp_path, case)
    result = headrace.export_policy(saved)
    policy, session = headrace.load_policy(saved), OnnxSession(result.path)
    memory = {}
    if policy.state_size:
        memory = {"state": np.zeros((ROWS, policy.state_size), np.float32)}
    assert bool(memory) == (case[2] != "none")
    for seed in (1, 2):
        obs = cases.observations(policy, ROWS, seed)
        own = policy(*as_env_gives(policy, obs))
        given = session(inputs_of(obs) | memory)
        for name, part in flat(own).items():
            assert_same(given[name], part)
        memory = {"state": given["next_state"]} if memory else {}


STOCHASTIC = ("PPO, Box", "PPO, Discrete, masked", "SAC, Box")


@repeats("head", dict.fromkeys((*STOCHASTIC, *cases.HEADS)), keep=len(STOCHASTIC))
def test_with_the_same_noise_a_stochastic_file_draws_what_the_policy_does(head, tmp_path):
    saved = cases.save(tmp_path, (head, "Box of numbers", "none"))
    result = headrace.export_policy(saved, stochastic=True)
    policy = headrace.load_policy(saved)
    obs = cases.observations(policy, ROWS)
    with torch_seed(3):
        noise = torch.rand(ROWS, policy.num_draws).clamp(1e-6, 1 - 1e-6)
    with torch.no_grad():
        action = policy.module.act(obs, noise)["action"].numpy()
        greedy = policy.module.act_greedily(obs)["action"].numpy()
    assert not np.array_equal(action, greedy)
    codec = ActionCodec(policy.spec.action)
    given = OnnxSession(result.path)(inputs_of(obs) | {"noise": noise.numpy()})
    for name, part in flat(codec.batched(codec.to_env(action))).items():
        assert_same(given[name], part)
    # What is not in (0, 1) takes no forbidden choice, and gives no infinite number.
    for edge in (0.0, 1.0):
        ends = OnnxSession(result.path)(
            inputs_of(obs) | {"noise": np.full_like(noise.numpy(), edge)}
        )
        for part in json.loads(result.metadata["outputs"]):
            assert np.isfinite(ends[part["name"]]).all()
        if "masked" in head and "action" in ends and policy.spec.action.kind == "discrete":
            allowed = obs["action_mask"].numpy()
            assert allowed[np.arange(ROWS), ends["action"] + 1].all()


def test_values_are_given_on_request(tmp_path):
    saved = cases.save(tmp_path, cases.EACH)
    policy = headrace.load_policy(saved)
    obs = cases.observations(policy, ROWS)
    session = OnnxSession(headrace.export_policy(saved, value=True).path)
    with torch.no_grad():
        params, value = policy.module(obs)
    given = session({"obs": obs.numpy()})
    np.testing.assert_allclose(given["value"], value.numpy(), atol=1e-5)
    np.testing.assert_allclose(given["params"], params.numpy(), atol=1e-5)
    without = OnnxSession(headrace.export_policy(saved).path)({"obs": obs.numpy()})
    assert list(without) == ["action", "params"]


def test_a_policy_in_bf16_is_exported_in_fp32(tmp_path):
    saved = cases.save(tmp_path, cases.EACH, precision="bf16")
    result = headrace.export_policy(saved)
    policy = headrace.load_policy(saved)
    obs = cases.observations(policy, ROWS)
    with torch.no_grad():
        in_bf16 = policy.module(obs)[0]
        policy.module.use_fp32()
        in_fp32 = policy.module(obs)[0]
    given = torch.from_numpy(OnnxSession(result.path)({"obs": obs.numpy()})["params"])
    assert (given - in_fp32).abs().max() < 1e-5 < 1e-3 < (given - in_bf16).abs().max()
    assert "The policy in bf16 takes the same action for" in result.notes[-1]


def test_an_agent_s_index_is_an_input_and_the_state_of_the_game_is_not(tmp_path):
    parts = (
        ("", cases.NUMBERS),
        ("agent_id", dataclasses.replace(cases.CHOICE, start=(0,))),
        ("state", cases.NUMBERS),
    )
    observation = dataclasses.replace(cases.NESTED, parts=parts, paths=())
    spec = dataclasses.replace(
        cases.spec_of(cases.HEADS["PPO, Discrete"], observation), roles=(("player", 3),),
        state_key="state", id_key="agent_id",
    )  # fmt: skip
    saved = cases.save_policy(tmp_path, cases.HEADS["PPO, Discrete"], spec)
    result = headrace.export_policy(saved)
    assert [array["name"] for array in json.loads(result.metadata["inputs"])] == ["obs", "agent"]
    policy = headrace.load_policy(saved)
    obs, agent = np.random.default_rng(0).normal(size=(ROWS, 4)), np.arange(ROWS) % 3
    given = OnnxSession(result.path)({"obs": obs.astype(np.float32), "agent": agent})
    np.testing.assert_array_equal(given["action"], policy(obs, agent=agent))
    with pytest.raises(headrace.HeadraceError, match="its critic sees the state of the game"):
        headrace.export_policy(saved, value=True)


def test_exporting_changes_nothing_of_the_policy(tmp_path):
    policy = headrace.load_policy(cases.save(tmp_path, cases.EACH, precision="bf16"))
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    module = ExportedPolicy(policy, stochastic=True, value=True)
    obs = cases.observations(policy, ROWS)
    module({"obs": obs, "noise": torch.full((ROWS, 1), 0.5)})
    after = policy.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert policy.module.normalize_obs.of("").count == 100
    with torch.no_grad():  # still in bf16
        assert (policy.module(obs)[0] - module.policy(obs)[0]).abs().max() > 1e-3
