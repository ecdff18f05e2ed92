"""Runs the C++ kernels on arrays that end, or begin, at a page that may not be touched: one element too far is a crash.

Compilers read past the end of what they vectorise too (g++ 12 for AVX2 did). Prints each case before it runs it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from test_compiled import draw
from test_kernels import Case, same_pattern
from test_native import DEFAULT, MODES

from peft_sel.cpp import load_library
from peft_sel.kernels import native
from peft_sel.numerics.newton import Coefficients, solve_in_place

SHAPES = [(1, 1), (3, 5), (4, 16), (5, 33), (9, 403), (70, 17)]
RANKS = [0, 1, 3, 4, 6, 8]
PATTERNS = [DEFAULT, same_pattern("row"), same_pattern("row_col_add"), {"exp_scale": "global", "shift": "column"}]
LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0
plain_empty = torch.empty


def guard(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """Copy a tensor to memory between two forbidden pages, up to the second or from the first."""
    if not (size := tensor.numel() * tensor.element_size()):
        return tensor
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    last = (pages + 1) * mmap.PAGESIZE
    offset = last - size if at_end else mmap.PAGESIZE
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    copy.copy_(tensor)
    for page in (0, last):
        if LIBC.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return copy


@contextmanager
def guarded_results(at_end: bool) -> Iterator[None]:
    """What torch.empty makes is guarded too."""
    torch.empty = lambda *size, **options: guard(plain_empty(*size, **options), at_end)
    try:
        yield
    finally:
        torch.empty = plain_empty


def guard_case(case: Case, at_end: bool) -> Case:
    scales = {
        name: {part: guard(t.detach(), at_end) for part, t in parts.items()} for name, parts in case.scales.items()
    }
    residual = None if case.residual is None else tuple(guard(t.detach(), at_end) for t in case.residual)
    return case._replace(raw=guard(case.raw.detach(), at_end), scales=scales, residual=residual)


def run_kernels() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for at_end, shape, rank, patterns in itertools.product((True, False), SHAPES, RANKS, PATTERNS):
        for mode, dtype in zip(MODES, (*dtypes, torch.bfloat16), strict=True):
            print("kernels", f"{at_end=} {shape=} {rank=} {patterns=} {mode=} {dtype=}", flush=True)
            case = draw(mode, patterns, shape, torch.float32).with_result(dtype)
            factors = (torch.randn(rank, shape[1]), torch.randn(shape[0], rank)) if rank else None
            case = guard_case(case._replace(residual=factors), at_end)
            names = ("raw", *(name for name, _ in case.spec.patterns))
            with guarded_results(at_end):
                folded = native.fold(*case)
                weight = torch.empty(shape, dtype=dtype)
                grad = guard(torch.randn(shape).to(dtype), at_end)
                native.pull_back(case.spec, grad, *case[1:4], names, case.residual, weight)
            assert torch.equal(weight, folded)


def run_inversion() -> None:
    for at_end, shape, rule in itertools.product((True, False), SHAPES, MODES[:3]):
        for sizes in ((shape, shape, shape), ((shape[0], 1), (shape[1],), (1,)), ((1,), (shape[0], 1), (shape[1],))):
            print("inversion", f"{at_end=} {shape=} {rule=} {sizes=}", flush=True)
            drawn = [guard((0.05 + 0.1 * torch.rand(size)).double(), at_end) for size in sizes]
            values = guard(0.02 * torch.randn(shape), at_end)
            solve_in_place(load_library(), values, Coefficients(*drawn, torch.zeros(1)), rule)


if __name__ == "__main__":
    torch.manual_seed(0)
    run_inversion()
    run_kernels()
