"""Compiled backend: the reference's blocks, fused by torch.compile once that pays off, with the same bits on a CPU."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from peft_sel.kernels import reference
from peft_sel.kernels.reference import Factors, WeightSpec

# Compiling takes about as long as the time that it saves over this many weights (10 s, at 1 ns each on two cores):
# whoever stops earlier never waits for a compiler, whoever goes on loses at most as much again.
COMPILE_AFTER_WEIGHTS = 10_000_000_000

_weights_done = 0
_functions: dict[Hashable, Callable[..., Any]] = {}
_failed = False


def pays_off(weights: int) -> bool:
    """Count weights about to be evaluated, and say whether so many were that compiling is worth its time.

    Args:
        weights: How many are about to be evaluated.

    Returns:
        Whether to use this backend.
    """
    global _weights_done
    _weights_done += weights
    return _weights_done >= COMPILE_AFTER_WEIGHTS and not _failed


def fold_block(spec: WeightSpec, raw: Tensor, beta: Tensor, factors: Factors, delta: Tensor | None) -> Tensor:
    """Do what reference.fold_block does."""
    key = ("fold", spec, raw.dtype, delta is None)
    result: Tensor = _call(reference.fold_block, key, spec, raw, beta, factors, delta)
    return result


def pull_back_block(
    spec: WeightSpec, grad: Tensor, raw: Tensor, beta: Tensor, factors: Factors, names: Collection[str]
) -> dict[str, Tensor]:
    """Do what reference.pull_back_block does."""
    key = ("pull back", spec, raw.dtype, names)
    result: dict[str, Tensor] = _call(reference.pull_back_block, key, spec, grad, raw, beta, factors, names)
    return result


def _call(function: Callable[..., Any], key: Hashable, *args: Any) -> Any:
    """Call a function of reference.py, compiled for the constants in key; as it is where that fails."""
    global _failed
    if _failed:
        return function(*args)
    if key not in _functions:
        _functions[key] = _compile(function, len(_functions))
    try:
        return _functions[key](*args)
    except Exception as error:  # whatever breaks in a compiler, training can go on
        _failed = True
        cause = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}: {cause}); SEL goes on with plain torch, which "
            "computes the same in two to three times the time per weight. Installing a C++ compiler (g++) cures this",
            stacklevel=2,
        )
        return function(*args)


def _compile(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    # A code object of its own: Dynamo counts recompiles per code object, and stops at eight.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    one_thread: dict[str, Any] = {"cpp.threads": 1}  # blocks run side by side already
    compiled: Callable[..., Any] = torch.compile(copied, dynamic=True, fullgraph=True, options=one_thread)
    return compiled
