"""Triton backend, for GPUs: one pass over raw for a fold, one over raw and its gradient for all gradients.

Deterministic: tiles are summed in float32 in a fixed order, and their sums in float64, without atomics. A GPU computes
the reference's bits of a CPU where nothing is summed. Triton is imported at the first call.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from peft_sel.kernels import reference
from peft_sel.kernels.formulas import Factors, Residual, Scales, WeightSpec, broadcast_scales
from peft_sel.kernels.reference import multiply_residual, pull_back_residual
from peft_sel.numerics import SCALE_NAMES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOLD_TILE = 32, 128  # rows and columns
PULL_BACK_TILE = 16, 64  # 4 weights per thread: about 100 registers, so that two programs fit a processor
SEGMENT = 128  # rows that one program sums over, tile by tile
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

_failed = False


def can_run(spec: WeightSpec, raw: Tensor) -> bool:
    """Whether this backend takes a weight: not empty, of at most 32 bits, not fake, no scale of pattern lora."""
    plain = type(raw) in (Tensor, nn.Parameter) and raw.dtype in DTYPES and spec.dtype in DTYPES
    return plain and raw.numel() > 0 and spec.can_fuse and not _failed


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> Tensor:
    """Do what reference.fold does; the result lies in memory as raw does."""
    if can_run(spec, raw):
        try:
            return _fold(spec, raw, beta, broadcast_scales(spec, scales), multiply_residual(residual))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever breaks in a compiler, training can go on
            _give_up(error)
    return reference.fold(spec, raw, beta, scales, residual)


def pull_back(
    spec: WeightSpec,
    grad: Tensor,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    names: tuple[str, ...],
    residual: Residual,
) -> tuple[Tensor | None, Scales, Residual]:
    """Do what reference.pull_back does; all sums end in float64."""
    if can_run(spec, raw) and grad.dtype in DTYPES:
        try:
            raw_grad, grads = _pull_back(spec, grad, raw, beta, scales, names)
            return raw_grad, grads, pull_back_residual(grad, residual)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _give_up(error)
    return reference.pull_back(spec, grad, raw, beta, scales, names, residual)


def _give_up(error: Exception) -> None:
    global _failed
    _failed = True
    cause = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
    warnings.warn(
        f"Triton does not work here ({type(error).__name__}: {cause}); SEL goes on without it, at several times the "
        "time per weight",
        stacklevel=4,
    )


def _import_kernels() -> ModuleType:
    from peft_sel.kernels import triton_kernels

    return triton_kernels


def _fold(spec: WeightSpec, raw: Tensor, beta: Tensor, factors: Factors, delta: Tensor | None) -> Tensor:
    kernels = _import_kernels()
    # Triton's interpreter, which runs on the CPU, truncates where a GPU rounds.
    result = torch.empty_like(raw, dtype=spec.dtype if raw.is_cuda else torch.float32, requires_grad=False)
    transposed = _is_transposed(raw)
    rows, columns = _in_order(raw.shape, transposed)
    block_rows, block_columns = FOLD_TILE
    grid = _count(rows, block_rows), _count(columns, block_columns)
    added = raw if delta is None else delta
    with torch.cuda.device_of(raw):
        kernels.fold_kernel[grid](
            result,
            raw,
            added,
            beta.to(raw.device, torch.float32),
            rows,
            columns,
            *(stride for tensor in (result, raw, added) for stride in _in_order(tensor.stride(), transposed)),
            *_list_factors(spec, raw, factors, transposed),
            *_list_constants(kernels, spec, transposed),
            delta is not None,
            block_rows,
            block_columns,
            **OPTIONS,
        )
    return result.to(spec.dtype)


def _pull_back(
    spec: WeightSpec, grad: Tensor, raw: Tensor, beta: Tensor, scales: Scales, names: tuple[str, ...]
) -> tuple[Tensor | None, Scales]:
    kernels = _import_kernels()
    transposed = _is_transposed(raw)
    rows, columns = _in_order(raw.shape, transposed)
    block_rows, block_columns = PULL_BACK_TILE
    grid = _count(columns, block_columns), _count(rows, SEGMENT)
    # Where its gradient is not asked for, raw stands for it: the kernel writes none.
    raw_grad = torch.empty_like(raw, dtype=torch.float32, requires_grad=False) if "raw" in names else raw
    summed = [name for name in scales if name in names]
    row_sums = torch.empty(grid[0], len(summed), rows, dtype=torch.float32, device=raw.device)
    column_sums = torch.empty(grid[1], len(summed), columns, dtype=torch.float32, device=raw.device)
    with torch.cuda.device_of(raw):
        kernels.pull_back_kernel[grid](
            raw_grad,
            grad,
            raw,
            beta.to(raw.device, torch.float32),
            row_sums,
            column_sums,
            rows,
            columns,
            *(stride for tensor in (raw_grad, grad, raw) for stride in _in_order(tensor.stride(), transposed)),
            *_list_factors(spec, raw, broadcast_scales(spec, scales), transposed),
            *_list_constants(kernels, spec, transposed),
            "raw" in names,
            *(summed.index(name) if name in summed else -1 for name in SCALE_NAMES),
            block_rows,
            block_columns,
            SEGMENT,
            **OPTIONS,
        )
    by_side = _in_order((row_sums.sum(0, dtype=torch.float64), column_sums.sum(0, dtype=torch.float64)), transposed)
    grads: Scales = {}
    for index, name in enumerate(summed):
        sums = {
            "value": row_sums[:, index].sum(dtype=torch.float64).reshape(1),
            "row": by_side[0][index],
            "column": by_side[1][index],
        }
        grads[name] = {part: sums[part] for part in scales[name]}
    return raw_grad if "raw" in names else None, grads


def _is_transposed(raw: Tensor) -> bool:
    """Whether the rows lie side by side in memory, not the columns."""
    return raw.stride(0) < raw.stride(1) and not raw.is_contiguous()


def _in_order(pair: Any, transposed: bool) -> tuple[Any, Any]:
    """Return what belongs to the kernel's rows, then to its columns."""
    of_rows, of_columns = pair
    return (of_columns, of_rows) if transposed else (of_rows, of_columns)


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _list_factors(spec: WeightSpec, raw: Tensor, factors: Factors, transposed: bool) -> list[Tensor]:
    """Return each scale's values by rows (or its one value) and by columns; raw stands for those that there are not."""
    patterns = dict(spec.patterns)
    result: list[Tensor] = []
    for name in SCALE_NAMES:
        vectors = [factor.reshape(-1).contiguous() for factor in factors.get(name, ())]
        of_columns = vectors.pop() if vectors and "col" in patterns[name] else raw
        of_rows = vectors.pop() if vectors else raw
        result += _in_order((of_rows, of_columns), transposed and patterns.get(name) != "global")
    return result


def _list_constants(kernels: ModuleType, spec: WeightSpec, transposed: bool) -> list[Any]:
    """Return the pattern of each scale as the kernel sees it, mode, family, and whether to divide by the multiplier."""
    row, column = _in_order((kernels.ROW, kernels.COLUMN), transposed)
    codes = {
        "global": kernels.GLOBAL,
        "row": row,
        "column": column,
        "row_col_mult": kernels.ROW_COL_MULT,
        "row_col_add": kernels.ROW_COL_ADD,
    }
    patterns = dict(spec.patterns)
    present = [codes[patterns[name]] if name in patterns else kernels.ABSENT for name in SCALE_NAMES]
    normalize = spec.normalize_by_inner_mult and "inner_multiplier" in patterns
    return [*(code.value for code in present), spec.mode, spec.family, normalize]
