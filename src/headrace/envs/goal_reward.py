"""The reward of a goal environment as a function of goals. Left out: who asks (`replay/`)."""

from collections.abc import Callable

from headrace.envs.api import explain_errors
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError
from headrace.spec import Array


def goal_reward(maker: EnvMaker) -> Callable[[Array, Array], Array]:
    """Return the function from achieved and desired goals `[B, ...]` to rewards `[B]`.

    It is the method `compute_reward(achieved_goal, desired_goal, info)` of an environment that is
    made for it, as in Gymnasium-Robotics.

    Raises:
        ConfigError: the environment has no such method.
    """
    env = maker()
    has_it = env.has_wrapper_attr("compute_reward")
    compute = env.get_wrapper_attr("compute_reward") if has_it else None
    if not callable(compute):
        raise ConfigError(
            f"hindsight replaces goals, and needs the reward for other goals, but {maker.name} has "
            "no method compute_reward(achieved_goal, desired_goal, info).\nAdd it, or use "
            "--hindsight 0."
        )

    def of_goals(achieved: Array, desired: Array) -> Array:
        with explain_errors(f"while compute_reward of {maker.name} was called"):
            rewards: Array = compute(achieved, desired, {})
        return rewards

    return of_goals
