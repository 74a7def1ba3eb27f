"""Noisy layers: noise by address, its distribution, and none of it in evaluations."""

import copy

import numpy as np
import torch

from headrace.device_seeding import normal_noise
from headrace.models.action_values.noisy import NoisyLinear, renew_noise

CPU = torch.device("cpu")


def test_noise_is_normal_and_belongs_to_its_address():
    noise = normal_noise(3, 5, 0, 100_000, CPU)
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    share = [float((noise.abs() < z).double().mean()) for z in (1, 2, 3)]
    np.testing.assert_allclose(share, [0.6827, 0.9545, 0.9973], atol=0.005)
    assert torch.equal(normal_noise(3, 5, 0, 10, CPU), normal_noise(3, 5, 0, 10, CPU))
    others = [normal_noise(*address, 10, CPU) for address in ((4, 5, 0), (3, 6, 0), (3, 5, 1))]
    far = normal_noise(3, 5 + 2**32, 0, 10, CPU)  # more gradient steps than 32 bits count
    for other in [*others, far]:
        assert not torch.isin(other, noise[:10]).any()


def test_weights_are_means_and_factorised_noise():
    torch.manual_seed(0)
    layer = NoisyLinear(4, 3)
    x = torch.randn(7, 4)
    assert torch.all(layer.weight_sigma == 0.25)
    renew_noise(layer, 1, 2, 0)
    noise = normal_noise(1, 2, 0, 7, CPU).float()
    f = noise.sign() * noise.abs().sqrt()
    weight = layer.weight + 0.25 * f[4:].unsqueeze(1) * f[:4]
    expected = x @ weight.T + layer.bias + 0.25 * f[4:]
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), x @ layer.weight.T + layer.bias)


def test_layers_have_noise_of_their_own_which_copies_share_until_it_is_renewed():
    torch.manual_seed(0)
    both = torch.nn.Sequential(NoisyLinear(4, 4), NoisyLinear(4, 4))
    renew_noise(both, 1, 2, 0)
    assert not torch.isin(both[0].noise_in, both[1].noise_in).any()
    other = copy.deepcopy(both)
    renew_noise(other, 1, 2, 1)
    assert not torch.isin(both[0].noise_in, other[0].noise_in).any()
    renew_noise(other, 1, 2, 0)
    assert torch.equal(both[1].noise_out, other[1].noise_out)
