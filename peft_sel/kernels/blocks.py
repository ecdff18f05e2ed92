"""A whole weight, block by block of rows: what every backend shares."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from peft_sel.kernels.reference import Factors, WeightSpec
from peft_sel.numerics import broadcast_parts, compute_dtype, reduce_gradient, slice_parts

Scales = dict[str, dict[str, Tensor]]

# Torch runs an operation on so few elements in the calling thread. More would be shared among threads, and thousands of
# small parallel regions, each waiting for its slowest thread, stall on a machine that has other things to do.
INLINE_ELEMENTS = 1 << 15


class Backend(NamedTuple):
    """How blocks are evaluated: see reference.py for what the two functions promise.

    Attributes:
        block_elements: Weights per block.
        fold_block: Effective weight of a block.
        pull_back_block: Elementwise gradients of a block.
    """

    block_elements: int
    fold_block: Callable[[WeightSpec, Tensor, Tensor, Factors, Tensor | None], Tensor]
    pull_back_block: Callable[[WeightSpec, Tensor, Tensor, Tensor, Factors, Collection[str]], dict[str, Tensor]]


class WeightGradients(NamedTuple):
    """Gradients of a fold; those not asked for are None or absent."""

    raw: Tensor | None
    scales: Scales
    residual_a: Tensor | None
    residual_b: Tensor | None


def _row_blocks(rows: int, columns: int, block_elements: int) -> list[slice]:
    """Return slices of rows of about block_elements weights."""
    if rows == 0 or columns == 0:
        return []
    step = max(1, block_elements // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _broadcast_scales(spec: WeightSpec, scales: Scales) -> Factors:
    return {name: broadcast_parts(pattern, scales[name]) for name, pattern in spec.patterns}


def _slice_factors(factors: Factors, rows: slice) -> Factors:
    """Return the rows that a block meets of tensors that broadcast to the weight."""
    return {
        name: tuple(tensor[rows] if tensor.dim() == 2 and tensor.shape[0] > 1 else tensor for tensor in tensors)
        for name, tensors in factors.items()
    }


def fold_weight(
    backend: Backend,
    spec: WeightSpec,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    residual: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the effective weight of raw, (d_out, d_in), in spec.dtype; see kernels.fold."""
    delta = None
    if residual is not None:
        a, b = (factor.to(compute_dtype(raw)) for factor in residual)
        delta = (b * spec.residual_scaling) @ a  # whole: a product of some rows differs in its last bits
    result = torch.empty(raw.shape, dtype=spec.dtype, device=raw.device)
    factors = _broadcast_scales(spec, scales)
    for rows in _row_blocks(raw.shape[0], raw.shape[1], backend.block_elements):
        block_delta = None if delta is None else delta[rows]
        result[rows] = backend.fold_block(spec, raw[rows], beta, _slice_factors(factors, rows), block_delta)
    return result


def pull_back(
    backend: Backend,
    spec: WeightSpec,
    grad: Tensor,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    residual: tuple[Tensor, Tensor] | None,
    names: Collection[str],
) -> WeightGradients:
    """Pull dLoss/dw_eff back to the named inputs of a fold ("raw", scale names, "residual_a", "residual_b").

    Sums over rows are carried from block to block in float64.
    """
    dtype = compute_dtype(raw)
    raw_grad = torch.empty(raw.shape, dtype=dtype, device=raw.device) if "raw" in names else None
    scale_grads = {
        name: {part: torch.zeros_like(tensor, dtype=_sum_dtype(part, dtype)) for part, tensor in scales[name].items()}
        for name in scales
        if name in names
    }
    a, b = (factor.to(dtype) for factor in residual) if residual is not None else (raw, raw)
    a_grad = torch.zeros_like(a, dtype=torch.float64) if "residual_a" in names else None
    b_grad = torch.zeros_like(b) if "residual_b" in names else None
    factors = _broadcast_scales(spec, scales)
    elementwise_names = tuple(name for name in ("raw", *scales) if name in names)
    patterns = dict(spec.patterns)
    for rows in _row_blocks(raw.shape[0], raw.shape[1], backend.block_elements):
        block_grad = grad[rows].to(dtype)
        elementwise = backend.pull_back_block(
            spec, block_grad, raw[rows], beta, _slice_factors(factors, rows), elementwise_names
        )
        if raw_grad is not None:
            raw_grad[rows] = elementwise["raw"]
        for name, sums in scale_grads.items():
            parts = slice_parts(scales[name], rows.start, rows.stop)
            for part, value in reduce_gradient(patterns[name], parts, elementwise[name]).items():
                if _is_row_part(part):
                    sums[part][rows] = value
                else:
                    sums[part] += value
        if a_grad is not None:
            a_grad += b[rows].T @ block_grad
        if b_grad is not None:
            b_grad[rows] = block_grad @ a.T
    return WeightGradients(
        raw_grad,
        scale_grads,
        None if a_grad is None else a_grad * spec.residual_scaling,
        None if b_grad is None else b_grad * spec.residual_scaling,
    )


def _is_row_part(part: str) -> bool:
    return part in ("row", "b")


def _sum_dtype(part: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if _is_row_part(part) else torch.float64
