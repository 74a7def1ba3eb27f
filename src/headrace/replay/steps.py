"""Recorded steps of episodes, to learn from without an environment.

Left out: where they come from (`datasets/`), and how batches are made of them
(`collectors/data.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, Obs, each


@dataclass(frozen=True)
class Steps:
    """R steps, episode after episode. The last one ends an episode.

    Attributes:
        obs: `[R, ...]`, of which each action was chosen.
        action: `[R, ...]`, as a policy emits it.
        reward, terminated, truncated: `[R]`. A step that ends an episode is one of the latter two.
        final_obs: `[F, ...]`, the true next observations of steps that are truncated, in order.
    """

    obs: Obs
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Obs

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return int((self.terminated | self.truncated).sum())

    def streams(self, count: int) -> list[range]:
        """Cut the steps at ends of episodes into `count` ranges, as equal as that allows.

        There may be fewer ranges, if there are fewer episodes.
        """
        ends = 1 + (self.terminated | self.truncated).nonzero().squeeze(-1).numpy()
        wanted = np.arange(1, count + 1) * (len(self) / count)
        cuts = np.unique(ends[np.minimum(np.searchsorted(ends, wanted - 0.5), len(ends) - 1)])
        return [range(first, end) for first, end in zip((0, *cuts[:-1]), cuts, strict=True)]


class Reader:
    """Reads several streams of steps at once, each from the beginning again after its end.

    Args:
        streams: ranges of steps.

    Attributes:
        position: the steps that each stream has read, `[n]`.
    """

    def __init__(self, steps: Steps, streams: Sequence[range]) -> None:
        self._steps = steps
        self._first = torch.tensor([stream.start for stream in streams])
        self._size = torch.tensor([len(stream) for stream in streams])
        self._final_at = steps.truncated.nonzero().squeeze(-1)
        self.position = torch.zeros(len(streams), dtype=torch.int64)

    def fill(self, out: Fragment) -> None:
        """Fill a fragment `[T, n]` with the next T steps of each stream."""
        steps, num_steps = self._steps, out.num_steps
        ahead = torch.arange(num_steps + 1).unsqueeze(1)
        row = self._first + (self.position + ahead) % self._size
        for target, source in _pairs(out.obs, steps.obs):
            target.copy_(source[row])
        row = row[:-1]
        out.action.copy_(steps.action[row])
        out.reward.copy_(steps.reward[row])
        out.terminated.copy_(steps.terminated[row])
        out.truncated.copy_(steps.truncated[row])
        out.valid.fill_(True)
        at, column = out.truncated.nonzero(as_tuple=True)
        final = torch.searchsorted(self._final_at, row[at, column])
        for target, source in _pairs(out.final_obs, steps.final_obs):
            target[: len(at)] = source[final]
        out.final_step[: len(at)], out.final_row[: len(at)] = at, column
        out.final_step[len(at) :] = num_steps
        out.num_final.fill_(len(at))
        self.position += num_steps


def _pairs(target: Obs, source: Obs) -> list[tuple[Tensor, Tensor]]:
    if isinstance(target, dict):
        assert isinstance(source, dict)
        return [(target[key], source[key]) for key in target]
    assert isinstance(source, Tensor)
    return [(target, source)]


def joined(episodes: Sequence[Steps]) -> Steps:
    """Return the steps of episodes, one after the other."""

    def join(name: str) -> Obs:
        parts = [getattr(episode, name) for episode in episodes]
        joined_parts: Obs = each(lambda *arrays: torch.cat(arrays), *parts)
        return joined_parts

    names = ("obs", "action", "reward", "terminated", "truncated", "final_obs")
    return Steps(**{name: join(name) for name in names})  # type: ignore[arg-type]
