"""The formulas of numerics on a weight, or some of its rows, in plain torch: what every backend evaluates."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peft_sel.numerics import (
    broadcast_parts,
    combine_factors,
    compute_dtype,
    effective_weight,
    effective_weight_gradients,
)

Scales = dict[str, dict[str, Tensor]]
Factors = dict[str, tuple[Tensor, ...]]
Residual = tuple[Tensor, Tensor] | None  # A, (r, d_in), and B, (d_out, r), which has residual_scaling in it


class WeightSpec(NamedTuple):
    """What is fixed about a weight: everything but its tensors.

    Attributes:
        mode: Mode of the transform.
        patterns: (scale name, pattern) of each scale that is present.
        residual_scaling: alpha / r of the residual.
        dtype: Dtype of the effective weight.
        family: Family of the transform.
        normalize_by_inner_mult: Whether the transform is divided by the inner multiplier.
    """

    mode: str
    patterns: tuple[tuple[str, str], ...]
    residual_scaling: float
    dtype: torch.dtype
    family: str = "symexp"
    normalize_by_inner_mult: bool = False

    @property
    def can_fuse(self) -> bool:
        """Whether one pass can compute the weight: a scale of pattern lora needs matrix products."""
        return all(pattern != "lora" for _, pattern in self.patterns)


def is_plain(raw: Tensor) -> bool:
    """Whether raw is computed in float32, dense, row by row or column by column in memory, and no fake tensor."""
    lies_in_order = type(raw) in (Tensor, nn.Parameter) and (raw.is_contiguous() or raw.T.is_contiguous())
    return lies_in_order and compute_dtype(raw) == torch.float32


def broadcast_scales(spec: WeightSpec, scales: Scales) -> Factors:
    """Return what combine_factors combines into each scale of a weight."""
    return {name: broadcast_parts(pattern, scales[name]) for name, pattern in spec.patterns}


def slice_factors(factors: Factors, start: int, stop: int) -> Factors:
    """Return what the rows start..stop of a weight meet of its factors."""
    return {
        name: tuple(tensor[start:stop] if tensor.dim() == 2 and tensor.shape[0] > 1 else tensor for tensor in tensors)
        for name, tensors in factors.items()
    }


def fold_block(spec: WeightSpec, raw: Tensor, beta: Tensor, factors: Factors, delta: Tensor | None) -> Tensor:
    """Compute the effective weight of a block of rows, in spec.dtype.

    Args:
        spec: The weight's constants.
        raw: Raw weights, (rows, d_in).
        beta: Curvature, 0-d.
        factors: What combine_factors combines into each scale of these rows.
        delta: Residual to add, (rows, d_in), or None.

    Returns:
        f(raw) + delta, rounded once.
    """
    scales = {name: combine_factors(pattern, factors[name]) for name, pattern in spec.patterns}
    weight = effective_weight(
        raw,
        **scales,
        beta=beta,
        mode=spec.mode,
        family=spec.family,
        normalize_by_inner_mult=spec.normalize_by_inner_mult,
    )
    if delta is not None:
        weight = torch.where(delta == 0, weight, weight + delta)  # adding +0 would turn -0.0 into +0.0
    return weight.to(spec.dtype)


def pull_back_block(
    spec: WeightSpec, grad: Tensor, raw: Tensor, beta: Tensor, factors: Factors, names: Collection[str]
) -> dict[str, Tensor]:
    """Pull a block of dLoss/dw_eff back to raw and to the expanded scales, elementwise.

    Args:
        spec: The weight's constants.
        grad: dLoss/dw_eff, (rows, d_in).
        raw: Raw weights, (rows, d_in).
        beta: Curvature, 0-d.
        factors: What combine_factors combines into each scale of these rows.
        names: "raw" or names of scales.

    Returns:
        One (rows, d_in) gradient per name.
    """
    scales = {name: combine_factors(pattern, factors[name]) for name, pattern in spec.patterns}
    return effective_weight_gradients(
        grad,
        raw,
        **scales,
        beta=beta,
        mode=spec.mode,
        names=names,
        family=spec.family,
        normalize_by_inner_mult=spec.normalize_by_inner_mult,
    )
