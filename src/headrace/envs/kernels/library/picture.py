"""Draws agents as discs in a square, for videos."""

import numpy as np

from headrace.spec import Array

SIDE = 480  # pixels
_MARGIN = 16
_GROUND, _EDGE = (245, 245, 240), (120, 120, 120)
TAGGER, RUNNER, TAGGED = (200, 40, 40), (40, 90, 200), (190, 190, 190)


def draw_agents(x: Array, y: Array, colors: Array, length: float) -> Array:
    """Draw a disc for each agent, later ones above: `[SIDE, SIDE, 3]` uint8.

    `x` and `y`, `[agents]`, are from the left and from below; `colors` are `[agents, 3]` uint8.
    """
    picture = np.full((SIDE, SIDE, 3), _GROUND, np.uint8)
    first, last = _MARGIN, SIDE - 1 - _MARGIN
    for line in (first - 6, last + 6):
        picture[line, first - 6 : last + 7] = picture[first - 6 : last + 7, line] = _EDGE
    scale = (last - first) / length
    radius = max(3, min(8, int(40 / np.sqrt(len(x)))))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for at_x, at_y, color in zip(first + x * scale, last - y * scale, colors, strict=True):
        picture[(columns - at_x) ** 2 + (rows - at_y) ** 2 <= radius**2] = color
    return picture


def agent_colors(is_tagger: Array, alive: Array) -> Array:
    """Return `[agents, 3]`: the colors of taggers, of runners, and of agents that have left."""
    roles = np.where(is_tagger[:, None], TAGGER, RUNNER)
    return np.where(alive[:, None], roles, TAGGED).astype(np.uint8)
