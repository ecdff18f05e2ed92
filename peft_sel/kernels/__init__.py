"""The transform as one differentiable operation that keeps nothing weight-sized but its inputs.

Backends evaluate it, chosen for each call: native.py (C++, on CPUs), triton_backend.py (on GPUs), compiled.py
(torch.compile), reference.py (plain torch, block by block), and fused.py inside somebody else's torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peft_sel.kernels import compiled, fused, native, reference, triton_backend
from peft_sel.kernels.formulas import Residual, Scales, WeightSpec
from peft_sel.numerics import compute_dtype, look_up

__all__ = ["Scales", "WeightSpec", "fold", "linear", "use_backend"]

BACKENDS = {"reference": reference, "native": native, "compiled": compiled, "triton": triton_backend}

Layout = tuple[tuple[str, str], ...]  # names of scale and part, in the order of the parts

_forced: ModuleType | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Evaluate with one backend, whatever would be chosen; for tests and comparisons.

    Args:
        name: "reference", "native", "compiled" or "triton".
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
        return fused if spec.can_fuse else reference
    if _forced is not None:
        return _forced
    if native.can_run(spec, raw):
        return native
    if raw.is_cuda and triton_backend.can_run(spec, raw):
        return triton_backend
    return compiled if compiled.can_run(spec, raw) and (training or compiled.pays_off(raw)) else reference


class _Inputs(NamedTuple):
    """What a weight is computed from; the last three as flat as autograd wants them."""

    raw: Tensor
    beta: Tensor
    residual_a: Tensor | None
    residual_b: Tensor | None
    parts: tuple[Tensor, ...]


def _pack(tensors: Sequence[Any]) -> _Inputs:
    raw, table, beta, residual_a, residual_b, *parts = tensors
    if table is not None:  # raw is the base weight: hold what is looked up no longer than these inputs
        with torch.inference_mode(False), torch.no_grad():  # as in _compute
            raw = look_up(raw, table)
    return _Inputs(raw, beta, residual_a, residual_b, tuple(parts))


def _compute(spec: WeightSpec, layout: Layout, inputs: _Inputs, training: bool) -> Tensor:
    """Compute an effective weight, without gradients."""
    raw, beta, a, b, parts = inputs
    backend = _select_backend(spec, raw, training)
    arguments = (spec, raw, beta, _group(layout, parts))
    result: Tensor
    if backend is native and not torch.is_inference_mode_enabled():  # no product in torch, for autocast to change
        result = native.fold(*arguments, _scale_residual(spec, raw, a, b))
        return result
    # The same in every mode, for torch.compile; leaving inference mode turns gradients on.
    with torch.autocast(raw.device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
        result = backend.fold(*arguments, _scale_residual(spec, raw, a, b))
        return result


def _pull_back(
    spec: WeightSpec,
    layout: Layout,
    inputs: _Inputs,
    grad: Tensor,
    needed: tuple[bool, ...],
    weight: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Pull dLoss/dw_eff back to the inputs that need it, in their order; let native fill weight in the same pass."""
    raw, beta, a, b, parts = inputs
    needs_raw, _, _, needs_a, needs_b, *needs_parts = needed
    grad = grad.to_dense() if grad.is_sparse else grad  # of nn.Embedding(sparse=True)
    needed_scales = dict.fromkeys(scale for (scale, _), needs in zip(layout, needs_parts, strict=True) if needs)
    names = (*(("raw",) if needs_raw else ()), *needed_scales)
    residual = _scale_residual(spec, raw, a, b) if needs_a or needs_b else None
    arguments = (spec, grad, raw, beta, _group(layout, parts), names, residual)
    with torch.autocast(raw.device.type, enabled=False):
        if weight is not None:
            raw_grad, grads, residual_grads = native.pull_back(*arguments, weight)
        else:
            raw_grad, grads, residual_grads = _select_backend(spec, raw, True).pull_back(*arguments)
    part_grads = [
        grads[scale][part].to(tensor.dtype) if needs else None
        for (scale, part), tensor, needs in zip(layout, parts, needs_parts, strict=True)
    ]
    a_grad, b_grad = residual_grads or (None, None)
    if b_grad is not None and spec.residual_scaling != 1:
        b_grad = b_grad * spec.residual_scaling
    return _like(raw_grad, raw), None, None, _like(a_grad, a), _like(b_grad, b), *part_grads


def _scale_residual(spec: WeightSpec, raw: Tensor, a: Tensor | None, b: Tensor | None) -> Residual:
    """Return A and scaling * B in the dtype of the computation."""
    if a is None or b is None:
        return None
    dtype, scaling = compute_dtype(raw), spec.residual_scaling
    return a.to(dtype), b.to(dtype) if scaling == 1 else b.to(dtype) * scaling


class _Fold(torch.autograd.Function):
    """Effective weight from raw, scales and residual; backward recomputes from these inputs."""

    @staticmethod
    def forward(ctx: Any, spec: WeightSpec, layout: Layout, *tensors: Any) -> Tensor:
        ctx.spec, ctx.layout = spec, layout
        ctx.save_for_backward(*tensors)
        return _compute(spec, layout, _pack(tensors), any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _pack(ctx.saved_tensors)
        return None, None, *_pull_back(ctx.spec, ctx.layout, inputs, grad, ctx.needs_input_grad[2:])


class _Linear(torch.autograd.Function):
    """x @ w_eff.T + bias, which saves what nn.Linear saves and computes w_eff again in backward."""

    @staticmethod
    def forward(
        ctx: Any, spec: WeightSpec, layout: Layout, dtype: torch.dtype, x: Tensor, bias: Tensor | None, *tensors: Any
    ) -> Tensor:
        ctx.spec, ctx.layout, ctx.dtype = spec, layout, dtype
        ctx.save_for_backward(x, *tensors)
        weight = _compute(spec, layout, _pack(tensors), True)
        return torch.nn.functional.linear(x, weight.to(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        inputs = _pack(tensors)
        _, _, _, needs_x, needs_bias, *needed = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        weight = x_grad = None
        input_grads: tuple[Tensor | None, ...] = (None,) * len(needed)
        raw, _, a, *_ = inputs
        trains_residual = a is None or any(needed[3:5])  # else native's gradients know nothing of it
        if needs_x and any(needed) and trains_residual and _select_backend(ctx.spec, raw, True) is native:
            weight = torch.empty_like(raw, dtype=ctx.spec.dtype, requires_grad=False)  # filled with the gradients
        elif needs_x:
            x_grad = rows @ _compute(ctx.spec, ctx.layout, inputs, True).to(ctx.dtype)
        if any(needed):
            weight_grad = rows.T @ x.reshape(-1, x.shape[-1])
            input_grads = _pull_back(ctx.spec, ctx.layout, inputs, weight_grad, tuple(needed), weight)
        if weight is not None:
            x_grad = rows @ weight.to(ctx.dtype)
        x_grad = None if x_grad is None else x_grad.reshape(x.shape)
        bias_grad = rows.sum(0) if needs_bias else None
        return None, None, None, x_grad, bias_grad, *input_grads


def _group(layout: Layout, parts: tuple[Tensor, ...]) -> Scales:
    """Rebuild the scales from their flattened parts."""
    scales: Scales = {}
    for (scale, part), tensor in zip(layout, parts, strict=True):
        scales.setdefault(scale, {})[part] = tensor
    return scales


def _like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if grad is None or tensor is None else grad.to(tensor.dtype)


def fold(
    spec: WeightSpec,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    residual: tuple[Tensor, Tensor] | None = None,
    table: Tensor | None = None,
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
        table: Raw weights of the values of a bf16 or fp16 base weight, which raw then is, and which gets no gradient;
            look_up finds the raw weights for as long as they are needed.

    Returns:
        w_eff of raw's shape, in spec.dtype: f(raw) + residual_scaling * B @ A.
    """
    result: Tensor = _Fold.apply(spec, *_flatten(raw, beta, scales, residual, table))
    return result


def linear(
    x: Tensor,
    bias: Tensor | None,
    spec: WeightSpec,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    residual: tuple[Tensor, Tensor] | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Compute torch.nn.functional.linear(x, fold(spec, raw, beta, scales, residual), bias), keeping less for backward.

    Saves x and the inputs of the fold. Backward computes the effective weight a second time instead of keeping it.
    Follows autocast as linear does. Not twice differentiable.

    Args:
        x: Input, (..., d_in).
        bias: (d_out,) or None.
        spec: As in fold, and so the others.
        raw: Raw weight, (d_out, d_in).
        beta: Curvature, 0-d.
        scales: Parts of each scale.
        residual: (A, B) or None.
        table: Raw weights of the values of a base weight, or None.

    Returns:
        (..., d_out), in the dtype that linear gives.
    """
    device, dtype = x.device.type, spec.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    layout, *tensors = _flatten(raw, beta, scales, residual, table)
    result: Tensor = _Linear.apply(spec, layout, dtype, x, bias, *tensors)
    return result


def _flatten(
    raw: Tensor, beta: Tensor, scales: Scales, residual: tuple[Tensor, Tensor] | None, table: Tensor | None
) -> tuple[Any, ...]:
    """Return (layout, raw, table, beta, A, B, *parts)."""
    layout = tuple((scale, part) for scale, parts in scales.items() for part in parts)
    a, b = residual if residual is not None else (None, None)
    raw = raw if table is None else raw.detach()
    return layout, raw, table, beta, a, b, *(tensor for parts in scales.values() for tensor in parts.values())
