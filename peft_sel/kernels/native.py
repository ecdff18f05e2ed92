"""Native backend: native.cpp, compiled once for the CPU at hand and kept in the user's cache folder.

What it computes elementwise has the reference's bits; sums have another order, the same for any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peft_sel.kernels.formulas import Factors, Residual, Scales, WeightSpec, broadcast_scales
from peft_sel.numerics import MODES, SCALE_NAMES, compute_dtype

SOURCE = Path(__file__).with_name("native.cpp")
COMPILER = ("g++", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-O3", "-march=native")
# Bits first: no contraction into fused multiply-adds. The other two let rounding and comparisons run on vectors.
EXACTNESS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
WIDE_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
MIN_PARALLEL_ELEMENTS = 1 << 15

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
    ]


def can_run(spec: WeightSpec, raw: Tensor) -> bool:
    """Whether this backend takes a weight: on a CPU, float32, dense, of the symexp family, no scale of pattern lora."""
    return (
        raw.device.type == "cpu"
        and sys.platform == "linux"
        and spec.family == "symexp"
        and spec.can_fuse
        and spec.dtype in TYPES
        and type(raw) in (Tensor, nn.Parameter)
        and (raw.is_contiguous() or raw.T.is_contiguous())
        and compute_dtype(raw) == torch.float32
        and raw.numel() > 0
        and load_library() is not None
    )


@functools.cache
def load_library() -> Any:
    """Return native.cpp as a library, compiled if it was not before; None, with a warning, where that fails."""
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError) as error:
        cause = " ".join((getattr(error, "stderr", None) or str(error)).split())[:300]
        warnings.warn(
            f"native.cpp does not compile here ({cause}); SEL goes on with plain torch, which computes the same in "
            "five to ten times the time per weight. Installing a C++ compiler (g++) cures this",
            stacklevel=2,
        )
        return None
    library.sel_fold.argtypes = [POINTER(_Weight), c_void_p, c_int64]
    library.sel_pull_back.argtypes = [POINTER(_Weight), POINTER(_Gradients)]
    library.sel_fold.restype = library.sel_pull_back.restype = None
    return library


def _build() -> Path:
    """Return the file of the library for this source, compiler line and processor."""
    command = (*COMPILER, *EXACTNESS, *WIDE_VECTORS)
    information = Path("/proc/cpuinfo").read_text().splitlines()
    processor = [line for line in information if line.startswith(("flags", "Features"))][:1]
    key = hashlib.sha256(repr((SOURCE.read_bytes(), command, processor)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peft_sel"
    library = folder / f"native-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, library.name)
            subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True, capture_output=True, text=True)
            made.replace(library)
    return library


def fold(spec: WeightSpec, raw: Tensor, beta: Tensor, factors: Factors, residual: Residual) -> Tensor:
    """Do what reference.fold does; the residual's product is summed in another order."""
    if not raw.is_contiguous():
        swapped = {name: tuple(t if t.dim() == 1 else t.T for t in reversed(factors[name])) for name in factors}
        return fold(_swap_patterns(spec), raw.T, beta, swapped, _swap_residual(residual)).T
    inputs = _Inputs(spec, raw, beta, factors, residual)
    result = torch.empty(raw.shape, dtype=spec.dtype)
    load_library().sel_fold(inputs.weight, result.data_ptr(), TYPES[spec.dtype])
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
    if not raw.is_contiguous():
        swapped = (_swap_parts(scales), names, _swap_residual(residual), None if weight is None else weight.T)
        raw_grad, grads, residual_grads = pull_back(_swap_patterns(spec), grad.T, raw.T, beta, *swapped)
        return None if raw_grad is None else raw_grad.T, _swap_parts(grads), _swap_residual(residual_grads)
    inputs = _Inputs(spec, raw, beta, broadcast_scales(spec, scales), residual)
    grad = grad.to(grad.dtype if grad.dtype in TYPES else torch.float32).contiguous()
    raw_grad = torch.empty(raw.shape) if "raw" in names else None
    gradients = _Gradients(grad=grad.data_ptr(), grad_type=TYPES[grad.dtype], raw=_address(raw_grad))
    sums: Scales = {}
    for name, _ in spec.patterns:
        if name in names:
            lengths = {part: raw.shape[1 if part == "column" else 0] for part in scales[name]}
            sums[name] = {part: torch.zeros(length, dtype=torch.float64) for part, length in lengths.items()}
            for part, total in sums[name].items():
                side = gradients.column if part == "column" else gradients.row
                side[SCALE_NAMES.index(name)] = total.data_ptr()
    a_grad = torch.zeros(inputs.weight.rank, raw.shape[1], dtype=torch.float64)
    b_grad = torch.zeros(raw.shape[0], inputs.weight.rank, dtype=torch.float64)
    if inputs.weight.rank > 0:
        gradients.a_grad, gradients.b_grad = a_grad.data_ptr(), b_grad.data_ptr()
    if weight is not None:
        gradients.weight, gradients.weight_type = weight.data_ptr(), TYPES[spec.dtype]
    load_library().sel_pull_back(inputs.weight, gradients)
    for parts in sums.values():
        if "value" in parts:
            parts["value"] = parts["value"].sum(0, keepdim=True)
    return raw_grad, sums, None if residual is None else (a_grad, b_grad)


class _Inputs:
    """A weight as the library takes it, and the tensors whose memory it points into."""

    def __init__(self, spec: WeightSpec, raw: Tensor, beta: Tensor, factors: Factors, residual: Residual) -> None:
        self._alive: list[Tensor] = []
        rows, columns = raw.shape
        self.weight = _Weight(
            rows=rows,
            columns=columns,
            raw=self.hold(raw).data_ptr(),
            mode=MODES.index(spec.mode),
            normalize=spec.normalize_by_inner_mult and "inner_multiplier" in factors,
            num_threads=torch.get_num_threads() if raw.numel() >= MIN_PARALLEL_ELEMENTS else 1,
            beta=float(beta),
        )
        if residual is not None:
            a, b = (self.hold(factor) for factor in residual)
            self.weight.rank, self.weight.a, self.weight.b = len(a), a.data_ptr(), b.data_ptr()
        for name, pattern in spec.patterns:
            scale = self.weight.scales[SCALE_NAMES.index(name)]
            scale.pattern = PATTERNS[pattern]
            *first, last = (self.hold(factor).data_ptr() for factor in factors[name])
            if pattern in ("global", "row"):
                scale.row = last
            else:
                scale.column, scale.row = last, first[0] if first else None

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor in float32 and contiguous, alive as long as this object."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = tensor.to(torch.float32).contiguous()
        self._alive.append(tensor)
        return tensor


def _swap_patterns(spec: WeightSpec) -> WeightSpec:
    return spec._replace(patterns=tuple((name, TRANSPOSED.get(pattern, pattern)) for name, pattern in spec.patterns))


def _swap_residual(residual: Residual) -> Residual:
    return None if residual is None else (residual[1].T, residual[0].T)


def _swap_parts(scales: Scales) -> Scales:
    return {name: {TRANSPOSED.get(part, part): tensor for part, tensor in scales[name].items()} for name in scales}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
