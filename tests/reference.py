"""The method in slow, plain numpy, written from SPEC.md alone: the tests' oracle, sharing no code with peft_sel.

Every argument may be a number, an array or a tensor. Scales are named e, l, m, n, s as in SPEC.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

# 64 significant bits on x86; where long double is plain float64 the tests' tolerances hold too, with less to spare.
WIDE = np.longdouble
MODES = ("mismatch", "congruent", "oppose", "exp_only")
SCALES = ("exp_scale", "linear_scale", "inner_multiplier", "offset", "shift")
FAMILIES = {  # modes and scales of each
    "symexp": (MODES, SCALES),
    "sinh": (("congruent",), ("exp_scale", "inner_multiplier")),
    "damped": (("congruent", "exp_only"), ("exp_scale", "linear_scale", "inner_multiplier", "offset")),
}
PATTERNS = ("global", "row", "column", "row_col_mult", "row_col_add", "lora")


def wide(value) -> np.ndarray:
    """Any number, array or tensor, exactly, as a wide array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double().numpy()
    return np.asarray(value, dtype=WIDE)


def effective_weight(raw, e, l, m, n, s, beta, mode, family="symexp", normalize=False) -> np.ndarray:  # noqa: E741
    """w_eff of SPEC.md section 2; a family ignores the scales that it lacks."""
    raw, e, l, m, n, s, beta = map(wide, (raw, e, l, m, n, s, beta))  # noqa: E741
    sigma, size = np.copysign(1, raw), abs(raw)
    if family == "sinh":
        total = e * np.sinh(beta * m * raw)
    elif family == "damped":
        E = e * np.exp(-n) * np.expm1(beta * m * size) * np.exp(-size)
        L = l * raw * -np.expm1(-n * np.exp(size))
        total = sigma * E + {"congruent": 1, "exp_only": 0}[mode] * L
    else:
        S = sigma * e * np.exp(-n) * np.expm1(beta * size * m + s)
        L = size * l if mode == "mismatch" else {"congruent": 1, "oppose": -1, "exp_only": 0}[mode] * raw * l
        total = S + L
    return total / m if normalize else total


def gradients(grad, raw, e, l, m, n, s, beta, mode, family="symexp", normalize=False) -> dict[str, np.ndarray]:  # noqa: E741
    """Elementwise grad * dw_eff/d(argument) by central differences; for raw one-sided, away from zero."""
    grad, *values = np.broadcast_arrays(*map(wide, (grad, raw, e, l, m, n, s)))
    result = {}
    for index, name in enumerate(("raw", *SCALES)):

        def shifted(delta, index=index):
            arguments = [*values[:index], values[index] + delta, *values[index + 1 :]]
            return effective_weight(*arguments, beta, mode, family, normalize)

        if name == "raw":  # the map may jump at 0: stay on the weight's side (0 * step keeps the sign of -0.0)
            step = np.copysign(WIDE(1e-6) * np.maximum(abs(values[0]), WIDE(0.01)), values[0])
            slope = (4 * shifted(step) - shifted(2 * step) - 3 * shifted(0 * step)) / (2 * step)
        else:
            step = WIDE(1e-6) * np.maximum(abs(values[index]), WIDE(0.1))
            slope = (shifted(step) - shifted(-step)) / (2 * step)
        result[name] = grad * slope
    return result


def differentiate(loss: Callable[[np.ndarray], np.ndarray], value) -> np.ndarray:
    """Gradient of a scalar function of one array by central differences, one element at a time."""
    value = wide(value)
    result = np.zeros_like(value)
    for position in np.ndindex(value.shape):
        step = np.zeros_like(value)
        step[position] = WIDE(1e-6) * max(abs(value[position]), WIDE(0.1))
        result[position] = (loss(value + step) - loss(value - step)) / (2 * step[position])
    return result


def invert(weight, e, l, m, n, beta, mode, init="exact", family="symexp", normalize=False) -> np.ndarray:  # noqa: E741
    """The raw weight w with w_eff = weight (s = 0), by bisection of magnitudes; init="congruent" inverts that rule."""
    weight, e, l, m, n, beta = np.broadcast_arrays(*map(wide, (weight, e, l, m, n, beta)))  # noqa: E741
    sign, target = np.copysign(1, weight), abs(weight)
    rule = "congruent" if init == "congruent" else mode

    def reached(x):
        return sign * effective_weight(sign * x, e, l, m, n, 0, beta, rule, family, normalize) >= target

    low = np.zeros_like(target)
    high = np.where(target > 0, np.minimum(target, 1) * WIDE(1e-3), 0)
    while not np.all(reached(high)):
        high = np.where(reached(high), high, 2 * high)
    for _ in range(100):
        middle = (low + high) / 2
        below = ~reached(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return sign * (low + high) / 2


def start_value(scale_name: str, beta: float, family: str = "symexp") -> float:
    """Where a scale starts (sections 2 and 4)."""
    if family == "damped" and scale_name in ("linear_scale", "offset"):
        return {"linear_scale": 1.0, "offset": 0.5}[scale_name]
    return {"exp_scale": 1 / beta, "linear_scale": 1 / max(beta, 7.5), "inner_multiplier": 1.0}.get(scale_name, 0.0)


def part_shapes(pattern: str, shape: tuple[int, int], rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a pattern's parts."""
    rows, columns = shape
    return {
        "global": {"value": (1,)},
        "row": {"row": (rows,)},
        "column": {"column": (columns,)},
        "row_col_mult": {"row": (rows,), "column": (columns,)},
        "row_col_add": {"row": (rows,), "column": (columns,)},
        "lora": {"base": (1,), "a": (rank, columns), "b": (rows, rank)},
    }[pattern]


def expand(pattern: str, parts: dict) -> np.ndarray:
    """One scale as an array that broadcasts to (d_out, d_in) (4.4)."""
    parts = {name: wide(part) for name, part in parts.items()}
    if pattern == "global":
        return parts["value"]
    if pattern == "row":
        return parts["row"][:, None]
    if pattern == "column":
        return parts["column"][None, :]
    if pattern == "row_col_mult":
        return np.outer(parts["row"], parts["column"])
    if pattern == "row_col_add":
        return np.add.outer(parts["row"], parts["column"])
    return parts["base"] + parts["b"] @ parts["a"]


def anneal(step: float, start: float, end: float, steps: float) -> float:
    """The learning-rate multiplier k(t)."""
    progress = min(step / steps, 1.0) if steps > 0 else 1.0
    return float(np.exp(np.log(start) + np.log(end / start) / 2 * (1 - np.cos(np.pi * progress))))


def relative_error(got, want) -> float:
    """Largest |got - want| / |want|, where 0 for 0 counts as no error."""
    error, size = abs(wide(got) - wide(want)), abs(wide(want))
    return float(np.max(np.divide(error, size, out=np.where(error == 0, 0, WIDE(np.inf)), where=size != 0), initial=0))


def ulp_error(got, want) -> np.ndarray:
    """Elementwise |got - want| in float32 units in the last place of want."""
    return abs(wide(got) - wide(want)) / np.spacing(abs(wide(want)).astype(np.float32))
