"""Goals that are replaced by what the same episode reached later, when transitions are drawn.

Hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495), with its goals `future`.
Left out: the rows themselves (`buffer.py`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from headrace.batch import Minibatch
from headrace.errors import EnvError
from headrace.spec import Array, EnvSpec

DESIRED, ACHIEVED = "desired_goal", "achieved_goal"

GoalReward = Callable[[Array, Array], Array]
"""From achieved and desired goals `[B, ...]` to rewards `[B]`."""


def has_goals(spec: EnvSpec) -> bool:
    """Return whether observations have a goal, and in the same form what was achieved."""
    spaces = dict(spec.observation.parts)
    return DESIRED in spaces and spaces[DESIRED] == spaces.get(ACHIEVED)


class Episodes(nn.Module):
    """Which episode each row of the buffer is of, and the newest row of each.

    Args:
        capacity: rows of each environment.
    """

    first: Tensor
    newest: Tensor

    def __init__(self, num_envs: int, capacity: int) -> None:
        super().__init__()
        # The number of the first row of each row's episode. At the place of that row: the number
        # of the newest row whose next observation is stored as one of the same episode.
        none = torch.full((capacity, num_envs), -1, dtype=torch.int64)
        self.register_buffer("first", none)
        self.register_buffer("newest", none.clone())

    def add(self, env: Tensor, number: Tensor, goes_on: Tensor, leads_on: Tensor) -> None:
        """Note new rows.

        Args:
            env: `[n]`.
            number: `[T, n]`, of the rows.
            goes_on: `[T, n]`, whether a row is of the same episode as the row before it.
            leads_on: `[T, n]`, whether a row is a transition to an observation of its episode.
        """
        capacity, num_envs = self.first.shape
        begins = torch.where(goes_on, 0, number)
        begins[0] += torch.where(goes_on[0], self.first[(number[0] - 1) % capacity, env], 0)
        first = torch.cummax(begins, 0).values
        self.first[number % capacity, env] = first
        place = first % capacity * num_envs + env
        newest = torch.where(leads_on, number, first - 1)
        self.newest.view(-1).scatter_reduce_(0, place.flatten(), newest.flatten(), "amax")

    def newest_of(self, number: Tensor, env: Tensor, end: Tensor) -> Tensor:
        """Return the newest row of each row's episode that leads to an observation of it.

        Args:
            end: of each environment, the number of its next row.
        """
        capacity = len(self.first)
        first = self.first[number % capacity, env]
        newest = self.newest[first % capacity, env]
        # Of an episode longer than the buffer the first row is overwritten: no goals follow.
        return torch.where(first > end[env] - capacity, newest, number - 1)


def relabel(
    columns: Minibatch,
    reached: Tensor,
    is_chosen: Tensor,
    reward: GoalReward,
) -> None:
    """Replace goals in transitions, and rewards by those for the new goals.

    Args:
        columns: `obs`, `next_obs` and `reward`, in place.
        reached: `[B, ...]`, the goals to take.
        is_chosen: `[B]`, the transitions whose goals are replaced.
        reward: of the environment.

    Raises:
        EnvError: the environment's function fails, or does not give a number for each row.
    """
    chosen = is_chosen.view(-1, *[1] * (reached.dim() - 1))
    goal = torch.where(chosen, reached, columns["obs"][DESIRED])
    for name in ("obs", "next_obs"):
        columns[name] = columns[name] | {DESIRED: goal}
    achieved = columns["next_obs"][ACHIEVED]
    found = np.asarray(reward(achieved.cpu().numpy(), goal.cpu().numpy()), dtype=np.float32)
    if found.shape != tuple(is_chosen.shape):
        raise EnvError(
            f"compute_reward gave an array of shape {found.shape} for {len(goal)} goals: expected "
            f"({len(goal)},), one reward for each row.\nLet it take arrays of goals, as "
            "Gymnasium-Robotics' environments do."
        )
    rewards = torch.from_numpy(found).to(columns["reward"].device)
    columns["reward"] = torch.where(is_chosen, rewards, columns["reward"])
