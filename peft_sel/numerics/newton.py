"""Newton's method for h(x) = q * expm1(b * x) + lam * x = y >= 0: in plain torch, and in C++ for float32 on a CPU."""

from __future__ import annotations

import math
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peft_sel.cpp import load_library
from peft_sel.numerics.transform import MODES

FLOAT32_STEPS = 2  # bring x within about 1e-5, so that float64 has one step left to do, or two
LIBRARY_FLOAT32_STEPS = 3  # cost less there than the second step of a tile in float64
MAX_STEPS = 16
MAX_RESIDUAL = 1e-10
MIN_PARALLEL_ELEMENTS = 1 << 15


class Coefficients(NamedTuple):
    """q, b and lam of h(x) = q * expm1(b * x) + lam * x, and the offset that is in q, in one dtype."""

    growth: Tensor
    curvature: Tensor
    linear: Tensor
    offset: Tensor

    def to(self, dtype: torch.dtype) -> Coefficients:
        """Return the coefficients in a dtype."""
        return Coefficients(*(tensor.to(dtype) for tensor in self))


def solve(target: Tensor, coefficients: Coefficients, out_dtype: torch.dtype) -> tuple[Tensor, int, float]:
    """Solve h(x) = target >= 0 in float64.

    Args:
        target: y, any shape, of out_dtype.
        coefficients: In float64; each broadcasts to target.
        out_dtype: To what x will be rounded, float32 or float64; the first steps for float32 are taken in it.

    Returns:
        x in float64, the number of steps (0 for the closed form where lam is 0) and the largest relative residual.
    """
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


def _newton_step(x: Tensor, target: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Return (next x, step): one Newton step on h(x) = target, kept at x >= 0."""
    q, b, lam, _ = coefficients
    growth = torch.expm1(b * x)
    step = (q * growth + lam * x - target) / (q * b * (growth + 1) + lam)
    return (x - step).clamp_min_(0), step


def _max_relative_residual(x: Tensor, target: Tensor, coefficients: Coefficients) -> float:
    q, b, lam, _ = coefficients
    return relative_error(q * torch.expm1(b * x) + lam * x, target)


def relative_error(reached: Tensor, target: Tensor) -> float:
    """Return the largest |reached - target| / target; absolute where target is 0."""
    return float(((reached - target).abs_() / torch.where(target == 0, 1.0, target)).max())


class _Coefficient(Structure):
    _fields_ = [("values", c_void_p), ("row_stride", c_int64), ("column_stride", c_int64)]


class _Inversion(Structure):
    _fields_ = [
        ("numel", c_int64),
        ("columns", c_int64),
        ("values", c_void_p),
        ("rule", c_int64),
        ("float32_steps", c_int64),
        ("max_steps", c_int64),
        ("max_residual", c_double),
        ("num_threads", c_int64),
        ("growth", _Coefficient),
        ("curvature", _Coefficient),
        ("linear", _Coefficient),
        ("steps_taken", c_int64),
        ("residual_left", c_double),
    ]


def find_library(weight: Tensor, coefficients: Coefficients) -> Any:
    """Find the C++ library if it takes a weight: on a CPU, not float64, of Tensor's own type, and with a linear path.

    Args:
        weight: What is to be inverted, by a rule other than exp_only.
        coefficients: lam before the rule gives it a sign; where it is 0 there is a closed form.

    Returns:
        The library; None where it does not take the weight, and where there is none.
    """
    is_plain = type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype != torch.float64
    return load_library() if is_plain and bool(coefficients.linear.any()) else None


def solve_in_place(library: Any, values: Tensor, coefficients: Coefficients, rule: str) -> tuple[int, float]:
    """Replace weights by their raw weights, as solve finds them, but for roundings of float64 on the way.

    Args:
        library: What find_library returned.
        values: Weights, float32, contiguous, not empty, of at least one dimension.
        coefficients: In float64; each broadcasts to values. lam >= 0, to which the rule gives its sign.
        rule: Mode whose rule is inverted, not exp_only.

    Returns:
        The number of steps of the slowest tile, and the largest relative residual, both as solve returns them.
    """
    columns, ndim = values.shape[-1], values.dim()
    matrices = [t.reshape(t.shape[-ndim:]).expand(values.shape).reshape(-1, columns) for t in coefficients[:3]]
    growth, curvature, linear = (_Coefficient(matrix.data_ptr(), *matrix.stride()) for matrix in matrices)
    task = _Inversion(
        numel=values.numel(),
        columns=columns,
        values=values.data_ptr(),
        rule=MODES.index(rule),
        float32_steps=LIBRARY_FLOAT32_STEPS,
        max_steps=MAX_STEPS,
        max_residual=MAX_RESIDUAL,
        num_threads=torch.get_num_threads() if values.numel() >= MIN_PARALLEL_ELEMENTS else 1,
        growth=growth,
        curvature=curvature,
        linear=linear,
    )
    library.sel_invert(byref(task))
    return task.steps_taken, task.residual_left
