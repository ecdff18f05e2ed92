"""Choice of the fixed curvature beta of a tensor (SPEC section 4)."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from peft_sel.errors import ConfigError, NonFiniteWeightError

ROWS_AT_ONCE = 1024  # bounds the float64 copy


def width_beta(hidden_size: int) -> float:
    """Return the curvature for weights drawn from scratch: 7.5 * (hidden_size / 1024) ** 0.85 (section 5.2.0.1).

    Args:
        hidden_size: Width of the model.

    Returns:
        7.5 at 1024, 13.5 at 2048, 19.1 at 3072: the paper's values by one formula.

    Raises:
        ConfigError: If hidden_size is not positive.
    """
    if hidden_size <= 0:
        raise ConfigError("hidden_size", hidden_size, "the width must be positive")
    return 7.5 * (hidden_size / 1024) ** 0.85


def auto_beta(weight: Tensor, beta_rms: float = 0.3, name: str = "weight", hidden_size: int | None = None) -> float:
    """Return beta_rms / rms(weight), which puts a trained tensor into the paper's operating range.

    A tensor of zeros has no scale of its own: it gets the width rule's curvature, with a warning.

    Args:
        weight: The pretrained weight, any float dtype; the mean square is taken in float64.
        beta_rms: beta times the root mean square, positive; 0.23 to 0.36 in the paper.
        name: How errors and warnings call the tensor.
        hidden_size: Width of the model, for a tensor of zeros; None for the tensor's smaller side.

    Returns:
        The curvature, positive and finite.

    Raises:
        ConfigError: If beta_rms is not positive and finite.
        NonFiniteWeightError: If the weight holds NaN or infinity.
    """
    if not (math.isfinite(beta_rms) and beta_rms > 0):
        raise ConfigError("beta_rms", beta_rms, "must be a positive, finite number")
    total = sum(
        float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2 for rows in weight.detach().split(ROWS_AT_ONCE)
    )
    if not math.isfinite(total):
        raise NonFiniteWeightError(name, int((~torch.isfinite(weight)).sum()))
    if total == 0.0:
        beta = width_beta(hidden_size or max(1, min(weight.shape, default=1)))
        warnings.warn(
            f"{name} is all zeros, so beta='auto' has no scale to go by; using the width rule's {beta:.4g}",
            stacklevel=2,
        )
        return beta
    return beta_rms / math.sqrt(total / weight.numel())
