"""Observations of every kind: what is read, stored, refused, and what a policy makes of it."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.spaces import read
from headrace.errors import ConfigError, UnsupportedSpaceError
from headrace.models.networks import ImageEncoder, image_layout
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.support import build_policy, inline, plan_for, policies_for, workers
from tests.training.test_api import TINY

spaces = gym.spaces
TWO = spaces.Discrete(2)


class Everything(gym.Env):
    """A Dict of one of each, the values of which say where they come from."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "bits": spaces.MultiBinary([2, 2]),
                "choice": spaces.Discrete(3, start=1),
                "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "many": spaces.MultiDiscrete([2, 4]),
                "numbers": spaces.Box(-1, 1, (2,), np.float64),
                "text": spaces.Text(5),
            }
        )
        self.action_space = TWO
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), float(action), False, self.t == 7, {}

    def _obs(self):
        t = self.t
        return {
            "text": "hello",
            "numbers": np.array([t, self.np_random.random()]),
            "many": np.array([t % 2, t % 4]),
            "image": np.full((8, 8, 3), t, np.uint8),
            "choice": 1 + t % 3,
            "bits": np.array([[t % 2, 1], [0, 1]], np.int8),
        }


def of(observation, action=TWO, info=None, **kwargs):
    return read("x", observation, action, info or {}, **kwargs)


def test_every_kind_of_space_is_read_and_changes_are_noted():
    spec = of(Everything().observation_space, drop_obs_keys=("text",))
    assert spec.observation.describe() == (
        "Dict(bits: MultiBinary(2, 2) int8, choice: Discrete(3), image: Box(8, 8, 3) uint8, "
        "many: MultiDiscrete([2, 4]), numbers: Box(2,) float32)"
    )
    assert spec.notes == (
        "the observation 'text' (Text) is dropped",
        "the observation 'numbers' is float64, and stored as float32",
    )
    assert EnvSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("observation", "kwargs", "kind", "words"),
    [
        (spaces.Dict(a=spaces.Dict(b=TWO)), {}, UnsupportedSpaceError, "'a'.*Dict"),
        (spaces.Dict(a=spaces.Tuple([TWO])), {}, UnsupportedSpaceError, "'a'.*Tuple"),
        (spaces.Dict(a=spaces.Text(3)), {}, UnsupportedSpaceError, "'a'.*Text.*\n.*keys a"),
        (spaces.Box(0, 9, (2,), np.uint16), {}, UnsupportedSpaceError, "uint16"),
        (spaces.Dict(a=TWO), {"drop_obs_keys": ("b",)}, ConfigError, "no 'b', its keys are a"),
        (spaces.Dict(a=TWO), {"drop_obs_keys": ("a",)}, ConfigError, "leaves no observation"),
        (TWO, {"drop_obs_keys": ("a",)}, ConfigError, "no Dict observation"),
    ],
)
def test_unsupported_spaces_are_refused_by_name_and_key(observation, kwargs, kind, words):
    with pytest.raises(kind, match=words):
        of(observation, **kwargs)


def dict_plan(**kwargs):
    plan = plan_for(Everything, drop_obs_keys=("text",), **kwargs)
    return plan


def test_dict_observations_are_stored_whole_and_workers_make_the_same():
    plan = dict_plan(num_steps=10)
    batches = []
    for make in (inline, workers):
        collector = make(plan)
        collector.publish(policies_for(plan), 0)
        collected = collector.collect()
        batches.append([
            {key: part.clone() for key, part in fragment.obs.items()}
            | {f"final.{key}": part.clone() for key, part in fragment.finals()[0].items()}
            for fragment in collected.fragments
        ])  # fmt: skip
        collector.close()
    for one, other in zip(*batches, strict=True):
        for key, part in one.items():
            assert torch.equal(part, other[key]), key
    obs = batches[0][0]
    # Row t of the first episode: t steps taken. It was cut off after 7: row 7 is the next one's.
    assert obs["image"][:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert obs["choice"][:8, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 1]
    assert obs["many"][3, 0].tolist() == [1, 3]
    assert obs["bits"][3, 0].tolist() == [[1, 1], [0, 1]]
    assert obs["final.numbers"][0, 0] == 7
    assert obs["final.image"].dtype == torch.uint8


def test_a_dict_run_trains_resumes_exactly_and_its_policy_acts(tmp_path):
    given = dict(env=Everything, drop_obs_keys=("text",), **TINY)
    network = Network(normalize_obs=True)
    whole = headrace.train(run_dir=tmp_path / "a", total_env_steps=96, network=network, **given)
    headrace.train(run_dir=tmp_path / "b", total_env_steps=32, network=network,
                   schedule_env_steps=96, **given)  # fmt: skip
    again = headrace.resume(tmp_path / "b", env=Everything, total_env_steps=96, quiet=True)
    for name, value in whole.policy.module.state_dict().items():
        assert torch.equal(value, again.policy.module.state_dict()[name]), name
    obs, _ = Everything().reset(seed=0)
    assert whole.policy(obs) in (0, 1)
    with pytest.raises(ValueError, match="no 'bits'"):
        whole.policy({"numbers": obs["numbers"]})


@pytest.mark.parametrize(
    ("shape", "channels", "size"),
    [
        ((84, 84), 1, (84, 84)),
        ((4, 84, 80), 4, (84, 80)),
        ((96, 90, 3), 3, (96, 90)),
        ((3, 3, 3), 3, (3, 3)),
        ((4, 40, 36, 3), 12, (40, 36)),
        ((4, 3, 40, 36), 12, (40, 36)),
        ((4, 1, 40, 36), 4, (40, 36)),
    ],
)
def test_images_are_read_in_every_layout(shape, channels, size):
    space = Space("box", shape, "uint8")
    layout = image_layout(space)
    assert (layout.channels, layout.height, layout.width) == (channels, *size)
    # The same picture in every layout gives the same features
    encoder = ImageEncoder(space, "auto")
    image = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    plain = image.permute(0, *(d + 1 for d in layout.order)).reshape(2, channels, *size)
    torch.testing.assert_close(encoder(image), encoder.net(plain.float() / 255))
    assert encoder(image.unsqueeze(0)).shape == (1, 2, encoder.num_features)


def test_image_nets_are_chosen_by_shape():
    for space in (
        Space("box", (84, 84, 3), "float32"),
        Space("box", (128,), "uint8"),
        Space("discrete", (), "int64", nvec=(3,), start=(0,)),
    ):
        assert image_layout(space) is None
    kernels = {
        size: next(
            iter(ImageEncoder(Space("box", (size, size, 3), "uint8"), "auto").net)
        ).kernel_size
        for size in (84, 24, 7)
    }
    assert kernels == {84: (8, 8), 24: (3, 3), 7: (3, 3)}
    with pytest.raises(ConfigError, match="sides of 36 pixels"):
        ImageEncoder(Space("box", (20, 20), "uint8"), "nature")


def test_images_are_normalized_by_channel_and_numbers_each_on_its_own():
    plan = dict_plan()
    policy = build_policy(plan.spec, Network(normalize_obs=True), seed=0)
    shapes = [tuple(m.mean.shape) for m in policy.normalize_obs.moments]
    assert shapes == [(1, 1, 3), (2,)]  # image, numbers; choices and bits are left alone
    image = torch.randint(0, 256, (5, 2, 8, 8, 3), dtype=torch.uint8)
    valid = torch.ones(5, 2, dtype=torch.bool)
    valid[4] = False
    obs = {
        "bits": torch.zeros(5, 2, 2, 2, dtype=torch.int8),
        "choice": torch.ones(5, 2, dtype=torch.int64),
        "image": image,
        "many": torch.zeros(5, 2, 2, dtype=torch.int64),
        "numbers": torch.randn(5, 2, 2),
    }
    policy.normalize_obs.update(obs, valid)
    moments = policy.normalize_obs.moments[0]
    seen = image[:4].double().flatten(0, 3)
    torch.testing.assert_close(moments.mean.flatten(), seen.mean(0))
    torch.testing.assert_close(moments.var.flatten(), seen.var(0, correction=0))
    out = policy.normalize_obs(obs)
    torch.testing.assert_close(
        out["image"][0, 0, 0, 0].double(),
        (image[0, 0, 0, 0] - seen.mean(0)) / seen.std(0, correction=0),
        atol=1e-5,
        rtol=1e-5,
    )
    assert torch.equal(out["choice"], obs["choice"])


def test_minigrid_s_preset_drops_the_text_with_a_note(tmp_path, capsys):
    pytest.importorskip("minigrid")
    run = headrace.train(
        "MiniGrid-Empty-5x5-v0", run_dir=tmp_path / "run", total_env_steps=2048, num_workers=2
    )
    said = capsys.readouterr().out
    assert "the observation 'mission' (MissionSpace) is dropped" in said
    assert "drop_obs_keys=('mission',)" in said
    assert run.policy.spec.observation.describe().startswith("Dict(direction: Discrete(4), image")


def test_multi_binary_actions_are_choices_of_two():
    spec = env_spec(EnvMaker(lambda: _with_action(spaces.MultiBinary(3))))
    assert spec.action.describe() == "MultiDiscrete([2, 2, 2])"


def _with_action(space):
    env = Everything()
    env.observation_space, env.action_space = TWO, space
    return env
