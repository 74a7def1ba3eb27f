"""Observations of every kind: what is read, stored, refused, and what a policy makes of it."""

import json
import re

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.spaces.specs import read
from headrace.errors import ConfigError, EnvError, UnsupportedSpaceError
from headrace.importing import load_callable
from headrace.models.networks import ImageEncoder, image_layout
from headrace.models.policy import Network
from headrace.spec import ActionCodec, EnvSpec, Space
from tests.support import Nested, build_policy, inline, plan_for, policies_for, workers
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
        "the observation 'numbers' is float64, and stored as float32",
        "the observation 'text' (Text) is dropped",
    )
    assert EnvSpec.from_json(spec.to_json()) == spec


DOTTED = spaces.Dict({"a.b": TWO, "a": spaces.Dict(c=TWO)})
NESTED = spaces.Tuple([TWO, spaces.Dict(a=spaces.Tuple([spaces.Text(3), TWO]), b=TWO)])


@pytest.mark.parametrize(
    ("observation", "kwargs", "described"),
    [
        (spaces.Discrete(4, start=-2), {}, "Discrete(4)"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), {}, "MultiDiscrete([2, 3, 4, 5])"),
        (spaces.Box(0, 9, (2,), np.uint16), {}, "Box(2,) int32"),
        (spaces.Box(0, 9, (2,), np.uint32), {}, "Box(2,) int64"),
        (spaces.Box(0, 9, (2,), np.uint64), {}, "Box(2,) int64"),
        (spaces.Box(-9, 9, (2,), np.int64), {}, "Box(2,) int64"),
        (spaces.Box(0, 1, (2,), bool), {}, "Box(2,) bool"),
        (spaces.Tuple([TWO]), {}, "Tuple(0: Discrete(2))"),
        (spaces.Dict(a=spaces.Dict(b=TWO)), {}, "Dict(a.b: Discrete(2))"),
        (NESTED, {}, "Tuple(0: Discrete(2), 1.a.1: Discrete(2), 1.b: Discrete(2))"),
        (NESTED, {"drop_obs_keys": ("1.a",)}, "Tuple(0: Discrete(2), 1.b: Discrete(2))"),
        (NESTED, {"drop_obs_keys": ("1",)}, "Tuple(0: Discrete(2))"),
        # A dot in a key of one's own is no path
        (DOTTED, {"drop_obs_keys": ("a",)}, "Dict(a.b: Discrete(2))"),
    ],
    ids=str,
)
def test_observations_are_read(observation, kwargs, described):
    spec = of(observation, **kwargs)
    assert spec.observation.describe() == described
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_an_image_of_floats_is_named():
    assert of(spaces.Box(0, 255, (8, 8, 3), np.uint8)).notes == ()
    assert of(spaces.Box(0, 1, (8, 8, 3))).notes == (
        "the observation, of shape (8, 8, 3), is taken as 192 numbers, and not as an image: images "
        "are uint8",
    )


def test_a_part_that_is_no_numbers_is_left_out_and_named():
    parts = {
        "empty": spaces.Box(0, 1, (0,)),
        "graph": spaces.Graph(TWO, None),
        "huge": spaces.Box(0, 2**64 - 1, (1,), np.uint64),
        "one": spaces.OneOf([TWO]),
        "some": spaces.Sequence(TWO),
        "text": spaces.Text(3),
        "two": TWO,
    }
    spec = of(spaces.Dict(parts))
    assert spec.observation.describe() == "Dict(two: Discrete(2))"
    why = "is left out: a policy takes numbers of a fixed shape"
    assert spec.notes == (
        "the observation 'empty' (Box) is left out: it holds no number",
        f"the observation 'graph' (Graph) {why}",
        "the observation 'huge' (Box) is left out: torch has no integers above 2**63 - 1",
        f"the observation 'one' (OneOf) {why}",
        f"the observation 'some' (Sequence) {why}",
        f"the observation 'text' (Text) {why}",
    )


@pytest.mark.parametrize(
    ("observation", "kwargs", "kind", "words"),
    [
        (spaces.Text(3), {}, UnsupportedSpaceError, "observation space .* Text.*FlattenObs"),
        (spaces.Dict(a=spaces.Text(3)), {}, UnsupportedSpaceError, "Dict.*Text.*FlattenObs"),
        (spaces.Tuple([]), {}, UnsupportedSpaceError, "Tuple"),
        (spaces.Box(0, 1, (0,)), {}, UnsupportedSpaceError, "holds no number.*TransformObs"),
        (spaces.Dict({3: TWO}), {}, UnsupportedSpaceError, "the key 3: expected a string"),
        (spaces.Dict({"": TWO}), {}, UnsupportedSpaceError, "the key '': expected a string"),
        (
            spaces.Dict({"a.b": TWO, "a": spaces.Dict(b=TWO)}), {},
            UnsupportedSpaceError, r"Two parts .*'a.b': \('a', 'b'\) and \('a.b',\)",
        ),
        (spaces.Dict(a=TWO), {"drop_obs_keys": ("b",)}, ConfigError, "no 'b', its keys are a"),
        (spaces.Dict(a=TWO), {"drop_obs_keys": ("a",)}, ConfigError, "leaves no observation"),
        (TWO, {"drop_obs_keys": ("a",)}, ConfigError, "no Dict or Tuple observation"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_observations_are_refused_by_name(observation, kwargs, kind, words):
    with pytest.raises(kind, match=f"(?s){words}"):
        of(observation, **kwargs)


class Of(gym.Env):
    """Samples of any spaces."""

    def __init__(self, observation=TWO, action=TWO):
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {}


def texts():
    return Of(spaces.Text(3))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.OneOf([TWO, spaces.Box(0, 1, (2,))]),
        spaces.Sequence(TWO),
        spaces.Graph(TWO, None),
        spaces.Box(0, 2**64 - 1, (1,), np.uint64),
        spaces.Tuple([spaces.Text(3), spaces.Text(4)]),
    ],
    ids=str,
)
def test_the_remedy_of_a_refused_observation_works(space):
    with pytest.raises(UnsupportedSpaceError) as refused:
        env_spec(EnvMaker(lambda: Of(space)))
    if "FlattenObservation" in str(refused.value):
        name = re.search("--wrapper ([^ ]+:[A-Za-z]+)", str(refused.value))[1]
        wrapper = load_callable(name, ConfigError)
    else:
        (name,) = re.findall("gymnasium.wrappers.([A-Za-z]+)", str(refused.value))
        numbers = spaces.Box(0, 99, (1,))

        def wrapper(env):
            change = lambda obs: np.array([len(str(obs))], np.float32)  # noqa: E731
            return getattr(gym.wrappers, name)(env, change, numbers)

    plan = plan_for(lambda: Of(space), wrappers=(wrapper,))
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    assert collector.collect().fragments
    collector.close()


PARTS = spaces.Dict(
    a=spaces.Tuple([spaces.Discrete(3, start=5), spaces.Box(-2, 3, (2, 2), np.float64)]),
    b=spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, 4]]),
    c=spaces.Dict(d=spaces.Box(0, 4, (3,), np.uint8), e=spaces.MultiBinary([2, 2])),
)


@pytest.mark.parametrize(
    ("space", "described"),
    [
        (spaces.Discrete(4, start=-2), "Discrete(4)"),
        (spaces.MultiBinary(3), "MultiDiscrete([2, 2, 2])"),
        (spaces.MultiBinary([1, 2]), "MultiDiscrete([2, 2])"),
        (spaces.MultiDiscrete([2, 3], start=[4, -5]), "MultiDiscrete([2, 3])"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "MultiDiscrete([2, 3, 4, 5])"),
        (spaces.Box(-1, 5, (1, 2), np.int32), "MultiDiscrete([7, 7])"),
        (spaces.Box(0, 999, (1,), np.int64), "MultiDiscrete([1000])"),
        (spaces.Tuple([TWO, TWO]), "Tuple(0: Discrete(2), 1: Discrete(2))"),
        (spaces.Dict(x=spaces.Box(-1, 1, (1,))), "Dict(x: Box(1,) float32)"),
        (
            PARTS,
            "Dict(a: Tuple(0: Discrete(3), 1: Box(2, 2) float64), b: MultiDiscrete([2, 3, 4, 5]), "
            "c: Dict(d: MultiDiscrete([5, 5, 5]), e: MultiDiscrete([2, 2, 2, 2])))",
        ),
    ],
    ids=str,
)
def test_actions_are_read_and_reach_the_environment_as_its_space_has_them(space, described):
    """The environment itself raises on an action that is not in its space."""
    plan = plan_for(lambda: Of(action=space), num_steps=64)
    assert plan.spec.action.describe() == described
    assert EnvSpec.from_json(json.loads(json.dumps(plan.spec.to_json()))) == plan.spec
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    collector.collect()
    collector.close()


def test_the_numbers_of_a_row_are_those_of_their_parts():
    codec = ActionCodec(of(TWO, PARTS).action)
    row = np.float32([2, -9, 0, 1, 9, 0, 1, 2, 3, 0, 2, 4, 0, 1, 1, 0])
    (action,) = codec.elements(codec.to_env(row[None]))
    assert PARTS.contains(action)
    assert action["a"][0] == 7
    assert action["a"][1].tolist() == [[-2, 0.5], [3, 3]]
    assert action["b"].tolist() == [[1, 3], [5, 7]]
    assert action["c"]["d"].tolist() == [0, 2, 4]
    assert action["c"]["e"].tolist() == [[0, 1], [1, 0]]
    large = 2**24 - 1  # the last choice that may be: float32 has no more bits
    wide = ActionCodec(of(TWO, spaces.Tuple([spaces.Discrete(2**24, start=5)])).action)
    assert wide.elements(wide.to_env(np.float32([[large]])))[0] == (large + 5,)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(3), "action space .* Text"),
        (spaces.Dict(a=spaces.Sequence(TWO)), "action space 'a' .* Sequence"),
        (spaces.Tuple([TWO, spaces.Graph(TWO, None)]), "action space 1 .* Graph"),
        (spaces.OneOf([TWO]), "action space .* OneOf"),
        (spaces.Box(0, 1000, (1,), np.int64), "1001 are more than 1000"),
        (spaces.Box(-np.inf, np.inf, (1,), np.int64), "are more than 1000"),
        (spaces.Tuple([spaces.Discrete(2**24 + 1)]), "16777217 choices are more than 16777216"),
        (spaces.Tuple([]), "it has no parts"),
        (spaces.Dict(a=spaces.Box(0, 1, (2, 0))), "action space 'a' .*holds no number"),
        (spaces.Dict({3: TWO}), "action space has the key 3: expected a string"),
    ],
    ids=str,
)
def test_unsupported_actions_are_refused_by_name(space, words):
    with pytest.raises(UnsupportedSpaceError, match=words) as refused:
        of(TWO, space)
    if "key 3" in words:
        return
    (name,) = re.findall("gymnasium.wrappers.([A-Za-z]+)", str(refused.value))

    def wrapper(env):
        return getattr(gym.wrappers, name)(env, lambda action: env.action_space.sample(), TWO)

    plan = plan_for(lambda: Of(action=space), wrappers=(wrapper,))
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    assert collector.collect().fragments
    collector.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda obs: obs[:1], r"without the part 1 \(a tuple of 1\)"),
        (lambda obs: list(obs), ""),
        (lambda obs: obs[0], r"without the part 0 \(a ndarray\)"),
        (lambda obs: (obs[0], {}), r"an observation '1' without the key 'choice' \(it has \[\]\)"),
        (lambda obs: (obs[0], obs[1] | {"pair": (1, 2)}), r"'1.pair.0' of shape \(\)"),
    ],
)
def test_an_observation_that_lacks_a_part_is_refused(change, words):
    class Lacking(Nested):
        lacks = False

        def _obs(self):
            return change(super()._obs()) if self.lacks else super()._obs()

    plan = plan_for(Lacking)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    try:
        Lacking.lacks = True
        if not words:
            collector.collect()
        else:
            with pytest.raises(EnvError, match=words):
                collector.collect()
    finally:
        collector.close()


def test_a_nested_observation_s_parts_are_stored_by_their_paths():
    plan = plan_for(Nested, num_steps=20, num_envs=2)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    (fragment,) = collector.collect().fragments
    assert plan.spec.notes[0].startswith("the observation '1.text' (Text) is left out: ")
    (cut,) = np.flatnonzero((fragment.terminated | fragment.truncated)[:, 0])
    counts = list(range(cut + 1)) + list(range(20 - cut))
    assert fragment.obs["0"][:, 0, 3, 3, 0].tolist() == counts
    assert fragment.obs["1.choice"][:, 0].tolist() == [t % 3 - 1 for t in counts]
    assert fragment.obs["1.pair.1"][:, 0].tolist() == [[t % 2, 1] for t in counts]
    # Where the environment was steered to, by what it said one step later
    pair = fragment.obs["1.pair.0"]
    steered = ActionCodec(plan.spec.action).to_env(fragment.action[:, 0].numpy())[:, 3:]
    goal = pair[0, 0].numpy()
    np.testing.assert_allclose(pair[1, 0].numpy(), goal + steered[0] / 2, rtol=1e-5)
    collector.close()


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


def test_minigrid_s_text_is_left_out_with_a_note(tmp_path, capsys):
    pytest.importorskip("minigrid")
    run = headrace.train(
        "MiniGrid-Empty-5x5-v0", run_dir=tmp_path / "run", total_env_steps=2048, num_workers=2
    )
    said = capsys.readouterr().out
    assert said.count("the observation 'mission' (MissionSpace) is left out") == 1
    assert run.policy.spec.observation.describe().startswith("Dict(direction: Discrete(4), image")


def test_minigrid_trains_without_a_word_about_its_text():
    pytest.importorskip("minigrid")
    spec = env_spec(EnvMaker("MiniGrid-Empty-8x8-v0"))
    assert spec.observation.describe() == "Dict(direction: Discrete(4), image: Box(7, 7, 3) uint8)"
    assert any("'mission' (MissionSpace) is left out" in note for note in spec.notes)
