"""Scripted players: what they are told, when they are asked, and what they may answer."""

import re

import gymnasium as gym
import numpy as np
import pytest

from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import ConfigError, PlayerError
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.scripted import ScriptedPolicy
from headrace.spec import Agents
from tests.envs.games.support import Camp
from tests.envs.games.turns_support import Table
from tests.envs.kernels.support import Ring


def played(env, scripts, episodes=3, **more):
    """Play a game with scripts by `first:end` of their agents."""
    maker = EnvMaker(env, **more)
    spec = env_spec(maker)
    names = getattr(env, "possible_agents", ["first_0", "first_1", "second_0"])
    shares = {text: Agents(*_slice(text)) for text in scripts}
    policies = {
        text: ScriptedPolicy(script, "script", spec.for_agents(shares[text]), names)
        for text, script in scripts.items()
    }
    return evaluate(policies, maker, spec=spec, shares=shares, episodes=episodes, num_steps=16)


def _slice(text):
    first, end = map(int, text.split(":"))
    return first, end - first


class Watched(Table):
    """Notes what each agent sees when it is to move, and what it does."""

    seen, done = [], []

    def last(self):
        result = super().last()
        if not result[2] and not result[3]:
            self.seen.append((self.agent_selection, result[0], result[4].get("action_mask")))
        return result

    def step(self, action):
        if action is not None:
            self.done.append((self.agent_selection, np.asarray(action).tolist()))
        super().step(action)


def test_a_script_sees_what_the_environment_gives_on_its_own_turns_alone():
    told, chosen = [], []

    def player(observation, agent):
        told.append((agent, observation, None))
        chosen.append((agent, int(observation["action_mask"].argmax())))
        return chosen[-1][1]

    def bank(observation, *, action_mask):  # a mask from info
        told.append(("bank_0", observation, action_mask))
        chosen.append(("bank_0", [int(action_mask[:3].argmax()), int(action_mask[3:].argmax())]))
        return chosen[-1][1]

    Watched.seen.clear()
    Watched.done.clear()
    assert len(played(Watched, {"0:3": player, "3:4": bank}, episodes=1).returns) == 1
    assert len(told) >= 16 and {agent for agent, *_ in told} == set(Table.possible_agents)
    assert Watched.done == chosen
    for (agent, obs, mask), (whose, seen, its) in zip(told, Watched.seen, strict=False):
        assert agent == whose
        if agent == "bank_0":
            np.testing.assert_array_equal(obs, seen)
            np.testing.assert_array_equal(mask, np.concatenate(its))
            assert obs.dtype == np.float32
        else:
            assert obs.keys() == seen.keys()
            for key, part in seen.items():
                np.testing.assert_array_equal(obs[key], part)


def test_a_script_may_take_the_info():
    def bank(observation, info):
        mask = info["action_mask"]
        return [mask[:3].argmax(), mask[3:].argmax()]

    assert played(Table, {"0:3": lambda obs: obs["action_mask"].argmax(), "3:4": bank})


class Sized(Camp):
    """Guests act in a Dict with a Tuple inside, and the cook in choices that begin with 2."""

    taken = []  # noqa: RUF012

    def action_space(self, agent):
        if agent == "cook_0":
            return gym.spaces.Discrete(3, start=2)
        inside = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.MultiBinary(2)])
        return gym.spaces.Dict({"where": gym.spaces.Box(-2, 3, (2,)), "what": inside})

    def step(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), action
            self.taken.append(action)
        return super().step({agent: 1.0 for agent in actions})


def test_actions_reach_the_environment_as_they_are():
    Sized.taken.clear()
    action = {"where": [0.25, 3], "what": (1, [0, 1])}
    played(Sized, {"0:3": lambda obs, agent: action, "3:4": lambda obs, agent: 4})
    guests = [taken for taken in Sized.taken if isinstance(taken, dict)]
    assert guests and len(guests) < len(Sized.taken)
    for taken in guests:
        np.testing.assert_allclose(taken["where"], [0.25, 3])
        assert taken["what"][0] == 1 and taken["what"][1].tolist() == [0, 1]
    assert {int(taken) for taken in Sized.taken if not isinstance(taken, dict)} == {4}


def test_agents_of_a_kernel_game_that_have_left_are_not_asked():
    alive = []

    def walk(observation, name):
        alive.append(bool(observation[3]))
        return [1, 1]

    assert played(Ring, {"0:2": walk, "2:3": walk}, native=True, episodes=8)
    assert all(alive) and len(alive) > 20


class Chooser:
    def __call__(self, observation, agent_name, depth=3):
        assert agent_name in Camp.possible_agents
        return [1, 1]


def test_scripts_are_called_as_their_arguments_say():
    guest = lambda *both: [0.5, 0.0] if len(both) == 2 else None  # noqa: E731
    assert played(Camp, {"0:3": guest, "3:4": Chooser()})

    def deep(observation, depth=3):
        assert depth == 3
        return [1, 1]

    def named(observation, agent=None):
        assert agent == "cook_0"
        return [1, 1]

    for cook in (deep, named, lambda observation: [1, 1]):
        assert played(Camp, {"0:3": guest, "3:4": cook})


@pytest.mark.parametrize(
    "script", [lambda: 0, lambda a, b, c: 0, lambda obs, agent, *, seed: 0, lambda *, info: 0]
)
def test_what_cannot_be_called_is_refused(script):
    with pytest.raises(ConfigError, match=r"The player script takes .*: expected \(observation, a"):
        played(Camp, {"0:3": script, "3:4": script})


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ([3, 0], "[3, 0]"),
        ([-1, 0], "[-1, 0]"),
        ([0], "[0]"),
        (None, "None"),
        ("left", "'left'"),
        ({"a": 1}, "{'a': 1}"),
        ([0.5, 1], "[0.5, 1]"),
    ],
)
def test_what_is_no_action_is_an_error(action, said):
    message = f"chose {said} for agent cook_0: expected an action of MultiDiscrete([3, 2])"
    with pytest.raises(PlayerError, match=re.escape(message)):
        played(Camp, {"0:3": lambda obs: [0.0, 0.0], "3:4": lambda obs: action})


def test_boxes_clip_and_refuse_what_is_not_finite():
    with pytest.raises(PlayerError, match=r"for agent guest_0: expected an action of Box\(2,\)"):
        played(Camp, {"0:3": lambda obs: [np.nan, 0.0], "3:4": lambda obs: [1, 1]})
    assert played(Camp, {"0:3": lambda obs: [99.0, 0.0], "3:4": lambda obs: [1, 1]})


def test_the_error_of_a_script_has_its_traceback():
    def fails(observation, agent):
        raise KeyError("no such key")

    with pytest.raises(PlayerError) as caught:
        played(Camp, {"0:3": fails, "3:4": fails})
    lines = str(caught.value).splitlines()
    assert 'raise KeyError("no such key")' in lines[2]
    assert "headrace/evaluation/scripted.py" not in str(caught.value)
    assert lines[-1].startswith("The player script failed (agent guest_0, observation [")
