"""A kernel environment as a vector: its memory, on whichever device, and the accounts of episodes.

Left out: the program (`codegen.py`, `compiler.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Column, Fragment
from headrace.envs.api import GUARDS, Episode, Guards, Restored, env_error
from headrace.envs.episodes import check_finite, ended_episodes
from headrace.envs.kernels import compiler
from headrace.envs.kernels.codegen import ROWS, Call, Shape
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Agents, Array, EnvSpec

_OF_A_STEP = ("env_id", "terminated", "action", "reward")
"""Arrays of the world that say nothing once a step is done."""


class KernelVector:
    """A `VectorEnv` over a kernel environment; see there for the contract of each method.

    With several agents, their rows are columns of the fragment: those of env 0, then of env 1, ...

    Args:
        env: the environment.
        spec: what it offers to an agent.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed; each env has its own random numbers from it (`kernel_env.uniform`).
        meter: told of step times (a reset within a step is part of it).
        parts: which agents are rows of which fragment; default: all, of one.
        target: what it is compiled for: then the fragments are on that device.
        num_threads: of the CPU.
        role: `env` for training, `eval` for evaluation: their seeds differ.
        sampler: named in errors; "": the author's own are raised as they are.
        guards: whether to check for NaN and infinity.
        encoded: whether actions are as a policy emits them; else they are as the space has them.
        autoreset: whether a step begins the next episode where one has ended; else its true last
            observation stays in its row, and `go_on` begins the next.
        last_episodes: `finish` gives so many of those that ended, the last ones; 0: all.

    Attributes:
        world: all arrays of the world, by name; written in place by the program.
        num_ended: how many episodes ended in the last fragment.
        device: where all of it is.
    """

    can_be_recorded = True

    def __init__(
        self,
        env: KernelEnv,
        spec: EnvSpec,
        env_id: Array,
        seed: int,
        meter: Meter,
        *,
        parts: Sequence[Agents] = (),
        target: Target = "cpu",
        num_threads: int = 1,
        role: str = "env",
        sampler: str = "inline",
        guards: Guards = GUARDS,
        encoded: bool = True,
        autoreset: bool = True,
        last_episodes: int = 0,
    ) -> None:
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = 0
        self.step_s = 0.0
        self.num_ended, self._last_episodes = 0, last_episodes
        self._meter, self._sampler, self._guards = meter, sampler, guards
        self._limit = env.max_episode_steps if autoreset else 0
        self._scratch = env.scratch
        self._parts = tuple(parts) or (Agents(0, env.num_agents),)
        shape = replace(shape_of(env, spec, self._parts), autoreset=autoreset)
        self._program = compiler.program(env, shape, target, num_threads)
        on_gpu = target == "cuda" and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.world = self._zeros(_world(env, spec, len(env_id)))
        self.world["env_id"].copy_(torch.from_numpy(env_id))
        self.world["episode"].fill_(-1)
        # Held here: a view does not keep its memory.
        self._tables = {
            name: torch.tensor(of, device=self.device)
            for name, of in env.constants.items()
            if isinstance(of, np.ndarray)
        }
        arrays = {name: self._program.view(of) for name, of in (self.world | self._tables).items()}
        self._w = self._program.types.World(
            **dict(env.constants) | arrays, seed=np.uint64(derive(seed, role))
        )
        self._role = role
        self._codec = _codec(spec, self.device, encoded=encoded)
        # Whose row 0 is the current observations
        self._current = [
            batch.allocate(batch.columns(spec, {}, 1, len(env_id) * size), device=self.device)
            for _, size in self._parts
        ]
        self._so_far = torch.zeros(
            len(env_id), env.num_agents, dtype=torch.float64, device=self.device
        )
        self.books: dict[str, Tensor] = {}
        self._fragments: tuple[Fragment, ...] = ()
        self._r: list[tuple[object, ...]] = []
        self._num_steps = 0
        self._begun = False
        self._bound_at = 0.0

    def bind(self, *fragments: Fragment) -> None:
        """Write into these, one of each part; the very first time this resets all envs."""
        if fragments[0].num_steps != self._num_steps:
            self._keep_books(fragments[0].num_steps)
        if not self._begun:
            self._begin()
        if [*map(id, fragments)] != [*map(id, self._fragments)]:
            for fragment, part in zip(fragments, self._parts, strict=True):
                columns = Agents(0, part.size).ids(self.env_id, part.size)
                fragment.env_id.copy_(torch.from_numpy(columns))
                self._make_room(fragment)
            self._r = [self._rows(fragment) for fragment in fragments]
            self._fragments = fragments
        # From here on only what a CUDA graph can hold
        for fragment, current in zip(fragments, self._current, strict=True):
            fragment.obs[0].copy_(current.obs[0])  # type: ignore[index]
            fragment.final_step.fill_(self._num_steps)  # no place is used yet
        self.books["num_cut"].zero_()
        self._bound_at = time.monotonic()

    def finals_per_row(self, num_steps: int) -> int:
        """How many episodes of each row can be truncated in so many steps."""
        return -(-num_steps // self._limit) if self._limit else 0

    def tensors(self) -> list[Tensor]:
        """All that changes from one fragment to the next."""
        current = [of.obs for of in self._current]
        return [*self.world.values(), self._so_far, *current]  # type: ignore[list-item]

    def step(self, t: int) -> None:
        """Step every env, and begin the next episode of those that ended; raises EnvError."""
        self._run(self._program.step, f"step {t + 1} of the fragment", *self._r, t)
        self._meter.lap("env_step")

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        num_envs = len(self.env_id)
        self.step_s = (time.monotonic() - self._bound_at) / (self._num_steps * num_envs)
        for fragment, current, part in zip(
            self._fragments, self._current, self._parts, strict=True
        ):
            if self._guards.enabled:
                check_finite(fragment, self.env_id, part, self.spec, self._sampler)
            current.obs[0].copy_(fragment.obs[-1])  # type: ignore[index]
        books, sizes = self.books, [size for _, size in self._parts]
        episodes, self.num_ended = ended_episodes(
            books["ended_length"], books["ended_return"], self.env_id, sizes, self._last_episodes
        )
        return episodes

    def state(self) -> dict[str, Array]:
        """The whole world, and the returns so far."""
        passing = (*_OF_A_STEP, *self._scratch)
        kept = {name: of for name, of in self.world.items() if name not in passing}
        kept["episode_step"] = kept.pop("step")
        kept["so_far"] = self._so_far
        return {name: tensor.cpu().numpy().copy() for name, tensor in kept.items()}

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`."""
        rows = [current.obs[0].cpu().numpy() for current in self._current]  # type: ignore[index]
        return {"obs.": np.concatenate([of.reshape(len(self.env_id), -1) for of in rows], 1)}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Every env as it was."""
        arrays = self.world | {"episode_step": self.world["step"], "so_far": self._so_far}
        for name, array in state.items():
            if name in arrays:
                arrays[name].copy_(torch.from_numpy(array))
        size = self.spec.observation.size
        ends = np.cumsum([agents * size for _, agents in self._parts])
        rows = np.split(state["obs."], ends[:-1], 1)
        for current, of in zip(self._current, rows, strict=True):
            current.obs[0].copy_(torch.from_numpy(of.reshape(-1, size)))  # type: ignore[index]
        self._begun = True
        return Restored(set_state=len(self.env_id))

    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that earlier ones, of one step at least, cannot have had."""
        self._keep_books(self._num_steps)
        self.world["episode"].fill_(num_steps - 1)
        self._begin()
        return Restored(new_episode=len(self.env_id))

    def restart(self, seed: int) -> None:
        """Begin every env's first episode, as if the vector were made with this seed."""
        self._w = self._w._replace(seed=np.uint64(derive(seed, self._role)))
        if not self.books:
            self._keep_books(self._num_steps)
        self.world["episode"].fill_(-1)
        self._begin()

    def go_on(self, over: Tensor) -> None:
        """Begin the next episode where `over`, `[n]` bool, is True, for the next `bind`."""
        self.books["over"].copy_(over)
        rows = [self._rows(current) for current in self._current]
        self._run(self._program.begin, "a reset", *rows)
        self._meter.lap("env_reset")

    def close(self) -> None:
        """End the program's threads."""
        self._program.close()

    def _begin(self) -> None:
        self.go_on(torch.ones(len(self.env_id), dtype=torch.bool))
        self._begun = True

    def _run(self, part: Callable[..., None], doing: str, *args: object) -> None:
        """A part of the program, which may fail to compile as well."""
        try:
            part(len(self.env_id), self._w, self._b, *args)
        except Exception as error:
            if not self._sampler:
                raise
            first, last = self.env_id[[0, -1]]
            where = f"envs {first} to {last} of {self.spec.id}, sampler {self._sampler}"
            raise env_error(error, f"in {doing}, {where}") from error

    def _make_room(self, fragment: Fragment) -> None:
        """A place for each final observation that there can be."""
        rows = torch.arange(fragment.num_envs, device=self.device)
        num_final = self.finals_per_row(self._num_steps) * len(rows)
        fragment.final_row[:num_final] = rows.repeat(num_final // len(rows))
        fragment.num_final.fill_(num_final)

    def _rows(self, fragment: Fragment) -> tuple[object, ...]:
        columns = (self._program.view(getattr(fragment, name)) for name in ROWS)
        return self._program.types.Rows(*columns)  # type: ignore[no-any-return]

    def _keep_books(self, num_steps: int) -> None:
        """Allocate what the program keeps besides the world, for fragments of so many steps.

        over: `[n]` bool: the episode ended in this step. num_cut: `[n]`: episodes of this fragment
        that were truncated. so_far: `[n, agents]`: the return of the episode under way. was_alive:
        `[n, agents]` bool: as a step began. ended_return: `[T, n, parts]`: of an episode that ended
        there, the mean over a part's agents. ended_length: `[T, n]`: its steps; 0: none ended.
        """
        n, num_agents = len(self.env_id), sum(size for _, size in self._parts)
        self._num_steps = num_steps
        self.books = self._zeros(
            {
                "over": ((n,), torch.bool),
                "num_cut": ((n,), torch.int32),
                "was_alive": ((n, num_agents), torch.bool),
                "ended_return": ((num_steps, n, len(self._parts)), torch.float64),
                "ended_length": ((num_steps, n), torch.int32),
            }
        )
        self.books["so_far"] = self._so_far
        views = {name: self._program.view(of) for name, of in (self.books | self._codec).items()}
        self._b = self._program.types.Books(**views)

    def _zeros(self, columns: dict[str, Column]) -> dict[str, Tensor]:
        return {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in columns.items()
        }


def shape_of(env: KernelEnv, spec: EnvSpec, parts: tuple[Agents, ...]) -> Shape:
    """What the text of an environment's program depends on."""

    def call(name: str) -> Call:
        return Call(name, "agent" if env.per_agent(name) else "env")

    lanes = 1
    while lanes < min(env.num_agents, compiler.THREADS):
        lanes *= 2
    return Shape(
        world=(*_world(env, spec, 1), *env.constants, "seed"),
        resets=tuple(map(call, env.resets)),
        phases=tuple(map(call, env.phases)),
        parts=parts,
        several=bool(env.agents),
        action_parts=0 if spec.action.kind == "discrete" else spec.action.size,
        is_box=spec.action.kind == "box",
        max_episode_steps=env.max_episode_steps,
        obs_size=spec.observation.size,
        lanes=lanes,
    )


def _world(env: KernelEnv, spec: EnvSpec, n: int) -> dict[str, Column]:
    """The arrays of `n` environments."""
    rows = (n, env.num_agents) if env.agents else (n,)
    parts = () if spec.action.kind == "discrete" else (spec.action.size,)
    world: dict[str, Column] = {
        "env_id": ((n,), torch.int64),
        "episode": ((n,), torch.int64),
        "step": ((n,), torch.int32),
        "terminated": ((n,), torch.bool),
        "action": (rows + parts, torch.float32 if spec.action.kind == "box" else torch.int64),
        "reward": (rows, torch.float32),
    }
    if env.agents:
        world["alive"] = (rows, torch.bool)
    for lead, fields in (((n,), env.state), ((n, env.num_agents), env.agent_state)):
        for name, field in fields.items():
            dtype, shape = field if isinstance(field, tuple) else (field, ())
            world[name] = (lead + shape, getattr(torch, np.dtype(dtype).name))
    return world


def _codec(spec: EnvSpec, device: torch.device, *, encoded: bool) -> dict[str, Tensor]:
    """From a given action to the environment's: the numbers of `ActionCodec`, or those of none."""
    codec = ActionCodec(spec.action)
    is_box = spec.action.kind == "box"
    dtype = torch.float32 if is_box else torch.int64
    numbers = {"scale": codec.scale, "shift": codec.shift, "low": codec.low, "high": codec.high}
    if not encoded:
        none = {"scale": 1, "shift": 0} | ({"low": -np.inf, "high": np.inf} if is_box else {})
        numbers |= {name: np.full_like(numbers[name], number) for name, number in none.items()}
    return {
        name: torch.tensor(of, dtype=dtype, device=device).flatten() for name, of in numbers.items()
    }
