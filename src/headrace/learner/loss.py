"""A loss as a module, whose gradients several ranks can average."""

from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import LossSpec
from headrace.batch import Minibatch
from headrace.errors import ConfigError
from headrace.models.recurrent import Core


class Loss(nn.Module):
    """A loss as a module, so that `Ranks.wrap` can average its gradients."""

    def __init__(self, spec: LossSpec, config: Any, *, compiled: bool) -> None:
        super().__init__()
        self.module, self._config = spec.module, config
        if compiled:
            _check_compiler()
            for part in spec.module.modules():
                if isinstance(part, Core):
                    part.stay_out_of_graphs()
        self._function = torch.compile(spec.function) if compiled else spec.function

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self._function(self.module, minibatch, self._config)


def _check_compiler() -> None:
    """Raise ConfigError before torch.compile would fail in the first update."""
    # Imported here, since most runs do not need it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=True, but torch.compile finds no C++ compiler that works.\n"
            "Install g++ (or name one by CXX), or train without --compile."
        ) from error
