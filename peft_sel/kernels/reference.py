"""Reference backend: the formulas of numerics, applied to cache-sized blocks of rows with plain torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from peft_sel.numerics import (
    compute_dtype,
    effective_weight,
    effective_weight_gradients,
    expand_parts,
    reduce_gradient,
    slice_parts,
)

CPU_BLOCK_ELEMENTS = 1 << 16  # a block's temporaries (float32) stay in the second-level cache
DEVICE_BLOCK_ELEMENTS = 1 << 24  # bounds the temporaries of an accelerator, which wants few large operations

Scales = dict[str, dict[str, Tensor]]


class WeightSpec(NamedTuple):
    """What is fixed about a weight: everything but its tensors.

    Attributes:
        mode: Mode of the transform.
        patterns: Pattern of each scale that is present, by scale name.
        residual_scaling: alpha / r of the residual.
        dtype: Dtype of the effective weight.
        family: Family of the transform.
    """

    mode: str
    patterns: dict[str, str]
    residual_scaling: float
    dtype: torch.dtype
    family: str = "symexp"


class WeightGradients(NamedTuple):
    """Gradients of a fold; those not asked for are None or absent."""

    raw: Tensor | None
    scales: Scales
    residual_a: Tensor | None
    residual_b: Tensor | None


def _row_blocks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each about as large as suits the device."""
    if weight.numel() == 0:
        return
    elements = CPU_BLOCK_ELEMENTS if weight.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    rows = max(1, elements // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def _expand_products(spec: WeightSpec, scales: Scales) -> dict[str, Tensor]:
    """Return the lora scales whole: like the residual, a product of some rows may differ in its last bits."""
    return {name: expand_parts("lora", parts) for name, parts in scales.items() if spec.patterns[name] == "lora"}


def _expand_rows(spec: WeightSpec, scales: Scales, products: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return each scale of a block of rows as a tensor that broadcasts to the block."""
    return {
        name: products[name][rows]
        if name in products
        else expand_parts(spec.patterns[name], slice_parts(parts, rows.start, rows.stop))
        for name, parts in scales.items()
    }


def fold_weight(
    spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute the effective weight of raw, (d_out, d_in), in spec.dtype; see kernels.fold."""
    delta = None
    if residual is not None:
        a, b = (factor.to(compute_dtype(raw)) for factor in residual)
        delta = (b * spec.residual_scaling) @ a  # whole: a product of some rows differs in its last bits
    result = torch.empty(raw.shape, dtype=spec.dtype, device=raw.device)
    products = _expand_products(spec, scales)
    for rows in _row_blocks(raw):
        expanded = _expand_rows(spec, scales, products, rows)
        block = effective_weight(raw[rows], **expanded, beta=beta, mode=spec.mode, family=spec.family)
        if delta is not None:
            # where: adding +0 would turn -0.0 into +0.0
            block = torch.where(delta[rows] == 0, block, block + delta[rows])
        result[rows] = block
    return result


def pull_back(
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
    a_grad = b_grad = None
    if residual is not None:
        a, b = (factor.to(dtype) for factor in residual)
        a_grad = torch.zeros_like(a, dtype=torch.float64) if "residual_a" in names else None
        b_grad = torch.zeros_like(b) if "residual_b" in names else None
    products = _expand_products(spec, scales)
    for rows in _row_blocks(raw):
        block_grad = grad[rows].to(dtype)
        expanded = _expand_rows(spec, scales, products, rows)
        elementwise = effective_weight_gradients(
            block_grad, raw[rows], **expanded, beta=beta, mode=spec.mode, names=names
        )
        if raw_grad is not None:
            raw_grad[rows] = elementwise["raw"]
        for name, sums in scale_grads.items():
            parts = slice_parts(scales[name], rows.start, rows.stop)
            for part, value in reduce_gradient(spec.patterns[name], parts, elementwise[name]).items():
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
