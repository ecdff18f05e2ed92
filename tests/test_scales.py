"""Structured scales: start, expansion and the reduction of gradients for every pattern."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch

from peft_sel.errors import SELError
from peft_sel.numerics.scales import (
    PATTERNS,
    SCALE_NAMES,
    expand_parts,
    init_parts,
    mean_value,
    reduce_gradient,
    start_value,
)

SHAPES = ((5, 7), (1, 1), (1, 6), (6, 1))
RANK = 3


def draw_parts(pattern: str, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = reference.part_shapes(pattern, shape, RANK)
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in shapes.items()}


def test_names_are_the_specs() -> None:
    assert tuple(SCALE_NAMES) == reference.SCALES
    assert tuple(PATTERNS) == reference.PATTERNS


@pytest.mark.parametrize("beta", [0.75, 7.5, 12.5, 60.0])
@pytest.mark.parametrize("name", reference.SCALES)
def test_start_value(name: str, beta: float) -> None:
    assert start_value(name, beta) == reference.start_value(name, beta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_start_expands_to_the_start_value(pattern: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """r = c = sqrt(v) rounds twice (1.5 eps relative); every other pattern starts at v rounded once."""
    value = 1 / 12.5
    torch.manual_seed(0)  # lora draws its A
    parts = init_parts(pattern, value, shape, rank=RANK, dtype=dtype)
    assert {name: tuple(part.shape) for name, part in parts.items()} == reference.part_shapes(pattern, shape, RANK)
    assert all(part.dtype == dtype for part in parts.values())
    expanded = expand_parts(pattern, parts)
    assert torch.broadcast_shapes(expanded.shape, shape) == shape
    rounding = 2 * torch.finfo(dtype).eps if pattern == "row_col_mult" else 0.5 * torch.finfo(dtype).eps
    assert np.all(abs(reference.wide(expanded) - value) <= rounding * value)


def test_row_col_mult_starts_at_the_square_root() -> None:
    parts = init_parts("row_col_mult", 1 / 7.5, (3, 4), rank=RANK, dtype=torch.float64)
    for part in parts.values():
        assert part.tolist() == pytest.approx([math.sqrt(1 / 7.5)] * len(part), rel=4e-16)  # one or two roundings


def test_row_col_add_starts_at_the_value_exactly() -> None:
    """No split of the start may cost the scale its exact value, in particular 0 for offset and shift."""
    for value in (0.0, 1.0, 1 / 7.5):
        parts = init_parts("row_col_add", value, (3, 4), rank=RANK, dtype=torch.float64)
        assert torch.all(expand_parts("row_col_add", parts) == value)


def test_lora_starts_at_its_base_and_can_learn() -> None:
    torch.manual_seed(1)
    parts = init_parts("lora", 0.125, (5, 7), rank=RANK, dtype=torch.float64)
    assert parts["base"].item() == 0.125
    assert torch.all(parts["b"] == 0)
    assert torch.linalg.matrix_rank(parts["a"]).item() == RANK  # with A = 0 too, neither factor would get a gradient
    gradient = reduce_gradient("lora", parts, torch.ones(5, 7, dtype=torch.float64))
    assert torch.all(gradient["b"] != 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_expansion_matches_oracle(pattern: str, shape: tuple[int, int]) -> None:
    parts = draw_parts(pattern, shape, seed=2)
    got = np.broadcast_to(reference.wide(expand_parts(pattern, parts)), shape)
    want = np.broadcast_to(reference.expand(pattern, parts), shape)
    # A rank-3 product sums four terms of order 1.
    assert np.allclose(got, want, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_reduced_gradient_matches_finite_differences(pattern: str, shape: tuple[int, int]) -> None:
    """The expansion is at most bilinear, so central differences are exact up to rounding (1e-13 / 1e-6 in float64)."""
    parts = draw_parts(pattern, shape, seed=3)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    got = reduce_gradient(pattern, parts, grad)
    assert set(got) == set(parts)
    for name, part in parts.items():

        def loss(value, name=name):
            expanded = np.broadcast_to(reference.expand(pattern, {**parts, name: value}), shape)
            return (reference.wide(grad) * expanded).sum()

        want = reference.differentiate(loss, part)
        assert got[name].shape == part.shape
        assert np.allclose(reference.wide(got[name]), want, rtol=1e-9, atol=1e-9 * abs(want).max())


def test_unknown_pattern_is_an_error() -> None:
    with pytest.raises(SELError, match="diagonal"):
        init_parts("diagonal", 1.0, (2, 2), rank=1, dtype=torch.float32)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_product_that_starts_at_zero_names_the_patterns_that_work(value: float) -> None:
    """r = c = 0 is a dead saddle: neither factor would get a gradient."""
    with pytest.raises(SELError, match=r"row_col_mult.*global, row, column, row_col_add or lora"):
        init_parts("row_col_mult", value, (2, 2), rank=1, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_mean_is_that_of_the_whole_scale_and_of_all_in_a_stack(pattern: str, shape: tuple[int, int]) -> None:
    members = [draw_parts(pattern, shape, seed) for seed in range(3)]
    wholes = [np.broadcast_to(reference.expand(pattern, parts), shape) for parts in members]
    bound = 64 * np.finfo(np.float64).eps * max(float(np.abs(whole).max()) for whole in wholes)  # sums of 35 terms
    assert mean_value(pattern, members[0]) == pytest.approx(float(wholes[0].mean()), rel=0, abs=bound)
    stack = {name: torch.stack([parts[name] for parts in members]) for name in members[0]}
    assert mean_value(pattern, stack) == pytest.approx(float(np.mean(wholes)), rel=0, abs=bound)
