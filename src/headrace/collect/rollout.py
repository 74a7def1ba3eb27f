"""The inner loop: T steps of one vector into one fragment. All kinds of collectors run this one.

Left out: processes and memory (`inline.py`, `workers.py`), what a step does (`envs/`).
"""

import contextlib

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment
from headrace.collect.api import Plan, ShouldStop
from headrace.envs.api import Episode, Restored, VectorEnv
from headrace.envs.vector import make_vector
from headrace.meter import Meter
from headrace.models import policy as policies
from headrace.models.numpy_actor import actor_for
from headrace.models.policy import Actor
from headrace.seeding import action_noise
from headrace.spec import Array


def rollout(
    vector: VectorEnv,
    fragment: Fragment,
    actor: Actor,
    noise: Tensor,
    meter: Meter,
    stop: ShouldStop,
) -> int:
    """Step `vector` through one fragment.

    Args:
        vector: is bound to the fragment here, and not committed.
        fragment: is filled, except for `policy_version`.
        actor: the policy.
        noise: `[T, n, draws]`, uniform in (0, 1).
        meter: told where the time goes.
        stop: asked before every step.

    Returns:
        The number of steps taken: T, or fewer if told to stop.
    """
    vector.bind(fragment)
    actions = fragment.action.numpy()
    act = actor.begin(fragment, noise)
    meter.lap("rollout")
    for t in range(fragment.num_steps):
        if stop():
            return t
        act(t)
        meter.lap("infer")
        vector.step(t, actions[t])
    actor.finish()
    meter.lap("infer")
    return fragment.num_steps


class Sampler:
    """The vectors of one process, with a copy of the policy.

    Args:
        plan: the run's.
        vectors: which vectors of the run are this sampler's: vector v has the envs
            `v * n .. (v + 1) * n - 1`.
        fragments: memory for one fragment per vector.
        meter: this process's.
        name: in errors.
    """

    def __init__(
        self, plan: Plan, vectors: list[int], fragments: list[Fragment], meter: Meter, name: str
    ) -> None:
        self._plan, self._fragments, self._meter = plan, fragments, meter
        self._indices = vectors
        # Its weights are overwritten by the first publish.
        self.policy = policies.build(plan.spec, plan.network, 0, plan.model)
        self._steps = 0
        self._full = False  # all fragments are full and not yet committed
        n = plan.envs_per_vector
        self._vectors: list[VectorEnv] = []
        for v in vectors:
            self._vectors.append(
                make_vector(
                    plan.maker,
                    plan.spec,
                    np.arange(v * n, (v + 1) * n),
                    plan.seed,
                    meter,
                    num_threads=plan.threads_per_sampler,
                    reseed=plan.reseed_episodes,
                    replay_limit_s=plan.replay_limit_s,
                    sampler=name,
                )
            )

    @torch.no_grad()
    def collect(self, version: int, stop: ShouldStop) -> tuple[list[Episode] | None, int]:
        """Fill one fragment of every vector; the ones before count now.

        Returns:
            The episodes that ended (None: told to stop, nothing of this counts), and the number of
            env steps taken.
        """
        self.commit()
        plan = self._plan
        taken = 0
        episodes: list[Episode] = []
        actor = actor_for(self.policy, plan.spec, plan.network)
        for vector, fragment in zip(self._vectors, self._fragments, strict=True):
            fragment.policy_version.fill_(version)
            noise = action_noise(
                plan.seed, vector.env_id, self._steps, plan.num_steps, self.policy.num_draws
            )
            steps = rollout(vector, fragment, actor, torch.from_numpy(noise), self._meter, stop)
            taken += int(fragment.valid[:steps].sum())
            if steps < plan.num_steps:
                return None, taken
            episodes += vector.finish()
        self._full = True
        self._meter.lap("rollout")
        return episodes, taken

    def commit(self) -> None:
        """Make the fragments that were filled count, if they do not yet: they are learned from."""
        if self._full:
            self._full = False
            self._steps += self._plan.num_steps
            for vector in self._vectors:
                vector.commit()

    def give_up(self) -> None:
        """The fragments that were filled never count."""
        self._full = False

    def state(self) -> dict[str, Array]:
        """The state of every vector, by its index in the run."""
        state = {"steps": np.array(self._steps)}
        for v, vector in zip(self._indices, self._vectors, strict=True):
            state |= {f"vector{v}.{name}": array for name, array in vector.state().items()}
        return state

    def restore(self, state: dict[str, Array]) -> Restored:
        """Go on from the state of the vectors that are this sampler's."""
        self._steps = int(state["steps"])
        restored = Restored()
        for v, vector in zip(self._indices, self._vectors, strict=True):
            own = {
                name.removeprefix(f"vector{v}."): array
                for name, array in state.items()
                if name.startswith(f"vector{v}.")
            }
            if own:
                restored.add(vector.restore(own))
            elif self._steps:
                restored.add(vector.start_after(self._steps))
            # else: the run was stopped before its first batch, and begins as it would have
        return restored

    def close(self) -> None:
        """Close all environments; EnvError if one fails in it."""
        with contextlib.ExitStack() as stack:  # goes on with the rest if one raises
            for vector in self._vectors:
                stack.callback(vector.close)
