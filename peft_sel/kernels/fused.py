"""A whole weight as one expression, for a compiler to fuse: one pass for a fold, two for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peft_sel.kernels.formulas import (
    Factors,
    Residual,
    Scales,
    WeightSpec,
    broadcast_scales,
    fold_block,
    pull_back_block,
    slice_factors,
)
from peft_sel.kernels.reference import multiply_residual, pull_back_residual
from peft_sel.numerics import reduce_gradient, slice_parts

CHUNK_ROWS = 64  # of a float32 sum over rows; sums of those, and sums over columns, are in float64

Sums = dict[tuple[str, str], Tensor]  # by names of scale and part


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> Tensor:
    """Compute the effective weight of raw, (d_out, d_in), in spec.dtype."""
    return fold_block(spec, raw, beta, broadcast_scales(spec, scales), multiply_residual(residual))


def pull_back(
    spec: WeightSpec,
    grad: Tensor,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    names: tuple[str, ...],
    residual: Residual,
    *,
    call: Callable[..., Any] | None = None,
) -> tuple[Tensor | None, Scales, Residual]:
    """Pull dLoss/dw_eff back to raw, the parts of the scales, none of which has the pattern lora, and the residual.

    Args:
        spec: The weight's constants.
        grad: dLoss/dw_eff, (d_out, d_in).
        raw: Raw weight, (d_out, d_in).
        beta: Curvature, 0-d.
        scales: Parts of each scale.
        names: "raw" or names of scales.
        residual: A and B, or None if their gradients are not asked for.
        call: Calls sum_gradients, compiled; None for a plain call.

    Returns:
        Gradients of raw (None if not asked for), of the named scales, and of the residual.
    """
    factors, patterns = broadcast_scales(spec, scales), dict(spec.patterns)
    arguments = (spec, names, grad, raw, beta, factors)
    raw_grad, sums = sum_gradients(*arguments) if call is None else call(sum_gradients, *arguments)
    grads: Scales = {}
    for (name, part), value in sums.items():
        grads.setdefault(name, {})[part] = value
    start, stop = raw.shape[0] // CHUNK_ROWS * CHUNK_ROWS, raw.shape[0]
    column_names = tuple(name for name in grads if "column" in grads[name])
    if start < stop and column_names:
        rest = slice_factors(factors, start, stop)
        elementwise = pull_back_block(spec, grad[start:], raw[start:], beta, rest, column_names)
        for name in column_names:
            parts = slice_parts(scales[name], start, stop)
            grads[name]["column"] += reduce_gradient(patterns[name], parts, elementwise[name])["column"]
    return raw_grad, grads, pull_back_residual(grad, residual)


def sum_gradients(
    spec: WeightSpec, names: tuple[str, ...], grad: Tensor, raw: Tensor, beta: Tensor, factors: Factors
) -> tuple[Tensor | None, Sums]:
    """Form the gradient of raw, and sum those of the scales over columns, and over rows in whole chunks only.

    Args:
        spec: The weight's constants.
        names: "raw" or names of scales.
        grad: dLoss/dw_eff, (d_out, d_in).
        raw: Raw weight, (d_out, d_in).
        beta: Curvature, 0-d.
        factors: What combine_factors combines into each scale.

    Returns:
        Gradient of raw or None, and sums in float64: (d_out,) for row parts, (d_in,) for column parts, (1,) for values.
    """
    elementwise = pull_back_block(spec, grad, raw, beta, factors, names)
    raw_grad, sums = elementwise.get("raw"), {}
    patterns = [(name, pattern) for name, pattern in spec.patterns if name in names]
    for name, pattern in patterns:
        if pattern == "global":
            sums[name, "value"] = elementwise[name].sum(1, dtype=torch.float64).sum(0, keepdim=True)
        elif pattern != "column":
            terms = elementwise[name] * factors[name][1] if pattern == "row_col_mult" else elementwise[name]
            sums[name, "row"] = terms.sum(1, dtype=torch.float64)
    column_patterns = [(name, pattern) for name, pattern in patterns if pattern not in ("global", "row")]
    if column_patterns:
        # Computed once more, from other views of the inputs: a tensor used by both kinds of sums would be stored.
        chunks = {name: tuple(_chunk_rows(factor) for factor in factors[name]) for name in factors}
        column_names = [name for name, _ in column_patterns]
        elementwise = pull_back_block(spec, _chunk_rows(grad), _chunk_rows(raw), beta, chunks, column_names)
        for name, pattern in column_patterns:
            terms = elementwise[name] * chunks[name][0] if pattern == "row_col_mult" else elementwise[name]
            sums[name, "column"] = terms.sum(1).sum(0, dtype=torch.float64)
    return raw_grad, sums


def _chunk_rows(tensor: Tensor) -> Tensor:
    """View (rows, columns) as (chunks, CHUNK_ROWS, columns), without the last rows; leave what broadcasts over rows."""
    if tensor.dim() < 2 or tensor.shape[0] == 1:
        return tensor
    chunks = tensor.shape[0] // CHUNK_ROWS
    return tensor[: chunks * CHUNK_ROWS].unflatten(0, (chunks, CHUNK_ROWS))
