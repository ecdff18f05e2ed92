"""Inversion: the raw weight whose effective weight is a given one (section 9.0.0.2, SPEC section 3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from peft_sel.errors import ConfigError, ConvergenceError, NonFiniteWeightError, ShiftStartError, SlopeError
from peft_sel.numerics.damped import solve_damped
from peft_sel.numerics.lookup import (
    CPU_BLOCK_ELEMENTS,
    DEVICE_BLOCK_ELEMENTS,
    INFINITIES,
    find_magnitudes,
    look_up,
    make_table,
)
from peft_sel.numerics.newton import MAX_RESIDUAL, Coefficients, find_library, relative_error, solve, solve_in_place
from peft_sel.numerics.transform import check_beta, check_choice, check_family

INITS = ("exact", "congruent")
MIN_SLOPE_RATIO = 1.25
MIN_DAMPED_CURVATURE = 1.25  # of exp_only, which is bounded at 1 and below


class InversionReport(NamedTuple):
    """How an inversion went.

    Attributes:
        num_steps: Newton steps of the slowest block, 0 for the closed forms (sinh, and exp_only of symexp).
        max_relative_residual: Largest |f(w) - W| / |W| in float64, before raw is rounded to its dtype.
        converged: Whether that residual is small enough; invert_weight raises where it is not.
    """

    num_steps: int
    max_relative_residual: float
    converged: bool


def _bounds(tensor: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value, in one pass; NaN where the tensor holds one, 1 where it is empty."""
    if tensor.numel() == 0:
        return 1.0, 1.0
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)


def _solve_sinh(target: Tensor, coefficients: Coefficients) -> tuple[Tensor, int, float]:
    """Solve q * sinh(b * x) = target >= 0, as solve does its equation."""
    double = target.to(torch.float64)
    x = torch.asinh(double / coefficients.growth) / coefficients.curvature
    return x, 0, relative_error(coefficients.growth * torch.sinh(coefficients.curvature * x), double)


def _check_slope(name: str, mode: str, coefficients: Coefficients) -> None:
    """Refuse branches with a negative linear path whose starting slope is below 1.25 times that path."""
    slope, linear = coefficients.growth * coefficients.curvature, coefficients.linear
    if _bounds(slope)[0] >= MIN_SLOPE_RATIO * _bounds(linear)[1]:
        return  # without a comparison for each weight
    margin = slope - MIN_SLOPE_RATIO * linear
    if bool((margin < -1e-6 * slope).any()):  # 1e-6: the slope of float32 scales is exact to a few ulp only
        worst = int(margin.argmin())
        raise SlopeError(name, mode, *(float(t.expand(margin.shape).reshape(-1)[worst]) for t in (slope, linear)))


def _check_damped(name: str, rule: str, coefficients: Coefficients) -> None:
    """Refuse an offset that is not positive, and curvatures at which the map without a linear path turns around."""
    if not bool((coefficients.offset > 0).all()):
        raise ConfigError(
            "offset",
            float(coefficients.offset.min()),
            f"{name}: family='damped' needs n above 0: at 0 it has no linear path, below it no inverse",
        )
    if not bool(coefficients.linear.any()) and not bool((coefficients.curvature >= MIN_DAMPED_CURVATURE).all()):
        raise ConfigError(
            "beta",
            float(coefficients.curvature.min()),
            f"{name}: family='damped' without its linear path reaches no large weight at beta*inner_multiplier below "
            f"{MIN_DAMPED_CURVATURE}; raise it (beta_pattern, beta_rms), or use mode='congruent' with a linear_scale",
        )


def _row_block(tensor: Tensor, start: int, stop: int, ndim: int) -> Tensor:
    """Return the part of a broadcastable tensor that meets the rows start..stop of a weight with ndim dimensions."""
    return tensor[start:stop] if tensor.dim() == ndim and tensor.shape[0] != 1 else tensor


def invert_weight(
    weight: Tensor,
    exp_scale: Tensor,
    linear_scale: Tensor | None = None,
    inner_multiplier: Tensor | None = None,
    offset: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    beta: float | Tensor,
    mode: str,
    init: str = "exact",
    family: str = "symexp",
    normalize_by_inner_mult: bool = False,
    name: str = "weight",
) -> tuple[Tensor, InversionReport]:
    """Find the raw weight that maps to a given weight (9.0.0.2): the right inverse of effective_weight.

    The solve runs in float64 on the float32 values of beta and the scales that the forward pass uses, so a bf16 or fp16
    weight comes back bit for bit when the effective weight is cast to its dtype. Works block by block: in C++ on a CPU
    where there is a compiler, unless weight is float64; elsewhere in torch, by rows. A bf16 or fp16 weight whose scales
    are single numbers is looked up in a table of all values between its smallest and its largest, unless it has fewer
    elements than that; the report is then that of the table.

    Args:
        weight: W, any shape, any float dtype, finite.
        exp_scale: e_w > 0, broadcasts to weight; used as given (the float32 value of the forward pass).
        linear_scale: l_w >= 0, broadcasts to weight; None for 0.
        inner_multiplier: m > 0, broadcasts to weight; None for 1.
        offset: n, broadcasts to weight; None for 0.
        shift: s; must be 0 everywhere or None.
        beta: Fixed curvature, positive.
        mode: The mode of the forward pass.
        init: "exact" inverts the mode's own rule; "congruent" inverts the congruent rule also for mismatch and oppose
            (the paper's mismatched initialisation: under mismatch negative weights come out weaker by 2*l_w*|w|).
        family: The family of the forward pass; sinh has a closed form.
        normalize_by_inner_mult: As in the forward pass.
        name: How errors call the tensor.

    Returns:
        (raw, report): raw has weight's shape; float64 for float64 weight, else float32.

    Raises:
        NonFiniteWeightError: If weight holds NaN or infinity.
        SlopeError: If a branch subtracts the linear path and e_w*exp(-n)*beta*m < 1.25*l_w.
        ShiftStartError: If shift is not 0.
        ConfigError: If mode, init or family is unknown, the family lacks a mode or scale, beta is not positive, a scale
            has the wrong sign, or damped exp_only has beta*m <= 1, where it reaches no large weight.
        ConvergenceError: If the solve misses the weight.

    Example:
        >>> w = torch.randn(8, 8).to(torch.bfloat16)
        >>> e = torch.tensor(1 / 7.5)
        >>> raw, report = invert_weight(w, e, e, beta=7.5, mode="congruent")
        >>> bool((effective_weight(raw, e, e, beta=7.5, mode="congruent").to(w.dtype) == w).all())
        True
    """
    given = {"linear_scale": linear_scale, "inner_multiplier": inner_multiplier, "offset": offset, "shift": shift}
    check_family(family, mode, [scale for scale, value in given.items() if value is not None])
    check_choice("init", init, INITS)
    check_beta(float(beta))
    magnitudes = find_magnitudes(weight) if weight.dtype in INFINITIES else None
    if magnitudes is None:
        is_finite = all(map(math.isfinite, _bounds(weight)))
    else:
        is_finite = magnitudes.stop <= INFINITIES[weight.dtype]
    if not is_finite:
        raise NonFiniteWeightError(name, int((~torch.isfinite(weight)).sum()))
    if shift is not None and bool((shift != 0).any()):
        raise ShiftStartError(name)
    rule = "congruent" if init == "congruent" and mode != "exp_only" else mode
    out_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    coefficients = _start_coefficients(
        exp_scale, linear_scale, inner_multiplier, offset, beta, rule, out_dtype, weight.device
    )
    if normalize_by_inner_mult and inner_multiplier is not None:
        multiplier = inner_multiplier.detach().to(weight.device, torch.float64)
        coefficients = coefficients._replace(
            growth=coefficients.growth / multiplier, linear=coefficients.linear / multiplier
        )
    if family == "damped":
        _check_damped(name, rule, coefficients)
    if rule in ("mismatch", "oppose"):
        _check_slope(name, mode, coefficients)

    def invert(values: Tensor) -> tuple[Tensor, InversionReport]:
        raw = torch.empty_like(values, dtype=out_dtype, memory_format=torch.contiguous_format, requires_grad=False)
        return raw, _invert_blocks(values, raw, coefficients, rule, family)

    is_uniform = all(tensor.numel() == 1 for tensor in coefficients)
    if magnitudes is not None and is_uniform and weight.numel() > 2 * len(magnitudes):
        table, report = make_table(magnitudes, weight.dtype, weight.device, invert)
        if report.converged:  # else it may be at a value that the weight lacks
            return look_up(weight.detach().contiguous(), table), report
    raw, report = invert(weight.detach())
    if not report.converged:
        raise ConvergenceError(name, report.num_steps, report.max_relative_residual)
    return raw, report


def _start_coefficients(
    exp_scale: Tensor,
    linear_scale: Tensor | None,
    inner_multiplier: Tensor | None,
    offset: Tensor | None,
    beta: float | Tensor,
    rule: str,
    forward_dtype: torch.dtype,
    device: torch.device,
) -> Coefficients:
    """Return q, b and l >= 0 in float64 from the values that the forward pass uses, after checking their signs."""

    def double(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=device).detach().to(torch.float64)

    for field, scale, positive in (
        ("exp_scale", exp_scale, True),
        ("linear_scale", linear_scale, False),
        ("inner_multiplier", inner_multiplier, True),
    ):
        low, high = (1.0, 1.0) if scale is None else _bounds(scale)
        if not (low > 0 if positive else low >= 0) or high == math.inf:
            requirement = "above 0" if positive else "at 0 or above"
            raise ConfigError(field, low, f"must start {requirement} and be finite")
    growth, shrink = double(exp_scale), double(0.0)
    if offset is not None:
        shrink = double(offset)
        low, high = _bounds(offset)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ConfigError("offset", low, "must start finite")
        growth = growth * torch.exp(-shrink)
    curvature = double(torch.as_tensor(beta, dtype=torch.float64).to(forward_dtype))
    if inner_multiplier is not None:
        curvature = curvature * double(inner_multiplier)
    linear = double(0.0) if linear_scale is None or rule == "exp_only" else double(linear_scale)
    return Coefficients(growth, curvature, linear, shrink)


def _invert_blocks(weight: Tensor, raw: Tensor, coefficients: Coefficients, rule: str, family: str) -> InversionReport:
    """Fill raw with the solution, block by block of rows."""
    if weight.numel() == 0:
        return InversionReport(0, 0.0, True)
    if weight.dim() == 0:
        return _invert_blocks(weight[None], raw[None], coefficients, rule, family)
    if family == "symexp" and (library := find_library(weight, coefficients)) is not None:
        num_steps, max_residual = solve_in_place(library, raw.copy_(weight), coefficients, rule)
        return InversionReport(num_steps, max_residual, max_residual <= MAX_RESIDUAL)
    elements = CPU_BLOCK_ELEMENTS if weight.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    rows_per_block = max(1, elements * weight.shape[0] // weight.numel())
    num_steps, max_residual = 0, 0.0
    for start in range(0, weight.shape[0], rows_per_block):
        stop = start + rows_per_block
        block = weight[start:stop].to(raw.dtype)
        own = Coefficients(*(_row_block(tensor, start, stop, weight.dim()) for tensor in coefficients))
        if family == "sinh":
            x, steps, residual = _solve_sinh(block.abs(), own)
        elif family == "damped":
            x, steps, residual = solve_damped(block.abs().to(torch.float64), *own)
        else:
            if rule == "mismatch":
                # A number and a float32 block would make float32.
                own = own._replace(linear=torch.copysign(own.linear, block.to(torch.float64)))
            elif rule == "oppose":
                own = own._replace(linear=-own.linear)
            x, steps, residual = solve(block.abs(), own, raw.dtype)
        raw[start:stop] = torch.copysign(x, block)
        num_steps = max(num_steps, steps)
        max_residual = residual if not residual <= max_residual else max_residual  # keeps NaN
    return InversionReport(num_steps, max_residual, max_residual <= MAX_RESIDUAL)
