"""Compiled backend: fused.py through torch.compile, one kernel for all shapes of a kind of weight.

What it computes elementwise has the reference's bits on a CPU; sums have another order.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import Tensor

from peft_sel.kernels import fused
from peft_sel.kernels.formulas import Residual, Scales, WeightSpec, broadcast_scales, fold_block, is_plain
from peft_sel.kernels.reference import multiply_residual

MIN_ELEMENTS = 1 << 16  # below, a call costs more than it saves
MIN_ROWS, MIN_COLUMNS = 2 * fused.CHUNK_ROWS, 16  # torch.compile treats sizes of 0 and 1 as constants
# A fold saves about 6 ns per weight, and compiling it takes 3 to 6 s. Gradients are not counted: they come in training,
# whose results may not depend on when a compiler took over.
FOLD_AFTER_WEIGHTS = 1_000_000_000
EXAMPLE_SHAPE = (1031, 1543)

_functions: dict[str, Callable[..., Any]] = {}
_weights_folded = 0
_failed = False


def can_run(spec: WeightSpec, raw: Tensor) -> bool:
    """Whether this backend takes a weight: large, float32, dense, no fake tensor, and no scale of pattern lora."""
    rows, columns = raw.shape
    large = raw.numel() >= MIN_ELEMENTS and rows >= MIN_ROWS and columns >= MIN_COLUMNS
    return large and is_plain(raw) and spec.can_fuse and not _failed


def pays_off(raw: Tensor) -> bool:
    """Count the weights of a fold, and say whether so many were folded that compiling is worth its time."""
    global _weights_folded
    _weights_folded += raw.numel()
    return _weights_folded >= FOLD_AFTER_WEIGHTS


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> Tensor:
    """Do what reference.fold does."""
    factors, delta = broadcast_scales(spec, scales), multiply_residual(residual)
    result: Tensor = _call(fold_block, spec, raw, beta, factors, delta)
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
    """Do what reference.pull_back does."""
    grad = grad.contiguous() if raw.is_contiguous() else grad.T.contiguous().T
    return fused.pull_back(spec, grad, raw, beta, scales, names, residual, call=_call)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of fused.py, compiled for its arguments' kind; as it is where that fails."""
    global _failed
    # torch.compile would tell parameters from other tensors.
    args = tuple(_map_tensors(Tensor.detach, arg) for arg in args)
    # Dynamo compiles anew for each such state, and fails at the ninth of one function.
    state = torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    key = repr((function.__name__, state, *(_map_tensors(_kind, arg) for arg in args)))
    try:
        if key not in _functions:
            _functions[key] = _compile(function, *(_map_tensors(_make_example, arg) for arg in args))
        return _functions[key](*args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever breaks in a compiler, training can go on
        _failed = True
        cause = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}: {cause}); SEL goes on with plain torch, which "
            "computes the same in five to ten times the time per weight. If a C++ compiler is missing, g++ cures it",
            stacklevel=2,
        )
        return function(*args)


def _compile(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    # A code object of its own: Dynamo counts recompiles per code object, and stops at eight.
    code = function.__code__.replace(co_name=f"{function.__name__}_{len(_functions)}")
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    compiled: Callable[..., Any] = torch.compile(copied, dynamic=True, fullgraph=True)
    # Sizes that are equal in one call need not be so in the next.
    with warnings.catch_warnings(), symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        warnings.simplefilter("ignore")  # the compiler's own
        compiled(*example)
    return compiled


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to an argument that is a tensor, or to those in factors; return other arguments."""
    if isinstance(value, dict):
        return {name: tuple(function(tensor) for tensor in tensors) for name, tensors in value.items()}
    return function(value) if isinstance(value, Tensor) else value


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a compiled function is specialised on: which sizes broadcast, layout, dtype and device."""
    return tuple(size == 1 for size in tensor.shape), tensor.is_contiguous(), tensor.dtype, tensor.device


def _make_example(tensor: Tensor) -> Tensor:
    """Make a tensor of that kind with sizes that are neither equal nor divisible, and large enough for threads."""
    sizes = [1 if size == 1 else example for size, example in zip(tensor.shape, EXAMPLE_SHAPE, strict=False)]
    return tensor.new_ones(sizes) if tensor.is_contiguous() else tensor.new_ones(sizes[::-1]).T
