"""Structured scales: small parameters that stand for one number per weight (section 4.4 of the paper)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from peft_sel.errors import ConfigError
from peft_sel.numerics.transform import FAMILIES, SCALE_NAMES, check_choice

PATTERNS = ("global", "row", "column", "row_col_mult", "row_col_add", "lora")
DAMPED_OFFSET = 0.5  # where n of the damped family starts
MIN_LINEAR_BETA = 7.5  # below this curvature the linear path keeps the share that it has here (SPEC section 4)


def start_value(scale: str, beta: float, family: str = "symexp") -> float:
    """Return the value a scale starts at for a curvature (SPEC sections 2 and 4).

    Args:
        scale: One of SCALE_NAMES.
        beta: Curvature of the tensor, positive.
        family: Family of the transform.

    Returns:
        1/beta for exp_scale, 1/max(beta, 7.5) for linear_scale (damped: 1), 1 for inner_multiplier, 0 for offset
        (damped: 0.5) and shift.

    Raises:
        ConfigError: If the scale or the family is unknown.
    """
    check_choice("scale", scale, SCALE_NAMES)
    check_choice("family", family, FAMILIES)
    if scale == "exp_scale":
        return 1.0 / beta
    if scale == "linear_scale":
        return 1.0 if family == "damped" else 1.0 / max(beta, MIN_LINEAR_BETA)
    if scale == "offset" and family == "damped":
        return DAMPED_OFFSET
    return 1.0 if scale == "inner_multiplier" else 0.0


def init_parts(
    pattern: str,
    value: float,
    shape: tuple[int, int],
    *,
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Create the parameters of a scale that stands for one value everywhere.

    Args:
        pattern: One of PATTERNS.
        value: Value of the expanded scale.
        shape: (d_out, d_in) of the target weight.
        rank: Inner dimension of the lora pattern.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Returns:
        Parts by name: global {"value" (1,)}; row {"row" (d_out,)}; column {"column" (d_in,)}; row_col_mult and
        row_col_add both vectors; lora {"base" (1,), "a" (rank, d_in) drawn from N(0, 1/d_in), "b" (d_out, rank) zero}.

    Raises:
        ConfigError: If row_col_mult would start at 0 or below, or the pattern is unknown.
    """
    rows, columns = shape
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if pattern == "global":
        return {"value": torch.full((1,), value, **options)}  # FSDP takes no 0-d parameters
    if pattern == "row":
        return {"row": torch.full((rows,), value, **options)}
    if pattern == "column":
        return {"column": torch.full((columns,), value, **options)}
    if pattern == "row_col_mult":
        if value <= 0:
            raise ConfigError(
                "pattern",
                pattern,
                f"a product of rows and columns that starts at {value:g} has no gradient or no square root; use "
                "global, row, column, row_col_add or lora for this scale",
            )
        root = math.sqrt(value)
        return {"row": torch.full((rows,), root, **options), "column": torch.full((columns,), root, **options)}
    if pattern == "row_col_add":
        return {"row": torch.full((rows,), value, **options), "column": torch.zeros(columns, **options)}
    if pattern == "lora":
        return {
            "base": torch.full((1,), value, **options),
            "a": torch.randn(rank, columns, **options) / math.sqrt(max(columns, 1)),
            "b": torch.zeros(rows, rank, **options),
        }
    raise ConfigError("pattern", pattern, f"unknown; choose one of {', '.join(PATTERNS)}")


def broadcast_parts(pattern: str, parts: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return what combine_factors combines into the scale: tensors that broadcast to the (d_out, d_in) weight.

    Args:
        pattern: One of PATTERNS.
        parts: Parameters as init_parts makes them.

    Returns:
        One tensor, of shape (1,) for global, (d_out, 1) for row, (1, d_in) for column and (d_out, d_in) for lora, whose
        product is formed here, whole; a row and a column for row_col_mult and row_col_add.
    """
    if pattern == "global":
        return (parts["value"],)
    if pattern == "lora":
        return (parts["base"] + parts["b"] @ parts["a"],)
    row = (parts["row"][:, None],) if "row" in parts else ()
    column = (parts["column"][None, :],) if "column" in parts else ()
    return row + column


def combine_factors(pattern: str, factors: tuple[Tensor, ...]) -> Tensor:
    """Combine what broadcast_parts returns, or some rows of it, into the scale."""
    if len(factors) == 1:
        return factors[0]
    row, column = factors
    return row * column if pattern == "row_col_mult" else row + column


def expand_parts(pattern: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the scale as a tensor that broadcasts to the (d_out, d_in) weight.

    Args:
        pattern: One of PATTERNS.
        parts: Parameters as init_parts makes them.

    Returns:
        Shape (1,) for global, (d_out, 1) for row, (1, d_in) for column, (d_out, d_in) for the others.
    """
    return combine_factors(pattern, broadcast_parts(pattern, parts))


def smallest_value(pattern: str, parts: dict[str, Tensor]) -> float:
    """Return the smallest value of a scale, without forming a product of rows and columns."""
    factors = broadcast_parts(pattern, parts)
    if len(factors) == 2:
        row, column = (torch.stack(torch.aminmax(factor)) for factor in factors)
        factors = row[:, None], column[None, :]
    return float(combine_factors(pattern, factors).min())


def mean_value(pattern: str, parts: dict[str, Tensor]) -> float:
    """Return the mean of a scale over the weight, over all matrices of a stack, from its parts alone.

    Args:
        pattern: One of PATTERNS.
        parts: Parameters as init_parts makes them, or stacks of them, which have one dimension more.

    Returns:
        The mean.
    """
    if pattern == "lora":
        low_rank = (parts["b"].mean(-2) * parts["a"].mean(-1)).sum(-1, keepdim=True)
        return float((parts["base"] + low_rank).mean())
    means = torch.stack([part.mean(-1) for part in parts.values()])
    return float((means.prod(0) if pattern == "row_col_mult" else means.sum(0)).mean())


def reduce_gradient(pattern: str, parts: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Reduce the gradient of an expanded scale to the gradients of its parts: the transpose of expand_parts.

    Args:
        pattern: One of PATTERNS.
        parts: Parameters as init_parts makes them.
        grad: Gradient with respect to the expanded scale, (d_out, d_in).

    Returns:
        One gradient per part, of that part's shape.
    """
    if pattern == "global":
        return {"value": grad.sum().reshape(parts["value"].shape)}
    if pattern == "row":
        return {"row": grad.sum(1)}
    if pattern == "column":
        return {"column": grad.sum(0)}
    if pattern == "row_col_mult":
        return {"row": grad @ parts["column"], "column": parts["row"] @ grad}
    if pattern == "row_col_add":
        return {"row": grad.sum(1), "column": grad.sum(0)}
    return {"base": grad.sum().reshape(parts["base"].shape), "a": parts["b"].T @ grad, "b": grad @ parts["a"].T}


def slice_parts(parts: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return the parts that belong to the rows start..stop of the weight."""
    return {name: part[start:stop] if name in ("row", "b") else part for name, part in parts.items()}
