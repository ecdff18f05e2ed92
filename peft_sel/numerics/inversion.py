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
from peft_sel.numerics.transform import check_beta, check_choice, check_family

INITS = ("exact", "congruent")
FLOAT32_STEPS = 2  # bring x within about 1e-7, so that float64 has one step left to do
MAX_STEPS = 16
MIN_SLOPE_RATIO = 1.25
MAX_RESIDUAL = 1e-10
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


class _Coefficients(NamedTuple):
    """q, b and lam of h(x) = q * expm1(b * x) + lam * x, and the offset that is in q, in one dtype."""

    growth: Tensor
    curvature: Tensor
    linear: Tensor
    offset: Tensor

    def to(self, dtype: torch.dtype) -> _Coefficients:
        return _Coefficients(*(tensor.to(dtype) for tensor in self))


def _newton_step(x: Tensor, target: Tensor, coefficients: _Coefficients) -> tuple[Tensor, Tensor]:
    """Return (next x, step): one Newton step on h(x) = target, kept at x >= 0."""
    q, b, lam, _ = coefficients
    growth = torch.expm1(b * x)
    step = (q * growth + lam * x - target) / (q * b * (growth + 1) + lam)
    return (x - step).clamp_min_(0), step


def _solve(target: Tensor, coefficients: _Coefficients, out_dtype: torch.dtype) -> tuple[Tensor, int, float]:
    """Solve h(x) = target >= 0 in float64; return (x, steps, largest relative residual)."""
    double = target.to(torch.float64)
    if not bool(coefficients.linear.any()):
        x = torch.log1p(double / coefficients.growth) / coefficients.curvature
        return x, 0, _max_relative_residual(x, double, coefficients)
    # Right in slope at 0 and in growth at infinity: from here 2 to 4 steps do, wherever the weight lies.
    start_dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    y, single = target.to(start_dtype), coefficients.to(start_dtype)
    x = torch.log1p(y * (single.curvature / (single.growth * single.curvature + single.linear))) / single.curvature
    num_steps = 0
    if start_dtype == torch.float32:
        for _ in range(FLOAT32_STEPS):
            x, _ = _newton_step(x, y, single)
        x, num_steps = x.to(torch.float64), FLOAT32_STEPS
    last_step = 1e-8 if out_dtype == torch.float64 else 1e-6  # Newton squares it
    residual = math.inf
    while num_steps < MAX_STEPS and not residual <= MAX_RESIDUAL:
        x, step = _newton_step(x, double, coefficients)
        num_steps += 1
        if bool((step.abs_() <= last_step * x).all()):
            residual = _max_relative_residual(x, double, coefficients)
    return x, num_steps, residual


def _max_relative_residual(x: Tensor, target: Tensor, coefficients: _Coefficients) -> float:
    q, b, lam, _ = coefficients
    return _relative_error(q * torch.expm1(b * x) + lam * x, target)


def _relative_error(reached: Tensor, target: Tensor) -> float:
    return float(((reached - target).abs_() / torch.where(target == 0, 1.0, target)).max())


def _solve_sinh(target: Tensor, coefficients: _Coefficients) -> tuple[Tensor, int, float]:
    """Solve q * sinh(b * x) = target >= 0, as _solve does its equation."""
    double = target.to(torch.float64)
    x = torch.asinh(double / coefficients.growth) / coefficients.curvature
    return x, 0, _relative_error(coefficients.growth * torch.sinh(coefficients.curvature * x), double)


def _check_slope(name: str, mode: str, coefficients: _Coefficients) -> None:
    """Refuse branches with a negative linear path whose starting slope is below 1.25 times that path."""
    slope = coefficients.growth * coefficients.curvature
    margin = slope - MIN_SLOPE_RATIO * coefficients.linear
    if bool((margin < -1e-6 * slope).any()):  # 1e-6: the slope of float32 scales is exact to a few ulp only
        worst = int(margin.argmin())
        linear = coefficients.linear.expand(margin.shape).reshape(-1)[worst]
        raise SlopeError(name, mode, float(slope.expand(margin.shape).reshape(-1)[worst]), float(linear))


def _check_damped(name: str, rule: str, coefficients: _Coefficients) -> None:
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
    weight comes back bit for bit when the effective weight is cast to its dtype. Works block by block of rows. A bf16
    or fp16 weight whose scales are single numbers is looked up in a table of all values between its smallest and its
    largest, unless it has fewer elements than that; the report is then that of the table.

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
    largest_bits = None if magnitudes is None else magnitudes.stop - 1
    if not (torch.isfinite(weight).all() if largest_bits is None else largest_bits < INFINITIES[weight.dtype]):
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

    def solve(values: Tensor) -> tuple[Tensor, InversionReport]:
        raw = torch.empty_like(values, dtype=out_dtype, memory_format=torch.contiguous_format, requires_grad=False)
        return raw, _invert_blocks(values, raw, coefficients, rule, family)

    is_uniform = all(tensor.numel() == 1 for tensor in coefficients)
    if magnitudes is not None and is_uniform and weight.numel() > 2 * len(magnitudes):
        table, report = make_table(magnitudes, weight.dtype, weight.device, solve)
        if report.converged:  # else it may be at a value that the weight lacks
            return look_up(weight.detach().contiguous(), table), report
    raw, report = solve(weight.detach())
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
) -> _Coefficients:
    """Return q, b and l >= 0 in float64 from the values that the forward pass uses, after checking their signs."""

    def double(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=device).detach().to(torch.float64)

    for field, scale, positive in (
        ("exp_scale", exp_scale, True),
        ("linear_scale", linear_scale, False),
        ("inner_multiplier", inner_multiplier, True),
    ):
        if scale is not None and not bool((torch.isfinite(scale) & (scale > 0 if positive else scale >= 0)).all()):
            requirement = "above 0" if positive else "at 0 or above"
            raise ConfigError(field, float(scale.min()), f"must start {requirement} and be finite")
    growth, shrink = double(exp_scale), double(0.0)
    if offset is not None:
        shrink = double(offset)
        if not bool(torch.isfinite(offset).all()):
            raise ConfigError("offset", float(offset.min()), "must start finite")
        growth = growth * torch.exp(-shrink)
    curvature = double(torch.as_tensor(beta, dtype=torch.float64).to(forward_dtype))
    if inner_multiplier is not None:
        curvature = curvature * double(inner_multiplier)
    linear = double(0.0) if linear_scale is None or rule == "exp_only" else double(linear_scale)
    return _Coefficients(growth, curvature, linear, shrink)


def _invert_blocks(weight: Tensor, raw: Tensor, coefficients: _Coefficients, rule: str, family: str) -> InversionReport:
    """Fill raw with the solution, block by block of rows."""
    if weight.numel() == 0:
        return InversionReport(0, 0.0, True)
    if weight.dim() == 0:
        return _invert_blocks(weight[None], raw[None], coefficients, rule, family)
    elements = CPU_BLOCK_ELEMENTS if weight.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    rows_per_block = max(1, elements * weight.shape[0] // weight.numel())
    num_steps, max_residual = 0, 0.0
    for start in range(0, weight.shape[0], rows_per_block):
        stop = start + rows_per_block
        block = weight[start:stop].to(raw.dtype)
        own = _Coefficients(*(_row_block(tensor, start, stop, weight.dim()) for tensor in coefficients))
        if family == "sinh":
            x, steps, residual = _solve_sinh(block.abs(), own)
        elif family == "damped":
            x, steps, residual = solve_damped(block.abs().to(torch.float64), *own)
        else:
            if rule == "mismatch":
                own = own._replace(linear=own.linear * torch.copysign(torch.ones_like(block), block))
            elif rule == "oppose":
                own = own._replace(linear=-own.linear)
            x, steps, residual = _solve(block.abs(), own, raw.dtype)
        raw[start:stop] = torch.copysign(x, block)
        num_steps = max(num_steps, steps)
        max_residual = residual if not residual <= max_residual else max_residual  # keeps NaN
    return InversionReport(num_steps, max_residual, max_residual <= MAX_RESIDUAL)
