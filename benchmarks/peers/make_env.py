"""Makes an environment by the name that `headrace train` takes; needs Gymnasium only.

Left out: wrappers of a trainer's own.
"""

import importlib

import gymnasium as gym


def make_env(name):
    """An environment from a Gymnasium id, or from `module:callable`."""
    module, _, attribute = name.partition(":")
    if attribute:
        return getattr(importlib.import_module(module), attribute)()
    if name.startswith("MiniGrid-"):
        import minigrid  # noqa: F401  # registers its ids
    if name.startswith(("highway-", "merge-", "roundabout-")):
        import highway_env  # noqa: F401
    return gym.make(name)
