"""A collector that reads recorded steps, and steps no environment.

Left out: where the steps come from (`datasets/`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace import batch
from headrace.collectors.api import Collected, Collector, SamplingPlan, ShouldStop
from headrace.errors import ConfigError
from headrace.models.policy import Policy
from headrace.replay.steps import Reader, Steps
from headrace.spec import Array

_PREFIX = "data_"


class DataCollector(Collector):
    """Reads as many streams of steps as the plan has environments, over and over.

    Args:
        num_ranks: each has as many streams.
        state: saved state to resume from; {}: begin.

    Raises:
        ConfigError: there are fewer episodes than environments.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        steps: Steps,
        num_ranks: int,
        stop: ShouldStop,
        state: Mapping[str, Array],
    ) -> None:
        super().__init__(plan, stop)
        num_streams = plan.num_envs * num_ranks
        streams = steps.streams(num_streams)
        if len(streams) < num_streams:
            raise ConfigError(
                f"num_envs={num_streams}, but the data have only {steps.num_episodes} episodes, "
                f"which make {len(streams)} streams.\nUse --num-envs {len(streams)} or fewer."
            )
        self._name = f"{_PREFIX}{plan.first_env}"
        own = streams[plan.first_env : plan.first_env + plan.num_envs]
        self._reader = Reader(steps, own)
        positions = _positions(state)
        if len(positions) == num_streams:
            self._reader.position = positions[plan.first_env : plan.first_env + plan.num_envs]
        self._fragment = batch.allocate(batch.columns(plan.spec, {}, plan.num_steps, plan.num_envs))
        self._fragment.env_id.copy_(torch.arange(plan.num_envs) + plan.first_env)

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._version = version

    def collect(self) -> Collected | None:
        if self._stop():
            return None
        self._before = self._reader.position.clone()
        self._reader.fill(self._fragment)
        self._fragment.policy_version.fill_(self._version)
        count = self._fragment.valid.numel()
        self.ledger.collected += count
        return Collected([self._fragment], count)

    def discard_batch(self) -> None:
        self._reader.position = self._before
        self.ledger.lost += self._fragment.valid.numel()

    def state(self) -> dict[str, Array]:
        return {self._name: self._reader.position.numpy()}

    def close(self) -> None:
        return


def _positions(state: Mapping[str, Array]) -> Tensor:
    """Return the positions of all streams that are saved, of all ranks in order; `[0]` if none."""
    saved = {
        int(name.removeprefix(_PREFIX)): torch.from_numpy(position)
        for name, position in state.items()
        if name.startswith(_PREFIX)
    }
    none = torch.zeros(0, dtype=torch.int64)
    return torch.cat([none, *(saved[first] for first in sorted(saved))])
