"""The only place that calls `backward`: zero, backward, clip, step; and sums over ranks.

With one rank the sums are what they are given. Left out: learning-rate schedules (the algorithm
passes the rate with each step).
"""

import torch
from torch import Tensor, nn


class Optimizer:
    """Adam over a module's parameters, with a clipped and checked gradient.

    Kingma & Ba 2015, arXiv:1412.6980; epsilon 1e-5 as PPO's reference implementation has it.
    """

    def __init__(self, module: nn.Module, max_grad_norm: float, eps: float = 1e-5) -> None:
        self.max_grad_norm = max_grad_norm
        self._parameters = list(module.parameters())
        self._adam = torch.optim.Adam(self._parameters, lr=0.0, eps=eps, fused=True)
        device = self._parameters[0].device
        self.nonfinite = torch.zeros((), device=device)
        """How many steps were masked because their gradient was not finite (on the device)."""
        self.num_steps = 0
        """How many steps were asked for."""

    def step(self, loss: Tensor, lr: float) -> Tensor:
        """One step down the gradient of `loss`.

        A step whose gradient norm is NaN or infinite changes nothing (neither the parameters nor
        Adam's moments) and is counted in `nonfinite`; nothing here waits for the device.

        Args:
            loss: scalar.
            lr: learning rate for this step.

        Returns:
            The gradient's norm before clipping, on the device.
        """
        for parameter in self._parameters:
            # Not Adam's own zero_grad: what it does besides takes as long as a small layer.
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        bad = (~torch.isfinite(norm)).float()
        self.nonfinite += bad
        self._adam.found_inf = bad  # type: ignore[attr-defined]  # fused Adam skips the step itself
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.num_steps += 1
        return norm

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
