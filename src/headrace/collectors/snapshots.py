"""Snapshots of the environments on the learner's side, for checkpoints and restarted workers.

A batch enters the snapshots once the learner has read it (`release_batch`), just before it is
learned from; an update that fails is never saved. Where workers never stop, each fragment enters
once it is finished. Left out: restoring (`VectorEnv.restore`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragments, plain, poison, select
from headrace.collectors.api import SamplingPlan
from headrace.collectors.rollout import RolloutResult, remembered
from headrace.envs.api import describe_position
from headrace.envs.episode_replay import ActionLog
from headrace.envs.games.vector import TAKEN
from headrace.seeding import derive
from headrace.spec import GAMES, ActionCodec, Array


class EpisodeSnapshots:
    """Snapshots of all vectors of a rank.

    Args:
        state: saved state to resume from, as `state` returns it; {}: begin.
    """

    def __init__(self, plan: SamplingPlan, state: Mapping[str, Array]) -> None:
        self._num_steps = plan.num_steps
        self._steps = dict.fromkeys(plan.vectors, int(state.get("steps", 0)))
        self._vectors = {v: _VectorSnapshot(plan, v, state) for v in plan.vectors}
        self._plan = plan
        self._staged: tuple[dict[int, Fragments], list[RolloutResult]] | None = None

    def steps(self, vectors: Iterable[int] | None = None) -> int:
        """Return how many steps each env has taken in fragments that count.

        Where vectors differ, the most of `vectors` (None: all).
        """
        return max(self._steps[v] for v in (self._steps if vectors is None else vectors))

    def begin(self, states: Mapping[int, dict[str, Array]]) -> None:
        """Enter states, with observations, that vectors were restored to or began anew with."""
        for v, state in states.items():
            self._vectors[v].begin(state)

    def stage(self, fragments: dict[int, Fragments], results: list[RolloutResult]) -> None:
        """Stage a whole batch until `accept` or `drop`."""
        self._staged = fragments, results

    def drop(self) -> None:
        """Drop the staged batch, which does not count."""
        self._staged = None

    def accept(self) -> None:
        """Enter the staged batch, if there is one: it counts."""
        if self._staged is None:
            return
        fragments, results = self._staged
        for result in results:
            for v, state in result.states.items():
                self._vectors[v].accept(fragments[v], state, result.step_s[v])
                self._steps[v] += self._num_steps
        self._staged = None

    def state(self, vectors: Iterable[int] | None = None) -> dict[str, Array]:
        """Return the snapshots of these vectors (None: all), as named arrays."""
        state = {"steps": np.array(self.steps(vectors))}
        for v in self._vectors if vectors is None else vectors:
            state |= self._vectors[v].state()
        return state

    def describe_position(self, fragments: Mapping[int, Fragments], worker: str) -> str:
        """Describe where a worker is, by its rewards: NaN where it has not written yet."""
        for v, of_vector in fragments.items():
            if count_unwritten(self._plan, of_vector):
                return self._vectors[v].describe_position(of_vector, worker)
        return f"after the last step of a fragment, {worker}"


def mark_unwritten(of_vectors: Iterable[Fragments]) -> None:
    """Mark all env steps as not written, by poison in the rewards."""
    for fragments in of_vectors:
        for fragment in fragments:
            poison(fragment.reward)


def count_unwritten(plan: SamplingPlan, fragments: Fragments) -> int:
    """Return how many env steps of a vector's marked fragments are not written."""
    return int(np.isnan(fragments[-1].reward.numpy()).sum()) // plan.parts[-1].size


class _VectorSnapshot:
    """The snapshot of one vector; the arguments are those of `EpisodeSnapshots`."""

    def __init__(self, plan: SamplingPlan, vector: int, state: Mapping[str, Array]) -> None:
        n = plan.envs_per_vector
        self._plan, self._name = plan, f"vector{vector}."
        self.env_id = np.arange(vector * n, (vector + 1) * n)
        self._codec, self._log = ActionCodec(plan.spec.action), ActionLog()
        self._known = select(state, self._name)

    def begin(self, state: dict[str, Array]) -> None:
        """Enter a state, with observations. The actions of restored episodes are kept."""
        before = self.state()
        kept = {
            i: actions
            for i in range(len(self.env_id))
            if (actions := before.get(f"{self._name}env{i}.actions")) is not None
            and state["episode_step"][i]  # not begun anew
        }
        longest = max(map(len, kept.values()), default=0)
        action = self._plan.spec.action
        shape: tuple[int, ...] = action.shape
        dtype: Any = action.dtype
        if (taken := state.pop(TAKEN, None)) is not None:
            shape, dtype = taken.shape[2:], taken.dtype
        log = np.zeros((longest, len(self.env_id), *shape), dtype)
        for i, actions in kept.items():
            log[longest - len(actions) :, i] = actions.reshape(-1, *shape)
        self._log = ActionLog()
        self._log.commit(log, longest)
        self._known = state

    def accept(self, fragments: Fragments, state: dict[str, Array], step_s: float) -> None:
        """Enter full fragments, and the vector's state after them.

        `step_s`, the mean seconds of an env step, says what could be replayed in time.
        """
        if not self._plan.maker.native:  # such a form cannot be replayed
            # No more is kept than could be replayed in time: an episode may be endless.
            longest = int(state["episode_step"].max())
            if longest * step_s > self._plan.replay_limit_s:
                longest = int(self._plan.replay_limit_s / step_s)
            self._log.commit(self._actions(fragments, state), longest)
        known = {name: array for name, array in state.items() if name != TAKEN}
        if not any(name.startswith("obs.") for name in known):
            known |= self._last_obs(fragments)
        states = [fragment.recurrent_state[1] for fragment in fragments]
        self._known = known | remembered(states, len(self.env_id))

    def _actions(self, fragments: Fragments, state: dict[str, Array]) -> Array:
        """Return the actions of all env steps, `[T, n, ...]`, in the units of the environment."""
        if TAKEN in state:
            return state[TAKEN]
        (fragment,) = fragments
        rows, action = fragment.action.numpy(), self._plan.spec.action
        values = self._codec.to_env(rows.reshape(-1, *rows.shape[2:]))
        return values.reshape(*rows.shape[:2], *action.shape).astype(action.dtype)

    def _last_obs(self, fragments: Fragments) -> dict[str, Array]:
        """Return the last observations of each environment, as `VectorEnv.obs` does."""
        if len(fragments) > 1 or self._plan.spec.num_agents > 1:
            rows = [plain(f.obs)[-1].numpy().reshape(len(self.env_id), -1) for f in fragments]
            return {"obs.": np.concatenate(rows, 1)}
        obs = fragments[0].obs
        last = obs if isinstance(obs, dict) else {"": obs}
        return {f"obs.{key}": o[-1].numpy().copy() for key, o in last.items()}

    def state(self) -> dict[str, Array]:
        """Return it as named arrays; {} before the first fragment."""
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

    def describe_position(self, fragments: Fragments, worker: str) -> str:
        """Describe a worker's position in fragments that are not full."""
        fragment, spec = fragments[-1], self._plan.spec
        t, column = (int(x) for x in np.argwhere(np.isnan(fragment.reward.numpy()))[0])
        if t == 0 and _is_poison(fragment.action[0, column]):  # never written to
            return (
                f"in the first reset, or the policy's first step, of envs {self.env_id.tolist()} "
                f"of {spec.id}, {worker}"
            )
        i = column // self._plan.parts[-1].size
        if spec.num_agents > 1 or spec.interface in GAMES:
            step = f"in step {t + 1} of the fragment of env {self.env_id[i]} of {spec.id}"
            if t and not i:  # which games have ended is not written yet
                step += f", or in the reset before it, of one of the envs {self.env_id.tolist()}"
            return f"{step}; {worker}"
        ends = (fragment.terminated | fragment.truncated).numpy()
        if column == 0 and t and ends[t - 1].any():
            ended = " or ".join(map(str, self.env_id[ends[t - 1]]))
            return (
                f"in step {t + 1} of the fragment of env {self.env_id[0]} of {spec.id}, "
                f"or in the reset before it, of env {ended}; {worker}"
            )
        episode, steps = 0, t
        if self._known:
            episode, steps = (int(self._known[k][i]) for k in ("episode", "episode_step"))
            steps += t
        if len(ends_of_env := np.flatnonzero(ends[:t, i])):
            episode, steps = episode + len(ends_of_env), t - int(ends_of_env[-1]) - 1
        env = int(self.env_id[i])
        seeded = self._plan.reseed_episodes or episode == 0
        position = describe_position(
            f"{env} of {spec.id}",
            worker,
            episode,
            derive(self._plan.seed, "env", env, episode) if seeded else None,
            steps,
            self._codec.elements(self._codec.to_env(fragment.action[t, i : i + 1].numpy()))[0],
        )
        return f"in {position}"


def _is_poison(action: Tensor) -> bool:
    again = torch.empty_like(action)
    poison(again)
    return bool(torch.equal(action.nan_to_num(), again.nan_to_num()))


_OF_ONE_ENV = re.compile(r"env(\d+)\.(.+)")


def regroup(state: dict[str, Array], num_envs: int, envs_per_vector: int) -> dict[str, Array]:
    """Return the same environments in vectors of another size, for another number of learners.

    `state` and `num_envs` are of the whole run; `envs_per_vector` is the new size. A vector has no
    state if one of its environments has none.
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
