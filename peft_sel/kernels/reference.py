"""Reference backend: a weight block by block of rows, so that the temporaries of plain torch stay small."""

from __future__ import annotations

import torch
from torch import Tensor

from peft_sel.kernels.formulas import (
    Residual,
    Scales,
    WeightSpec,
    broadcast_scales,
    fold_block,
    pull_back_block,
    slice_factors,
)
from peft_sel.numerics import compute_dtype, reduce_gradient, slice_parts

# Torch runs an operation on so few elements in the calling thread. More would be shared among threads, and thousands of
# small parallel regions, each waiting for its slowest thread, stall on a machine that has other things to do.
INLINE_ELEMENTS = 1 << 15
# An accelerator has no such cache and wants few large operations; the block bounds the temporaries.
ACCELERATOR_ELEMENTS = 1 << 24
MATMUL_ELEMENTS = 1 << 20  # few matrix products, which run on all threads, of blocks that fit a cache
MATMUL_ROWS = 1 << 10  # of a float32 sum


def _row_blocks(tensor: Tensor, cpu_elements: int = INLINE_ELEMENTS) -> list[slice]:
    """Return slices of the rows of a matrix, of about so many elements on a CPU; one slice for a compiler to fuse."""
    rows, columns = tensor.shape
    if rows == 0 or columns == 0:
        return []
    if torch.compiler.is_compiling():
        return [slice(0, rows)]
    step = max(1, (cpu_elements if tensor.device.type == "cpu" else ACCELERATOR_ELEMENTS) // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> Tensor:
    """Compute the effective weight of raw, (d_out, d_in), in spec.dtype: fold_block of all rows."""
    factors, delta = broadcast_scales(spec, scales), multiply_residual(residual)
    result = torch.empty(raw.shape, dtype=spec.dtype, device=raw.device)
    for rows in _row_blocks(raw):
        block_factors = slice_factors(factors, rows.start, rows.stop)
        result[rows] = fold_block(spec, raw[rows], beta, block_factors, None if delta is None else delta[rows])
    return result


def pull_back(
    spec: WeightSpec,
    grad: Tensor,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    names: tuple[str, ...],
    residual: Residual,
) -> tuple[Tensor | None, Scales, Residual]:
    """Pull dLoss/dw_eff back to raw, the parts of the scales and the residual.

    Args:
        spec: The weight's constants.
        grad: dLoss/dw_eff, (d_out, d_in).
        raw: Raw weight, (d_out, d_in).
        beta: Curvature, 0-d.
        scales: Parts of each scale.
        names: "raw" or names of scales.
        residual: A and B, or None if their gradients are not asked for.

    Returns:
        Gradients of raw (None if not asked for), of the named scales, and of the residual (None likewise); sums over
        rows are carried in float64.
    """
    dtype = compute_dtype(raw)
    raw_grad = torch.empty(raw.shape, dtype=dtype, device=raw.device) if "raw" in names else None
    sums = {
        name: {part: torch.zeros_like(tensor, dtype=_sum_dtype(part, dtype)) for part, tensor in scales[name].items()}
        for name in scales
        if name in names
    }
    factors, patterns = broadcast_scales(spec, scales), dict(spec.patterns)
    for rows in _row_blocks(raw):
        block_factors = slice_factors(factors, rows.start, rows.stop)
        elementwise = pull_back_block(spec, grad[rows], raw[rows], beta, block_factors, names)
        if raw_grad is not None:
            raw_grad[rows] = elementwise["raw"]
        for name, part_sums in sums.items():
            parts = slice_parts(scales[name], rows.start, rows.stop)
            for part, value in reduce_gradient(patterns[name], parts, elementwise[name]).items():
                if _is_row_part(part):
                    part_sums[part][rows] = value
                else:
                    part_sums[part] += value
    return raw_grad, sums, pull_back_residual(grad, residual)


def multiply_residual(residual: Residual) -> Tensor | None:
    """Return B @ A, whole: a product of some rows differs in its last bits."""
    return None if residual is None else residual[1] @ residual[0]


def pull_back_residual(grad: Tensor, residual: Residual) -> Residual:
    """Pull dLoss/dw_eff, (d_out, d_in), back to A and B of the residual, in float64 and in their dtype."""
    if residual is None:
        return None
    a, b = residual
    a_grad, b_grad = torch.zeros_like(a, dtype=torch.float64), torch.zeros_like(b)
    for rows in _row_blocks(grad, min(MATMUL_ELEMENTS, MATMUL_ROWS * grad.shape[1])):
        block = grad[rows].to(a.dtype)
        a_grad += b[rows].T @ block
        b_grad[rows] = block @ a.T
    return a_grad, b_grad


def _is_row_part(part: str) -> bool:
    return part in ("row", "b")


def _sum_dtype(part: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if _is_row_part(part) else torch.float64
