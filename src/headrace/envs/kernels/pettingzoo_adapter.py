"""Kernel games of several agents in PettingZoo's form, its parallel API.

Left out: games of others in this form, and drawing.
"""

from copy import deepcopy
from typing import Any

import numpy as np

import headrace.envs.kernels.library  # noqa: F401  # registers its ids
from headrace.envs.kernels.gym_adapter import Kernel, Stepper, check_choices
from headrace.envs.kernels.registry import build, registered
from headrace.errors import MissingExtraError, UsageError
from headrace.spec import Array

try:
    import pettingzoo
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"PettingZoo's form needs a package that is not installed ({error}).\n"
        "To install it: pip install 'headrace[pettingzoo]'"
    ) from None


class KernelParallelEnv(pettingzoo.ParallelEnv):  # type: ignore[misc]  # PettingZoo has no types
    """One game; interpreted, so that a debugger stops in the author's functions.

    Agents are named by their roles: `tagger_0`, `tagger_1`, ..., `runner_0`. One that has left the
    game is no longer among `agents`.

    `reset(seed=s)` begins the first episode of this seed, and a reset without one the next episode.

    Args:
        kernel_env: an id, `module:Class`, a class, or a kernel environment.
        compiled: whether to compile it, for the CPU.
        **kwargs: of the class's constructor, and `max_episode_steps`.

    Raises:
        UsageError: it does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, kernel_env: Kernel, *, compiled: bool = False, **kwargs: Any) -> None:
        if isinstance(kernel_env, str):
            kernel_env = registered(kernel_env) or kernel_env
        env = build(kernel_env, **kwargs)
        self.metadata = {"name": type(env).__name__, "render_modes": [], "is_parallelizable": True}
        roles = env.agents or {"agent": 1}
        self.possible_agents = [
            f"{role}_{i}" for role, count in roles.items() for i in range(count)
        ]
        self.agents: list[str] = []
        self.render_mode = None
        # Copies: each agent has a generator of its own to sample with.
        self.observation_spaces = {
            agent: deepcopy(env.observation_space) for agent in self.possible_agents
        }
        self.action_spaces = {agent: deepcopy(env.action_space) for agent in self.possible_agents}
        self._row = {agent: row for row, agent in enumerate(self.possible_agents)}
        # Where an agent gives none, for it has left the game.
        none = np.zeros((env.num_agents, *(env.action_space.shape or ())))
        self._none = none + getattr(env.action_space, "start", 0)
        self._stepper = Stepper(env, 1, "cpu" if compiled else "python")
        self._begun = False

    def observation_space(self, agent: str) -> Any:
        """See PettingZoo."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """See PettingZoo."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """See PettingZoo; there are no options."""
        if seed is None and not self._begun:
            seed = int(np.random.default_rng().integers(1 << 31))
        self._begun = True
        obs = self._stepper.go_on() if seed is None else self._stepper.reset(seed)
        self.agents = list(self.possible_agents)
        return dict(zip(self.agents, obs, strict=True)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """See PettingZoo: observations, rewards, terminations, truncations, infos by agent.

        Raises:
            UsageError: an agent has no action, or one that is not in its space.
            gymnasium.error.ResetNeeded: no episode was begun.
        """
        taken = self._stepper.step(self._given(actions))
        found = [(agent, self._row[agent]) for agent in self.agents]
        terminated, truncated = (
            {agent: bool(of[row]) for agent, row in found}
            for of in (taken.terminated, taken.truncated)
        )
        self.agents = [a for a, _ in found if not (terminated[a] or truncated[a])]
        return (
            {agent: taken.obs[row] for agent, row in found},
            {agent: float(taken.reward[row]) for agent, row in found},
            terminated,
            truncated,
            {agent: {} for agent, _ in found},
        )

    def close(self) -> None:
        """See PettingZoo."""
        self._stepper.close()

    def _given(self, actions: dict[str, Any]) -> Array:
        """`[agents, ...]`, as the space has them."""
        given = self._none.copy()
        for agent in self.agents:
            space = self.action_spaces[agent]
            if agent not in actions:
                raise UsageError(f"step: no action for {agent}, which is in the game.")
            check_choices(space, actions[agent])
            given[self._row[agent]] = actions[agent]
        return given
