"""Games in turns: a vector's moves against the loop of PettingZoo's documentation, and errors."""

import warnings
from functools import partial

import numpy as np
import pytest
from mpe2 import simple_tag_v3
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.classic.chess import chess
from pettingzoo.classic.connect_four import connect_four
from pettingzoo.classic.rps import rps
from pettingzoo.classic.tictactoe import tictactoe

from headrace import batch
from headrace.config.policies import assign_agents
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.games.vector import TAKEN, GameVector
from headrace.errors import EnvError
from tests.envs.games.support import Camp
from tests.envs.games.turns_support import Moves, Table, choose, columns_of, played_plainly
from tests.marks import repeats

with warnings.catch_warnings():  # it imports a game of its own in a way that it warns of
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import api_test, parallel_api_test

GAMES = {
    "table": Table,
    "tic-tac-toe": tictactoe.env,
    "connect four": connect_four.env,
    "rock, paper, scissors": partial(rps.env, max_cycles=6),
    "tag, in turns": partial(simple_tag_v3.env, max_cycles=5),
    "chess": chess.env,
}
PLACE = r"env [01] of Wrong, inline, episode \d+ \(reset seed \d+, \d+ steps so far\)"


def vector_of(make, env_id=(0, 1), seed=3, **kwargs):
    spec = env_spec(EnvMaker(make))
    assert spec.interface == "turns"
    parts = tuple(assign_agents({}, spec).values())
    context = VectorContext(spec, np.array(env_id), seed, parts=parts, **kwargs)
    return GameVector([make() for _ in env_id], context, remake=make)


def fragments_of(vector, num_steps):
    n = len(vector.env_id)
    return [
        batch.allocate(
            batch.columns(
                vector.spec.for_agents(part), {"value": ((), batch.torch.float32)}, num_steps,
                n * part.size,
            )
        )
        for part in vector.parts
    ]  # fmt: skip


def played(vector, fragments, act):
    """Fill one fragment of each policy, with the actions that `act(t)` writes; the episodes."""
    vector.bind(*fragments)
    for t in range(fragments[0].num_steps):
        act(t)
        for fragment in fragments:
            fragment.policy_version[t] = t
            first = fragment.action[t].reshape(fragment.num_envs, -1)[:, 0]
            fragment.stored_outputs["value"][t] = first
        vector.step(t)
    return vector.finish()


def all_played(vector, num_steps, length):
    """Play fragments of `length` steps: the moves of each policy, all actions, the episodes."""
    fragments, rng = fragments_of(vector, length), np.random.default_rng(5)
    moves = [Moves(fragment.num_envs) for fragment in fragments]
    actions, episodes = [[] for _ in fragments], []

    def act(t):
        choose(vector, fragments, vector.parts, t, rng)
        for taken, fragment in zip(actions, fragments, strict=True):
            taken.append(fragment.action[t].numpy().copy())

    for first in range(0, num_steps, length):
        ended = played(vector, fragments, act)
        episodes += [of._replace(ended_at=of.ended_at + first) for of in ended]
        for of_policy, fragment in zip(moves, fragments, strict=True):
            of_policy.read(*columns_of(fragment))
    return moves, list(map(np.stack, actions)), episodes


@repeats(
    ("game", "length"),
    [
        ("table", 60), ("table", 7), ("tic-tac-toe", 20), ("connect four", 60), ("chess", 30),
        ("rock, paper, scissors", 15), ("tag, in turns", 20),
        ("table", 1), ("table", 2), ("tic-tac-toe", 3), ("connect four", 4),
    ],
    keep=7,
)  # fmt: skip
def test_moves_equal_those_of_a_plain_loop(game, length):
    make, env_id = GAMES[game], (4, 5, 6)
    num_steps = 420 if game == "table" else 60
    vector = vector_of(make, env_id)
    moves, actions, episodes = all_played(vector, num_steps, length)
    expected, ended = played_plainly(make, vector.spec, vector.parts, actions, 3, num_steps, env_id)
    for of_policy, wanted in zip(moves, expected, strict=True):
        of_policy.assert_equal(wanted)
        for move in (move for column in of_policy.columns for move in column):
            assert move["outputs"]["value"] == np.ravel(move["action"])[0]
    assert [(of.ended_at, of.env_id, of.num_steps) for of in episodes] == [e[:3] for e in ended]
    for episode, (*_, means) in zip(episodes, ended, strict=True):
        sizes = [part.size for part in vector.parts]
        assert episode.total_reward == pytest.approx(np.average(means, weights=sizes))
        assert episode.by_policy == pytest.approx(tuple(means) if len(means) > 1 else ())
    assert game == "chess" or len(ended) > 2
    every = [move for of in expected for column in of for move in column]
    assert len(every) > 2.5 * num_steps
    if game == "table":
        for kind in ("terminated", "truncated"):
            assert sum(move[kind] for move in every) > 20
        assert any(move["terminated"] and move["truncated"] for move in every)
        assert len({move["reward"] for move in every}) > 10
    vector.close()


@pytest.mark.parametrize("length", [7, 4])
def test_a_restored_vector_goes_on_in_the_middle_of_a_game(length):
    """The moves that wait are brought back as well, and the episodes are replayed."""
    expected, actions, _ = all_played(vector_of(Table), 28, length)
    vector, log = vector_of(Table), []
    fragments = fragments_of(vector, length)
    moves = [Moves(fragment.num_envs) for fragment in fragments]
    for first in range(0, 28, length):

        def act(t, first=first):
            for fragment, taken in zip(fragments, actions, strict=True):
                fragment.action[t] = fragment.action.new_tensor(taken[first + t])

        played(vector, fragments, act)
        for of_policy, fragment in zip(moves, fragments, strict=True):
            of_policy.read(*columns_of(fragment))
        state = {name: array.copy() for name, array in vector.state().items()}
        log.append(state.pop(TAKEN))
        for i, steps in enumerate(state["episode_step"].tolist()):
            all_of_env = np.concatenate(log)[:, i]
            state[f"env{i}.actions"] = all_of_env[len(all_of_env) - steps :]
        vector = vector_of(Table)
        assert vector.restore(state).replayed == 2
    assert [of.columns for of in moves] == [of.columns for of in expected]
    assert any(of.cut for of in moves)


def test_who_is_in_the_game_is_known_at_each_move():
    vector = vector_of(Table)
    fragments, rng, joined = fragments_of(vector, 40), np.random.default_rng(5), 0
    vector.bind(*fragments)
    for t in range(40):
        choose(vector, fragments, vector.parts, t, rng)
        before = vector.state()["alive"]
        vector.step(t)
        alive = vector.state()["alive"]
        joined += int((alive & ~before).sum())
        for game, row in zip(vector._envs, alive, strict=True):
            assert {vector.names[i] for i in np.flatnonzero(row)} == set(game.agents)
    assert joined > 4


def test_a_game_that_does_not_repeat_itself_begins_anew():
    """What waited of its last moves is forgotten: no transition goes from one game to another."""
    vector, fragments = vector_of(Table), None
    fragments = fragments_of(vector, 10)
    rng = np.random.default_rng(5)
    played(vector, fragments, lambda t: choose(vector, fragments, vector.parts, t, rng))
    state = vector.state()
    taken = state.pop(TAKEN)
    for i, steps in enumerate(state["episode_step"].tolist()):
        state[f"env{i}.actions"] = taken[10 - steps :, i]
    assert state["moves.0.kept.is_kept"].any(axis=1).all()

    class Other(Table):
        def reset(self, seed=None, options=None):
            super().reset(seed + 1)

    again = vector_of(Other)
    assert again.restore(state).new_episode == 2
    assert not again.state()["moves.0.kept.is_kept"].any()


class ZooTable(Table, AECEnv):
    """The same as a game of PettingZoo's."""

    num_agents = AECEnv.num_agents


class ZooCamp(Camp, ParallelEnv):
    """`Camp` as a game of PettingZoo's."""

    def __init__(self):
        super().__init__()
        self.spaces = {a: (Camp.observation_space(self, a), Camp.action_space(self, a)) for a in
                       self.possible_agents}  # fmt: skip

    def observation_space(self, agent):
        return self.spaces[agent][0]

    def action_space(self, agent):
        return self.spaces[agent][1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # on names, bounds and the like
def test_the_games_of_these_tests_pass_pettingzoo_s_own_tests(capsys):
    api_test(ZooTable(), num_cycles=300)
    for _ in range(3):
        parallel_api_test(ZooCamp(), num_cycles=30)
    assert capsys.readouterr().out.count("Passed") == 4


def wrong(**how):
    """`Table` that does something else at and after its third move."""

    class Wrong(Table):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.leaves_after = dict.fromkeys(self.leaves_after, 99)

        def last(self, observe=True):
            found = super().last(observe)
            is_due = self.moves >= 3 and "last" in how
            return how["last"](self, list(found)) if is_due else found

        def step(self, action):
            super().step(action)
            if self.moves >= 3 and "step" in how:
                how["step"](self)

    return Wrong


def but(place, change):
    """Put something else into what `last` returns, of players."""

    def changed(game, found):
        if game.agent_selection != "bank_0":
            found[place] = change(found[place])
        return found

    return changed


def fails(*_):
    raise ZeroDivisionError


def vanishes(game):
    """An agent that is no longer there, and had no turn in which it ended."""
    game.agents.remove("player_0")
    game._next()


def stays(game):
    """Agents that are dead, and stay in the game."""
    game.terminations = dict.fromkeys(game.agents, True)
    game.step = lambda action: None


AGENT = r"player_\d"
IN_STEP_3 = r"ZeroDivisionError(.|\n)*failed in step 3 with action \{'\w+': .*" + PLACE


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"step": fails}, IN_STEP_3),
        ({"last": fails}, IN_STEP_3),
        ({"last": but(0, lambda o: o | {"action_mask": np.zeros(4, np.int8)})},
         f"gave agent {AGENT} an action mask that allows no action at all .{PLACE}"),
        ({"last": but(0, lambda o: o | {"observation": np.full(3, np.nan)})},
         f"gave agent {AGENT} a value that is not finite .*nan.*{PLACE}"),
        ({"last": but(0, lambda o: o | {"observation": np.zeros(2)})},
         rf"gave agent {AGENT} an observation 'observation' of shape \(2,\) .*{PLACE}"),
        ({"last": but(0, lambda o: o | {"action_mask": np.ones(5, np.int8)})},
         rf"gave agent {AGENT} an observation 'action_mask' of shape \(5,\).*{PLACE}"),
        ({"last": but(0, lambda o: {"observation": o["observation"]})},
         f"gave agent {AGENT} an observation without the key 'action_mask'.*{PLACE}"),
        ({"last": but(0, lambda o: None)}, f"gave agent {AGENT} an observation without .*{PLACE}"),
        ({"last": but(1, lambda r: np.nan)}, f"gave agent {AGENT} a value .*reward nan.*{PLACE}"),
        ({"last": but(1, lambda r: np.ones(2))},
         f"the reward .*expected one number .agent {AGENT}, .*{PLACE}"),
        ({"last": but(1, lambda r: None)}, f"reward None; .*agent {AGENT}, .*{PLACE}"),
        ({"last": lambda game, found: tuple(found[:4])},
         rf"last\(\) of agent \w+ returned a tuple of 4; expected \(obs.*{PLACE}"),
        ({"last": lambda game, found: [*found[:4], {}] if game.agent_selection == "bank_0"
          else found}, rf"gave agent bank_0 no action mask in info\['action_mask'\] .*{PLACE}"),
        ({"step": lambda game: setattr(game, "agent_selection", "nobody")},
         f"agent 'nobody' is in `agent_selection`, and not in `possible_agents`.*{PLACE}"),
        ({"step": lambda game: game.agents.append("guest")},
         f"agent 'guest' is in `agents`.*{PLACE}"),
        ({"step": vanishes},
         f"The agent player_0 is no longer in `agents`, and had no turn.*{PLACE}"),
        ({"step": lambda game: game.agents.clear()}, f"agent {AGENT} is no longer in.*{PLACE}"),
        ({"step": stays}, rf"left the game, such as \w+, had 1000 turns in a row .*{PLACE}"),
    ],
)  # fmt: skip
def test_bad_values_of_a_game_are_refused_with_agent_and_position(how, message):
    vector = vector_of(wrong(**how))
    with pytest.raises(EnvError, match=message):
        all_played(vector, 40, 20)


def test_a_mask_of_an_agent_that_waits_or_has_left_may_allow_nothing():
    """That of players at `Table` does; PettingZoo's classic games have such masks."""
    vector = vector_of(Table)
    moves, _, _ = all_played(vector, 40, 20)
    finals = [
        move["next_obs"]["action_mask"]
        for column in moves[0].columns
        for move in column
        if move["truncated"] and not move["is_cut"] and not move["terminated"]
    ]
    assert [0, 0, 0, 0] in finals
