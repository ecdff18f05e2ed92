"""Native backend: cpp/transform.cpp on CPUs.

What it computes elementwise has the reference's bits; sums have another order, the same for any number of threads.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from peft_sel.cpp import load_library
from peft_sel.kernels.formulas import Residual, Scales, WeightSpec, is_plain
from peft_sel.kernels.reference import pull_back_residual
from peft_sel.numerics import MODES, SCALE_NAMES

MIN_PARALLEL_ELEMENTS = 1 << 15
# Rows of a float32 sum over rows, at least; and of the weight's size, the part that all those sums may take.
CHUNK_ROWS, MAX_CHUNKS, SUMS_SHARE = 64, 256, 4
MAX_RANK = 32  # of a residual whose gradients transform.cpp forms; above, matrix products do

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PATTERNS = {"global": 1, "row": 2, "column": 3, "row_col_mult": 4, "row_col_add": 5}
TRANSPOSED = {"row": "column", "column": "row"}


class _Scale(Structure):
    _fields_ = [("pattern", c_int64), ("row", c_void_p), ("column", c_void_p)]


class _Weight(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("columns", c_int64),
        ("raw", c_void_p),
        ("rank", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("mode", c_int64),
        ("normalize", c_int64),
        ("num_threads", c_int64),
        ("beta", c_float),
        ("scales", _Scale * len(SCALE_NAMES)),
    ]


class _Gradients(Structure):
    _fields_ = [
        ("grad", c_void_p),
        ("grad_type", c_int64),
        ("raw", c_void_p),
        ("row", c_void_p * len(SCALE_NAMES)),
        ("column", c_void_p * len(SCALE_NAMES)),
        ("a_grad", c_void_p),
        ("b_grad", c_void_p),
        ("weight", c_void_p),
        ("weight_type", c_int64),
        ("column_sums", c_void_p),
        ("chunk_rows", c_int64),
    ]


def can_run(spec: WeightSpec, raw: Tensor) -> bool:
    """Whether this backend takes a weight: on a CPU, float32, dense, of the symexp family, no scale of pattern lora."""
    return (
        raw.device.type == "cpu"
        and spec.family == "symexp"
        and spec.can_fuse
        and spec.dtype in TYPES
        and is_plain(raw)
        and raw.numel() > 0
        and (library := load_library()) is not None
        and (spec.dtype != torch.float16 or library.sel_has_float16())
    )


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> Tensor:
    """Do what reference.fold does; the residual's product is summed in another order."""
    if _is_transposed(raw):
        return fold(_swap_patterns(spec), raw.T, beta, _swap_parts(scales), _swap_residual(residual)).T
    inputs = _Inputs(spec, raw, beta, scales, residual)
    result = torch.empty(raw.shape, dtype=spec.dtype, device=raw.device)
    load_library().sel_fold(byref(inputs.weight), c_void_p(result.data_ptr()), c_int64(TYPES[spec.dtype]))
    return result


def pull_back(
    spec: WeightSpec,
    grad: Tensor,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    names: tuple[str, ...],
    residual: Residual,
    weight: Tensor | None = None,
) -> tuple[Tensor | None, Scales, Residual]:
    """Do what reference.pull_back does, and in the same pass what fold does.

    Args:
        spec: As in reference.pull_back, and so the others.
        grad: dLoss/dw_eff.
        raw: Raw weight.
        beta: Curvature.
        scales: Parts of each scale.
        names: "raw" or names of scales.
        residual: A and B.
        weight: Receives the effective weight, if not None: of spec.dtype, and laid out like raw.

    Returns:
        As reference.pull_back.
    """
    if _is_transposed(raw):
        swapped = (_swap_parts(scales), names, _swap_residual(residual), None if weight is None else weight.T)
        raw_grad, grads, residual_grads = pull_back(_swap_patterns(spec), grad.T, raw.T, beta, *swapped)
        return None if raw_grad is None else raw_grad.T, _swap_parts(grads), _swap_residual(residual_grads)
    inputs = _Inputs(spec, raw, beta, scales, residual)
    rows, columns = raw.shape
    known = grad.dtype in TYPES and (grad.dtype != torch.float16 or load_library().sel_has_float16())
    if not known or grad.shape != raw.shape or not grad.is_contiguous():
        grad = grad.to(grad.dtype if known else torch.float32).expand(raw.shape).contiguous()
    raw_grad = torch.empty(raw.shape, dtype=torch.float32, device=raw.device) if "raw" in names else None
    gradients = _Gradients(grad=grad.data_ptr(), grad_type=TYPES[grad.dtype])
    gradients.raw = None if raw_grad is None else raw_grad.data_ptr()
    trained = [(name, part) for name, _ in spec.patterns if name in names for part in scales[name]]
    lengths = [columns if part == "column" else rows for _, part in trained]
    rank = inputs.weight.rank if inputs.weight.rank <= MAX_RANK else 0
    # One buffer, whose parts are the gradients: a tensor for each would cost as much as a small weight's pass.
    totals = torch.empty(sum(lengths) + rank * (rows + columns), dtype=torch.float32, device=raw.device)
    address = totals.data_ptr()
    for (name, part), length in zip(trained, lengths, strict=True):
        side = gradients.column if part == "column" else gradients.row
        side[SCALE_NAMES.index(name)] = address
        address += length * totals.itemsize
    if rank > 0:
        gradients.a_grad, gradients.b_grad = address, address + rank * columns * totals.itemsize
    if weight is not None:
        gradients.weight, gradients.weight_type = weight.data_ptr(), TYPES[spec.dtype]
    num_sums = rank + sum(part == "column" for _, part in trained)
    gradients.chunk_rows = max(CHUNK_ROWS, -(-rows // MAX_CHUNKS), SUMS_SHARE * num_sums)
    column_sums = torch.empty(
        -(-rows // gradients.chunk_rows) * num_sums * columns, dtype=torch.float32, device=raw.device
    )
    gradients.column_sums = column_sums.data_ptr()
    load_library().sel_pull_back(byref(inputs.weight), byref(gradients))
    *sums, a_grad, b_grad = totals.split([*lengths, rank * columns, rows * rank])
    scale_grads: Scales = {}
    for (name, part), total in zip(trained, sums, strict=True):
        total = total.sum(0, keepdim=True, dtype=torch.float64) if part == "value" else total
        scale_grads.setdefault(name, {})[part] = total
    if residual is None:
        return raw_grad, scale_grads, None
    if rank == 0:
        return raw_grad, scale_grads, pull_back_residual(grad, residual)
    return raw_grad, scale_grads, (a_grad.view(rank, columns), b_grad.view(rows, rank))


class _Inputs:
    """A weight as the library takes it, and the tensors whose memory it points into."""

    def __init__(self, spec: WeightSpec, raw: Tensor, beta: Tensor, scales: Scales, residual: Residual) -> None:
        self._alive: list[Tensor] = []
        rows, columns = raw.shape
        self.weight = _Weight(
            rows=rows,
            columns=columns,
            raw=self.hold(raw, rows * columns),
            mode=MODES.index(spec.mode),
            normalize=spec.normalize_by_inner_mult and "inner_multiplier" in scales,
            num_threads=torch.get_num_threads() if raw.numel() >= MIN_PARALLEL_ELEMENTS else 1,
            beta=float(beta),
        )
        if residual is not None:
            a, b = residual
            self.weight.rank = len(a)
            self.weight.a = self.hold(a, len(a) * columns)
            self.weight.b = self.hold(b, rows * len(a))
        for name, pattern in spec.patterns:
            scale, parts = self.weight.scales[SCALE_NAMES.index(name)], scales[name]
            scale.pattern = PATTERNS[pattern]
            if "column" in parts:
                scale.column = self.hold(parts["column"], columns)
            if "row" in parts:
                scale.row = self.hold(parts["row"], rows)
            elif "value" in parts:
                scale.row = self.hold(parts["value"], 1)

    def hold(self, tensor: Tensor, numel: int) -> int:
        """Return the address of a tensor's values in float32, contiguous, alive as long as this object."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != numel:
            tensor = tensor.to(torch.float32).reshape(numel)
        self._alive.append(tensor)
        return tensor.data_ptr()


def _is_transposed(matrix: Tensor) -> bool:
    return not matrix.is_contiguous() and matrix.T.is_contiguous()


def _swap_patterns(spec: WeightSpec) -> WeightSpec:
    return spec._replace(patterns=tuple((name, TRANSPOSED.get(pattern, pattern)) for name, pattern in spec.patterns))


def _swap_residual(residual: Residual) -> Residual:
    return None if residual is None else (residual[1].T, residual[0].T)


def _swap_parts(scales: Scales) -> Scales:
    return {name: {TRANSPOSED.get(part, part): tensor for part, tensor in scales[name].items()} for name in scales}
