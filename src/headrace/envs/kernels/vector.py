"""A vector of kernel environments: its memory, on the CPU or a GPU, and its episodes."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Column, Fragment
from headrace.envs.api import Episode, Restored, VectorContext, env_error
from headrace.envs.episodes import DeviceVector
from headrace.envs.kernels import compiler
from headrace.envs.kernels.codegen import ROWS, ProgramSpec
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.seats import MEMBER, SIDE
from headrace.seeding import derive
from headrace.spec import ActionCodec, Array, EnvSpec

_STEP_FIELDS = ("env_id", "terminated", "action", "reward")
"""Fields of the world that nothing needs after a step."""


class KernelVector(DeviceVector):
    """A vector of kernel environments.

    The rows of several agents are columns of the fragment: those of env 0, then of env 1, ...

    Args:
        encoded: whether actions are as the policy emits them, or in the units of the space.
        autoreset: whether a step begins the next episode where one has ended. Otherwise the last
            observation stays in its row, and `begin_episodes` begins the next one.

    Attributes:
        world: all arrays of the world, by name. The program writes to them.
        w: the world as the environment's functions get it.
        ended: `[n]` bool: the episode ended in the last step.
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
        spec, n = self.spec, len(self.env_id)
        self._limit = env.max_episode_steps if autoreset else 0
        self._scratch = env.scratch
        program = ProgramSpec(env, spec, self.parts, autoreset=autoreset)
        self._program = compiler.make_program(env, program, target, context.num_threads)
        self.world = self._zeros(program.world)
        self.world["env_id"].copy_(torch.from_numpy(self.env_id))
        self.world["episode"].fill_(-1)
        self._tables = {  # kept here, since a view does not own its memory
            name: torch.tensor(value, device=self.device)
            for name, value in env.constants.items()
            if isinstance(value, np.ndarray)
        }
        world = dict(env.constants) | self._views(self.world | self._tables)
        self.w = self._program.types.World(**world, seed=self._seed(context.seed))
        # Row 0 of these has the current observations
        self._current = [
            batch.allocate(batch.columns(spec, {}, 1, n * part.size), device=self.device)
            for part in self.parts
        ]
        # num_truncated: episodes of this fragment; episode_return: of the unfinished episode;
        # was_alive: as the step began.
        agents = (env.num_agents,)
        self._buffers = _codec_tensors(spec, self.device, encoded=encoded) | self._zeros(
            {
                "ended": ((), torch.bool),
                "num_truncated": ((), torch.int32),
                "episode_return": (agents, torch.float64),
                "was_alive": (agents, torch.bool),
            }
        )
        self.ended = self._buffers["ended"]
        self._resize(1)
        self._fragments: tuple[Fragment, ...] = ()
        self._started = False

    def bind(self, *fragments: Fragment) -> None:
        if fragments[0].num_steps != self._num_steps:
            self._resize(fragments[0].num_steps)
        if not self._started:
            self._begin_all()
        if [*map(id, fragments)] != [*map(id, self._fragments)]:
            for i, fragment in enumerate(fragments):
                self._write_env_id(fragment, i)
                self._place_finals(fragment)
            self._r = [self._rows(fragment) for fragment in fragments]
            self._fragments = fragments
        # From here on, only what a CUDA graph can record
        for fragment, current in zip(fragments, self._current, strict=True):
            fragment.obs[0].copy_(current.obs[0])  # type: ignore[index]
            fragment.final_step.fill_(self._num_steps)  # no place is in use yet
        self._buffers["num_truncated"].zero_()
        self._bound_at = time.monotonic()

    def finals_per_row(self, num_steps: int) -> int:
        """Return how many episodes of each row can be truncated in so many steps."""
        return -(-num_steps // self._limit) if self._limit else 0

    def tensors(self) -> list[Tensor]:
        """Return all tensors that change from one fragment to the next."""
        current = [fragment.obs for fragment in self._current]
        seats = [] if self.seats is None else [self.seats.member, self.seats.side]
        return [*self.world.values(), self._buffers["episode_return"], *current, *seats]  # type: ignore[list-item]

    def step(self, t: int) -> None:
        self._run("step", f"step {t + 1} of the fragment", *self._r, t)
        self._seat(t, self.ended, self.world["episode"], self._fragments)
        self.context.meter.lap("env_step")

    def finish(self) -> list[Episode]:
        for fragment, current, part in zip(self._fragments, self._current, self.parts, strict=True):
            if self.context.guards.enabled:
                self._check_finite(fragment, part)
            current.obs[0].copy_(fragment.obs[-1])  # type: ignore[index]
        return self._ended_episodes()

    def state(self) -> dict[str, Array]:
        omitted = (*_STEP_FIELDS, *self._scratch)
        tensors = {k: tensor for k, tensor in self._state_tensors().items() if k not in omitted}
        return {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}

    def obs(self) -> dict[str, Array]:
        rows = [current.obs[0].cpu().numpy() for current in self._current]  # type: ignore[index]
        return {"obs.": np.concatenate([row.reshape(len(self.env_id), -1) for row in rows], 1)}

    def restore(self, state: dict[str, Array]) -> Restored:
        tensors = self._state_tensors()
        for name, array in state.items():
            if name in tensors:
                tensors[name].copy_(torch.from_numpy(array))
        size = self.spec.observation.size
        ends = np.cumsum([part.size * size for part in self.parts])
        rows = np.split(state["obs."], ends[:-1], 1)
        for current, obs in zip(self._current, rows, strict=True):
            current.obs[0].copy_(torch.from_numpy(obs.reshape(-1, size)))  # type: ignore[index]
        self._started = True
        return Restored(set_state=len(self.env_id))

    def start_after(self, episode: int | Array) -> Restored:
        self.world["episode"].copy_(torch.as_tensor(episode) - 1)
        self._begin_all()
        return Restored(new_episode=len(self.env_id))

    def restart(self, seed: int) -> None:
        """Begin every env's first episode, as if the vector were made with this seed."""
        self.w = self.w._replace(seed=self._seed(seed))
        self.world["episode"].fill_(-1)
        self._begin_all()

    def begin_episodes(self, ended: Tensor) -> None:
        """Begin the next episode where `ended`, `[n]` bool, is True, for the next `bind`."""
        self.ended.copy_(ended)
        rows = [self._rows(current) for current in self._current]
        self._run("begin", "a reset", *rows)
        if self.seats is not None:
            self.seats.draw_where(self.ended, self.world["episode"])
        self.context.meter.lap("env_reset")

    def close(self) -> None:
        self._program.close()

    def _begin_all(self) -> None:
        self.begin_episodes(torch.ones(len(self.env_id), dtype=torch.bool))
        self._started = True

    def _seed(self, seed: int) -> np.uint64:
        return np.uint64(derive(seed, self.context.role))

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = self.world | {"so_far": self._buffers["episode_return"]}
        tensors["episode_step"] = tensors.pop("step")
        if self.seats is not None:
            tensors |= {MEMBER: self.seats.member, SIDE: self.seats.side}
        return tensors

    def _run(self, function: str, moment: str, *args: object) -> None:
        try:
            self._program.call(function, len(self.env_id), self.w, self._b, *args)
        except Exception as error:
            if not self.context.worker:
                raise
            raise env_error(error, f"in {moment}, {self.context.describe_all()}") from error

    def _place_finals(self, fragment: Fragment) -> None:
        rows = torch.arange(fragment.num_envs, device=self.device)
        num_final = self.finals_per_row(self._num_steps) * len(rows)
        fragment.final_row[:num_final] = rows.repeat(num_final // len(rows))
        fragment.num_final.fill_(num_final)

    def _rows(self, fragment: Fragment) -> Any:
        return self._program.types.Rows(**self._views({k: getattr(fragment, k) for k in ROWS}))

    def _resize(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._allocate_ended(num_steps)
        ended = {"ended_return": self.ended_return, "ended_length": self.ended_length}
        self._b = self._program.types.Buffers(**self._views(self._buffers | ended))

    def _views(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {name: self._program.view(tensor) for name, tensor in tensors.items()}

    def _zeros(self, columns: dict[str, Column]) -> dict[str, Tensor]:
        n = len(self.env_id)
        return {
            name: torch.zeros((n, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in columns.items()
        }


def _codec_tensors(spec: EnvSpec, device: torch.device, *, encoded: bool) -> dict[str, Tensor]:
    """Return the numbers of `ActionCodec`; if actions are not encoded, neutral ones."""
    codec = ActionCodec(spec.action)
    is_box = spec.action.kind == "box"
    dtype = torch.float32 if is_box else torch.int64
    numbers = {"scale": codec.scale, "shift": codec.shift, "low": codec.low, "high": codec.high}
    if not encoded:
        neutral = {"scale": 1, "shift": 0} | ({"low": -np.inf, "high": np.inf} if is_box else {})
        numbers |= {name: np.full_like(numbers[name], value) for name, value in neutral.items()}
    return {
        name: torch.tensor(array, dtype=dtype, device=device).flatten()
        for name, array in numbers.items()
    }
