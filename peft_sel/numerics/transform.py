"""The map from a raw to an effective weight, and its derivatives (Eq. 2-7).

Every function here is plain torch, elementwise, and works on any block of a weight: the kernels call it block by block.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from peft_sel.errors import ConfigError
from peft_sel.numerics.elementary import exp, expm1

MODES = ("mismatch", "congruent", "oppose", "exp_only")
FAMILIES = ("symexp",)


def check_choice(field: str, value: str, known: Collection[str]) -> None:
    """Raise a ConfigError that lists the known names if value is not one of them."""
    if value not in known:
        raise ConfigError(field, value, f"unknown; choose one of {', '.join(known)}")


def check_beta(beta: float) -> None:
    """Raise a ConfigError unless beta is positive and finite."""
    if not (math.isfinite(beta) and beta > 0):
        raise ConfigError("beta", beta, "the curvature must be a positive, finite number")


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that the formula is evaluated in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _signed_linear(sign: Tensor, linear_scale: Tensor | None, mode: str) -> Tensor | None:
    """Return lam, the factor of |w| inside sigma * (E + |w| * lam), or None where there is no linear path."""
    if mode == "exp_only" or linear_scale is None:
        return None
    if mode == "mismatch":
        return sign * linear_scale
    return linear_scale if mode == "congruent" else -linear_scale


def _exponential_terms(
    magnitude: Tensor,
    inner_multiplier: Tensor | None,
    offset: Tensor | None,
    shift: Tensor | None,
    beta: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return exp(-n) * expm1(a), the curvature beta * m and exp(-n) (None for no offset)."""
    curvature = torch.as_tensor(beta, dtype=magnitude.dtype, device=magnitude.device)
    if inner_multiplier is not None:
        curvature = curvature * inner_multiplier
    exponent = curvature * magnitude
    if shift is not None:
        exponent = exponent + shift
    growth = expm1(exponent)
    if offset is None:
        return growth, curvature, None
    decay = exp(-offset)
    return decay * growth, curvature, decay


def effective_weight(
    raw: Tensor,
    exp_scale: Tensor,
    linear_scale: Tensor | None = None,
    inner_multiplier: Tensor | None = None,
    offset: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    beta: float | Tensor,
    mode: str,
    family: str = "symexp",
) -> Tensor:
    """Map raw weights to effective weights (Eq. 3-7).

    Evaluates ``sigma * (E + |w| * lam)`` with ``E = e_w * exp(-n) * expm1(beta * m * |w| + s)`` and lam the linear
    scale with the sign that the mode gives it. Monotone in each half-line for valid scales; both zeros keep their sign
    and have a live (one-sided) slope under autograd.

    Args:
        raw: Raw weights w, any shape; float64 is computed in float64, everything else in float32.
        exp_scale: e_w, broadcasts to raw.
        linear_scale: l_w, broadcasts to raw; None for 0.
        inner_multiplier: m, broadcasts to raw; None for 1.
        offset: n, broadcasts to raw; None for 0.
        shift: s, broadcasts to raw; None for 0. A non-zero shift makes the map jump at 0.
        beta: Fixed curvature, positive.
        mode: "mismatch", "congruent", "oppose" or "exp_only".
        family: "symexp".

    Returns:
        Effective weights, shape of raw; float32, or float64 if raw or a scale is.

    Raises:
        ConfigError: If mode or family is unknown or beta is not positive.

    Example:
        >>> w = torch.tensor([-1.0, 0.0, 1.0])
        >>> e = torch.tensor(1 / 7.5)
        >>> up = effective_weight(w, e, e, beta=7.5, mode="congruent")
        >>> bool((up == -up.flip(0)).all())
        True
    """
    check_choice("mode", mode, MODES)
    check_choice("family", family, FAMILIES)
    if not isinstance(beta, Tensor):
        check_beta(beta)
    raw = raw.to(compute_dtype(raw))
    sign = torch.copysign(torch.ones_like(raw), raw.detach())
    magnitude = sign * raw
    growth, _, _ = _exponential_terms(magnitude, inner_multiplier, offset, shift, beta)
    inside = exp_scale * growth
    signed_linear = _signed_linear(sign, linear_scale, mode)
    if signed_linear is not None:
        inside = inside + magnitude * signed_linear
    return sign * inside


def effective_weight_gradients(
    grad: Tensor,
    raw: Tensor,
    exp_scale: Tensor,
    linear_scale: Tensor | None = None,
    inner_multiplier: Tensor | None = None,
    offset: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    beta: float | Tensor,
    mode: str,
    names: Collection[str],
) -> dict[str, Tensor]:
    """Pull a gradient with respect to the effective weight back to raw and each scale, elementwise (SPEC section 5).

    Args:
        grad: dLoss/dw_eff, shape of raw, any float dtype.
        raw: Raw weights; float64 is computed in float64, everything else in float32.
        exp_scale: e_w, as in effective_weight.
        linear_scale: l_w, as in effective_weight.
        inner_multiplier: m, as in effective_weight.
        offset: n, as in effective_weight.
        shift: s, as in effective_weight.
        beta: Fixed curvature.
        mode: One of the four modes.
        names: Which gradients to form: "raw" or names of scales.

    Returns:
        One tensor of raw's shape for each name; reduce it to the scale's own shape with reduce_gradient.
    """
    dtype = compute_dtype(raw)
    raw, grad = raw.to(dtype), grad.to(dtype)
    sign = torch.copysign(torch.ones_like(raw), raw)
    magnitude = sign * raw
    growth, curvature, decay = _exponential_terms(magnitude, inner_multiplier, offset, shift, beta)
    exponential = growth + (1.0 if decay is None else decay)  # exp(a - n)
    signed_linear = _signed_linear(sign, linear_scale, mode)
    signed_grad = grad * sign
    gradients: dict[str, Tensor] = {}
    if "raw" in names:
        slope = exp_scale * curvature * exponential
        gradients["raw"] = grad * (slope if signed_linear is None else slope + signed_linear)
    if "exp_scale" in names:
        gradients["exp_scale"] = signed_grad * growth
    if "linear_scale" in names:
        if mode == "exp_only":
            gradients["linear_scale"] = torch.zeros_like(raw)
        else:
            upstream = grad if mode == "mismatch" else signed_grad
            gradients["linear_scale"] = upstream * (-magnitude if mode == "oppose" else magnitude)
    if "inner_multiplier" in names:
        gradients["inner_multiplier"] = signed_grad * exp_scale * exponential * (beta * magnitude)
    if "offset" in names:
        gradients["offset"] = -signed_grad * exp_scale * growth
    if "shift" in names:
        gradients["shift"] = signed_grad * exp_scale * exponential
    return gradients
