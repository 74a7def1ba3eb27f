"""Kernel environments of several agents in the form of PettingZoo's parallel API."""

from copy import deepcopy
from typing import Any

import numpy as np

import headrace.envs.kernels.library  # noqa: F401  # registers its ids
from headrace.envs.kernels.gym_adapter import KernelSource, KernelStepper, check_discrete_action
from headrace.envs.kernels.registry import build, registered_class
from headrace.errors import MissingExtraError, UsageError, install_command
from headrace.spec import Array

try:
    import pettingzoo
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"PettingZoo's form needs a package that is not installed ({error}).\n"
        f"To install it: {install_command('pettingzoo')}"
    ) from None


class KernelParallelEnv(pettingzoo.ParallelEnv):  # type: ignore[misc]  # PettingZoo has no types
    """One game; interpreted unless `compiled`, so that a debugger stops in its functions.

    Agents are named by their roles: `tagger_0`, `tagger_1`, ..., `runner_0`. `reset(seed=s)` begins
    the first episode of seed s; a reset without a seed begins the next one.

    Args:
        kernel_env: an id, `module:Class`, a class, or a kernel environment.
        **kwargs: arguments of the class, and `max_episode_steps`.

    Raises:
        UsageError: it does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, kernel_env: KernelSource, *, compiled: bool = False, **kwargs: Any) -> None:
        if isinstance(kernel_env, str):
            kernel_env = registered_class(kernel_env) or kernel_env
        env = build(kernel_env, **kwargs)
        self.metadata = {"name": type(env).__name__, "render_modes": [], "is_parallelizable": True}
        roles = env.agents or {"agent": 1}
        self.possible_agents = [
            f"{role}_{i}" for role, count in roles.items() for i in range(count)
        ]
        self.agents: list[str] = []
        self.render_mode = None
        # Copies, since each agent has its own generator to sample with
        self.observation_spaces = {
            agent: deepcopy(env.observation_space) for agent in self.possible_agents
        }
        self.action_spaces = {agent: deepcopy(env.action_space) for agent in self.possible_agents}
        self._row = {agent: row for row, agent in enumerate(self.possible_agents)}
        # The actions of agents that have left the game
        zeros = np.zeros((env.num_agents, *(env.action_space.shape or ())))
        self._default_actions = zeros + getattr(env.action_space, "start", 0)
        self._stepper = KernelStepper(env, 1, "cpu" if compiled else "python")

    def observation_space(self, agent: str) -> Any:
        """Return the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """Return the space of an agent's actions."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Begin an episode; there are no options."""
        obs = self._stepper.reset(seed, np.random.default_rng())
        self.agents = list(self.possible_agents)
        return dict(zip(self.agents, obs, strict=True)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return observations, rewards, terminations, truncations and infos by agent after a step.

        Raises:
            UsageError: an agent has no action, or a discrete one outside of its space.
            gymnasium.error.ResetNeeded: no episode was begun.
        """
        obs, reward, *ends, _ = self._stepper.step(self._rows(actions))
        rows = [(agent, self._row[agent]) for agent in self.agents]
        terminated, truncated = ({agent: bool(end[row]) for agent, row in rows} for end in ends)
        self.agents = [agent for agent, _ in rows if not (terminated[agent] or truncated[agent])]
        return (
            {agent: obs[row] for agent, row in rows},
            {agent: float(reward[row]) for agent, row in rows},
            terminated,
            truncated,
            {agent: {} for agent, _ in rows},
        )

    def close(self) -> None:
        """End the threads."""
        self._stepper.close()

    def _rows(self, actions: dict[str, Any]) -> Array:
        """Return the actions as `[agents, ...]`, in the units of the space."""
        rows = self._default_actions.copy()
        for agent in self.agents:
            if agent not in actions:
                raise UsageError(f"step: no action for {agent}, which is in the game.")
            check_discrete_action(self.action_spaces[agent], actions[agent])
            rows[self._row[agent]] = actions[agent]
        return rows
