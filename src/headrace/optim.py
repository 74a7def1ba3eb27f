"""The only place that calls `backward`: zero, backward (mean over ranks), clip, step.

Left out: learning-rate schedules (the algorithm passes the rate with each step), and how ranks meet
(`ranks.py`).
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headrace.batch import Minibatch, each


class Optimizer:
    """Adam over a module's parameters, with a clipped and checked gradient.

    Kingma & Ba 2015, arXiv:1412.6980; epsilon 1e-5 as PPO's reference implementation has it.

    Args:
        loss: a module that makes (loss, metrics) of a minibatch; over several ranks as
            `Ranks.wrap` gives it. Both are sums over rows.
        max_grad_norm: gradients longer than this (L2) are shortened to it.
        num_accumulation_steps: parts of a minibatch whose gradients are added up before a step.
        eps: Adam's.
    """

    def __init__(
        self,
        loss: nn.Module,
        max_grad_norm: float,
        num_accumulation_steps: int = 1,
        eps: float = 1e-5,
    ) -> None:
        self._loss, self._num_parts = loss, num_accumulation_steps
        self.max_grad_norm = max_grad_norm
        self._parameters = list(loss.parameters())
        self._adam = torch.optim.Adam(self._parameters, lr=0.0, eps=eps, fused=True)
        device = self._parameters[0].device
        self.nonfinite = torch.zeros((), device=device)
        """How many steps were masked because their gradient was not finite (on the device)."""
        self.num_steps = 0
        """How many steps were asked for."""

    def step(self, minibatch: Minibatch, lr: float) -> dict[str, Tensor]:
        """One step down the gradient of the loss, its mean over ranks.

        A step whose gradient norm is NaN or infinite changes nothing (neither the parameters nor
        Adam's moments) and is counted in `nonfinite`; nothing here waits for the device.

        Args:
            minibatch: what the loss takes; what has rows is cut into parts to be added up.
            lr: learning rate for this step.

        Returns:
            The loss's metrics, and `grad_norm`: the gradient's norm before clipping; on the device.
        """
        for parameter in self._parameters:
            # Not Adam's own zero_grad: what it does besides takes as long as a small layer.
            parameter.grad = None
        parts = _parts(minibatch, self._num_parts)
        metrics: dict[str, Tensor] = {}
        for number, part in enumerate(parts, start=1):
            with self._alone(number < len(parts)):
                total, of_part = self._loss(part)
                total.backward()
            metrics = {n: metrics[n] + v for n, v in of_part.items()} if metrics else of_part
        norm = nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        bad = (~torch.isfinite(norm)).float()
        self.nonfinite += bad
        self._adam.found_inf = bad  # type: ignore[attr-defined]  # fused Adam skips the step itself
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.num_steps += 1
        return metrics | {"grad_norm": norm}

    def _alone(self, more: bool) -> contextlib.AbstractContextManager[None]:
        """Ranks meet in the last part's `backward` only."""
        if more and isinstance(self._loss, DistributedDataParallel):
            return self._loss.no_sync()
        return contextlib.nullcontext()

    def broken(self) -> Tensor:
        """How many steps were masked, plus 1 if a parameter is not finite (on the device)."""
        norm = nn.utils.get_total_norm(self._parameters)
        return self.nonfinite + (~torch.isfinite(norm)).float()

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts as named tensors, for a checkpoint."""
        return {
            f"{index}.{name}": tensor
            for index, moments in self._adam.state_dict()["state"].items()
            for name, tensor in moments.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` gave."""
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            index, name = key.split(".")
            parameter = self._parameters[int(index)]
            if tensor.shape == parameter.shape:
                # In the parameter's own layout (channels-last): Adam walks through both as memory
                tensor = torch.empty_like(parameter).copy_(tensor)
            moments.setdefault(int(index), {})[name] = tensor
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": moments, "param_groups": groups})


def _parts(minibatch: Minibatch, count: int) -> list[Minibatch]:
    """Cut the rows into `count` parts; scalars go with each."""
    if count == 1:
        return [minibatch]
    rows = {
        name: each(lambda column: column.chunk(count), column)
        for name, column in minibatch.items()
        if isinstance(column, dict) or column.dim()
    }
    return [
        minibatch | {name: each(lambda chunks, i=i: chunks[i], of) for name, of in rows.items()}
        for i in range(count)
    ]
