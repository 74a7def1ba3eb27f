"""Experience in memory: allocated once, written in place by the sampler that owns it.

Shape legend, used all over the package (time-major; `...` is the shape of one element):

    T   num_steps           steps of a fragment
    n   envs of one vector  rows that one inference serves; N: of a whole batch
    K   T * n, or fewer     capacity for final observations

    obs             [T+1, n, ...]   what action t was chosen from; row T begins the next fragment
                                    (of a Dict space: a dict of such arrays, as final_obs)
    action          [T, n, ...]     as the policy emitted it (before `ActionCodec`)
    reward          [T, n]          float32, as the environment gave it
    terminated      [T, n]          bool: the episode ended, the future is worth nothing
    truncated       [T, n]          bool: it was cut off (a time limit), the future goes on unseen
    valid           [T, n]          bool: a real transition (False: the row of a reset only)
    policy_version  [T, n]          int64: version of the weights that chose the action
    env_id          [n]             int64: logical index of each env over the whole run
    recurrent_state [2, n, S]       float32, S numbers of a recurrent core (0 without): row 0
                                    before step 0; row 1 the current one while acting, in the end
                                    after step T-1, zero where an episode ended: the next row 0
    final_obs       [K, ...]        the true next observation of steps that were truncated: sparse,
    final_step      [K]             int64: its t (T: this place was not needed),
    final_row       [K]             int64: its column,
    num_final       [1]             int64: and how many of these places there are (on the CPU)
    stored_outputs  name -> [T, n, ...]   what else the algorithm asked the policy to emit

Left out: what fills it (`collectors/rollout.py`) and what is learned from it (`algos/`).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.spec import Array, EnvSpec, Space

Column = tuple[tuple[int, ...], torch.dtype]
StoredOutputs = Mapping[str, Column]
"""What an algorithm wants stored with each step: name -> (shape of one element, dtype)."""

Obs = Tensor | dict[str, Tensor]
"""Observations: one array, or one for each key of a Dict space."""

Minibatch = dict[str, Any]
"""Rows of a batch, flattened to `[rows, ...]`, and what the algorithm added to them: tensors, but
for `obs`, which is an `Obs`."""

_ALIGNMENT = 64  # a cache line, so that no two columns share one


def each(function: Callable[..., Any], *obs: Any) -> Any:
    """`function` of an observation's array; of a Dict's, of each of its arrays (same keys)."""
    if isinstance(obs[0], dict):
        return {key: function(*(o[key] for o in obs)) for key in obs[0]}
    return function(*obs)


@dataclass
class Fragment:
    """`[T, n]` of experience from one vector, or a batch of them side by side. See the legend."""

    obs: Obs
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    policy_version: Tensor
    env_id: Tensor
    recurrent_state: Tensor
    final_obs: Obs
    final_step: Tensor
    final_row: Tensor
    num_final: Tensor
    stored_outputs: dict[str, Tensor]

    @property
    def num_steps(self) -> int:
        """T."""
        return self.reward.shape[0]

    @property
    def num_envs(self) -> int:
        """The number of columns, n."""
        return self.reward.shape[1]

    def resets(self) -> Tensor:
        """Where the state of a recurrent core is zeroed: `[T + 1, n]` bool, before that row.

        After an end, and after a row that was only a reset. Row 0 is not told: row 0 of
        `recurrent_state` is as it must be.
        """
        ended = self.terminated | self.truncated | ~self.valid
        return torch.cat([torch.zeros_like(ended[:1]), ended])

    def carry(self, t: int) -> None:
        """Make row 1 of `recurrent_state`, which is after row t - 1, what row t begins with."""
        start, current = self.recurrent_state
        if not current.numel():
            return
        if t == 0:
            current.copy_(start)
        else:
            ended = self.terminated[t - 1] | self.truncated[t - 1] | ~self.valid[t - 1]
            current.masked_fill_(ended.unsqueeze(-1), 0.0)

    def finals(self) -> tuple[Obs, Tensor, Tensor]:
        """The final observations that were written: `([k, ...], t [k], column [k])`."""
        k = int(self.num_final)
        return each(lambda o: o[:k], self.final_obs), self.final_step[:k], self.final_row[:k]


def _stored_action(space: Space) -> Column:
    """Of a policy's action: zero-based choices, or the flat sample of a Gaussian."""
    if space.kind == "box":
        return (space.size,), torch.float32
    return space.shape, torch.int64


def columns(
    spec: EnvSpec,
    stored_outputs: StoredOutputs,
    num_steps: int,
    num_envs: int,
    state_size: int = 0,
    capacity: int | None = None,
) -> dict[str, Column]:
    """Name -> (whole shape, dtype) of every array of a fragment, in memory's order.

    Args:
        spec: what the policy sees and does.
        stored_outputs: what else the algorithm asked it to emit.
        num_steps: T.
        num_envs: n.
        state_size: S.
        capacity: K; default: as many as there can be, of which those that stay untouched cost no
            memory (on the CPU).
    """
    rows = (num_steps, num_envs)
    leaves = {
        f".{key}" if spec.observation.kind == "dict" else "": (s.shape, getattr(torch, s.dtype))
        for key, s in spec.observation.leaves
    }
    action_shape, action_dtype = _stored_action(spec.action)
    capacity = num_steps * num_envs if capacity is None else capacity
    return {
        **{f"obs{key}": ((num_steps + 1, num_envs, *s), d) for key, (s, d) in leaves.items()},
        "action": (rows + action_shape, action_dtype),
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


def extents(layout: Mapping[str, Column]) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of each column, the offsets aligned; last the end as ("", end, 0)."""
    offset = 0
    for name, (shape, dtype) in layout.items():
        size = dtype.itemsize
        for length in shape:
            size *= length
        yield name, offset, size
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    yield "", offset, 0


def num_bytes(layout: Mapping[str, Column]) -> int:
    """How much memory a fragment with this layout takes."""
    return list(extents(layout))[-1][1]


def allocate(
    layout: Mapping[str, Column],
    buffer: Any = None,
    *,
    fresh: bool = True,
    device: torch.device | None = None,
) -> Fragment:
    """Lay a fragment out in one contiguous piece of memory.

    Args:
        layout: from `columns`.
        buffer: writable memory of at least `num_bytes(layout)` (shared memory); default: the heap.
        fresh: poison it, so that reading what was never written is loud. Final observations are
            not: nobody sees rows past `num_final`, and untouched pages cost no memory.
        device: where; default: the CPU.

    Returns:
        A fragment whose tensors are views into the buffer.
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
    return of_named(arrays)


def named(fragment: Fragment) -> dict[str, Tensor]:
    """Its tensors by name, `group.key` where there are several; see the legend."""
    found: dict[str, Tensor] = {}
    for name, value in vars(fragment).items():
        of_name = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): tensor for key, tensor in of_name.items()}
    return found


def of_named(tensors: Mapping[str, Tensor]) -> Fragment:
    """The inverse of `named`."""
    arrays: dict[str, Any] = {"stored_outputs": {}}
    for name, tensor in tensors.items():
        group, dot, key = name.partition(".")
        if dot:
            arrays.setdefault(group, {})[key] = tensor
        else:
            arrays[group] = tensor
    return Fragment(**arrays)


def views(layout: Mapping[str, Column], raw: Tensor) -> dict[str, Tensor]:
    """The columns by name, in memory `[at least num_bytes(layout)]` uint8."""
    found: dict[str, Tensor] = {}
    for name, offset, size in extents(layout):
        if name:
            shape, dtype = layout[name]
            found[name] = raw[offset : offset + size].view(dtype).view(shape)
    return found


def written(fragment: Fragment) -> Fragment:
    """The same without the room for final observations that nobody has written."""
    obs, step, row = fragment.finals()
    return replace(fragment, final_obs=obs, final_step=step, final_row=row)


def poison(tensor: Tensor) -> None:
    """Fill with what no environment or policy writes: NaN, or the least integer of the dtype."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.zero_()  # no impossible value; but False is what `valid` must not stay
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def join(fragments: list[Fragment], device: torch.device, *, copy: bool = True) -> Fragment:
    """Fragments side by side as one `[T, N]` batch on `device`, in the order given.

    Args:
        fragments: at least one.
        device: where the batch is to be.
        copy: whether the fragments' memory may change while the batch is used. If not, a single one
            that is there already is the batch.
    """
    if not copy and len(fragments) == 1 and fragments[0].reward.device == device:
        return written(fragments[0])

    def beside(tensors: list[Any], dim: int) -> Any:
        return each(lambda *t: torch.cat(t, dim).to(device, non_blocking=True), *tensors)

    finals = [fragment.finals() for fragment in fragments]
    first_row = 0
    final_rows = []
    for fragment, (_, _, row) in zip(fragments, finals, strict=True):
        final_rows.append(row + first_row)
        first_row += fragment.num_envs
    return Fragment(
        **{
            name: beside([getattr(fragment, name) for fragment in fragments], 1)
            for name in (
                "obs",
                "action",
                "reward",
                "terminated",
                "truncated",
                "valid",
                "policy_version",
                "recurrent_state",
            )
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


def stratify(order: Tensor, num_minibatches: int) -> Tensor:
    """Split the steps of every env evenly over minibatches.

    Each minibatch takes T / num_minibatches steps of *every* env, so that learners that hold
    different envs make the minibatches that one learner with all of them makes.

    Args:
        order: `[T, n]`, a permutation of `0..T-1` in each column.
        num_minibatches: M, a divisor of T.

    Returns:
        `[M, T / M * n]`: indices into a batch that was flattened to `[T * n, ...]`.

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
    """Share whole runs of envs out to minibatches: what a recurrent core learns from.

    Each minibatch takes all T steps of N / num_minibatches envs. Of these, a learner among others
    holds as many as it happens to, or none.

    Args:
        place: `[E, n]`: where each env of this learner stands in an order of all N, in each of E
            epochs.
        num_steps: T.
        num_envs: N.
        num_minibatches: M, a divisor of N.

    Returns:
        `[E * M, R]`: indices into a batch that was flattened to `[T * n, ...]`, step after step;
        and how many of each row's R count. The rest is there to fill up. Where none counts, the
        first T are the run of some env.

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


# A fragment as it travels between machines: one or two pieces of memory.


def pack(layout: Mapping[str, Column], memory: Array) -> tuple[int, list[Array]]:
    """A fragment on the CPU, to be sent: without the room for final observations that is unused.

    Args:
        layout: from `columns`.
        memory: `[num_bytes(layout)]` uint8: where the fragment lies.

    Returns:
        How many final observations there are, and parts of one dimension, uint8: a piece of the
        memory itself, and, if there are any, these.
    """
    fragment = allocate(layout, memory, fresh=False)
    k = int(fragment.num_final)
    finals = _finals(layout, k)
    first = next(offset for name, offset, _ in extents(layout) if name == next(iter(finals)))
    parts: list[Array] = [memory[:first]]
    if k:
        parts.append(np.empty(num_bytes(finals), np.uint8))
        whole = named(written(fragment))
        for name, view in views(finals, torch.from_numpy(parts[1])).items():
            view.copy_(whole[name])
    return k, parts


def unpack(layout: Mapping[str, Column], k: int, parts: Iterator[Array]) -> Fragment:
    """The inverse of `pack`: takes a fragment's parts from those of several.

    Where parts are read-only, nobody may write to the fragment.
    """
    finals = _finals(layout, k)
    head = {name: column for name, column in layout.items() if name not in finals}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        first = torch.from_numpy(next(parts))
        rest = torch.from_numpy(next(parts)) if k else None
    if rest is None:
        rest = torch.zeros(num_bytes(finals), dtype=torch.uint8)
    return of_named(views(head, first) | views(finals, rest))


def _finals(layout: Mapping[str, Column], k: int) -> dict[str, Column]:
    """The columns of final observations, which are the last, with room for k of them."""
    of = {name: column for name, column in layout.items() if name.startswith("final_")}
    return {
        **{name: ((k, *shape[1:]), dtype) for name, (shape, dtype) in of.items()},
        "num_final": layout["num_final"],
    }
