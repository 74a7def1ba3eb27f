"""A kernel environment as a vector: its memory, on whichever device, and the accounts of episodes.

Left out: the program (`codegen.py`, `compiler.py`).
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Column, Fragment
from headrace.envs.api import Episode, Restored, VectorContext, env_error
from headrace.envs.episodes import DeviceVector
from headrace.envs.kernels import compiler
from headrace.envs.kernels.codegen import ROWS, Call, Shape
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.seeding import derive
from headrace.spec import ActionCodec, Agents, Array, EnvSpec

_OF_A_STEP = ("env_id", "terminated", "action", "reward")
"""Arrays of the world that say nothing once a step is done."""


class KernelVector(DeviceVector):
    """A `VectorEnv` over a kernel environment.

    With several agents, their rows are columns of the fragment: those of env 0, then of env 1, ...

    Args:
        env: the environment.
        context: what every vector is built with.
        target: what it is compiled for: then the fragments are on that device.
        encoded: whether actions are as a policy emits them; else they are as the space has them.
        autoreset: whether a step begins the next episode where one has ended; else its true last
            observation stays in its row, and `go_on` begins the next.

    Attributes:
        world: all arrays of the world, by name; written in place by the program.
        books: what the program keeps besides (`_keep_books`).
    """

    can_be_recorded = True

    def __init__(
        self,
        env: KernelEnv,
        context: VectorContext,
        *,
        target: Target = "cpu",
        encoded: bool = True,
        autoreset: bool = True,
    ) -> None:
        on_gpu = target == "cuda" and torch.cuda.is_available()
        super().__init__(context, torch.device("cuda" if on_gpu else "cpu"))
        spec, env_id = self.spec, self.env_id
        self._limit = env.max_episode_steps if autoreset else 0
        self._scratch = env.scratch
        shape = replace(shape_of(env, spec, self.parts), autoreset=autoreset)
        self._program = compiler.program(env, shape, target, context.num_threads)
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
            **dict(env.constants) | arrays, seed=np.uint64(derive(context.seed, context.role))
        )
        self._codec = _codec(spec, self.device, encoded=encoded)
        # Whose row 0 is the current observations
        self._current = [
            batch.allocate(batch.columns(spec, {}, 1, len(env_id) * size), device=self.device)
            for _, size in self.parts
        ]
        self._so_far = torch.zeros(
            len(env_id), env.num_agents, dtype=torch.float64, device=self.device
        )
        self.books: dict[str, Tensor] = {}
        self._fragments: tuple[Fragment, ...] = ()
        self._r: list[tuple[object, ...]] = []
        self._num_steps = 0
        self._begun = False

    def bind(self, *fragments: Fragment) -> None:
        """Write into these, one of each part; the very first time this resets all envs."""
        if fragments[0].num_steps != self._num_steps:
            self._keep_books(fragments[0].num_steps)
        if not self._begun:
            self._begin()
        if [*map(id, fragments)] != [*map(id, self._fragments)]:
            for fragment, part in zip(fragments, self.parts, strict=True):
                self._write_env_id(fragment, part)
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
        self.context.meter.lap("env_step")

    def finish(self) -> list[Episode]:
        """Check the full fragment; see `VectorEnv`."""
        for fragment, current, part in zip(self._fragments, self._current, self.parts, strict=True):
            if self.context.guards.enabled:
                self._check_finite(fragment, part)
            current.obs[0].copy_(fragment.obs[-1])  # type: ignore[index]
        return self._ended_episodes()

    def state(self) -> dict[str, Array]:
        """The whole world, and the returns so far."""
        passing = (*_OF_A_STEP, *self._scratch)
        kept = {name: of for name, of in self.world.items() if name not in passing}
        kept["episode_step"] = kept.pop("step")
        kept["so_far"] = self._so_far
        return {name: tensor.cpu().numpy().copy() for name, tensor in kept.items()}

    def obs(self) -> dict[str, Array]:
        """Return the current observations, as `obs.`: `[n, agents * size]`."""
        rows = [current.obs[0].cpu().numpy() for current in self._current]  # type: ignore[index]
        return {"obs.": np.concatenate([of.reshape(len(self.env_id), -1) for of in rows], 1)}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Every env as it was."""
        arrays = self.world | {"episode_step": self.world["step"], "so_far": self._so_far}
        for name, array in state.items():
            if name in arrays:
                arrays[name].copy_(torch.from_numpy(array))
        size = self.spec.observation.size
        ends = np.cumsum([agents * size for _, agents in self.parts])
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
        self._w = self._w._replace(seed=np.uint64(derive(seed, self.context.role)))
        if not self.books:
            self._keep_books(self._num_steps)
        self.world["episode"].fill_(-1)
        self._begin()

    def go_on(self, over: Tensor) -> None:
        """Begin the next episode where `over`, `[n]` bool, is True, for the next `bind`."""
        self.books["over"].copy_(over)
        rows = [self._rows(current) for current in self._current]
        self._run(self._program.begin, "a reset", *rows)
        self.context.meter.lap("env_reset")

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
            if not self.context.worker:
                raise
            raise env_error(error, f"in {doing}, {self.context.describe_all()}") from error

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
        `[n, agents]` bool: as a step began. And `ended_return`, `ended_length`.
        """
        n, num_agents = len(self.env_id), sum(size for _, size in self.parts)
        self._num_steps = num_steps
        self._allocate_ended(num_steps)
        self.books = self._zeros(
            {
                "over": ((n,), torch.bool),
                "num_cut": ((n,), torch.int32),
                "was_alive": ((n, num_agents), torch.bool),
            }
        )
        self.books["so_far"] = self._so_far
        self.books |= {"ended_return": self.ended_return, "ended_length": self.ended_length}
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
