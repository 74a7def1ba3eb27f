"""Lets two players play a game in turns, in each other's seats, and counts how the games ended.

It steps PettingZoo's environment itself, and asks a run's policy as a user would, by
`headrace.load_policy`: what is counted here shares no code with the evaluations of a training. (A
tournament, `headrace tournament`, counts both seats together.) Left out: who plays whom.
"""

from benchmarks.games import players
from headrace import load_policy
from headrace.envs.factory import EnvMaker

ENDS = {1: "wins", 0: "draws", -1: "losses"}
"""Of a game, by the sign of the first player's return."""


def policy_player(run_dir):
    """The newest policy of a run as a player, which takes its likeliest action."""
    policy = load_policy(run_dir)
    return lambda observation, agent: policy(observation)


def by_seat(game, player, opponent, games):
    """How so many games end for a player from each seat: counts by the seat's name."""
    players.seed(0)
    env = EnvMaker(game)()
    found = {}
    for seat in env.possible_agents:
        of = dict.fromkeys(env.possible_agents, opponent) | {seat: player}
        found[seat] = play(env, of, seat, games)
    env.close()
    return found


def play(env, of, seat, games):
    """Play games, with a player for each agent; how they ended for the one of `seat`."""
    ended = dict.fromkeys(ENDS.values(), 0)
    for game in range(games):
        env.reset(seed=game)
        returned = 0.0
        for agent in env.agent_iter():
            observation, reward, terminated, truncated, _ = env.last()
            if agent == seat:
                returned += reward
            over = terminated or truncated
            env.step(None if over else of[agent](observation, agent))
        ended[ENDS[(returned > 0) - (returned < 0)]] += 1
    return ended
