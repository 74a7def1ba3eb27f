"""Dense layers without autograd, against autograd: few columns and many, one network and two."""

import itertools

import pytest
import torch
from torch import nn

from headrace.models.critics.critics import BatchedLinear
from headrace.models.manual.dense import Dense, batched, linear
from headrace.models.manual.flat import FlatParameters

ROWS = 30


def one_network(sizes):
    """Layers with their parameters in a vector, and the same pass by modules."""
    modules = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    flat = FlatParameters([p for module in modules for p in module.parameters()])
    *hidden, last = modules
    layers = [*(linear(flat, module, "relu") for module in hidden), linear(flat, last)]
    return flat, layers, modules, lambda module, x: module(x)


def two_networks(sizes):
    """The same of two networks side by side."""
    modules = [BatchedLinear(2, *pair) for pair in itertools.pairwise(sizes)]
    flat = FlatParameters([p for module in modules for p in module.parameters()])
    *hidden, last = modules
    layers = [*(batched(module, "relu", flat) for module in hidden), batched(last, None, flat)]
    return flat, layers, modules, lambda module, x: module(x, frozen=False, first=None)


@pytest.mark.parametrize("networks", [one_network, two_networks])
@pytest.mark.parametrize(("num_in", "size"), [(3, 2), (3, 3), (20, 5), (20, 11)])
@pytest.mark.parametrize("num_out", [1, 5, 12])
def test_equals_autograd(networks, num_in, size, num_out):
    torch.manual_seed(0)
    flat, layers, modules, apply = networks((num_in, 16, 6, num_out))
    net = Dense(layers)
    for rows in (ROWS, ROWS, 1, ROWS):  # also in the memory of the pass before
        x = torch.randn(rows, num_in, requires_grad=True)
        seen = x if networks is one_network else x.expand(2, rows, num_in)
        expected = seen
        for number, module in enumerate(modules):
            expected = apply(module, expected)
            expected = expected.relu() if number < 2 else expected
        with torch.no_grad():
            found = net.forward(seen.detach())
        torch.testing.assert_close(found, expected.detach())
        signal = torch.randn_like(found)
        gradients = torch.autograd.grad((expected * signal).sum(), [*flat.parts(flat.flat), x])
        with torch.no_grad():
            net.output_gradient.copy_(signal)
            net.fill()
            for p, gradient in zip(flat.parts(flat.flat), gradients[:-1], strict=True):
                torch.testing.assert_close(flat.parts(flat.flat)[p], gradient)
            net.forward(seen.detach())
            net.output_gradient.copy_(signal)
            of_input = net.of_input(size)
        of_input = of_input if networks is one_network else of_input.sum(0)
        torch.testing.assert_close(of_input, gradients[-1][:, -size:])
