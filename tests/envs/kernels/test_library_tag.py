"""The Tag games: as their rules say, by a reference in NumPy, and the same whatever runs them.

On the grid all is exact, over whole episodes. In continuous space steps are compared one at a time,
from the same state, for small differences grow. Where a distance is within 1e-5 of deciding
otherwise (who is tagged, who is seen in which order, who runs into an edge) rounding may: such
states are counted and printed, are few, and are not compared.
"""

import math
import re
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch

from headrace.envs.kernels.library.picture import RUNNER, TAGGED, TAGGER
from headrace.envs.kernels.library.tag_continuous import TagContinuous
from headrace.envs.kernels.library.tag_gridworld import TagGridWorld
from headrace.errors import UsageError
from tests.envs.kernels import tag_reference
from tests.envs.kernels.support import act_at_random, run, vector_of
from tests.marks import repeats

SEED = 3
GRID = {"num_taggers": 3, "length": 4, "max_episode_steps": 7}
SMALL = {
    "num_taggers": 3,
    "num_runners": 4,
    "length": 10.0,
    "max_episode_steps": 6,
    "full_observation": False,
    "num_other_agents_observed": 4,
    "tagging_distance": 0.1,
    "tag_reward": 10.0,
    "tag_penalty": -5.0,
    "end_of_game_reward": 2.0,
}
BENCHMARK = {
    "num_taggers": 10,
    "num_runners": 100,
    "length": 20.0,
    "max_episode_steps": 40,
    "min_acceleration": -0.1,
    "max_acceleration": 0.1,
    "num_acceleration_levels": 20,
    "min_turn": -2.356,
    "max_turn": 2.356,
    "num_turn_levels": 20,
    "full_observation": False,
    "num_other_agents_observed": 10,
    "tagging_distance": 0.02,
    "tag_reward": 10.0,
    "tag_penalty": -10.0,
    "edge_hit_penalty": -0.5,
}


# --- on the grid


@repeats("full", [True, False])
@repeats(
    ("target", "n", "num_steps"), [("python", 4, 30), ("cpu", 300, 60), ("cuda", 2, 9)], keep=2
)
def test_grid_episodes_equal_the_reference(target, n, num_steps, full):
    env = TagGridWorld(**GRID, full_observation=full)
    vector, fragments = vector_of(env, n, num_steps, target, seed=SEED)
    act_at_random(fragments, vector.spec, np.random.default_rng(7))
    run(vector, fragments)
    (fragment,) = fragments
    actions = fragment.action.numpy().reshape(num_steps, n, 4)
    expected = tag_reference.Grid(env).play(SEED, np.arange(n), actions)
    by_env = {"terminated": fragment.terminated, "truncated": fragment.truncated}
    for name, actual in by_env.items():
        assert torch.equal(actual.view(num_steps, n, 4), of_all(expected[name])), name
    assert fragment.valid.all()
    assert np.array_equal(fragment.reward.numpy().reshape(num_steps, n, 4), expected["reward"])
    size = fragment.obs.shape[-1]
    assert np.array_equal(fragment.obs.numpy().reshape(-1, n, 4, size), expected["obs"])
    last = expected["last"].reshape(num_steps, -1, size)
    check_finals(fragment, last, np.testing.assert_array_equal)
    if target == "cpu":  # all that can happen has happened
        assert expected["truncated"].any()
        assert (expected["terminated"] & (expected["last"][:, :, 0, -1] == 1)).any(), "at T"
        assert len(np.unique(expected["reward"].round(3))) == 8, "with and without a wall"


def of_all(flag):
    """A flag of an environment, for each of its 4 agents."""
    return torch.from_numpy(flag)[..., None].expand(*flag.shape, 4)


def check_finals(fragment, last, check):
    """Check that truncated rows, and no others, have their episode's last observation."""
    obs, step, row = (item.numpy() for item in fragment.finals())
    used = step < fragment.num_steps
    places = sorted(zip(step[used], row[used], strict=True))
    assert places == [tuple(place) for place in fragment.truncated.nonzero().tolist()]
    check(obs[used], np.stack(last)[step[used], row[used]])


def placed(env, action, target="cpu", step=1, **world):
    """A world as given, before step `step` of an episode; then one step of `action` (per agent)."""
    vector, fragments = vector_of(env, 1, 1, target, seed=SEED)
    vector.bind(*fragments)
    again(vector, fragments, action, step=step, **world)
    return vector, fragments[0]


def again(vector, fragments, action, step=None, **world):
    vector.bind(*fragments)
    for name, values in world.items():
        vector.world[name][0] = torch.tensor(values)
    if step is not None:
        vector.world["step"].fill_(step - 1)
    fragments[0].action[0] = torch.tensor(action)
    vector.step(0)


BOTH = repeats("target", ["python", "cpu"])


@BOTH
def test_all_taggers_are_rewarded_for_a_tag(target):
    env = TagGridWorld(**GRID)
    # From either side, and one that stays away: all three have the reward, the runner pays once.
    vector, fragment = placed(env, [1, 2, 0, 0], target, x=[1, 3, 4, 2], y=[2, 2, 4, 2])
    assert fragment.reward[0].tolist() == [10, 10, 10, -2]
    assert fragment.terminated[0].all()
    assert not fragment.truncated.any()
    assert vector.world["step"].item() == 0, "the next episode began within the step"
    assert fragment.obs[1, 0, -1] == 0
    assert vector.world["x"][0, 3] == vector.world["y"][0, 3] == 0


@BOTH
def test_swapping_cells_is_no_tag(target):
    _, fragment = placed(TagGridWorld(**GRID), [1, 0, 0, 2], target, x=[1, 4, 4, 2], y=[2, 4, 4, 2])
    assert fragment.reward[0].tolist() == pytest.approx([-0.01] * 3 + [0.01])
    assert not fragment.terminated.any()
    assert fragment.obs[1, 0, :4].tolist() == [0.5, 1, 1, 0.25]


@BOTH
def test_tag_at_the_last_step_terminates_without_truncation(target):
    world = {"x": [1, 3, 4, 2], "y": [2, 3, 4, 2]}
    _, fragment = placed(TagGridWorld(**GRID), [1, 0, 0, 0], target, step=7, **world)
    assert fragment.terminated[0].all()
    assert not fragment.truncated.any()
    _, fragment = placed(TagGridWorld(**GRID), [0, 0, 0, 0], target, step=7, **world)
    assert fragment.truncated[0].all()
    assert not fragment.terminated.any()


@BOTH
def test_moves_into_each_wall_are_penalized(target):
    env = TagGridWorld(**GRID, wall_hit_penalty=0.5)
    vector, fragment = placed(env, [1, 2, 3, 4], target, x=[4, 0, 2, 3], y=[1, 1, 4, 0])
    assert fragment.reward[0].tolist() == pytest.approx([-0.51] * 3 + [-0.49])
    assert vector.world["x"][0].tolist() == [4, 0, 2, 3]
    assert vector.world["y"][0].tolist() == [1, 1, 4, 0]


@BOTH
def test_runner_observes_the_first_of_equally_near_taggers(target):
    env = TagGridWorld(**GRID, full_observation=False)
    _, fragment = placed(env, [0, 0, 0, 0], target, x=[4, 3, 1, 2], y=[4, 2, 2, 2])
    assert fragment.obs[1, 3].tolist() == pytest.approx([0.5, 0.5, 0.75, 0.5, 1, 1 / 7])
    assert fragment.obs[1, 2].tolist() == pytest.approx([0.25, 0.5, 0.5, 0.5, 0, 1 / 7])


# --- in continuous space

FLAVOURS = {
    "exits": (
        SMALL
        | {"tagging_distance": 0.25, "step_penalty": -0.1, "step_reward": 0.2}
        | {"edge_hit_penalty": -0.3},
        100,
        30,
    ),
    "stays": (SMALL | {"runner_exits_game_after_tagged": False, "runner_skill": 1.5}, 50, 30),
    "drawn": (SMALL | {"fixed_roles": False, "layout_seed": 8, "max_turn": 9.0}, 50, 30),
    "fixed": (SMALL | {"fixed_start": True}, 50, 30),
    "full": (SMALL | {"full_observation": True, "tagging_distance": 0.25}, 50, 30),
    "benchmark": (BENCHMARK, 30, 40),
}


@repeats("flavour", FLAVOURS, few=len(FLAVOURS) - 1)
def test_continuous_steps_equal_the_reference(flavour):
    arguments, n, num_steps = FLAVOURS[flavour]
    count = compare(TagContinuous(**arguments), n, num_steps, "cpu")
    assert count["tags"] > 100
    assert count["truncated"] >= n
    if arguments["tagging_distance"] > 0.2:
        assert count["terminated"] > 10
    if flavour == "benchmark":
        assert count["states"] > 100_000


@repeats(("target", "num_steps"), [("python", 14), ("cuda", 7)])
@repeats("flavour", ["exits", "full"])
def test_continuous_steps_equal_the_reference_on_other_targets(target, num_steps, flavour):
    compare(TagContinuous(**FLAVOURS[flavour][0]), 2, num_steps, target)


def compare(env, n, num_steps, target):
    """Whole episodes, a step at a time: the reference steps from the world's state each time."""
    reference = tag_reference.Continuous(env)
    vector, (fragment,) = vector_of(env, n, num_steps, target, seed=SEED)
    act_at_random([fragment], vector.spec, np.random.default_rng(11))
    vector.bind(fragment)
    start, count, last = world_of(vector), Counter(), []
    for t in range(num_steps):
        before = world_of(vector)
        vector.step(t)
        now = before["step"] + 1
        step = reference.step(before, fragment.action[t].numpy().reshape(n, -1, 2), now)
        sure = ~step.unsure_tag
        over = step.terminated | (now == env.max_episode_steps)
        check_rows(rows_of(fragment, t, n), before["alive"], step, over, sure)
        begun = reference.start(SEED, np.arange(n), before["episode"] + 1)
        if env.fixed_start:
            begun = {name: start[name][:1].repeat(n, 0) for name in begun}
        first = reference.observe(begun, np.zeros(n))

        def after(of_begun, of_step, over=over):
            return np.where(over.reshape(-1, *[1] * (of_step.ndim - 1)), of_begun, of_step)

        state = {name: after(begun[name], item) for name, item in step.state.items()}
        check_state(world_of(vector), state, sure)
        obs, ids, unsure = map(after, first, (step.obs, step.neighbours, step.unsure_order))
        sees = sure[:, None] & ~unsure
        actual = fragment.obs[t + 1].numpy().reshape(obs.shape)
        check_obs(actual[sees], obs[sees])
        if not env.full_observation:
            nearest = np.where(ids >= 0, vector.world["nearest"].numpy(), -1)
            assert np.array_equal(nearest[sees], ids[sees])
        last.append(step.obs.reshape(-1, obs.shape[-1]))
        count += Counter(
            states=before["alive"].sum(), edge=step.unsure_edge.sum(), tag=(~sure).sum(),
            order=unsure.sum(), tags=step.tagged.sum(),
            terminated=step.terminated.sum(), truncated=(over & ~step.terminated).sum(),
        )  # fmt: skip
    check_finals(fragment, last, lambda actual, of_last: check_obs(actual, of_last))
    print({name: int(item) for name, item in count.items()})
    assert count["tag"] + count["order"] < 1e-3 * count["states"]
    assert count["edge"] < 5e-2 * count["states"]  # who goes along an edge is always near it
    return count


def world_of(vector):
    return {name: item.numpy().copy() for name, item in vector.world.items()}


def rows_of(fragment, t, n):
    names = ("reward", "valid", "terminated", "truncated")
    return {name: getattr(fragment, name)[t].numpy().reshape(n, -1) for name in names}


def check_rows(row, alive, step, over, sure):
    """Check rewards, presence in the game, terminations and truncations."""
    assert np.array_equal(row["valid"], alive)
    rewarded = sure[:, None] & ~step.unsure_edge
    np.testing.assert_allclose(row["reward"][rewarded], step.reward[rewarded], 1e-5, 1e-5)
    stays = step.state["alive"]
    ends, cut = step.terminated[:, None], (over & ~step.terminated)[:, None]
    assert np.array_equal(row["terminated"][sure], (alive & (ends | ~stays))[sure])
    assert np.array_equal(row["truncated"][sure], (stays & cut)[sure])


def check_state(world, expected, sure):
    assert np.array_equal(world["alive"][sure], expected["alive"][sure])
    for name in ("x", "y", "speed", "acceleration"):
        np.testing.assert_allclose(world[name][sure], expected[name][sure], 1e-5, 1e-5)
    check_turns(world["heading"][sure] / (2 * np.pi), expected["heading"][sure] / (2 * np.pi))
    assert (world["heading"] >= 0).all()
    assert (world["heading"] < np.float32(2 * np.pi)).all()


def check_turns(actual, expected):
    away = actual - expected
    np.testing.assert_allclose(away - away.round(), 0, atol=1e-5 / (2 * np.pi))


def check_obs(actual, expected):
    """Observations `[rows, features]`; headings are equal modulo a full turn."""
    turns = slice(4 * actual.shape[1] // 7, 5 * (actual.shape[1] // 7))
    check_turns(actual[:, turns], expected[:, turns])
    for part in (slice(turns.start), slice(turns.stop, None)):
        np.testing.assert_allclose(actual[:, part], expected[:, part], 1e-5, 1e-5)


# Nobody moves where the speed is 0 and the action nothing
STILL = {"speed": [0.0] * 7, "acceleration": [0.0] * 7, "heading": [0.0] * 7}
NOTHING = [[0, 0]] * 7
FAR = {"x": [1.0, 4.0, 9.0, 1.0, 9.0, 5.0, 7.0], "y": [1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 7.0]}
# As far apart, but for runner 3: half a unit from tagger 0
NEAR_RUNNER_3 = {"x": [1.0, 4.0, 9.0, 1.5, 9.0, 5.0, 7.0], "y": [1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 7.0]}


def tag(target, x, y, step=1, action=NOTHING, **arguments):
    """Take one step of agents at these positions: taggers 0 to 2, runners 3 to 6."""
    env = TagContinuous(**SMALL | arguments)
    return placed(env, action, target, step=step, **STILL, x=x, y=y)


@BOTH
def test_tagger_is_rewarded_for_each_tagged_runner(target):
    x, y = [5.0, 1.0, 1.0, 5.5, 5.0, 4.4, 9.0], [5.0, 1.0, 2.0, 5.0, 4.5, 5.0, 9.0]
    vector, fragment = tag(target, x, y, step_penalty=-0.5, step_reward=0.25)
    assert fragment.reward[0].tolist() == [29.5, -0.5, -0.5, -4.75, -4.75, -4.75, 0.25]
    assert fragment.terminated[0].tolist() == [False] * 3 + [True] * 3 + [False]
    assert vector.world["alive"][0].tolist() == [True] * 3 + [False] * 3 + [True]
    assert fragment.valid.all()


@BOTH
def test_agent_that_left_neither_observes_nor_acts_nor_is_observed(target):
    vector, fragment = tag(target, **NEAR_RUNNER_3)
    seen = vector.world["nearest"][0, 0, 0].item()
    assert seen == 3, "the step's observation is of before the tag"
    assert fragment.obs[1, 0, 4 * 6] == 1
    assert fragment.obs[1, 3].any()
    action = [[0, 0]] * 3 + [[10, 3]] * 4
    again(vector, [fragment], action)
    assert not fragment.obs[1, 3].any()
    assert fragment.reward[0, 3] == 0
    assert fragment.valid[0].tolist() == [True] * 3 + [False] + [True] * 3
    assert not fragment.terminated.any()
    assert 3 not in vector.world["nearest"][0, 0]
    for name, value in {"x": 1.5, "y": 1, "speed": 0, "acceleration": 0, "heading": 0}.items():
        assert vector.world[name][0, 3] == value
    assert vector.world["speed"][0, 4] > 0


@BOTH
def test_full_observation_includes_agents_that_left(target):
    vector, fragment = tag(target, **NEAR_RUNNER_3, full_observation=True)
    again(vector, [fragment], NOTHING)
    blocks = fragment.obs[1, :, :-1].view(7, 7, 6)
    assert not blocks[3, :5].any()
    assert blocks[3, 5].tolist() == [1, 1, 1, 0, 0, 0]
    assert blocks[3, 6].tolist() == [1] * 6
    assert blocks[0, 6].tolist() == [1, 1, 0, 1, 1, 1]
    assert blocks[0, 0, 2] == pytest.approx(0.5 / (math.sqrt(2) * 10))
    assert fragment.obs[1, :, -1].tolist() == pytest.approx([2 / 6] * 3 + [0] + [2 / 6] * 3)


@BOTH
def test_first_of_equally_near_taggers_tags_within_the_distance(target):
    # Runner 3 is half a unit from taggers 1 and 2; runner 4 exactly one unit, its reach, from 0.
    x, y = [1.0, 5.0, 6.0, 5.5, 2.0, 9.0, 9.0], [1.0, 5.0, 5.0, 5.0, 1.0, 9.0, 8.0]
    vector, fragment = tag(target, x, y)
    assert fragment.reward[0].tolist() == [0, 10, 0, -5, 0, 0, 0]
    assert vector.world["tagged_by"][0].tolist() == [-1, -1, -1, 1, -1, -1, -1]


@BOTH
def test_equally_near_agents_are_observed_by_index(target):
    # Around agent 6: four in falling order of ids, and agent 0 far away; then five equally far
    x, y = [5.0, 5.0, 5.0, 6.5, 6.0, 1.0, 5.0], [9.5, 8.0, 2.5, 5.0, 5.0, 1.0, 5.0]
    vector, fragment = tag(target, x, y, tagging_distance=0.0)
    assert vector.world["nearest"][0, 6].tolist() == [4, 3, 2, 1]
    x, y = [5.0, 2.0, 8.0, 1.0, 9.0, 1.0, 5.0], [10.0, 1.0, 1.0, 8.0, 8.0, 1.0, 5.0]
    again(vector, [fragment], NOTHING, x=x, y=y)
    assert vector.world["nearest"][0, 6].tolist() == [0, 1, 2, 3]
    again(vector, [fragment], NOTHING, alive=[True, False] + [True] * 5)
    assert vector.world["nearest"][0, 6].tolist() == [0, 2, 3, 4]
    again(vector, [fragment], NOTHING, alive=[False] * 4 + [True] * 3)
    assert vector.world["nearest"][0, 6, :2].tolist() == [4, 5]


@BOTH
def test_partial_observation_of_few_agents_ends_with_zeros(target):
    vector, fragment = tag(target, **FAR)
    again(vector, [fragment], NOTHING, alive=[True] * 4 + [False] * 3)
    blocks = fragment.obs[1, :, :-1].view(7, 7, 4)
    assert vector.world["nearest"][0, 0, :3].tolist() == [1, 2, 3]
    assert blocks[0, 6].tolist() == [1, 1, 1, 0]
    assert not blocks[0, :, 3].any()
    assert fragment.obs[1, 0, -1] > 0


@BOTH
@repeats("exits", [True, False])
def test_remaining_runners_are_rewarded_at_the_time_limit(target, exits):
    _, fragment = tag(target, **NEAR_RUNNER_3, step=6, runner_exits_game_after_tagged=exits)
    tagged = -5 if exits else -3
    assert fragment.reward[0].tolist() == [10, 0, 0, tagged, 2, 2, 2]
    assert fragment.terminated[0].tolist() == [False] * 3 + [exits] + [False] * 3
    assert fragment.truncated[0].tolist() == [True] * 3 + [not exits] + [True] * 3
    obs, step, row = fragment.finals()
    (place,) = ((step == 0) & (row == 0)).nonzero().flatten().tolist()
    assert obs[place, 6 * 4] == 1, "the tagged runner is still seen"
    assert obs[place, -1] == 1
    _, fragment = tag(target, **NEAR_RUNNER_3, step=5, runner_exits_game_after_tagged=exits)
    assert fragment.reward[0].tolist() == [10, 0, 0, -5, 0, 0, 0]


@BOTH
@repeats("step", [3, 6])
def test_last_tag_terminates_even_at_the_time_limit(target, step):
    x, y = [1.0, 4.0, 9.0, 1.5, 4.5, 9.5, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5]
    vector, fragment = tag(target, x, y, step)
    assert fragment.reward[0].tolist() == [10, 10, 20, -5, -5, -5, -5]
    assert fragment.terminated[0].all()
    assert not fragment.truncated.any()
    assert vector.world["alive"].all()
    assert vector.world["step"].item() == 0


@BOTH
def test_positions_and_speeds_stay_within_bounds(target):
    env = TagContinuous(**SMALL, edge_hit_penalty=-0.25)
    world = STILL | FAR | {"x": [0.5, *FAR["x"][1:]], "heading": [math.pi] + [0.0] * 6}
    world |= {"speed": [1.0, 0.5] + [0.0] * 5, "acceleration": [0.0, 0.2] + [0.0] * 5}
    # To the edge; and at full speed the acceleration is lost. Table: 0, -1 + 2/9 k
    vector, fragment = placed(env, [[0, 0], [10, 0], *NOTHING[2:]], target, **world)
    assert fragment.reward[0].tolist() == [-0.25] + [0] * 6
    assert vector.world["x"][0, :2].tolist() == [0, 5]
    assert vector.world["speed"][0, :2].tolist() == [1, 1]
    assert vector.world["acceleration"][0, :2].tolist() == [0, 0]


# --- what they are made with


def test_defaults_equal_warpdrive_s():
    assert asdict(TagGridWorld()) == {
        "num_taggers": 10, "length": 10, "max_episode_steps": 100, "wall_hit_penalty": 0.1,
        "tag_reward": 10, "tag_penalty": 2, "step_cost": 0.01, "full_observation": True,
        "fixed_start": False,
    }  # fmt: skip
    assert asdict(TagContinuous()) == {
        "num_taggers": 1, "num_runners": 10, "length": 10, "max_episode_steps": 100,
        "min_acceleration": -1, "max_acceleration": 1, "num_acceleration_levels": 10,
        "min_turn": -math.pi / 2, "max_turn": math.pi / 2, "num_turn_levels": 10,
        "max_speed": 1, "tagger_skill": 1, "runner_skill": 1,
        "full_observation": True, "num_other_agents_observed": 2, "tagging_distance": 0.01,
        "tag_reward": 1, "tag_penalty": -1, "end_of_game_reward": 1,
        "step_penalty": 0, "step_reward": 0, "edge_hit_penalty": 0,
        "runner_exits_game_after_tagged": True, "fixed_roles": True, "fixed_start": False,
        "layout_seed": 0,
    }  # fmt: skip


def test_spaces_and_agents_follow_from_arguments():
    env = TagGridWorld(num_taggers=4)
    assert env.agents == {"tagger": 4, "runner": 1}
    assert env.observation_space.shape == (21,)
    env = TagContinuous(**BENCHMARK)
    assert env.agents == {"tagger": 10, "runner": 100}
    assert env.observation_space.shape == (71,)
    assert env.action_space.nvec.tolist() == [21, 21]
    assert TagContinuous().observation_space.shape == (7 * 10 + 1,)


def test_roles_are_drawn_once():
    env = TagContinuous(**SMALL, fixed_roles=False)
    assert env.agents == {"agent": 7}
    assert env.is_tagger.sum() == 3
    assert (TagContinuous(**SMALL, fixed_roles=False).is_tagger == env.is_tagger).all()
    drawn = [TagContinuous(**SMALL, fixed_roles=False, layout_seed=s).is_tagger for s in range(99)]
    assert (np.mean(drawn, 0) > 0.2).all()


def starts(env, n=20):
    vector, fragments = vector_of(env, n, 1, "python", seed=SEED)
    vector.bind(*fragments)
    return world_of(vector)


def test_initial_positions_are_random_or_fixed():
    world = starts(TagContinuous(**SMALL))
    assert len(np.unique(world["x"])) == len(np.unique(world["y"])) == 140
    assert set(world["heading"].ravel()) == {np.float32(k * math.pi / 2) for k in range(4)}
    assert np.histogram(world["x"], 4, (0, 10))[0].min() > 20
    world = starts(TagContinuous(**SMALL, fixed_start=True))
    assert len(np.unique(world["x"])) == len(np.unique(world["y"])) == 7
    other = starts(TagContinuous(**SMALL, fixed_start=True, layout_seed=1))
    assert (other["x"] != world["x"]).all()
    world = starts(TagGridWorld(**GRID), 200)
    assert set(world["x"][:, :3].ravel()) == set(world["y"][:, :3].ravel()) == {1, 2, 3}
    world = starts(TagGridWorld(**GRID, fixed_start=True))
    assert (world["x"] == [2, 2, 2, 0]).all()


@pytest.mark.parametrize("env", [TagGridWorld(**GRID), TagContinuous(**SMALL, fixed_roles=False)])
def test_picture_has_the_colors_of_the_roles(env):
    world = {name: item[0] for name, item in starts(env, 1).items()}
    world |= {name: np.linspace(0, env.length, env.num_agents) for name in "xy"}
    if isinstance(env, TagGridWorld):
        assert discs(env, world) == pytest.approx([3, 1, 0], rel=0.05)
        world["terminated"] = np.bool_(True)
        assert discs(env, world) == pytest.approx([3, 0, 1], rel=0.05)
    else:
        world["alive"][:2] = False
        assert discs(env, world) == pytest.approx([3, 2, 2], rel=0.05)


def discs(env, world):
    """Return the number of agents of each color, from the colored area."""
    shades = env.draw(world).reshape(-1, 3)
    sizes = [(shades == shade).all(-1).sum() for shade in (TAGGER, RUNNER, TAGGED)]
    return [size / (sizes[0] / 3) for size in sizes]


@repeats(
    ("env", "name", "value", "expected"),
    [
        (TagGridWorld, "num_taggers", 0, "at least 1"),
        (TagGridWorld, "num_taggers", 2.0, "int"),
        (TagGridWorld, "num_taggers", True, "int"),
        (TagGridWorld, "length", 1, "at least 2"),
        (TagGridWorld, "tag_penalty", -1, "at least 0"),
        (TagGridWorld, "step_cost", "1", "float"),
        (TagGridWorld, "full_observation", 1, "bool"),
        (TagContinuous, "max_episode_steps", 0, "at least 1"),
        (TagContinuous, "length", 0, "at least 1e-06"),
        (TagContinuous, "num_turn_levels", 0, "at least 1"),
        (TagContinuous, "num_other_agents_observed", 0, "at least 1"),
        (TagContinuous, "layout_seed", -1, "at least 0"),
        (TagContinuous, "tag_penalty", 1, "a finite number, 0 or less"),
        (TagContinuous, "tag_reward", -1, "at least 0"),
        (TagContinuous, "max_speed", math.inf, "at least 0"),
        (TagContinuous, "max_turn", -2, "at least min_turn=-1.57"),
        (TagContinuous, "fixed_roles", None, "bool"),
    ],
    keep=5,
)
def test_arguments_out_of_bounds_are_refused(env, name, value, expected):
    message = re.escape(f"{name}={value!r} ({env.__name__}): expected {expected}")
    with pytest.raises(UsageError, match=message):
        env(**{name: value})
