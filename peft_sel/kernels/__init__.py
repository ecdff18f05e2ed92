"""The transform as one differentiable operation that keeps nothing weight-sized but its inputs.

Backends evaluate it, chosen for each call: reference.py (plain torch, block by block), compiled.py (torch.compile), and
fused.py inside somebody else's torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peft_sel.kernels import compiled, fused, reference
from peft_sel.kernels.formulas import Scales, WeightSpec, broadcast_scales
from peft_sel.numerics import compute_dtype

__all__ = ["Scales", "WeightSpec", "fold", "use_backend"]

BACKENDS = {"reference": reference, "compiled": compiled}

_forced: ModuleType | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Evaluate with one backend, whatever would be chosen; for tests and comparisons.

    Args:
        name: "reference" or "compiled".
    """
    global _forced
    before, _forced = _forced, BACKENDS[name]
    try:
        yield
    finally:
        _forced = before


def _select_backend(spec: WeightSpec, raw: Tensor, training: bool) -> Any:
    """Return the module that evaluates a weight."""
    if torch.compiler.is_compiling():
        return fused if all(pattern != "lora" for _, pattern in spec.patterns) else reference
    if _forced is not None:
        return _forced
    return compiled if compiled.can_run(spec, raw) and (training or compiled.pays_off(raw)) else reference


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
        # The same in every mode, for torch.compile; leaving inference mode turns gradients on.
        with torch.autocast(raw.device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
            delta = None
            if residual_a is not None and residual_b is not None:
                a, b = residual_a.to(compute_dtype(raw)), residual_b.to(compute_dtype(raw))
                delta = (b * spec.residual_scaling) @ a  # whole: a product of some rows differs in its last bits
            factors = broadcast_scales(spec, _group(layout, parts))
            result: Tensor = _select_backend(spec, raw, any(ctx.needs_input_grad)).fold(spec, raw, beta, factors, delta)
            return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raw, beta, residual_a, residual_b, *parts = ctx.saved_tensors
        grad = grad.to_dense() if grad.is_sparse else grad  # of nn.Embedding(sparse=True)
        _, _, needs_raw, _, needs_a, needs_b, *needs_parts = ctx.needs_input_grad
        names = {scale for (scale, _), needed in zip(ctx.layout, needs_parts, strict=True) if needed}
        names |= {"raw"} if needs_raw else set()
        a_grad = b_grad = None
        with torch.autocast(raw.device.type, enabled=False):
            backend = _select_backend(ctx.spec, raw, True)
            raw_grad, grads = backend.pull_back(ctx.spec, grad, raw, beta, _group(ctx.layout, parts), names)
            if needs_a or needs_b:
                residual = residual_a, residual_b
                a_grad, b_grad = reference.pull_back_residual(ctx.spec, grad, residual, compute_dtype(raw))
        part_grads = [
            grads[scale][part].to(tensor.dtype) if needed else None
            for (scale, part), tensor, needed in zip(ctx.layout, parts, needs_parts, strict=True)
        ]
        residual_grads = _like(a_grad, residual_a), _like(b_grad, residual_b)
        return None, None, _like(raw_grad, raw), None, *residual_grads, *part_grads


def _group(layout: tuple[tuple[str, str], ...], parts: tuple[Tensor, ...] | list[Tensor]) -> Scales:
    """Rebuild the scales from their flattened parts."""
    scales: Scales = {}
    for (scale, part), tensor in zip(layout, parts, strict=True):
        scales.setdefault(scale, {})[part] = tensor
    return scales


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
