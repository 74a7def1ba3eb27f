"""The inner loop: T steps of one vector into one fragment. All kinds of collectors run this one.

Left out: processes and memory (`inline.py`, `workers.py`), what a step does (`envs/`).
"""

import contextlib
from dataclasses import dataclass, field

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
        vector: is bound to the fragment here.
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


@dataclass
class Filled:
    """What a sampler says of the fragments that it was told to fill.

    Attributes:
        taken: env steps, those that were lost included.
        lost: of them, those that failed, and gave nothing.
        whole: whether all are full; else it was told to stop, and nothing of them counts.
        episodes: that ended in them.
        dropped: those that were given up, each in a line: their rows are not valid.
        states: where each vector is now, by its index in the run; without observations.
        step_s: mean seconds per env step, likewise.
    """

    taken: int = 0
    lost: int = 0
    whole: bool = False
    episodes: list[Episode] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    states: dict[int, dict[str, Array]] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)


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
        n = plan.envs_per_vector
        # What a recurrent core remembers of each vector's envs
        self._memory = [torch.zeros(n, plan.network.state_size) for _ in vectors]
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
                    guards=plan.guards,
                )
            )

    @torch.no_grad()
    def collect(self, steps: int, version: int, stop: ShouldStop) -> Filled:
        """Fill one fragment of every vector.

        Args:
            steps: how many each env has taken before, in fragments that count.
            version: of the weights.
            stop: asked between two steps.
        """
        plan, filled = self._plan, Filled()
        actor = actor_for(self.policy, plan.spec, plan.network)
        for v, vector, fragment, memory in zip(
            self._indices, self._vectors, self._fragments, self._memory, strict=True
        ):
            fragment.policy_version.fill_(version)
            fragment.core_state[0] = memory
            noise = action_noise(
                plan.seed, vector.env_id, steps, plan.num_steps, self.policy.num_draws
            )
            taken = rollout(vector, fragment, actor, torch.from_numpy(noise), self._meter, stop)
            filled.taken += int(fragment.valid[:taken].sum()) + vector.lost_steps
            filled.lost += vector.lost_steps
            filled.dropped += vector.dropped
            if taken < plan.num_steps:
                return filled
            memory.copy_(fragment.core_state[1])
            filled.episodes += vector.finish()
            filled.states[v], filled.step_s[v] = vector.state(), vector.step_s
        filled.whole = True
        self._meter.lap("rollout")
        return filled

    def restore(self, state: dict[str, Array], begin_after: int) -> Restored:
        """Go on from the state of the vectors that are this sampler's, before the first `collect`.

        Args:
            state: of all vectors.
            begin_after: where one has none, it begins episodes that no run of so many steps of
                each env can have had; 0: its first ones.
        """
        restored = Restored()
        for v, vector, memory in zip(self._indices, self._vectors, self._memory, strict=True):
            own = {
                name.removeprefix(f"vector{v}."): array
                for name, array in state.items()
                if name.startswith(f"vector{v}.")
            }
            if own:
                restored.add(vector.restore(own))
                if memory.numel():
                    begun_anew = vector.state()["episode_step"] == 0
                    memory.copy_(torch.from_numpy(own["core_state"]))
                    memory[torch.from_numpy(begun_anew)] = 0.0
            elif begin_after:
                restored.add(vector.start_after(begin_after))
        return restored

    def states(self) -> dict[int, dict[str, Array]]:
        """Where each vector is, with observations and memory, by its index in the run."""
        return {
            v: vector.state() | vector.obs() | remembered(memory)
            for v, vector, memory in zip(self._indices, self._vectors, self._memory, strict=True)
        }

    def close(self) -> None:
        """Close all environments; EnvError if one fails in it."""
        with contextlib.ExitStack() as stack:  # goes on with the rest if one raises
            for vector in self._vectors:
                stack.callback(vector.close)


def remembered(state: Tensor) -> dict[str, Array]:
    """What a recurrent core remembers of a vector's envs `[n, S]`, as a named array (a copy)."""
    return {"core_state": state.numpy().copy()} if state.numel() else {}
