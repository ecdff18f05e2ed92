"""Products of bf16 matrices on CPUs without instructions for them, where torch's own take ten times as long."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

# How many results have the dtype of the arguments; flash attention's others are float32.
OPERATORS = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}


@contextmanager
def products_in_float32() -> Iterator[None]:
    """Compute bf16 products as float32 ones of the same values, rounded to bf16, in this process.

    That is what a product in bf16 is, sums in float32 and a result in bf16, but for the order of the sums; in attention
    the probabilities are not rounded on the way.
    """
    with _scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, count in OPERATORS.items():
            library.impl(name, _Product(name, count), "CPU", with_keyset=True)
        yield


class _Product:
    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        self.count = count

    def __call__(self, keys: Any, *args: Any, **options: Any) -> Any:
        if not any(_is_bf16(value) for value in args):
            return self.kernel.call_boxed(keys, *args, **options)
        widened = [value.float() if _is_bf16(value) else value for value in args]
        result = self.kernel.call_boxed(keys, *widened, **options)
        if isinstance(result, Tensor):
            return result.bfloat16()
        return (*(value.bfloat16() for value in result[: self.count]), *result[self.count :])


def _is_bf16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bfloat16
