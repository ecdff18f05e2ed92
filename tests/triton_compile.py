"""The Triton kernels compile for a GPU, without one; test_triton.py runs this file in a process of its own."""

from __future__ import annotations

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from peft_sel.kernels import triton_backend, triton_kernels

ROW_COL_MULT, ROW_COL_ADD, COLUMN = (
    getattr(triton_kernels, name).value for name in ("ROW_COL_MULT", "ROW_COL_ADD", "COLUMN")
)
DEFAULT = {"E": ROW_COL_MULT, "L": ROW_COL_MULT, "M": ROW_COL_MULT, "N": 0, "S": 0, "MODE": "mismatch"}
DAMPED = {"E": ROW_COL_MULT, "L": ROW_COL_ADD, "M": COLUMN, "N": COLUMN, "S": 0, "MODE": "congruent"}


def compile_kernel(name: str, tile: tuple[int, int], dtypes: dict[str, str], **constants: object) -> str:
    """Return the PTX for an H100 or H200."""
    kernel = getattr(triton_kernels, name)
    constants |= dict(zip(("BLOCK_ROWS", "BLOCK_COLUMNS"), tile, strict=True))
    signature, values = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[index,] = "constexpr", constants[argument]
        elif re.fullmatch(r"num_.*|.*_(row|column)", argument):
            signature[argument] = "i32"
        else:
            signature[argument] = "*" + dtypes.get(argument, "fp32")
    source = ASTSource(kernel, signature, values, {})
    ptx: str = compile(source, target=GPUTarget("cuda", 90, 32), options=triton_backend.OPTIONS).asm["ptx"]
    return ptx


@pytest.mark.parametrize(
    ("constants", "family", "normalize", "dtype"),
    [(DEFAULT, "symexp", False, "bf16"), (DAMPED, "damped", True, "fp16")],
)
def test_kernels_compile_without_contraction_float64_or_atomics(
    constants: dict[str, object], family: str, normalize: bool, dtype: str
) -> None:
    """A contracted product and sum would have other bits than a CPU's."""
    shared = {**constants, "FAMILY": family, "NORMALIZE": normalize}
    sums = {f"{scale}_SUM": place for scale, place in zip("ELMNS", (0, 1, 2, -1, -1), strict=True)}
    folds = compile_kernel("fold_kernel", triton_backend.FOLD_TILE, {"result_ptr": dtype}, **shared, RESIDUAL=True)
    gradients = compile_kernel(
        "pull_back_kernel",
        triton_backend.PULL_BACK_TILE,
        {"grad_ptr": dtype},
        **shared,
        **sums,
        RAW=True,
        SEGMENT=triton_backend.SEGMENT,
    )
    for ptx in (folds, gradients):
        assert "mul.rn.f32" in ptx
        assert not re.search(r"\bfma\b|\.f64", ptx)
    assert "st.global" in gradients and not re.search(r"\b(atom|red)\.", gradients)
