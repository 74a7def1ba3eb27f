"""Tic-tac-toe and connect four, learned without any flag, and with a league of 8.

    headrace train classic/tictactoe-v3
    headrace train classic/tictactoe-v3 --league 8

1,000,000 env steps each, which are moves; that is the default. Then the newest policy plays 1,000
games from each seat, always its likeliest action: against a player that chooses any of the allowed
moves at random, and in tic-tac-toe against one that plays perfectly, and chooses at random among
the moves that are equally good (`players.py`). PettingZoo's environment is stepped directly
(`play.py`).

What this does not show: how a policy fares against players who look for its weak points. One that
takes its likeliest action never loses tic-tac-toe against perfect play if it makes no mistake on
the ways that perfect play leads to; there are others.
"""

from benchmarks.games import play, players, runs

NAME = "games_classic"
ENV_STEPS, GAMES, SEEDS = 1_000_000, 1_000, 1
RANDOM, PERFECT = "random moves", "perfect play"
OPPONENTS = {
    "classic/tictactoe-v3": {RANDOM: players.random_move, PERFECT: players.perfect_tictactoe},
    "classic/connect_four-v3": {RANDOM: players.random_move},
}
FORMS = {"against itself": (), "with a league of 8": ("--league", "8")}
SEATS = ("first", "second")


def add_flags(parser):
    """Those of this part."""
    runs.add_flags(parser, SEEDS)


def measure(env, form, seed, flags, folder):
    """Train one run, and let it play."""
    more = [*FORMS[form], *(["--seed", seed] if seed else [])]
    if flags.share != 1:
        more += ["--total-env-steps", max(1, round(ENV_STEPS * flags.share))]
    name = f"{env.partition('/')[2]}, {form}, seed {seed}".replace(", ", "-").replace(" ", "_")
    trained = runs.train(folder, name, env, *more)
    player, games = play.policy_player(folder / name), max(1, round(GAMES * flags.share))
    against = {
        opponent: list(play.by_seat(env, player, moves, games).values())
        for opponent, moves in OPPONENTS[env].items()
    }
    return trained | {"seed": seed, "games_of_each_seat": games, "against": against}


def main(flags, parser):
    """Train and play, and write what came out; the exit code."""
    folder = runs.fresh(NAME)
    result = runs.about(NAME, flags, games={})
    for env in OPPONENTS:
        of = result["games"].setdefault(env, {})
        for form in FORMS:
            of[form] = [measure(env, form, seed, flags, folder) for seed in range(flags.seeds)]
            runs.save(result, flags)  # so that it stays if the next one is stopped
    runs.write(result, tables, flags)
    return 0


def tables(result):
    """A table for each game: a row for each way to train, opponent and seat."""
    lines = []
    for env, forms in result["games"].items():
        lines += ["", f"**{env}**", ""]
        lines += ["| learned | opponent | seat | games | won | drawn | lost |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for form, of in forms.items():
            for opponent in of[0]["against"]:
                for place, seat in enumerate(SEATS):
                    played = [each["against"][opponent][place] for each in of]
                    sums = [sum(each[end] for each in played) for end in play.ENDS.values()]
                    counts = " | ".join(f"{each:,}" for each in (sum(sums), *sums))
                    lines.append(f"| {form} | {opponent} | {seat} | {counts} |")
        lines += ["", f"{of[0]['env_steps']:,} env steps each."]
    return "\n".join(lines[1:])
