"""The Python form of ALE's games, which plays them as their own vector form does.

84×84 gray, four frames stacked, four frames skipped, up to 30 no-ops at the start and FIRE pressed
where the game has it (Mnih et al. 2015; Machado et al. 2018, arXiv:1709.06009, for sticky actions,
which the id decides). Wrappers and videos need this form. The learner may clip rewards.
"""

import os
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from headrace.machine.limits import cpu_cores

_VECTOR_ONLY = "reward_clipping", "autoreset_mode", "num_threads", "thread_affinity_offset"

_PREPROCESSING = {
    "noop_max": "noop_max",
    "frameskip": "frame_skip",
    "episodic_life": "terminal_on_life_loss",
    "grayscale": "grayscale_obs",
}
"""Argument of the vector form -> of Gymnasium's wrapper."""


def is_vector_form(env: Any) -> bool:
    """Return whether `env` is ALE's vector form, whose observations are stacks of frames."""
    return type(env).__module__.split(".")[0] == "ale_py" and hasattr(env, "num_envs")


def vector_kwargs(num_threads: int) -> dict[str, Any]:
    """Return arguments of ALE's vector form that differ from its defaults."""
    kwargs = {"reward_clipping": False, "autoreset_mode": "SameStep", "num_threads": num_threads}
    if cpu_cores() == os.cpu_count() == num_threads:
        # Each thread keeps a core: now and then the scheduler puts two of them on one, for a whole
        # step, while another core is idle. Not where other processes may use the cores.
        kwargs["thread_affinity_offset"] = 0
    return kwargs


class _Fire(gymnasium.Wrapper[Any, Any, Any, Any]):
    # Some games wait for FIRE

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        next_obs, _, terminated, truncated, next_info = self.env.step(1)
        return (obs, info) if terminated or truncated else (next_obs, next_info)


def make(env_id: str, **kwargs: Any) -> Any:
    """Make one game; it takes the arguments of ALE's vector form, and of the game itself.

    With `obs_type` (`ram`, `rgb`, ...) it is the bare game.
    """
    if "obs_type" in kwargs:
        return gymnasium.make(env_id, **kwargs)
    kwargs = {name: v for name, v in kwargs.items() if name not in _VECTOR_ONLY}
    stack, fire = kwargs.pop("stack_num", 4), kwargs.pop("use_fire_reset", True)
    size = kwargs.pop("img_width", 84), kwargs.pop("img_height", 84)
    preprocessing = {name: kwargs.pop(key) for key, name in _PREPROCESSING.items() if key in kwargs}
    env: Any = gymnasium.make(env_id, frameskip=1, **kwargs)
    env = AtariPreprocessing(env, screen_size=size, **preprocessing)
    if fire and env.unwrapped.get_action_meanings()[1:2] == ["FIRE"]:
        env = _Fire(env)
    return FrameStackObservation(env, stack, padding_type="zero")
