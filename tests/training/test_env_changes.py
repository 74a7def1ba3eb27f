"""Changes of environments between updates: `call_envs` and `set_envs`, returned by `on_update`."""

import json
import os
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import headrace
from headrace.envs.changes import UNKNOWN, record
from headrace.errors import ConfigError, EnvChangeError
from headrace.storage import checkpoint
from tests.ladder.test_resume import SETTINGS, UPDATE, assert_same
from tests.marks import repeats
from tests.support import inline, plan_for, policies_for

LAST = 8  # updates


class Slope(gym.Env):
    """Moves by `speed`, and by `wind` in the direction of the action; ends after 50 steps."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.speed, self.wind = 1.0, 0.0

    def set_wind(self, strength, *, sign=1):
        self.wind = sign * strength

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place, self.first_speed = 0, 0.0, self.speed
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.place += self.speed + self.wind * (2 * int(action) - 1)
        return self._obs(), self.speed, False, self.t == 50, {}

    def _obs(self):
        return np.array([self.t, self.place, self.first_speed], np.float32)


class WithState(Slope):
    """Offers its own state, without what `on_update` changes."""

    def get_state(self):
        return {"all": np.array([self.t, self.place, self.first_speed])}

    def set_state(self, state):
        t, self.place, self.first_speed = state["all"].tolist()
        self.t = int(t)


class Halved(gym.Wrapper):
    """Has an attribute of its own, and forwards none."""

    factor = 0.5

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, reward * self.factor, *rest


def curriculum(number, metrics):
    """What changes at which update; nothing in most."""
    return {
        1: headrace.set_envs(speed=2.0),
        2: headrace.call_envs("set_wind", 0.25) + headrace.set_envs(speed=3.0),
        4: headrace.call_envs("set_wind", 0.5, sign=-1),
        6: headrace.set_envs(speed=4.0),
    }.get(number)


def train(run_dir, env=Slope, updates=LAST, on_update=curriculum, **settings):
    return headrace.train(
        env, run_dir=run_dir, total_env_steps=updates * UPDATE, on_update=on_update,
        **SETTINGS | settings,
    )  # fmt: skip


def resume(run_dir, env=Slope, updates=LAST, on_update=curriculum, **settings):
    return headrace.resume(
        run_dir, env=env, total_env_steps=updates * UPDATE, on_update=on_update, **settings
    )


def saved(run_dir):
    return checkpoint.newest(run_dir).arrays("workers")


def observed(run_dir):
    """Each env's last observation: steps, place, and the speed with which the episode began."""
    arrays = saved(run_dir)
    return np.concatenate([arrays["vector0.obs."], arrays["vector1.obs."]])


def test_the_example_of_the_documentation_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/using.md").read_text()
    section = page.partition("## Environments that change during a run")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    code = code.replace("update == 10", "update == 1").replace("total_env_steps=100_000", "**sizes")
    monkeypatch.chdir(tmp_path)
    exec(code, {"sizes": SETTINGS | {"total_env_steps": 3 * UPDATE, "network": None}})
    [run] = (tmp_path / "runs").iterdir()
    changes = checkpoint.newest(run).manifest["counters"]["env_changes"]
    assert changes == [["set_length", [[1.0], {}], None, 1], ["bonus", None, 0.5, 2]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run")


def test_a_change_comes_before_the_next_batch(tmp_path):
    run = train(tmp_path / "a", updates=2, on_update=lambda i, _: headrace.set_envs(speed=1.0 + i))
    # 18 steps end the first episode, and the second begins, with the change after update 1.
    assert observed(run.dir).tolist() == [[14, 2.0 * 14, 2.0]] * 4
    resumed = resume(run.dir, updates=3, on_update=None, quiet=True)
    assert observed(resumed.dir).tolist() == [[46, 2.0 * 14 + 3.0 * 32, 2.0]] * 4


def test_what_a_wrapper_has_is_set_there_and_all_else_further_inside(tmp_path):
    def on_update(number, metrics):
        rewards.append(metrics["mean_return"])
        return headrace.set_envs(factor=1.0, speed=2.0) if number == 2 else None

    rewards = []
    train(tmp_path / "run", wrapper=Halved, updates=5, on_update=on_update)
    # The episodes of 50 steps end in updates 2, 4 and 5: with 50 * 0.5, ..., and 50 * 2.
    assert rewards[1] == 25.0
    ends_later = 36 * 2.0 + 14 * 0.5
    assert rewards[3] == (25.0 + ends_later) / 2
    assert rewards[4] == (25.0 + ends_later + 100.0) / 3


@pytest.mark.parametrize("num_workers", [1, 2])
@repeats("lag", [1, 0])
def test_any_number_of_workers_makes_the_same_batches(tmp_path, whole, num_workers, lag):
    same = whole if lag == 0 else train(tmp_path / "inline", lag=1)
    run = train(tmp_path / "run", num_workers=num_workers, lag=lag)
    assert observed(run.dir)[:, 2].tolist() == [4.0] * 4, "the last speed must have come"
    assert_same(same, run)


def test_with_lag_a_change_comes_one_batch_later(tmp_path):
    on_update = lambda i, _: headrace.set_envs(speed=1.0 + i)  # noqa: E731
    run = train(tmp_path / "run", updates=3, lag=1, on_update=on_update)
    # Batch 2 was under way; batch 3 has the change after update 1.
    assert observed(run.dir).tolist() == [[46, 1.0 * 14 + 2.0 * 32, 1.0]] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
@repeats("updates", [3, 2, 5])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    tmp_path, capsys, whole, num_workers, updates
):
    train(tmp_path / "run", updates=updates, num_workers=num_workers)
    assert saved(tmp_path / "run")["vector0.episode_step"].any(), "an episode is under way"
    capsys.readouterr()
    again = resume(tmp_path / "run")
    assert "4 replayed, 0 begun anew" in capsys.readouterr().out
    assert_same(whole, again)


def test_environments_with_a_state_of_their_own_go_on_with_the_changes(tmp_path, capsys):
    uninterrupted = train(tmp_path / "whole", WithState)
    train(tmp_path / "run", WithState, updates=3)
    capsys.readouterr()
    again = resume(tmp_path / "run", WithState)
    assert "4 restored, 0 replayed, 0 begun anew" in capsys.readouterr().out
    assert_same(uninterrupted, again)


def test_episodes_too_long_to_be_replayed_begin_anew_with_the_changes(tmp_path, capsys):
    train(tmp_path / "run", updates=3, replay_limit_s=1e-9, num_workers=2)
    rows = json.loads(saved(tmp_path / "run")["vector0.env0.changes"].tobytes())
    assert {row[0] for row in rows} == {-2}, "no step is kept with the changes"
    capsys.readouterr()
    run = resume(tmp_path / "run", updates=4)
    assert "0 replayed, 4 begun anew" in capsys.readouterr().out
    assert observed(run.dir)[:, 2].tolist() == [3.0] * 4


class Dies(Slope):
    """Ends its process in the fourth batch, in an episode of which it was changed at step 14."""

    def __init__(self, folder, times=1):
        super().__init__()
        self.marks = [Path(folder) / f"died{k}" for k in range(times)]

    def step(self, action):
        if self.t == 48 and self.speed == 3.0 and any(map(self.is_first, self.marks)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    @staticmethod
    def is_first(mark):
        """Make the mark, unless another process has: two workers may come here at once."""
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def test_the_successor_of_a_killed_worker_has_the_changes(tmp_path, whole):
    run = train(tmp_path / "run", lambda: Dies(tmp_path), num_workers=2)
    assert run.summary["restarts"] == 1
    assert_same(whole, run)


@pytest.mark.more
def test_new_episodes_after_two_losses_at_the_same_place_begin_with_the_changes(tmp_path):
    run = train(tmp_path / "run", lambda: Dies(tmp_path, times=2), updates=4, num_workers=1)
    assert run.summary["restarts"] == 2
    assert observed(run.dir)[:, [0, 2]].tolist() == [[32, 3.0]] * 4


def test_an_episode_whose_changes_have_no_known_step_is_not_replayed():
    plan = plan_for(Slope)
    one = inline(plan)
    for version in range(2):
        one.publish(policies_for(plan), version)
        one.collect()
        one.change_envs(record((), headrace.set_envs(wind=0.0)))  # which no observation shows
    state = one.state()
    rows = json.loads(state["vector0.env0.changes"].tobytes())
    assert [step for step, _ in rows] == [plan.num_steps]
    assert inline(plan, state=state).restored.replayed == 4
    rows[0][0] = UNKNOWN
    state["vector0.env0.changes"] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    restored = inline(plan, state=state).restored
    assert (restored.replayed, restored.new_episode) == (3, 1)


class FailsOnce(Slope):
    """Raises in one step, the first with speed 3; a file says that it has."""

    def __init__(self, folder):
        super().__init__()
        self.mark = Path(folder) / "failed"

    def step(self, action):
        if self.speed == 3.0 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("once")
        return super().step(action)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_made_anew_after_an_error_has_the_changes(tmp_path, num_workers):
    run = train(
        tmp_path / "run", lambda: FailsOnce(tmp_path), updates=4, on_env_error="restart",
        num_workers=num_workers,
    )  # fmt: skip
    assert run.summary["ledger"]["dropped_episodes"] == 1
    # Its new episode began 63 steps before the end of batch 4. Batch 5 makes up for the lost step.
    [place] = [p for t, p, first in observed(run.dir).tolist() if (t, first) == (45, 3.0)]
    assert place == pytest.approx(3.0 * 45, abs=0.5 * 45), "with the wind, and not with speed 1"


@pytest.mark.more
def test_workers_that_never_stop_have_the_changes(tmp_path):
    run = train(
        tmp_path / "run", algo="appo", num_workers=2, updates=20,
        on_update=lambda number, _: headrace.set_envs(speed=5.0) if number == 1 else None,
    )  # fmt: skip
    assert observed(run.dir)[:, 2].tolist() == [5.0] * 4
    again = resume(run.dir, updates=22, on_update=None, quiet=True)
    assert observed(again.dir)[:, 2].tolist() == [5.0] * 4


def test_inference_in_the_learner_makes_no_difference_to_changes(tmp_path):
    run = train(tmp_path / "run", num_workers=2, inference="learner", updates=3)
    assert observed(run.dir)[:, 2].tolist() == [2.0] * 4


def test_several_learners_make_the_same_changes(tmp_path):
    run = train(tmp_path / "run", num_learners=2, envs_per_vector=2, updates=4)
    one = train(tmp_path / "one", updates=4)
    assert np.array_equal(observed(run.dir)[:, [0, 2]], observed(one.dir)[:, [0, 2]])
    assert observed(run.dir)[:, 2].tolist() == [3.0] * 4
    resumed = resume(run.dir, updates=7, quiet=True)
    assert observed(resumed.dir)[:, 2].tolist() == [4.0] * 4


def test_of_each_method_and_attribute_the_last_change_is_kept(tmp_path):
    def on_update(number, _):
        speed = headrace.set_envs(speed=float(number))
        return speed if number == 6 else speed + headrace.call_envs("set_wind", number)

    run = train(tmp_path / "run", updates=6, on_update=on_update)
    manifest = checkpoint.newest(run.dir).manifest
    assert manifest["counters"]["env_changes"] == [
        ["set_wind", [[5], {}], None, 10],
        ["speed", None, 6.0, 11],
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (headrace.set_envs(sped=1), "no attribute 'sped' in Slope .*Did you mean speed"),
        (headrace.call_envs("set_wnd", 1), "no method 'set_wnd' in Slope .*Did you mean set_wind"),
        (
            headrace.call_envs("set_wind"),
            r"(?s)TypeError: .*strength.*in set_wind\(\) \(from on_update\), env 0",
        ),
    ],
)
def test_an_environment_without_the_name_ends_the_run(tmp_path, num_workers, changes, words):
    with pytest.raises(EnvChangeError, match=words) as caught:
        train(tmp_path / "run", num_workers=num_workers, on_update=lambda *_: changes)
    assert "env 0 of Slope" in str(caught.value)
    assert not any("on-env-error" in note for note in getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: headrace.set_envs(a=(1, 2)), r"set_envs: a: \(1, 2\): expected numbers, words"),
        (lambda: headrace.call_envs("f", object()), "call_envs: f: .*expected numbers, words"),
        (lambda: headrace.call_envs("f", x=float("nan")), "call_envs: f: .*expected numbers"),
    ],
)
def test_arguments_that_no_file_can_hold_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"speed": 1}, r"on_update returned \{'speed': 1\}: expected None, headrace.call_envs"),
        (headrace.set_envs(speed="x" * (1 << 18)), "262,1.. bytes; expected at most 262,144"),
    ],
)
def test_other_values_of_on_update_are_refused(tmp_path, returned, words):
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "run", on_update=lambda *_: returned)


@pytest.mark.parametrize(
    ("env", "settings", "words"),
    [
        ("headrace/CartPole-v1", {}, "CartPole-v1 is stepped many at a time.*\n.*python"),
        ("examples.tensor_env:Boats", {}, "is not changed by Headrace.*\n.*keep a reference"),
    ],
)
def test_environments_that_are_not_stepped_alone_are_refused(tmp_path, env, settings, words):
    with pytest.raises(ConfigError, match=words):
        headrace.train(
            env, run_dir=tmp_path / "run", total_env_steps=256, num_envs=4, num_steps=32,
            quiet=True, on_update=lambda *_: headrace.set_envs(speed=1), **settings,
        )  # fmt: skip
