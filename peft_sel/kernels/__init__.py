"""The transform as one differentiable operation that keeps nothing weight-sized but its inputs.

A backend evaluates one block of rows (see reference.py); `select_backend` chooses it for each call.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peft_sel.kernels import reference
from peft_sel.kernels.blocks import INLINE_ELEMENTS, Backend, Scales, fold_weight, pull_back
from peft_sel.kernels.reference import WeightSpec

__all__ = ["Scales", "WeightSpec", "fold", "select_backend"]

REFERENCE = Backend(INLINE_ELEMENTS, reference.fold_block, reference.pull_back_block)
# An accelerator has no such cache and wants few large operations; the block bounds the temporaries.
ACCELERATOR = Backend(1 << 24, reference.fold_block, reference.pull_back_block)
# Inside someone else's torch.compile a loop over blocks would be unrolled.
TRACED = Backend(sys.maxsize, reference.fold_block, reference.pull_back_block)


def select_backend(raw: Tensor) -> Backend:
    """Return the backend for a weight."""
    if torch.compiler.is_compiling():
        return TRACED
    return REFERENCE if raw.device.type == "cpu" else ACCELERATOR


class _Fold(torch.autograd.Function):
    """Effective weight from raw, scales and residual; backward recomputes from these inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: WeightSpec,
        layout: tuple[tuple[str, str], ...],
        raw: Tensor,
        beta: Tensor,
        residual_a: Tensor | None,
        residual_b: Tensor | None,
        *parts: Tensor,
    ) -> Tensor:
        ctx.spec, ctx.layout = spec, layout
        ctx.save_for_backward(raw, beta, residual_a, residual_b, *parts)
        with torch.autocast(raw.device.type, enabled=False):
            scales, residual = _group(layout, parts), _pair(residual_a, residual_b)
            return fold_weight(select_backend(raw), spec, raw, beta, scales, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raw, beta, residual_a, residual_b, *parts = ctx.saved_tensors
        grad = grad.to_dense() if grad.is_sparse else grad  # of nn.Embedding(sparse=True)
        _, _, needs_raw, _, needs_a, needs_b, *needs_parts = ctx.needs_input_grad
        names = {scale for (scale, _), needed in zip(ctx.layout, needs_parts, strict=True) if needed}
        names |= {
            name for name, needed in (("raw", needs_raw), ("residual_a", needs_a), ("residual_b", needs_b)) if needed
        }
        with torch.autocast(raw.device.type, enabled=False):
            scales, residual = _group(ctx.layout, parts), _pair(residual_a, residual_b)
            grads = pull_back(select_backend(raw), ctx.spec, grad, raw, beta, scales, residual, names)
        part_grads = [
            grads.scales[scale][part].to(tensor.dtype) if needed else None
            for (scale, part), tensor, needed in zip(ctx.layout, parts, needs_parts, strict=True)
        ]
        residual_grads = _like(grads.residual_a, residual_a), _like(grads.residual_b, residual_b)
        return None, None, _like(grads.raw, raw), None, *residual_grads, *part_grads


def _group(layout: tuple[tuple[str, str], ...], parts: tuple[Tensor, ...] | list[Tensor]) -> Scales:
    """Rebuild the scales from their flattened parts."""
    scales: Scales = {}
    for (scale, part), tensor in zip(layout, parts, strict=True):
        scales.setdefault(scale, {})[part] = tensor
    return scales


def _pair(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if a is None or b is None else (a, b)


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)


def fold(
    spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute the effective weight of a target weight (Eq. 3-7, plus the residual in weight space).

    Forward saves its inputs only and backward recomputes, so nothing weight-sized is kept. Evaluated in float32
    (float64 for float64 raw) whatever autocast says, and rounded once, to spec.dtype. Weights that are exactly 0 have a
    live gradient. Not twice differentiable.

    Args:
        spec: Mode, patterns, residual scaling and result dtype.
        raw: Raw weight, (d_out, d_in).
        beta: Curvature, a 0-d tensor.
        scales: Parts of each scale by scale name, as init_parts makes them; every name has a pattern in spec.
        residual: (A, B) of shapes (r, d_in) and (d_out, r), or None.

    Returns:
        w_eff of raw's shape, in spec.dtype: f(raw) + residual_scaling * B @ A.
    """
    layout = tuple((scale, part) for scale, parts in scales.items() for part in parts)
    tensors = [tensor for parts in scales.values() for tensor in parts.values()]
    residual_a, residual_b = residual if residual is not None else (None, None)
    result: Tensor = _Fold.apply(spec, layout, raw, beta, residual_a, residual_b, *tensors)
    return result
