"""The map from a raw to an effective weight, and its derivatives (Eq. 2-7, and the families of 10.2).

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
SCALE_NAMES = ("exp_scale", "linear_scale", "inner_multiplier", "offset", "shift")
FAMILY_MODES = {"symexp": MODES, "sinh": ("congruent",), "damped": ("congruent", "exp_only")}
FAMILY_SCALES = {
    "symexp": SCALE_NAMES,
    "sinh": ("exp_scale", "inner_multiplier"),
    "damped": ("exp_scale", "linear_scale", "inner_multiplier", "offset"),
}
FAMILIES = tuple(FAMILY_MODES)


def check_choice(field: str, value: str, known: Collection[str]) -> None:
    """Raise a ConfigError that lists the known names if value is not one of them."""
    if value not in known:
        raise ConfigError(field, value, f"unknown; choose one of {', '.join(known)}")


def check_family(family: str, mode: str, scales: Collection[str]) -> None:
    """Raise a ConfigError unless a family has a mode and the named scales."""
    check_choice("family", family, FAMILIES)
    check_choice("mode", mode, MODES)
    if mode not in FAMILY_MODES[family]:
        raise ConfigError("mode", mode, f"family={family!r} has only {' and '.join(FAMILY_MODES[family])}")
    for name in scales:
        check_choice("scale", name, SCALE_NAMES)
        if name not in FAMILY_SCALES[family]:
            raise ConfigError(
                name,
                "given",
                f"family={family!r} has no such scale, only {', '.join(FAMILY_SCALES[family])}; leave it out",
            )


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


def _grow(
    family: str, magnitude: Tensor, curvature: Tensor, offset: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return G of E = e_w * G, and what G lacks to its derivative with respect to beta * m * |w|."""
    exponent = curvature * magnitude
    if family == "sinh":
        up, down = expm1(exponent), expm1(-exponent)
        return (up - down) * 0.5, down + 1
    if family == "damped":
        if offset is None:
            raise ConfigError("offset", None, "family='damped' needs n above 0")
        # exp(-|w|) joins the exponent: the product of the printed factors would be 0 * inf for large weights.
        rise = exp((curvature - 1) * magnitude - offset)
        growth = rise * (0.0 - expm1(-exponent))  # and not -expm1, which may be -0.0
        return growth, rise - growth
    growth = expm1(exponent if shift is None else exponent + shift)
    if offset is None:
        return growth, 1.0
    decay = exp(-offset)
    return decay * growth, decay


def _damp(magnitude: Tensor, offset: Tensor) -> Tensor:
    """Return the damped family's factor on the linear path, 1 - exp(-n * exp(|w|))."""
    return -expm1(-offset * exp(magnitude))


def _curvature(magnitude: Tensor, inner_multiplier: Tensor | None, beta: float | Tensor) -> Tensor:
    curvature = torch.as_tensor(beta, dtype=magnitude.dtype, device=magnitude.device)
    return curvature if inner_multiplier is None else curvature * inner_multiplier


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
    normalize_by_inner_mult: bool = False,
) -> Tensor:
    """Map raw weights to effective weights (Eq. 3-7).

    Evaluates ``sigma * (E + |w| * lam)`` with lam the linear scale with the mode's sign, and E by family:

    - symexp: ``e_w * exp(-n) * expm1(beta * m * |w| + s)``;
    - sinh: ``e_w * sinh(beta * m * |w|)``, without a linear path;
    - damped: ``e_w * exp(-n) * expm1(beta * m * |w|) * exp(-|w|)``, and lam times ``1 - exp(-n * exp(|w|))``.

    Monotone in each half-line for valid scales (damped: from beta * m = 0.3 on); both zeros keep their sign and have a
    live (one-sided) slope under autograd.

    Args:
        raw: Raw weights w, any shape; float64 is computed in float64, everything else in float32.
        exp_scale: e_w, broadcasts to raw.
        linear_scale: l_w, broadcasts to raw; None for 0.
        inner_multiplier: m, broadcasts to raw; None for 1.
        offset: n, broadcasts to raw; None for 0.
        shift: s, broadcasts to raw; None for 0. A non-zero shift makes the map jump at 0.
        beta: Fixed curvature, positive.
        mode: "mismatch", "congruent", "oppose" or "exp_only"; sinh has only congruent, damped congruent and exp_only.
        family: "symexp", "sinh" (no linear_scale, offset, shift) or "damped" (no shift; offset above 0).
        normalize_by_inner_mult: Divide the result by m, which then changes the curvature and not the gain near zero.

    Returns:
        Effective weights, shape of raw; float32, or float64 if raw or a scale is.

    Raises:
        ConfigError: If mode or family is unknown, the family lacks a mode or scale, or beta is not positive.

    Example:
        >>> w = torch.tensor([-1.0, 0.0, 1.0])
        >>> e = torch.tensor(1 / 7.5)
        >>> up = effective_weight(w, e, e, beta=7.5, mode="congruent")
        >>> bool((up == -up.flip(0)).all())
        True
    """
    given = {"linear_scale": linear_scale, "inner_multiplier": inner_multiplier, "offset": offset, "shift": shift}
    check_family(family, mode, [name for name, scale in given.items() if scale is not None])
    if not isinstance(beta, Tensor):
        check_beta(beta)
    raw = raw.to(compute_dtype(raw))
    sign = torch.copysign(torch.ones_like(raw), raw.detach())
    magnitude = sign * raw
    growth, _ = _grow(family, magnitude, _curvature(magnitude, inner_multiplier, beta), offset, shift)
    inside = exp_scale * growth
    signed_linear = _signed_linear(sign, linear_scale, mode)
    if signed_linear is not None:
        if family == "damped" and offset is not None:
            signed_linear = signed_linear * _damp(magnitude, offset)
        inside = inside + magnitude * signed_linear
    if normalize_by_inner_mult and inner_multiplier is not None:
        inside = inside / inner_multiplier
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
    family: str = "symexp",
    normalize_by_inner_mult: bool = False,
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
        mode: One of the family's modes.
        names: Which gradients to form: "raw" or names of the family's scales.
        family: As in effective_weight.
        normalize_by_inner_mult: As in effective_weight.

    Returns:
        One tensor of raw's shape for each name; reduce it to the scale's own shape with reduce_gradient.

    Raises:
        ConfigError: If the family lacks a mode or a named scale.
    """
    check_family(family, mode, [name for name in names if name != "raw"])
    dtype = compute_dtype(raw)
    raw, grad = raw.to(dtype), grad.to(dtype)
    sign = torch.copysign(torch.ones_like(raw), raw)
    magnitude = sign * raw
    curvature = _curvature(magnitude, inner_multiplier, beta)
    growth, lacking = _grow(family, magnitude, curvature, offset, shift)
    rise = growth + lacking  # dG / d(beta * m * |w|)
    linear = _signed_linear(sign, linear_scale, mode)
    damping = damped_away = None
    if family == "damped" and offset is not None:
        damping = _damp(magnitude, offset)
        if linear is not None:
            # lam * |w| * d(damping)/dn; exp(|w|) * exp(-n * exp(|w|)) as one exponential, which cannot be inf * 0.
            damped_away = linear * magnitude * exp(magnitude - offset * exp(magnitude))
            linear = linear * damping
    normalizer = inner_multiplier if normalize_by_inner_mult else None
    grad = grad if normalizer is None else grad / normalizer
    signed_grad = grad * sign
    gradients: dict[str, Tensor] = {}
    if "raw" in names:
        slope = exp_scale * curvature * rise
        if family == "damped":
            slope = slope - exp_scale * growth
        if linear is not None:
            slope = slope + linear
        if damped_away is not None and offset is not None:
            slope = slope + damped_away * offset
        gradients["raw"] = grad * slope
    if "exp_scale" in names:
        gradients["exp_scale"] = signed_grad * growth
    if "linear_scale" in names:
        gradients["linear_scale"] = _linear_scale_gradient(grad, sign, magnitude, mode, damping)
    if "inner_multiplier" in names:
        gradients["inner_multiplier"] = signed_grad * exp_scale * rise * (beta * magnitude)
        if normalizer is not None:
            total = exp_scale * growth if linear is None else exp_scale * growth + magnitude * linear
            gradients["inner_multiplier"] = gradients["inner_multiplier"] - signed_grad * total / normalizer
    if "offset" in names:
        gradients["offset"] = -signed_grad * exp_scale * growth
        if damped_away is not None:
            gradients["offset"] = gradients["offset"] + signed_grad * damped_away
    if "shift" in names:
        gradients["shift"] = signed_grad * exp_scale * rise
    return gradients


def _linear_scale_gradient(grad: Tensor, sign: Tensor, magnitude: Tensor, mode: str, damping: Tensor | None) -> Tensor:
    if mode == "exp_only":
        return torch.zeros_like(magnitude)
    upstream = grad if mode == "mismatch" else grad * sign
    gradient = upstream * (-magnitude if mode == "oppose" else magnitude)
    return gradient if damping is None else gradient * damping
