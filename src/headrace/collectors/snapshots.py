"""Where the environments are, as the learner's side knows it: what it takes to go on from there.

For checkpoints, and for whoever takes over from a sampler that was lost. A batch is entered once it
counts (it is learned from); until then, environments would be brought back to before it.

Left out: bringing back (`VectorEnv.restore`), and files (`storage/checkpoint.py`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, poison
from headrace.collectors.api import SamplingPlan
from headrace.collectors.rollout import RolloutResult, remembered
from headrace.envs.api import describe_position
from headrace.envs.episode_replay import ActionLog
from headrace.seeding import derive
from headrace.spec import ActionCodec, Array


class EpisodeSnapshots:
    """Of all vectors of a rank.

    Args:
        plan: the run's.
        state: what they go on from, as `state` gave it; {}: they begin.
    """

    def __init__(self, plan: SamplingPlan, state: Mapping[str, Array]) -> None:
        self._num_steps = plan.num_steps
        self._steps = dict.fromkeys(plan.vectors, int(state.get("steps", 0)))
        self._of = {v: _Journal(plan, v, state) for v in plan.vectors}
        self._held: tuple[dict[int, Fragment], list[RolloutResult]] | None = None

    def steps(self, vectors: Iterable[int] | None = None) -> int:
        """How many each env has taken in fragments that count: the most of these vectors (all)."""
        return max(self._steps[v] for v in (self._steps if vectors is None else vectors))

    def begin(self, states: Mapping[int, dict[str, Array]]) -> None:
        """Vectors were brought to these states, with observations: where they were, or anew."""
        for v, state in states.items():
            self._of[v].begin(state)

    def stage(self, fragments: dict[int, Fragment], filled: list[RolloutResult]) -> None:
        """A batch is whole; whether it counts is not known yet."""
        self._held = fragments, filled

    def drop(self) -> None:
        """It does not."""
        self._held = None

    def accept(self) -> None:
        """It does."""
        if self._held is None:
            return
        fragments, all_filled = self._held
        for filled in all_filled:
            for v, state in filled.states.items():
                self._of[v].accept(fragments[v], state, filled.step_s[v])
                self._steps[v] += self._num_steps
        self._held = None

    def state(self, vectors: Iterable[int] | None = None) -> dict[str, Array]:
        """All of it (or of some vectors), as named arrays."""
        state = {"steps": np.array(self.steps(vectors))}
        for v in self._of if vectors is None else vectors:
            state |= self._of[v].state()
        return state

    def describe_position(self, fragments: Mapping[int, Fragment], worker: str) -> str:
        """Describe where a worker is, by the rewards that it has not written yet (NaN)."""
        for v, fragment in fragments.items():
            if count_unwritten(fragment):
                return self._of[v].describe_position(fragment, worker)
        return f"after the last step of a fragment, {worker}"


def unwritten(fragments: Iterable[Fragment]) -> None:
    """Have it seen which env steps are not written yet."""
    for fragment in fragments:
        poison(fragment.reward)


def count_unwritten(fragment: Fragment) -> int:
    """How many env steps are not written, of a fragment that was `unwritten`."""
    return int(np.isnan(fragment.reward.numpy()).sum())


class _Journal:
    """Of one vector.

    Args:
        plan: the run's.
        vector: its index over all ranks.
        state: what it goes on from, as `state` gave it; {}: nothing.
    """

    def __init__(self, plan: SamplingPlan, vector: int, state: Mapping[str, Array]) -> None:
        n = plan.envs_per_vector
        self._plan, self._name = plan, f"vector{vector}."
        self.env_id = np.arange(vector * n, (vector + 1) * n)
        self._codec, self._log = ActionCodec(plan.spec.action), ActionLog()
        self._known = {
            name.removeprefix(self._name): array
            for name, array in state.items()
            if name.startswith(self._name)
        }

    def begin(self, state: dict[str, Array]) -> None:
        """The vector was brought to `state`, with observations: from what is known, or begun anew.

        The actions of the episodes that were brought back go on.
        """
        before = self.state()
        given = {
            i: actions
            for i in range(len(self.env_id))
            if (actions := before.get(f"{self._name}env{i}.actions")) is not None
            and state["episode_step"][i]  # not begun anew
        }
        longest = max(map(len, given.values()), default=0)
        shape = self._plan.spec.action.shape
        log = np.zeros((longest, len(self.env_id), *shape), self._plan.spec.action.dtype)
        for i, actions in given.items():
            log[longest - len(actions) :, i] = actions.reshape(-1, *shape)
        self._log = ActionLog()
        self._log.commit(log, longest)
        self._known = state

    def accept(self, fragment: Fragment, state: dict[str, Array], step_s: float) -> None:
        """A fragment counts.

        Args:
            fragment: full.
            state: of the vector after it.
            step_s: mean seconds per env step, to see what could be replayed in time.
        """
        if not self._plan.maker.native:  # such a form cannot be replayed
            rows = fragment.action.numpy()
            actions = self._codec.to_env(rows.reshape(-1, *rows.shape[2:]))
            actions = actions.reshape(*rows.shape[:2], *self._plan.spec.action.shape)
            # No more is kept than could be replayed in time: an episode may be endless.
            longest = int(state["episode_step"].max())
            if longest * step_s > self._plan.replay_limit_s:
                longest = int(self._plan.replay_limit_s / step_s)
            self._log.commit(actions.astype(self._plan.spec.action.dtype), longest)
        last = fragment.obs if isinstance(fragment.obs, dict) else {"": fragment.obs}
        obs = {f"obs.{key}": o[-1].numpy().copy() for key, o in last.items()}
        self._known = state | obs | remembered(fragment.recurrent_state[1])

    def state(self) -> dict[str, Array]:
        """All of it, as named arrays; {} before the first fragment."""
        if not self._known:
            return {}
        state = dict(self._known)
        for i in range(len(self.env_id)):
            own = any(name.startswith(f"env{i}.state.") for name in state)
            seeded = self._plan.reseed_episodes or self._known["episode"][i] == 0
            if not own and seeded and not self._plan.maker.native:
                actions = self._log.last(i, int(self._known["episode_step"][i]))
                if actions is not None:
                    state[f"env{i}.actions"] = actions
        return {self._name + name: array for name, array in state.items()}

    def describe_position(self, fragment: Fragment, worker: str) -> str:
        """Describe where a worker is in `fragment`, which is not full."""
        t, i = (int(x) for x in np.argwhere(np.isnan(fragment.reward.numpy()))[0])
        if t == 0 and _is_poison(fragment.action[0, i]):  # never written to
            return (
                f"in the first reset, or the policy's first step, of envs {self.env_id.tolist()} "
                f"of {self._plan.spec.id}, {worker}"
            )
        if i == 0 and t and (ended := self._ended(fragment, t - 1)):
            return (
                f"in step {t + 1} of the fragment of env {self.env_id[0]} of {self._plan.spec.id}, "
                f"or in the reset before it, of env {' or '.join(ended)}; {worker}"
            )
        episode, steps = 0, t
        if self._known:
            episode, steps = (int(self._known[k][i]) for k in ("episode", "episode_step"))
            steps += t
        ends = np.flatnonzero((fragment.terminated | fragment.truncated).numpy()[:t, i])
        if len(ends):
            episode, steps = episode + len(ends), t - int(ends[-1]) - 1
        env = int(self.env_id[i])
        seeded = self._plan.reseed_episodes or episode == 0
        where = describe_position(
            f"{env} of {self._plan.spec.id}",
            worker,
            episode,
            derive(self._plan.seed, "env", env, episode) if seeded else None,
            steps,
            self._action(fragment, t, i),
        )
        return f"in {where}"

    def _ended(self, fragment: Fragment, t: int) -> list[str]:
        ends = (fragment.terminated | fragment.truncated)[t].numpy()
        return [str(env) for env in self.env_id[ends]]

    def _action(self, fragment: Fragment, t: int, i: int) -> Any:
        return self._codec.to_env(fragment.action[t, i : i + 1].numpy())[0]


def _is_poison(action: Tensor) -> bool:
    again = torch.empty_like(action)
    poison(again)
    return bool(torch.equal(action.nan_to_num(), again.nan_to_num()))


# The state of samplers, for vectors of another size: another number of learners shares them out.


_OF_ONE_ENV = re.compile(r"env(\d+)\.(.+)")


def regroup(state: dict[str, Array], num_envs: int, envs_per_vector: int) -> dict[str, Array]:
    """The same environments under way, in vectors of another size.

    Args:
        state: of all samplers of a run.
        num_envs: of the run.
        envs_per_vector: as it is to be. A vector of which an environment has no state has none.
    """
    envs: dict[int, dict[str, Array]] = defaultdict(dict)
    rest: dict[str, Array] = {}
    for name, array in state.items():
        vector, dot, column = name.partition(".")
        if not dot:
            rest[name] = array
            continue
        count = len(state[f"{vector}.episode"])
        first = int(vector.removeprefix("vector")) * count
        if own := _OF_ONE_ENV.fullmatch(column):
            envs[first + int(own[1])][f"env.{own[2]}"] = array
        else:
            for i in range(count):
                envs[first + i][column] = array[i]
    for v in range(num_envs // envs_per_vector):
        members = [envs.get(v * envs_per_vector + i) for i in range(envs_per_vector)]
        if None in members:
            continue
        for i, member in enumerate(members):
            assert member is not None
            for column, array in member.items():
                if column.startswith("env."):
                    rest[f"vector{v}.env{i}.{column.removeprefix('env.')}"] = array
        for column in members[0] or {}:
            if not column.startswith("env."):
                rest[f"vector{v}.{column}"] = np.stack([m[column] for m in members if m])
    return rest
