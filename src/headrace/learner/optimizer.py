"""The optimizer step: zero, backward (mean over ranks), clip, Adam. Only this calls `backward`.

A manual gradient (as `algos/manual_gradient.py`) replaces `backward`; the rest is the same.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headrace.algos.base import Metrics
from headrace.batch import Minibatch, each
from headrace.learner.compiling import check_compiler
from headrace.models.policy import Policy
from headrace.models.recurrent import Core


class GradientSteps(Protocol):
    """What makes the gradient steps of a loss: `Optimizer`, or code outside of the learner."""

    def start_update(self) -> None:
        """Prepare for the steps of an update: normalizers stay the same during it."""

    def step(self, minibatch: Minibatch, lr: float | Tensor) -> Metrics:
        """Take one optimizer step. Return the loss's metrics, and `grad_norm` before clipping."""

    def num_nonfinite(self) -> Tensor:
        """Return the number of masked steps, plus 1 if a parameter is not finite; on the device."""

    def state(self) -> dict[str, Tensor]:
        """Return the moments and the step count that a checkpoint of the learner holds."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors of `state`."""

    def leave_ranks(self) -> None:
        """Keep no connection to the other ranks, after the loss of one."""

    def join_ranks(self) -> None:
        """Average gradients over the ranks that there are then. Called on all of them at once."""


@dataclass(frozen=True)
class Outside:
    """A policy that is built and trained by code outside of the learner."""

    policy: Policy
    steps: GradientSteps


LossOf = Callable[[nn.Module, Minibatch], tuple[Tensor, dict[str, Tensor]]]


class Loss(nn.Module):
    """A loss as a module, so that `Ranks.wrap` can average its gradients."""

    def __init__(self, module: nn.Module, function: LossOf, *, compiled: bool) -> None:
        super().__init__()
        self.module = module
        if compiled:
            check_compiler()
            for part in module.modules():
                if isinstance(part, Core):
                    part.stay_out_of_graphs()
        self._function = torch.compile(function) if compiled else function

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self._function(self.module, minibatch)


class ManualGradient(Protocol):
    """An explicit gradient of a loss, without autograd."""

    @property
    def flat(self) -> Tensor:
        """The last gradient, of all parameters."""

    @property
    def parameters(self) -> Tensor:
        """All parameters in the same order. The module's parameters are views of it."""

    def parts(self, flat: Tensor) -> Mapping[nn.Parameter, Tensor]:
        """Return each parameter's part of a flat vector with the layout of `parameters`."""

    def start_update(self) -> None:
        """Read what stays the same during an update, such as a normalizer."""

    def __call__(self, minibatch: Minibatch) -> Mapping[str, Tensor | float]:
        """Fill `flat` with the gradient of a minibatch. Return the loss's metrics."""


@contextlib.contextmanager
def without_denormals() -> Iterator[None]:
    """Take numbers below 1e-38 as 0 within the `with`, where the CPU can.

    Adam's moments of units that are never active decay to such numbers, and most CPUs compute with
    them some ten times slower. Environments that this process steps are not affected.
    """
    before = bool(torch.tensor(1e-40) * 1 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class Optimizer:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) with a clipped and checked gradient.

    Args:
        loss: a module: minibatch -> (loss, metrics), both sums over rows. With several ranks it
            comes from `Ranks.wrap`, unless `manual` replaces autograd.
        max_grad_norm: limit of the gradient's L2 norm; 0: none.
        num_accumulation_steps: parts of a minibatch; a step adds up their gradients.
        manual: computes the gradient of `loss`; None: autograd does.
        over_ranks: replaces a manual gradient by its mean over ranks.
    """

    def __init__(
        self,
        loss: nn.Module,
        max_grad_norm: float,
        num_accumulation_steps: int = 1,
        manual: ManualGradient | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda loss: loss,
        over_ranks: Callable[[Tensor], None] = lambda gradient: None,
        eps: float = 1e-5,
        beta1: float = 0.9,
    ) -> None:
        self._loss, self._num_parts = wrap(loss), num_accumulation_steps
        self._manual, self._wrap, self._over_ranks = manual, wrap, over_ranks
        self.max_grad_norm = max_grad_norm
        self._parameters = list(loss.parameters())
        self._adam = _Adam(self._parameters, eps, beta1, manual)
        device = self._parameters[0].device
        self.nonfinite = torch.zeros((), device=device)
        """Number of steps that were masked, since their gradient was not finite (on the device)."""

    def start_update(self) -> None:
        """Prepare for the steps of an update: normalizers stay the same during it."""
        if self._manual is not None:
            self._manual.start_update()

    def step(self, minibatch: Minibatch, lr: float | Tensor) -> Metrics:
        """Take one optimizer step on the gradient's mean over ranks.

        If the gradient's norm is not finite, parameters and Adam's moments stay, and `nonfinite`
        counts the step. The host never waits for the device here.

        Returns:
            The loss's metrics, and `grad_norm`, the norm before clipping: tensors on the device,
            or floats.
        """
        parts = _parts(minibatch, self._num_parts)
        norm: Any
        if self._manual is None:
            metrics, norm = self._by_autograd(parts)
            bad = (~torch.isfinite(norm)).float()
            self.nonfinite += bad
            with torch.no_grad():
                self._adam.step([p.grad for p in self._parameters], lr, masked=bad)
        else:
            metrics, norm = self._manually(parts, self._manual)
            if math.isfinite(norm):
                self._adam.step([self._manual.flat], lr)
            else:
                self.nonfinite += 1
        return metrics | {"grad_norm": norm}

    def _by_autograd(self, parts: list[Minibatch]) -> tuple[Metrics, Tensor]:
        """Set each parameter's `grad`, clipped. Return metrics, and the norm before clipping."""
        for parameter in self._parameters:
            parameter.grad = None
        metrics: Metrics = {}
        for number, part in enumerate(parts, start=1):
            with self._alone(number < len(parts)):
                total, of_part = self._loss(part)
                total.backward()
            metrics = _added(metrics, of_part)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Equal to `torch.nn.utils.clip_grad_norm_` and `torch.optim.Adam(fused=True)` to the bit.
        # Their overhead is longer than a small network's backward.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.max_grad_norm:
            torch._foreach_mul_(gradients, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return metrics, norm

    def _manually(self, parts: list[Minibatch], gradient: ManualGradient) -> tuple[Metrics, float]:
        """Set `gradient.flat`, clipped. Return metrics, and the norm before clipping."""
        metrics, before = dict(gradient(parts[0])), None
        for part in parts[1:]:
            before = gradient.flat.clone() if before is None else before + gradient.flat
            metrics = _added(metrics, gradient(part))
        if before is not None:
            gradient.flat.add_(before)
        self._over_ranks(gradient.flat)
        values = gradient.flat.numpy()
        with np.errstate(all="ignore"):  # a norm that is not finite masks the step
            norm = math.sqrt(values.dot(values))  # torch's norm takes three times as long
        shortening = self.max_grad_norm / (norm + 1e-6)
        if 0 < shortening < 1:
            gradient.flat.mul_(shortening)
        return metrics, norm

    def _alone(self, more: bool) -> contextlib.AbstractContextManager[None]:
        """Delay the mean over ranks to the `backward` of the last part."""
        if more and isinstance(self._loss, DistributedDataParallel):
            return self._loss.no_sync()
        return contextlib.nullcontext()

    def leave_ranks(self) -> None:
        """Keep no connection to the other ranks, after the loss of one."""
        if isinstance(self._loss, DistributedDataParallel):
            self._loss = self._loss.module

    def join_ranks(self) -> None:
        """Average gradients over the ranks that there are then. Called on all of them at once."""
        self._loss = self._wrap(self._loss)

    def num_nonfinite(self) -> Tensor:
        """Return the number of masked steps, plus 1 if a parameter is not finite; on the device."""
        norm = nn.utils.get_total_norm(self._adam.parameters)
        return self.nonfinite + (~torch.isfinite(norm)).float()

    def state(self) -> dict[str, Tensor]:
        """Return Adam's moments and step count as named tensors."""
        return self._adam.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors of `state`."""
        for name, tensor in self._adam.state().items():
            tensor.copy_(state[name])


class _Adam:
    """Adam's moments, and one fused kernel for all parameters.

    All parameters share one step count. A parameter without a gradient is not stepped, but
    the count advances.

    Attributes:
        parameters: the tensors to step: those of the loss, or the flat one that holds them.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        eps: float,
        beta1: float,
        together: ManualGradient | None,
    ) -> None:
        self._eps, self._beta1, self._shaped, self._together = eps, beta1, parameters, together
        self.parameters: list[Tensor] = [*parameters] if together is None else [together.parameters]
        self._count = torch.zeros((), device=parameters[0].device)
        self._mean = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._square = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        dtypes = {p.dtype for p in self.parameters}  # the kernel takes one dtype at a time
        self._groups = [[i for i, p in enumerate(self.parameters) if p.dtype == d] for d in dtypes]

    def step(
        self,
        gradients: Sequence[Tensor | None],
        lr: Any,
        masked: Tensor | None = None,
    ) -> None:
        """Step the parameters that have a gradient. Do not step or count if `masked` is 1."""
        self._count += 1
        for group in self._groups:
            found = [i for i in group if gradients[i] is not None]
            torch._fused_adam_(
                [self.parameters[i] for i in found],
                [gradients[i] for i in found],  # type: ignore[misc]
                [self._mean[i] for i in found],
                [self._square[i] for i in found],
                [],
                [self._count] * len(found),
                lr=lr,
                beta1=self._beta1,
                beta2=0.999,
                weight_decay=0.0,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
                found_inf=masked,
            )
        if masked is not None:
            self._count -= masked

    def state(self) -> dict[str, Tensor]:
        moments = {"exp_avg": self._each(self._mean), "exp_avg_sq": self._each(self._square)}
        named = {f"{i}.{name}": t for name, each in moments.items() for i, t in enumerate(each)}
        return {"step": self._count} | named

    def _each(self, moments: list[Tensor]) -> list[Tensor]:
        """Return the moments by parameter of the loss."""
        if self._together is None:
            return moments
        parts = self._together.parts(moments[0])
        return [parts[p] for p in self._shaped]


def _added(metrics: Metrics, more: Mapping[str, Any]) -> Metrics:
    """Return the sums of metrics; those of each row are joined."""
    if not metrics:
        return dict(more)
    return {
        name: torch.cat((metrics[name], value)) if np.ndim(value) else metrics[name] + value
        for name, value in more.items()
    }


def _parts(minibatch: Minibatch, count: int) -> list[Minibatch]:
    """Cut the rows into `count` parts. Each part has all scalars."""
    if count == 1:
        return [minibatch]
    rows = {
        name: each(lambda column: column.tensor_split(count), column)
        for name, column in minibatch.items()
        if isinstance(column, dict) or column.dim()
    }
    return [
        minibatch | {name: each(lambda chunks, i=i: chunks[i], row) for name, row in rows.items()}
        for i in range(count)
    ]
