"""Players that follow a script: `player(observation, agent) -> action`.

Observations are PettingZoo's: a dict with the planes of the board, whose first has the player's own
pieces and whose second the opponent's, and an action mask.
"""

import functools
import random

LINES = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6),
)  # fmt: skip
OWN, OTHER, EMPTY = 1, -1, 0
_random = random.Random(0)


def random_move(observation, agent):
    """Any move that is allowed."""
    return _random.choice(allowed(observation))


def perfect_tictactoe(observation, agent):
    """A move that leads to the best end that can be forced: any of these.

    A player that always took the first of them would play the same game against a policy that
    always takes its likeliest action, again and again.
    """
    board = board_of(observation)
    values = {move: -value(after(board, move)) for move in allowed(observation)}
    best = max(values.values())
    return _random.choice([move for move, of in values.items() if of == best])


def seed(number):
    """Begin the random numbers of the players anew."""
    _random.seed(number)


def allowed(observation):
    """The moves that the mask allows."""
    return [move for move, is_allowed in enumerate(observation["action_mask"]) if is_allowed]


def board_of(observation):
    """The board of tic-tac-toe as whoever is to move sees it: `OWN`, `OTHER` or `EMPTY`."""
    planes = observation["observation"].reshape(9, 2)
    return tuple(OWN if own else OTHER if other else EMPTY for own, other in planes)


def after(board, move):
    """The board after a move, as the opponent sees it."""
    moved = (*board[:move], OWN, *board[move + 1 :])
    return tuple(-square for square in moved)


@functools.cache
def value(board):
    """What whoever is to move can force: 1 to win, 0 a draw, -1 to lose."""
    if any(all(board[square] == OTHER for square in line) for line in LINES):
        return -1
    moves = [move for move, square in enumerate(board) if square == EMPTY]
    return max((-value(after(board, move)) for move in moves), default=0)
