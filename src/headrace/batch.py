"""Fragments and batches in memory: allocated once, written in place by their owner.

Shape legend, used all over the package (time-major; `...` is the shape of one element):

    T   num_steps           steps of a fragment
    n   envs of one vector  rows that one inference serves; N: of a whole batch
    K   T * n, or fewer     capacity for final observations
    S                       numbers of a recurrent core; 0 without

`collectors/rollout.py` fills a fragment. Workers on other machines send it packed (`pack`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.spec import PLAIN, Array, EnvSpec

Column = tuple[tuple[int, ...], torch.dtype]
StoredOutputs = Mapping[str, Column]
"""What an algorithm wants stored with each step: name -> (shape of one element, dtype)."""

Obs = Tensor | dict[str, Tensor]
"""Observations: one array, or one for each part of a Dict or Tuple space."""

Minibatch = dict[str, Any]
"""Rows of a batch, flattened to `[rows, ...]`, and what the algorithm added to them: tensors, but
for `obs`, which is an `Obs`."""

_ALIGNMENT = 64  # a cache line, so that no two columns share one
_TIME_MAJOR = (
    "obs", "action", "reward", "terminated", "truncated", "valid", "policy_version",
    "recurrent_state",
)  # fmt: skip


def each(function: Callable[..., Any], *obs: Any) -> Any:
    """Apply `function` to an observation's array, or to each array of a Dict's (same keys)."""
    if isinstance(obs[0], dict):
        return {key: function(*(o[key] for o in obs)) for key in obs[0]}
    return function(*obs)


def plain(obs: Obs) -> Tensor:
    """Return the array of an observation that is no Dict, whatever is stored beside it."""
    return obs[PLAIN] if isinstance(obs, dict) else obs


def arrays(obs: Obs) -> list[Tensor]:
    """Return the arrays of an observation."""
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def select(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}


@dataclass
class Fragment:
    """`[T, n]` of one vector, or a batch of fragments side by side; shapes: see the legend."""

    obs: Obs  # [T+1, n, ...]: what action t was chosen from; row T begins the next fragment
    action: Tensor  # [T, n, ...]: as the policy emitted it (before `ActionCodec`)
    reward: Tensor  # [T, n] float32: as the environment gave it
    terminated: Tensor  # [T, n] bool: the episode ended, the future is worth nothing
    truncated: Tensor  # [T, n] bool: it was cut off (a time limit), the future goes on unseen
    valid: Tensor  # [T, n] bool: a real transition (False: the row of a reset only)
    policy_version: Tensor  # [T, n] int64: version of the weights that chose the action
    env_id: Tensor  # [n] int64: logical index of each env over the whole run
    # [2, n, S] float32. Row 0: before step 0. Row 1: the current one while acting; in the end after
    # step T-1, zero where an episode ended: the next row 0.
    recurrent_state: Tensor
    final_obs: Obs  # [K, ...]: the true next observation of steps that were truncated: sparse
    final_step: Tensor  # [K] int64: its t (T: this place was not needed)
    final_row: Tensor  # [K] int64: its column
    num_final: Tensor  # [1] int64: how many of these places there are (on the CPU)
    stored_outputs: dict[str, Tensor]  # [T, n, ...]: what else the algorithm asked the policy for

    @property
    def num_steps(self) -> int:
        """Number of steps, T."""
        return self.reward.shape[0]

    @property
    def num_envs(self) -> int:
        """Number of columns, n."""
        return self.reward.shape[1]

    def resets(self) -> Tensor:
        """Return whether the recurrent state is zeroed before each row, `[T + 1, n]` bool.

        It is zeroed after an end, and after a row that was only a reset. Row 0 is False.
        """
        ended = self.terminated | self.truncated | ~self.valid
        return torch.cat([torch.zeros_like(ended[:1]), ended])

    def carry(self, t: int) -> None:
        """Turn row 1 of `recurrent_state` from the state after row t - 1 to that before row t."""
        start, current = self.recurrent_state
        if not current.numel():
            return
        if t == 0:
            current.copy_(start)
        else:
            ended = self.terminated[t - 1] | self.truncated[t - 1] | ~self.valid[t - 1]
            current.masked_fill_(ended.unsqueeze(-1), 0.0)

    def finals(self) -> tuple[Obs, Tensor, Tensor]:
        """Return the final observations, `([k, ...], t [k], column [k])`.

        A place that is unused has t = T.
        """
        k = int(self.num_final)
        return each(lambda o: o[:k], self.final_obs), self.final_step[:k], self.final_row[:k]

    def first_rows(self, num_steps: int) -> "Fragment":
        """Return the first steps of a batch, with their final observations."""
        final_obs, step, row = self.finals()
        kept = (step < num_steps).nonzero().squeeze(-1)
        of_rows = ("action", "reward", "terminated", "truncated", "valid", "policy_version")
        return replace(
            self,
            obs=each(lambda o: o[: num_steps + 1], self.obs),
            **{name: getattr(self, name)[:num_steps] for name in of_rows},
            final_obs=each(lambda o: o[kept], final_obs),
            final_step=step[kept],
            final_row=row[kept],
            num_final=torch.tensor([len(kept)]),
            stored_outputs={name: x[:num_steps] for name, x in self.stored_outputs.items()},
        )

    def take(self, part: Tensor) -> "Fragment":
        """Return a batch of the columns `part`, with their final observations."""
        final_obs, step, row = self.finals()
        column = torch.full((self.num_envs,), -1, device=part.device)
        column[part] = torch.arange(len(part), device=part.device)
        kept = ((step < self.num_steps) & (column[row] >= 0)).nonzero().squeeze(-1)
        of_rows = ("action", "reward", "terminated", "truncated", "valid", "policy_version")
        return Fragment(
            obs=each(lambda o: o[:, part], self.obs),
            **{name: getattr(self, name)[:, part] for name in of_rows},
            env_id=self.env_id[part],
            recurrent_state=self.recurrent_state[:, part],
            final_obs=each(lambda o: o[kept], final_obs),
            final_step=step[kept],
            final_row=column[row[kept]],
            num_final=torch.tensor([len(kept)]),
            stored_outputs={name: x[:, part] for name, x in self.stored_outputs.items()},
        )


def columns(
    spec: EnvSpec,
    stored_outputs: StoredOutputs,
    num_steps: int,
    num_envs: int,
    state_size: int = 0,
    capacity: int | None = None,
) -> dict[str, Column]:
    """Return name -> (whole shape, dtype) of every array of a fragment, in memory's order.

    The default capacity K is the maximum. Untouched places cost no memory on the CPU.
    """
    rows = (num_steps, num_envs)
    leaves = {
        f".{key}" if spec.observation.kind == "dict" else "": (s.shape, getattr(torch, s.dtype))
        for key, s in spec.observation.leaves
    }
    # Zero-based choices, the flat sample of a Gaussian, or a row of both
    acts = spec.action
    dtype = torch.int64 if acts.kind in ("discrete", "multi_discrete") else torch.float32
    action: Column = (() if acts.kind == "discrete" else (acts.size,)), dtype
    capacity = num_steps * num_envs if capacity is None else capacity
    return {
        **{f"obs{key}": ((num_steps + 1, num_envs, *s), d) for key, (s, d) in leaves.items()},
        "action": (rows + action[0], action[1]),
        "reward": (rows, torch.float32),
        "terminated": (rows, torch.bool),
        "truncated": (rows, torch.bool),
        "valid": (rows, torch.bool),
        "policy_version": (rows, torch.int64),
        "env_id": ((num_envs,), torch.int64),
        "recurrent_state": ((2, num_envs, state_size), torch.float32),
        **{f"stored_outputs.{name}": (rows + s, d) for name, (s, d) in stored_outputs.items()},
        "final_step": ((capacity,), torch.int64),
        "final_row": ((capacity,), torch.int64),
        "num_final": ((1,), torch.int64),
        **{f"final_obs{key}": ((capacity, *s), d) for key, (s, d) in leaves.items()},
    }


def num_bytes(layout: Mapping[str, Column]) -> int:
    """Return the size of memory with this layout: of all columns, each of them aligned."""
    sizes = (dtype.itemsize * math.prod(shape) for shape, dtype in layout.values())
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def allocate(
    layout: Mapping[str, Column],
    buffer: Any = None,
    *,
    fresh: bool = True,
    device: torch.device | None = None,
) -> Fragment:
    """Lay a fragment out as `layout` in one contiguous piece of memory, by default on the CPU.

    Args:
        buffer: writable memory of at least `num_bytes(layout)` (shared memory); default: the heap.
        fresh: poison it, so that reads of unwritten memory show. Final observations are not
            poisoned: rows past `num_final` are never read, and untouched pages cost no memory.
    """
    if buffer is None:
        raw = torch.empty(num_bytes(layout), dtype=torch.uint8, device=device)
    else:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
    arrays = views(layout, raw)
    if fresh:
        for name, view in arrays.items():
            if not name.startswith("final_obs"):
                poison(view)
        arrays["num_final"].zero_()
    if device is not None:
        arrays["num_final"] = torch.zeros(1, dtype=torch.int64)
    return from_named_tensors(arrays)


Fragments = tuple[Fragment, ...]
"""The fragments of one vector: one of each policy that acts in it."""


def allocate_all(
    layouts: Sequence[Mapping[str, Column]], buffer: Any = None, *, fresh: bool = True
) -> Fragments:
    """Lay a vector's fragments out side by side in one piece of memory; see `allocate`."""
    if buffer is None:
        return tuple(allocate(layout) for layout in layouts)
    pieces = split_memory(layouts, memoryview(buffer))
    return tuple(
        allocate(layout, piece, fresh=fresh) for layout, piece in zip(layouts, pieces, strict=True)
    )


def split_memory(layouts: Sequence[Mapping[str, Column]], memory: Any) -> list[Any]:
    """Return each fragment's slice of the memory that `allocate_all` lays out."""
    ends = itertools.accumulate(map(num_bytes, layouts), initial=0)
    return [memory[first:end] for first, end in itertools.pairwise(ends)]


def named_tensors(fragment: Fragment) -> dict[str, Tensor]:
    """Return a fragment's tensors by name, `group.key` where there are several."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(fragment).items():
        if isinstance(value, dict):
            tensors |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        else:
            tensors[name] = value
    return tensors


def from_named_tensors(tensors: Mapping[str, Tensor]) -> Fragment:
    """Undo `named_tensors`."""
    fields: dict[str, Any] = {"stored_outputs": {}}
    for name, tensor in tensors.items():
        group, dot, key = name.partition(".")
        fields[group] = fields.get(group, {}) | {key: tensor} if dot else tensor
    return Fragment(**fields)


def views(layout: Mapping[str, Column], raw: Tensor) -> dict[str, Tensor]:
    """Return the columns by name, in memory `[at least num_bytes(layout)]` uint8."""
    arrays, offset = {}, 0
    for name, (shape, dtype) in layout.items():
        size = dtype.itemsize * math.prod(shape)
        arrays[name] = raw[offset : offset + size].view(dtype).view(shape)
        offset += num_bytes({name: layout[name]})
    return arrays


def trim(fragment: Fragment) -> Fragment:
    """Return the same without the unused room for final observations."""
    obs, step, row = fragment.finals()
    return replace(fragment, final_obs=obs, final_step=step, final_row=row)


def poison(tensor: Tensor) -> None:
    """Fill with a value that nothing else writes: NaN, or the least integer of the dtype."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.zero_()  # no impossible value; but False is what `valid` must not stay
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def join(fragments: list[Fragment], device: torch.device, *, copy: bool = True) -> Fragment:
    """Join fragments side by side as one `[T, N]` batch on `device`, in the order given.

    Without `copy`, a single fragment on the device is the batch itself: its memory must not change
    while the batch is used.
    """
    if not copy and len(fragments) == 1 and fragments[0].reward.device == device:
        return trim(fragments[0])

    def beside(tensors: list[Any], dim: int) -> Any:
        return each(lambda *t: torch.cat(t, dim).to(device, non_blocking=True), *tensors)

    finals = [fragment.finals() for fragment in fragments]
    first_row = itertools.accumulate((f.num_envs for f in fragments), initial=0)
    final_rows = [row + first for (_, _, row), first in zip(finals, first_row, strict=False)]
    return Fragment(
        **{
            name: beside([getattr(fragment, name) for fragment in fragments], 1)
            for name in _TIME_MAJOR
        },
        env_id=beside([fragment.env_id for fragment in fragments], 0),
        final_obs=beside([obs for obs, _, _ in finals], 0),
        final_step=beside([step for _, step, _ in finals], 0),
        final_row=beside(final_rows, 0),
        num_final=torch.tensor([sum(len(step) for _, step, _ in finals)]),
        stored_outputs={
            name: beside([fragment.stored_outputs[name] for fragment in fragments], 1)
            for name in fragments[0].stored_outputs
        },
    )


def one_of_each(env: Tensor) -> list[Tensor]:
    """Split the columns of a batch into parts with each env once, earlier fragments first."""
    seen: dict[int, int] = {}
    parts: list[list[int]] = []
    for column, i in enumerate(env.tolist()):
        seen[i] = seen.get(i, -1) + 1
        if seen[i] == len(parts):
            parts.append([])
        parts[seen[i]].append(column)
    return [torch.tensor(part, device=env.device) for part in parts]


def stratify(order: Tensor, num_minibatches: int) -> Tensor:
    """Split the steps of every env evenly over minibatches.

    Each minibatch takes T / num_minibatches steps of *every* env, so that learners that hold
    different envs make the minibatches that one learner with all of them makes.

    Args:
        order: `[T, n]`, a permutation of `0..T-1` in each column.
        num_minibatches: M, a divisor of T.

    Returns:
        `[M, T / M * n]`: indices of rows, `[T * n, ...]`.

    Raises:
        ValueError: if M does not divide T.
    """
    num_steps, num_envs = order.shape
    if num_steps % num_minibatches:
        raise ValueError(f"{num_steps} steps do not split into {num_minibatches} minibatches")
    flat = order * num_envs + torch.arange(num_envs, device=order.device)
    return flat.reshape(num_minibatches, -1)


def whole_runs(
    place: Tensor, num_steps: int, num_envs: int, num_minibatches: int
) -> tuple[Tensor, list[int]]:
    """Assign whole runs of envs to minibatches, for a recurrent core.

    Each of M minibatches takes all T steps of N / M envs. One learner may hold any number of these,
    or none. `place`, `[E, n]`, is the position of this learner's envs in an order of all N, by
    epoch.

    Returns:
        `[E * M, R]`: indices of rows, `[T * n, ...]`, step after step; and the number of each
        line's R that count. The rest is padding: the run of some env.

    Raises:
        ValueError: if M does not divide N.
    """
    if num_envs % num_minibatches:
        raise ValueError(f"{num_envs} envs do not split into {num_minibatches} minibatches")
    first = torch.arange(num_steps).unsqueeze(1) * place.shape[1]
    runs = [
        (first + (number == m).nonzero().T).flatten()
        for number in place // (num_envs // num_minibatches)
        for m in range(num_minibatches)
    ]
    sizes = [len(run) for run in runs]
    index = first.flatten().repeat(len(runs), max(sizes) // num_steps)
    for row, run in zip(index, runs, strict=True):
        row[: len(run)] = run
    return index, sizes


def pack(layout: Mapping[str, Column], memory: Array) -> tuple[int, list[Array]]:
    """Pack a fragment on the CPU for sending, without the unused room for final observations.

    `memory` is the fragment's, `[num_bytes(layout)]` uint8. Return the number of final observations
    and uint8 parts: a view of the memory, and a copy of the final observations, if any.
    """
    fragment = allocate(layout, memory, fresh=False)
    k = int(fragment.num_final)
    head, finals = _split(layout, k)
    parts: list[Array] = [memory[: num_bytes(head)]]
    if k:
        parts.append(np.empty(num_bytes(finals), np.uint8))
        whole = named_tensors(trim(fragment))
        for name, view in views(finals, torch.from_numpy(parts[1])).items():
            view.copy_(whole[name])
    return k, parts


def unpack(layout: Mapping[str, Column], k: int, parts: Iterator[Array]) -> Fragment:
    """Undo `pack`: take one fragment's parts from those of several."""
    head, finals = _split(layout, k)
    first = torch.from_numpy(next(parts))
    if k:
        rest = torch.from_numpy(next(parts))
    else:
        rest = torch.zeros(num_bytes(finals), dtype=torch.uint8)
    return from_named_tensors(views(head, first) | views(finals, rest))


def _split(layout: Mapping[str, Column], k: int) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return the first columns, and the last ones with room for k final observations."""
    finals: dict[str, Column] = {
        name: ((k, *shape[1:]), dtype)
        for name, (shape, dtype) in layout.items()
        if name.startswith("final_")
    }
    finals["num_final"] = layout["num_final"]
    return {name: column for name, column in layout.items() if name not in finals}, finals
