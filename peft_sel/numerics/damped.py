"""Inversion of the damped family, whose map is not convex: Newton inside a bracket (SPEC section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_STEPS = 16
LAST_STEP = 1e-8  # relative; Newton squares it


def solve_damped(
    target: Tensor, growth: Tensor, curvature: Tensor, linear: Tensor, offset: Tensor
) -> tuple[Tensor, int, float]:
    """Solve q * expm1(b * x) * exp(-x) + lam * x * (1 - exp(-n * exp(x))) = target for x >= 0.

    A step of Newton's that leaves the bracket is replaced by its middle. Where the map is not monotone (b below 0.3, or
    scales far from their start) this finds one of the solutions.

    Args:
        target: y >= 0, float64.
        growth: q > 0; this and the others are float64 and broadcast to target.
        curvature: b > 0; above 1 where lam is 0.
        linear: lam >= 0, 0 everywhere or nowhere.
        offset: n > 0.

    Returns:
        x, the number of steps, and the largest relative residual.
    """
    slope = growth * curvature + linear * -torch.expm1(-offset)  # at 0
    low, high = torch.zeros_like(target), _bound(target, growth, curvature, linear, offset)
    x = torch.minimum(torch.log1p(target * (curvature / slope)) / curvature, high)
    num_steps, settled = 0, False
    value, derivative = _evaluate(x, growth, curvature, linear, offset)
    while num_steps < MAX_STEPS and not settled:
        missing = value - target
        low, high = torch.where(missing < 0, x, low), torch.where(missing > 0, x, high)
        moved = x - missing / derivative
        inside = (moved >= low) & (moved <= high)  # false for NaN
        moved = torch.where(inside, moved, (low + high) / 2)
        settled = bool(((moved - x).abs() <= LAST_STEP * moved).all())
        x, num_steps = moved, num_steps + 1
        value, derivative = _evaluate(x, growth, curvature, linear, offset)
    residual = float(((value - target).abs() / torch.where(target == 0, 1.0, target)).max())
    return x, num_steps, residual


def _bound(target: Tensor, growth: Tensor, curvature: Tensor, linear: Tensor, offset: Tensor) -> Tensor:
    """Return an x at which the map is at the target or above, from each of its two paths."""
    by_linear = target / (linear * -torch.expm1(-offset))
    # From x = 1/b on, the exponential path is at least q * (1 - 1/e) * exp((b - 1) * x).
    by_growth = 1 / curvature + torch.log1p(target / (0.6 * growth)) / (curvature - 1)
    bound = torch.where(curvature > 1, torch.minimum(by_linear, by_growth), by_linear)
    return torch.where(linear > 0, bound, by_growth) * (1 + 1e-12)  # 1e-12: its own rounding


def _evaluate(x: Tensor, growth: Tensor, curvature: Tensor, linear: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the map and its derivative."""
    rise = growth * torch.exp((curvature - 1) * x)
    exponential = rise * -torch.expm1(-curvature * x)
    inside = offset * torch.exp(x)
    damping = -torch.expm1(-inside)
    value = exponential + linear * x * damping
    return value, curvature * rise - exponential + linear * (damping + x * offset * torch.exp(x - inside))
