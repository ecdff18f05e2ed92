"""exp and expm1 with the same bits wherever float32 runs on a CPU, and accurate everywhere.

float32 on a CPU goes through sums and products alone, whose rounding IEEE 754 fixes: the bits depend neither on the
vendor's math library nor on whether the code is compiled. That also keeps torch.compile accurate, which turns
torch.expm1 into exp(x) - 1 on CPUs, hundreds of ulp off for small weights. Elsewhere these are torch's own functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = 1 / math.log(2)
LN2_HIGH = 355 / 512  # nine bits: k * LN2_HIGH is exact
LN2_LOW = math.log(2) - LN2_HIGH
SERIES_TERMS = {torch.float32: 7, torch.float64: 14}  # of expm1 on |r| <= ln(2)/2, to a quarter of an ulp


def expm1(x: Tensor) -> Tensor:
    """Compute exp(x) - 1 without cancellation (SPEC section 3).

    Args:
        x: Any shape, float32 or float64.

    Returns:
        exp(x) - 1, within 1 ulp; in float32 on a CPU infinite from 88.4 on.
    """
    if not _uses_series(x):
        return torch.expm1(x)
    scale, rest = _reduce(x.clamp(-50.0, 1000.0))  # beyond lie -1 and infinity
    return scale * (rest + (1 - 1 / scale))


def exp(x: Tensor) -> Tensor:
    """Compute the exponential of x.

    Args:
        x: Any shape, float32 or float64.

    Returns:
        exp(x), within 1 ulp; in float32 on a CPU infinite from 88.4 on.
    """
    if not _uses_series(x):
        return torch.exp(x)
    scale, rest = _reduce(x.clamp(-1000.0, 1000.0))  # beyond lie 0 and infinity
    return scale * (1 + rest)


def _uses_series(x: Tensor) -> bool:
    in_float32_on_cpu = x.dtype == torch.float32 and x.device.type == "cpu" and not x.requires_grad
    return in_float32_on_cpu or torch.compiler.is_compiling()


def _reduce(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^k and expm1(r), where x = k*ln(2) + r and |r| <= ln(2)/2."""
    k = torch.round(x * LOG2_E)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    terms = SERIES_TERMS[x.dtype]
    series = r * (1 / math.factorial(terms)) + 1 / math.factorial(terms - 1)
    for power in range(terms - 2, 1, -1):
        series = series * r + 1 / math.factorial(power)
    return torch.exp2(k), r + r * r * series
