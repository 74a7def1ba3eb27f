"""The recurrent core of a policy, between its encoder and its trunks.

The state of an env is one flat row of float32: an LSTM's output and cell side by side, a GRU's
output. It is zero when an episode begins.
"""

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

CoreKind = Literal["none", "lstm", "gru"]
_PARTS = {"none": 0, "lstm": 2, "gru": 1}  # tensors of `size` numbers in a state


def state_size(kind: CoreKind, size: int) -> int:
    """Return S, the numbers in the state of one env; 0 without a core."""
    return _PARTS[kind] * size


class Core(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014, arXiv:1406.1078).

    Weights are orthogonal and biases zero, as in PPO's reference implementation with an LSTM
    (Huang et al. 2022, "The 37 implementation details of PPO").
    """

    def __init__(self, kind: CoreKind, num_features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.rnn = (nn.LSTM if kind == "lstm" else nn.GRU)(num_features, size)
        for name, parameter in self.rnn.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    def one_row(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `[n, size]` and the next state, from one row `[n, num_features]`."""
        rnn: Any = self.rnn
        # The module's own call, for one row, takes up to three times as long.
        weights = rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0
        state = state.to(features.dtype)
        if isinstance(rnn, nn.LSTM):
            output, cell = torch.lstm_cell(features, state.chunk(2, -1), *weights)
            return output, torch.cat([output, cell], -1)
        output = torch.gru_cell(features, state, *weights)
        return output, output

    def stay_out_of_graphs(self) -> None:
        """Keep `forward`, whose cuts depend on the data, out of compiled losses.

        A decorator would do the same, but its imports take as long as the rest of torch.
        """
        self.forward = torch.compiler.disable(self.forward)  # type: ignore

    def forward(self, features: Tensor, state: Tensor, reset: Tensor) -> Tensor:
        """Return the outputs `[T, n, size]` of rows in sequence, for learning."""
        return self.with_states(features, state, reset)[0]

    def with_states(
        self, features: Tensor, state: Tensor, reset: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the outputs of rows in sequence, and states between them.

        Torch's own kernels take whole stretches of rows, cut where an episode begins in any env.
        (A loop over rows took 4 to 17 times as long for an LSTM over 2 to 8 envs with long
        episodes, and no less for a GRU, or for 32 envs with short episodes.)

        Args:
            features: `[T, n, num_features]`.
            state: `[n, S]`, before the first row.
            reset: `[T, n]` bool: an episode begins with this row, so the state before it is zero.

        Returns:
            Outputs `[T, n, size]`; and last row of each stretch -> the state `[n, S]` after it, not
            zeroed for an end.
        """
        begins = reset.any(1).nonzero().flatten().tolist()
        cuts = [0, *(t for t in begins if t > 0), len(features)]
        state = state.to(features.dtype)
        outputs, after = [], {}
        for first, end in itertools.pairwise(cuts):
            state = state.masked_fill(reset[first].unsqueeze(-1), 0.0)
            output, state = self._stretch(features[first:end], state)
            outputs.append(output)
            after[end - 1] = state
        return torch.cat(outputs), after

    def _stretch(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and last state of rows in which only the first may begin an episode."""
        if isinstance(self.rnn, nn.LSTM):
            parts = tuple(part.unsqueeze(0).contiguous() for part in state.chunk(2, -1))
            output, parts = self.rnn(features, parts)
            return output, torch.cat(parts, -1).squeeze(0)
        output, last = self.rnn(features, state.unsqueeze(0).contiguous())
        return output, last.squeeze(0)
