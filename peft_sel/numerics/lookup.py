"""Raw weights of bf16 and fp16 weights, looked up in a table: two bytes have few values, a weight matrix has millions.

Read as an integer, a two-byte float is a sign bit and a magnitude, and consecutive integers are consecutive magnitudes.
A table holds the raw weight of each magnitude between the smallest and the largest of one weight, for both signs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # magnitudes from here on are not finite
SIGN = 1 << 15
CPU_BLOCK_ELEMENTS = 1 << 15  # fits the cache, and torch runs so few in the calling thread
DEVICE_BLOCK_ELEMENTS = 1 << 24  # bounds the temporaries of an accelerator, which wants few large operations

Report = TypeVar("Report")


def _flatten(tensor: Tensor) -> Tensor:
    """View a tensor as a vector, in the order in which its elements lie if that is possible without a copy."""
    return tensor.detach().reshape(-1)


def _blocks(vector: Tensor) -> tuple[Tensor, ...]:
    return vector.split(CPU_BLOCK_ELEMENTS if vector.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS)


def find_magnitudes(weight: Tensor) -> range:
    """Find the magnitudes, as integers, that a table for a weight has to hold: from its smallest but 0 to its largest.

    Args:
        weight: Any shape, bfloat16 or float16.

    Returns:
        The range, empty where all weights are 0. Its last member is INFINITIES[weight.dtype] or more where the weight
        holds an infinity or NaN.
    """
    smallest, largest = [], []
    for block in _blocks(_flatten(weight).view(torch.int16)):
        if block.numel():
            magnitudes = block & (SIGN - 1)
            largest.append(magnitudes.amax())
            smallest.append(magnitudes.sub_(1).bitwise_and_(SIGN - 1).amin())  # 0 becomes the largest
    if not largest:
        return range(0)
    stop = int(torch.stack(largest).amax()) + 1
    return range(min(int(torch.stack(smallest).amin()) + 1, stop), stop)


def make_table(
    magnitudes: range, dtype: torch.dtype, device: torch.device, solve: Callable[[Tensor], tuple[Tensor, Report]]
) -> tuple[Tensor, Report]:
    """Tabulate an elementwise function of two-byte floats that keeps both zeros.

    Args:
        magnitudes: Which magnitudes to hold, as integers; finite.
        dtype: bfloat16 or float16.
        device: Device of the table.
        solve: Takes a vector of values, and returns the vector of results and whatever else.

    Returns:
        The table and what else solve returned. Of shape (2, 1 + len(magnitudes)), float32 or as wide as the results:
        the first of magnitudes, then the results; one row for each sign.
    """
    values = torch.arange(magnitudes.start, magnitudes.stop, dtype=torch.int16, device=device).view(dtype)
    results, report = solve(torch.cat([values, -values]))
    results = results.to(torch.promote_types(results.dtype, torch.float32)).reshape(2, len(magnitudes))
    return torch.cat([results.new_full((2, 1), magnitudes.start), results], dim=1), report


def stack_tables(tables: list[Tensor]) -> Tensor:
    """Stack tables of different lengths; look_up takes each of the stack as it took the table itself."""
    length = max(table.shape[1] for table in tables)
    return torch.stack([torch.nn.functional.pad(t, (0, length - t.shape[1]), value=torch.nan) for t in tables])


def look_up(weight: Tensor, table: Tensor) -> Tensor:
    """Look every element of a weight up in a table.

    Args:
        weight: Any shape, of the table's bfloat16 or float16.
        table: What make_table made for it.

    Returns:
        Results in the weight's shape, and laid out as it is if that is a matrix; NaN for a magnitude that the table
        lacks.
    """
    if not weight.is_contiguous() and weight.dim() == 2 and weight.T.is_contiguous():
        return look_up(weight.T, table).T
    # For each of the 65,536 patterns of bits; made anew, since a table for each layer of a model has to be small.
    by_pattern = table.new_full((2 * SIGN,), torch.nan)
    places = torch.arange(table.shape[1] - 1, device=table.device) + table[0, 0].to(torch.int64)
    places = places.clamp_max(SIGN - 1)  # what stack_tables added: a NaN at a pattern that is a NaN
    by_pattern[places], by_pattern[places + SIGN] = table[0, 1:], table[1, 1:]
    by_pattern[0], by_pattern[SIGN] = 0.0, -0.0
    bits = _flatten(weight).view(torch.int16)
    if torch.compiler.is_compiling():
        return by_pattern[_to_pattern(bits)].view(weight.shape)
    result = torch.empty(weight.shape, dtype=table.dtype, device=weight.device)
    for block, target in zip(_blocks(bits), _blocks(result.view(-1)), strict=True):
        torch.index_select(by_pattern, 0, _to_pattern(block), out=target)
    return result


def _to_pattern(bits: Tensor) -> Tensor:
    return bits.view(torch.uint16).to(torch.int32)
