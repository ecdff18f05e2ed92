"""Short hashes of weights, by which one base is told from another."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

BLOCK = 1 << 14  # values per sum: what is computed of them fits a cache, and is too little to wake other threads for
BLOCKS_AT_ONCE = {"cpu": 1}
MANY_BLOCKS = 1 << 10  # on accelerators, where a launch costs more than memory traffic
DIGITS = 16
DIGEST = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
# The roundings by which one checkpoint may be loaded: a weight is told by each that is no wider than its own dtype.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def fingerprint_weight(weight: Tensor, stacked: bool = False) -> str:
    """Return the fingerprint of a weight: a hash of its values, and one of them in each narrower precision.

    So that the same checkpoint is known again when it is loaded in another dtype.

    Args:
        weight: The weight in its module's layout, of any floating-point dtype and strides, on any device.
        stacked: Whether it is a stack of matrices along its first dimension.

    Returns:
        Text such as "bfloat16:0123456789abcdef float16:0123456789abcdef", the weight's own precision first.
    """
    own = _own_precision(weight.dtype)
    names = [own, *(name for name in ("bfloat16", "float16") if name != own)]
    return " ".join(f"{name}:{_hash_members(weight, name, stacked)}" for name in names)


def matches_fingerprint(recorded: str, weight: Tensor, stacked: bool = False) -> bool:
    """Whether a weight has the values that a fingerprint was taken of, or one is a rounding of the other.

    Args:
        recorded: What fingerprint_weight returned.
        weight: The weight.
        stacked: Whether it is a stack of matrices.

    Returns:
        False if a single value differs in a single bit after the rounding.
    """
    hashes = choose_hashes(recorded, weight.dtype)
    return any(_hash_members(weight, name, stacked) == digits for name, digits in hashes.items())


def choose_hashes(recorded: str, dtype: torch.dtype) -> dict[str, str]:
    """Return those hashes of a fingerprint, by precision, of which a weight of a dtype must have one.

    They are the one in the weight's own precision, where the fingerprint was taken of a weight that could be rounded to
    it, and the one in the precision that it was taken in, to which the weight may be rounded.

    Args:
        recorded: What fingerprint_weight returned.
        dtype: Dtype of the weight to be compared.

    Returns:
        One or two hashes.
    """
    hashes = dict(entry.split(":") for entry in recorded.split())
    return {name: hashes[name] for name in (_own_precision(dtype), next(iter(hashes))) if name in hashes}


def fingerprints_agree(first: str, second: str) -> bool:
    """Whether two fingerprints are of the same weight, or of one and a rounding of it.

    Args:
        first: What fingerprint_weight returned.
        second: What it returned elsewhere.

    Returns:
        Whether matches_fingerprint would find one's weight to be the other's.
    """
    hashes, others = (dict(entry.split(":") for entry in text.split()) for text in (first, second))
    return any(name in hashes and hashes[name] == others.get(name) for name in (next(iter(hashes)), next(iter(others))))


def is_fingerprint(text: object) -> bool:
    """Whether an object is a text that fingerprint_weight could have returned."""
    if not isinstance(text, str) or not text:
        return False
    entries = [entry.partition(":") for entry in text.split(" ")]
    return all(name in PRECISIONS and DIGEST.fullmatch(digits) for name, _, digits in entries)


def hash_weight(weight: Tensor, precision: str) -> str:
    """Hash the shape of a weight, and every bit of its values as float32, after rounding them to a precision.

    Blocks of values, taken as 32-bit integers, are summed modulo 2^64 with odd factors of their positions, and the sums
    hashed with SHA-256: each value counts, and device, strides and threads do not.

    Args:
        weight: The weight.
        precision: A key of PRECISIONS.

    Returns:
        Hexadecimal digits.
    """
    flat = weight.detach().reshape(-1)
    factors = _position_factors(flat.device)
    num_blocks = -(-len(flat) // BLOCK)
    sums = torch.empty(num_blocks, dtype=torch.int64, device=flat.device)
    step = BLOCKS_AT_ONCE.get(flat.device.type, MANY_BLOCKS)
    for first in range(0, num_blocks, step):
        values = flat[first * BLOCK : (first + step) * BLOCK].to(PRECISIONS[precision]).to(torch.float32)
        integers = values.view(torch.int32).to(torch.int64)
        if rest := len(integers) % BLOCK:
            integers = torch.nn.functional.pad(integers, (0, BLOCK - rest))
        torch.sum(integers.view(-1, BLOCK).mul_(factors), 1, out=sums[first : first + step])
    data = struct.pack(f"<{num_blocks}q", *sums.tolist())
    return hashlib.sha256(f"{tuple(weight.shape)}".encode() + data).hexdigest()[:DIGITS]


def hash_stack(members: Iterable[str]) -> str:
    """Combine the hashes of the matrices of a stack, in their order."""
    return hashlib.sha256(" ".join(members).encode()).hexdigest()[:DIGITS]


def _hash_members(weight: Tensor, precision: str, stacked: bool) -> str:
    if stacked:
        return hash_stack(hash_weight(matrix, precision) for matrix in weight.unbind())
    return hash_weight(weight, precision)


def _own_precision(dtype: torch.dtype) -> str:
    return next((name for name, known in PRECISIONS.items() if known == dtype), "float32")


@cache
def _position_factors(device: torch.device) -> Tensor:
    """Return an odd 64-bit factor for each place in a block: SplitMix64 of its number."""
    state = torch.arange(1, BLOCK + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    return (state ^ _shift_right(state, 31)) | 1


def _shift_right(state: Tensor, count: int) -> Tensor:
    """Shift without the sign."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
