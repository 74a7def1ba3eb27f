"""Games of several agents, on the rungs of the ladder: workers, ranks, and resumed runs.

Rung 2: inline and workers make the same batches. Rung 5: more ranks learn the same. Rung 6: resumed
is what was never stopped. Each to the bit, but for ranks.
"""

import functools
import re
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from mpe2 import simple_tag_v3
from pettingzoo.classic.connect_four import connect_four

import headrace
from headrace.batch import each, join
from headrace.collectors.device import DeviceCollector
from headrace.config.resolve import resolve
from headrace.errors import ConfigError
from headrace.meter import Meter
from headrace.models.policy import Network
from headrace.replay.buffer import Rows
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.collectors.backends.test_inference_server import compare
from tests.collectors.test_lag import at_lag_1
from tests.distributed.ranks_support import on_ranks
from tests.envs.games.support import Camp
from tests.envs.games.turns_support import Moves, Table, columns_of
from tests.faults.test_env import assert_balanced
from tests.ladder.test_collect import both, equal, finals
from tests.ladder.test_ranks import assert_same as assert_same_learned
from tests.ladder.test_ranks import learn_all
from tests.marks import repeats
from tests.support import (
    Nested,
    inline,
    learner_for,
    never,
    plan_for,
    policies_for,
    saved_rows,
    workers,
)

CPU = torch.device("cpu")
TAG = partial(simple_tag_v3.parallel_env, max_cycles=10)
KERNEL = "headrace/TagGridWorld-v0"
KERNEL_SIZE = {"num_taggers": 3, "length": 4, "max_episode_steps": 12}


class Nests:
    """Two birds, each in a nest of its own: Tuple observations, Dict actions. One lays eggs."""

    possible_agents = ["bird_0", "bird_1", "cuckoo_0"]  # noqa: RUF012

    def __init__(self):
        self.nests = {agent: Nested() for agent in self.possible_agents}

    def observation_space(self, agent):
        return self.nests[agent].observation_space

    def action_space(self, agent):
        return self.nests[agent].action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
        found = {
            agent: self.nests[agent].reset(seed=own)
            for agent, own in zip(self.agents, seeds, strict=True)
        }
        return {a: obs for a, (obs, _) in found.items()}, {a: {} for a in found}

    def step(self, actions):
        found = {agent: self.nests[agent].step(actions[agent]) for agent in self.agents}
        results = [{a: values[k] for a, values in found.items()} for k in range(5)]
        self.agents = [a for a in self.agents if not results[2][a] and not results[3][a]]
        return tuple(results)

    def close(self):
        pass


class Menu:
    """Guests choose among what there is (in `info`), the cook among what is left (observed)."""

    possible_agents = ["guest_0", "guest_1", "cook_0"]  # noqa: RUF012

    def __init__(self):
        mask = gym.spaces.MultiBinary(5)
        seen = gym.spaces.Box(0, 9, (2,), np.float32)
        both = gym.spaces.Dict(seen=seen, action_mask=mask)
        guest, cook = (seen, gym.spaces.Discrete(3)), (both, gym.spaces.MultiDiscrete([3, 2]))
        self.spaces = dict(zip(self.possible_agents, (guest, guest, cook), strict=True))

    def observation_space(self, agent):
        return self.spaces[agent][0]

    def action_space(self, agent):
        return self.spaces[agent][1]

    def reset(self, seed=None, options=None):
        self.random, self.t = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        return self._offer()

    def _offer(self):
        self.there = {}
        for agent in self.agents:
            bits = self.random.integers(0, 2, 5).astype(np.int8)
            bits[self.random.integers(3)] = bits[3 + self.random.integers(2)] = 1
            self.there[agent] = bits
        seen = self.random.uniform(0, 9, 2).astype(np.float32)
        obs, infos = {}, {}
        for agent, bits in self.there.items():
            is_cook = agent == "cook_0"
            obs[agent] = {"seen": seen, "action_mask": bits} if is_cook else seen
            infos[agent] = {} if is_cook else {"action_mask": bits[:3]}
        return obs, infos

    def step(self, actions):
        for agent, action in actions.items():
            first, *rest = np.ravel(action).tolist()
            assert self.there[agent][first], (agent, action)
            assert all(self.there[agent][3 + of] for of in rest), (agent, action)
        self.t += 1
        reward = {agent: float(np.sum(action)) for agent, action in actions.items()}
        ends = {agent: agent == "guest_1" and self.t == 4 for agent in self.agents}
        cut = {agent: self.t == 7 for agent in self.agents}
        obs, infos = self._offer()
        self.agents = [a for a in self.agents if not ends[a] and not cut[a]]
        return obs, reward, ends, cut, infos

    def close(self):
        pass


GAMES = {
    "tag": {"env": TAG},
    "table": {"env": Table},
    "kernel": {"env": KERNEL, "native": True, "kwargs": KERNEL_SIZE},
    "menu": {"env": Menu},
    "connect four": {"env": connect_four.env},
    "camp": {"env": Camp},
    "nests": {"env": Nests},
}
IN_TURNS = ("table", "connect four")


def plan_of(game, **more):
    return plan_for(**{"policies": {}, "num_envs": 6, "num_steps": 24} | GAMES[game] | more)


@repeats(
    ("game", "num_workers"),
    [(game, w) for w in (2, 3, 1) for game in GAMES],
    keep=4,
    few=len(GAMES) + 2,
)
def test_inline_equals_workers(game, num_workers):
    plan = plan_of(game, network=Network(normalize_obs=True))
    seen = {"ends": 0, "finals": 0, "absent": 0}
    for a, b in both(plan, num_workers):
        assert len(a.fragments) == len(b.fragments) == 3 * len(plan.policies)
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
            seen["ends"] += int((x.terminated | x.truncated).sum())
            seen["finals"] += len(finals(x)[1])
            seen["absent"] += int((~x.valid).sum())
        assert sorted(a.episodes) == sorted(b.episodes)
        assert a.agent_steps == b.agent_steps == sum(int(f.valid.sum()) for f in a.fragments)
        assert all(len(of.by_policy) in (0, len(plan.policies)) for of in a.episodes)
    assert seen["ends"] > 10
    assert seen["finals"] > 4 or game == "connect four"
    assert (seen["absent"] > 0) == (game not in ("tag", "kernel")), seen


@repeats("game", ["table", "tag", "camp", "kernel", "connect four"], few=4)
def test_inline_equals_workers_at_lag_1(game):
    plan = plan_of(game, lag=1)
    for one, two in zip(
        at_lag_1(inline(plan), plan, 4), at_lag_1(workers(plan, 2), plan, 4), strict=True
    ):
        assert len(one) == 3 * len(plan.policies)
        for x, y in zip(one, two, strict=True):
            assert x["valid"].any()
            for name, column in x.items():
                if not name.startswith("final_"):
                    each(
                        lambda p, q: torch.testing.assert_close(p, q, rtol=0, atol=0),
                        column,
                        y[name],
                    )


@repeats("game", ["table", "tag", "connect four", "menu", "kernel"])
@repeats("num_workers", [2, 1])
def test_acting_in_the_learner_s_process_makes_the_same_but_for_rounding(game, num_workers):
    plan = plan_of(game)
    server = plan_of(game, inference_device=CPU)
    assert compare(plan, inline(plan), workers(server, num_workers)) > 4


@repeats("game", ["camp", "nests", "kernel"], keep=1)
@repeats("core", ["lstm", "gru"])
def test_inline_equals_workers_with_a_recurrent_core(game, core):
    plan = plan_of(game, network=Network(core=core, core_size=8), num_steps=10)
    remembered = []
    for a, b in both(plan, 2):
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
        remembered.append(sum(bool(x.recurrent_state[0].any()) for x in a.fragments))
    assert remembered[0] == 0
    assert min(remembered[1:]) >= len(plan.policies), remembered


def test_workers_of_a_kernel_game_make_the_batch_of_the_learner_s_device():
    plan = plan_of("kernel")
    one, many = DeviceCollector(plan, CPU, Meter(), never), workers(plan, 2)
    for version in range(4):
        policies = policies_for(plan, seed=version)
        for collector in (one, many):
            collector.publish(policies, version)
        a, b = one.collect(), many.collect()
        assert sorted(of[1:] for of in a.episodes) == sorted(of[1:] for of in b.episodes)
        assert a.agent_steps == b.agent_steps
        for k, whole in enumerate(a.fragments):
            parts = join(b.fragments[k :: len(plan.policies)], CPU)
            for name in ("action", "reward", "terminated", "truncated", "valid", "env_id"):
                assert torch.equal(getattr(whole, name), getattr(parts, name)), name
            assert torch.equal(whole.obs, parts.obs)
            close = {"rtol": 0, "atol": 4e-6}  # the policies act on batches of another size
            for name, column in whole.stored_outputs.items():
                torch.testing.assert_close(column, parts.stored_outputs[name], **close)
    one.close()
    many.close()


# Rung 5. Two of N envs in a vector, so that two ranks have two vectors each.
N, T, UPDATES = 8, 24, 3
LEARN = {
    ("ppo", "tag"): {"lr": 1e-3, "num_epochs": 2, "num_minibatches": 4},
    ("ppo", "table"): {"lr": 1e-3, "num_epochs": 2, "num_minibatches": 4, "ent_coef": 0.01},
    ("ppo", "kernel"): {"num_epochs": 2, "num_minibatches": 4},
    ("ppo", "camp"): {"core": "lstm", "core_size": 8, "num_minibatches": 4},
    ("dqn", "connect four"): {
        "lr": 1e-3, "learning_starts": 100, "batch_size": 12, "replay_ratio": 0.1, "n_step": 2,
        "replay_size": 400, "target_update_interval": 7, "num_workers": 0,
    },
    ("dqn", "tag"): {
        "lr": 1e-3, "learning_starts": 100, "batch_size": 12, "replay_ratio": 0.1,
        "replay_size": 400, "target_update_interval": 7, "num_workers": 0, "priority_alpha": 0.6,
    },
    ("a2c", "connect four"): {},
    ("impala", "table"): {},
}  # fmt: skip
FEW = (("ppo", "tag"), ("ppo", "table"))


def learn(ranks, algo, game):
    """The parameters of all policies after some updates, and the last metrics."""
    given = {"env": "x:Game", "algo": algo, "num_envs": N, "num_steps": T, "seed": 5}
    given |= {"envs_per_vector": 2, "normalize_obs": True, "arithmetic": "plain"}
    given |= {"total_env_steps": N * T * UPDATES} | LEARN[algo, game]
    settings = resolve(given)
    share = N // ranks.size
    plan = plan_of(
        game, num_steps=T, num_envs=share, first_env=share * ranks.rank, envs_per_vector=2, seed=5,
        settings=settings,
    )  # fmt: skip
    collector = inline(plan)
    learner = learner_for(settings, plan.spec, ranks, dtype=torch.float64)
    assert list(learner.policies) == list(plan.policies)
    for update in range(UPDATES):
        collector.publish(learner.policies, learner.version)
        batches = learner.assemble(collector.collect().fragments)
        metrics = learner.update(batches, update * N * T, N * T)
    collector.close()
    learner.check_equal()
    weights = {
        f"{name}.{key}": tensor.numpy()
        for name, policy in learner.policies.items()
        for key, tensor in policy.state_dict().items()
    }
    norms = [value for name, value in metrics.items() if name.endswith("grad_norm")]
    assert len(norms) >= len(learner.policies)
    return weights, "", metrics | {"grad_norm": min(norms)}


@functools.cache
def learned(size, cases):
    return on_ranks(size, partial(learn_all, learn_one=learn, cases=cases))


@repeats("case", LEARN, keep=len(FEW), few=5, ids="-".join)
def test_two_ranks_learn_the_same(case):
    one, two = (learned(size, FEW if case in FEW else (case,)) for size in (1, 2))
    assert_same_learned(one[0][case], [rank[case] for rank in two], 1e-9)


# Rung 6
SETTINGS = {
    "num_envs": 4, "num_steps": 24, "envs_per_vector": 2, "seed": 5, "quiet": True,
    "schedule_env_steps": 4 * 24 * 8, "check_ranks": 1, "lag": 0,
}  # fmt: skip
UPDATE = 4 * 24
PPO = headrace.PPO(lr=3e-3, lr_schedule="linear", num_minibatches=2, num_epochs=2)
DQN = headrace.DQN(
    lr=3e-3, learning_starts=100, batch_size=24, replay_size=400, replay_ratio=0.2, n_step=2,
    target_update_interval=7, exploration_fraction=0.5,
)  # fmt: skip
SAC = headrace.SAC(lr=3e-3, learning_starts=100, batch_size=24, replay_size=400, replay_ratio=0.1)


def train(path, env, updates, **more):
    settings = SETTINGS | {"normalize_obs": True} | more
    return headrace.train(env, run_dir=path, total_env_steps=updates * UPDATE, **settings)


def arguments_of(game):
    """Those of `train` for a game of `GAMES`."""
    of = GAMES[game]
    more = {"vectorization": "native", "env_kwargs": of["kwargs"]} if "kwargs" in of else {}
    return {"env": of["env"], **more}


def state_of(run):
    """All that was learned, and what the workers were in the middle of."""
    saved = checkpoint.newest(run.dir)
    found = {f"workers.{name}": t for name, t in saved.tensors("workers").items()}
    for name in saved.manifest["policies"]:
        for section in (f"policy_{name}", f"learner_{name}"):
            found |= {f"{section}.{key}": t for key, t in saved.tensors(section).items()}
        if "rows" in saved.manifest and f"learner_{name}" in saved.manifest["rows"]:
            rows = saved_rows(run.dir, f"learner_{name}")
            found |= {f"rows of {name}.{key}": t for key, t in rows.items()}
    return found


TIMED = re.compile(r"_s$|^seconds/|^ledger/")
"""Metrics that are times, or are not in all rows."""


def assert_same_run(one, other):
    left, right = state_of(one), state_of(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    rows = [read_metrics(run.dir) for run in (one, other)]
    assert len(rows[0]) == len(rows[1])
    for a, b in zip(*rows, strict=True):
        a, b = ({n: v for n, v in of.items() if not TIMED.search(n)} for of in (a, b))
        assert a == b
    for name in ("env_steps", "agent_steps", "mean_return", "episodes", "learner_steps"):
        assert one.summary[name] == other.summary[name], name


@repeats(
    ("game", "algo", "num_workers"),
    [
        ("table", PPO, 2), ("tag", PPO, 0), ("connect four", DQN, 2), ("kernel", PPO, 2),
        ("table", PPO, 0), ("tag", PPO, 2), ("connect four", DQN, 0), ("kernel", PPO, 0),
        ("menu", PPO, 2), ("nests", PPO, 2), ("camp", PPO, 2), ("tag", DQN, 2),
        ("connect four", PPO, 2), ("menu", PPO, 0),
    ],
    keep=3,
    few=10,
)  # fmt: skip
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, capsys, game, algo, num_workers):
    """The whole run is inline; but kernel games are one vector there, and so another one."""
    given = arguments_of(game) | {"algo": algo, "normalize_obs": algo is not DQN}
    is_kernel = game == "kernel"
    if is_kernel and not num_workers:
        given["envs_per_vector"] = 4
    of_whole = num_workers if is_kernel else 0
    whole = train(tmp_path / "whole", updates=6, num_workers=of_whole, **given)
    train(tmp_path / "part", updates=3, num_workers=num_workers, **given)
    saved = checkpoint.newest(tmp_path / "part").arrays("workers")
    assert saved["vector0.episode_step"].any(), "in the middle of a game"
    capsys.readouterr()
    again = headrace.resume(
        tmp_path / "part", env=given["env"], total_env_steps=6 * UPDATE, quiet=False
    )
    how = "4 restored, 0 replayed" if is_kernel else "0 restored, 4 replayed"
    assert f"{how}, 0 begun anew" in capsys.readouterr().out
    assert_same_run(whole, again)


@repeats("num_workers", [2, 0])
@repeats("core", ["lstm", "gru"])
def test_a_resumed_run_with_a_recurrent_core_equals_one_that_was_not_stopped(
    tmp_path, core, num_workers
):
    given = {"env": Camp, "algo": PPO, "core": core, "core_size": 8, "num_workers": num_workers}
    whole = train(tmp_path / "whole", updates=4, **given)
    train(tmp_path / "part", updates=2, **given)
    saved = checkpoint.newest(tmp_path / "part").arrays("workers")
    assert saved["vector0.core_state.0"].any()
    assert saved["vector0.core_state.1"].any()
    again = headrace.resume(tmp_path / "part", env=Camp, total_env_steps=4 * UPDATE, quiet=True)
    assert_same_run(whole, again)


@pytest.mark.parametrize("game", ["table", "connect four"])
def test_games_in_turns_refuse_a_recurrent_core(tmp_path, game):
    with pytest.raises(ConfigError, match="played in turns"):
        train(tmp_path / "run", updates=1, core="lstm", **arguments_of(game))


@repeats(("algo", "game"), [("appo", "table"), ("impala", "tag"), ("impala", "connect four"),
                            ("appo", "kernel"), ("appo", "camp")])  # fmt: skip
def test_workers_that_never_stop_keep_the_ledger_and_resume(tmp_path, algo, game):
    given = arguments_of(game) | {"algo": algo, "num_workers": 2, "lag": 2}
    run = train(tmp_path / "run", updates=6, **given)
    assert_balanced(run.summary)
    assert run.summary["env_steps"] == 6 * UPDATE
    again = headrace.resume(run.dir, env=given["env"], total_env_steps=12 * UPDATE, quiet=True)
    assert_balanced(again.summary)
    assert again.summary["env_steps"] == 12 * UPDATE
    assert again.summary["agent_steps"] > run.summary["agent_steps"]
    rows = read_metrics(run.dir)
    assert len(rows) == 12
    assert all(np.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))


def test_transitions_in_the_replay_are_the_moves_of_a_game_in_turns():
    """Of short fragments, in which columns are cut off."""
    settings = resolve(
        {"env": "x:Game", "algo": "dqn", "num_envs": 4, "num_steps": 6, "envs_per_vector": 2,
         "learning_starts": 10**5, "replay_size": 10**5, "seed": 5, "num_workers": 0}
    )  # fmt: skip
    plan = plan_of("connect four", num_envs=4, num_steps=6, settings=settings)
    collector, learner = inline(plan), learner_for(settings, plan.spec)
    moves = [Moves(4), Moves(4)]
    for update in range(30):
        collector.publish(learner.policies, learner.version)
        fragments = collector.collect().fragments
        for of_vector, fragment in zip(moves, fragments, strict=True):
            of_vector.read(*columns_of(fragment))
        learner.update(learner.assemble(fragments), 24 * update, 24)
    collector.close()
    buffer = learner.learners["default"].modules["replay"]
    columns = [column for of_vector in moves for column in of_vector.columns]
    ends = cut = 0
    for env, column in enumerate(columns):
        number = buffer.starts[: buffer.num_starts[env], env]
        assert len(number) == len(column) > 40
        rows = Rows(number, torch.full_like(number, env), torch.zeros_like(number))
        found = buffer.transitions(rows, 1, 0.5, lambda reward: reward)
        for k, move in enumerate(column):
            for name in ("obs", "next_obs"):
                if move[name] is not None:
                    assert {key: o[k].tolist() for key, o in found[name].items()} == move[name]
            assert found["action"][k] == move["action"]
            assert found["reward"][k] == move["reward"]
            assert found["discount"][k] == (0.0 if move["terminated"] else 0.5)
            ends += move["terminated"]
            cut += move["is_cut"]
        # What is longer than a move ends with the game, and where it was cut off
        longer = buffer.transitions(rows, 100, 1.0, lambda reward: reward)
        total, reached = 0.0, False
        for k in reversed(range(len(column))):
            if column[k]["terminated"] or column[k]["truncated"]:
                total, reached = 0.0, True
            total += column[k]["reward"]
            if reached:
                assert longer["reward"][k] == pytest.approx(total)
    assert ends > 20
    assert cut > 20


@repeats(("algo", "num_workers"), [(DQN, 2), (SAC, 2), (DQN, 0), (SAC, 0)])
def test_each_policy_has_a_replay_of_its_own(tmp_path, algo, num_workers):
    make = partial(TAG, continuous_actions=algo is SAC)
    run = train(tmp_path / "run", make, 6, algo=algo, num_workers=num_workers, normalize_obs=False)
    sizes = {"adversary": (3, 16), "agent": (1, 14)}
    for name, (num_agents, num_obs) in sizes.items():
        rows = saved_rows(run.dir, f"learner_{name}")
        assert rows["obs0"].shape[1] == num_obs
        assert int((rows["action"].reshape(len(rows["action"]), -1) != 0).any(1).sum()) > 50
        saved = checkpoint.newest(run.dir).tensors(f"learner_{name}")
        starts = next(t for key, t in saved.items() if key.endswith("num_starts"))
        assert starts.tolist() == [6 * 24] * 4 * num_agents
    assert run.summary["learner_steps"] > 20
