"""The quantile function of the normal distribution, which ONNX lacks, by plain operations.

Left out: the source's formula for tails below e^-25, which no noise reaches.
"""

import torch
from torch import Tensor

# Wichura 1988, "Algorithm AS 241: The Percentage Points of the Normal Distribution", PPND16:
# coefficients of two polynomials, from the highest power down, in the middle and further out.
_MIDDLE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_OUTER = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
     1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
     4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
     0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494,
     2.05319162663775882187, 1.0),
)  # fmt: skip
_SPLIT, _CENTER = 0.425, 0.180625
_OUTER_CENTER = 1.6


def ndtri(uniform: Tensor) -> Tensor:
    """Return `torch.special.ndtri` but for rounding, of numbers in [2^-24, 1 - 2^-24]."""
    centered = uniform - 0.5
    near = (_CENTER - centered * centered).clamp(min=0)
    middle = centered * _ratio(_MIDDLE, near)
    # 1 - uniform is exact, where it is the smaller one
    tail = torch.minimum(uniform, 1 - uniform)
    far = (-tail.log()).sqrt() - _OUTER_CENTER
    outer = _ratio(_OUTER, far) * centered.sign()
    return torch.where(centered.abs() <= _SPLIT, middle, outer)


def _ratio(coefficients: tuple[tuple[float, ...], ...], x: Tensor) -> Tensor:
    above, below = (_polynomial(each, x) for each in coefficients)
    return above / below


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    first, *rest = coefficients
    value = torch.full_like(x, first)
    for coefficient in rest:
        value = value * x + coefficient
    return value
