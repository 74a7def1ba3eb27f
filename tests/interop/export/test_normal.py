"""The quantile function of the normal distribution, against torch's."""

import torch

from headrace.interop.export.normal import ndtri


def test_it_equals_torch_s_over_the_grid_of_noise():
    uniform = (torch.arange(0, 2**23, 7, dtype=torch.float64) + 0.5) * 2.0**-23
    exact = torch.special.ndtri(uniform)
    torch.testing.assert_close(ndtri(uniform), exact, rtol=0, atol=1e-13)
    of_float = ndtri(uniform.float())
    assert of_float.dtype == torch.float32
    # float32 has steps of 5e-7 at the ends, where the largest are 5.3
    torch.testing.assert_close(of_float.double(), exact, rtol=0, atol=2e-6)
