"""What is inside of Gymnasium's own wrappers that only count steps or check what is checked anyway.

Stepping it directly saves two calls in each step; the time limit is then kept by whoever
steps. Left out: every other wrapper, which may do anything.
"""

from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

_TRANSPARENT = (OrderEnforcing, PassiveEnvChecker, TimeLimit)
NO_LIMIT = 1 << 62


def inside(env: Any) -> tuple[Any, int]:
    """The environment inside of wrappers that may be passed by, and their time limit (steps)."""
    limit = NO_LIMIT
    while type(env) in _TRANSPARENT:  # not a subclass, which may do more
        if type(env) is TimeLimit:
            limit = min(limit, int(env._max_episode_steps))
        env = env.env
    return env, limit
