"""The table of two-byte weights: the bits of the solve for each element, whatever the weight looks like."""

from __future__ import annotations

import pytest
import torch

from peft_sel.errors import SELError
from peft_sel.numerics import inversion, invert_weight

DTYPES = [torch.bfloat16, torch.float16]
KINDS = [
    *(("symexp", mode) for mode in ("mismatch", "congruent", "oppose", "exp_only")),
    ("sinh", "congruent"),
    ("damped", "congruent"),
    ("damped", "exp_only"),
]


def options(family: str, mode: str, beta: float) -> dict:
    scales = {"exp_scale": torch.tensor(1 / beta), "inner_multiplier": torch.ones(1, 1)}
    if family == "damped":
        scales["offset"] = torch.tensor(0.5)
    if mode != "exp_only" and family != "sinh":
        scales["linear_scale"] = torch.tensor([1.0 if family == "damped" else 1 / max(beta, 7.5)])
    return {**scales, "beta": beta, "mode": mode, "family": family, "name": "q_proj"}


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value, three times, in an order of its own."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    values = values[torch.isfinite(values)].repeat(3)
    return values[torch.randperm(len(values))]


def heavy_tailed(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weight = (torch.randn(shape) ** 3 * 0.02).to(dtype)
    weight.view(-1)[::1001], weight.view(-1)[1::1001] = 0.0, -0.0
    return weight


def assert_solved_alone(weight: torch.Tensor, **chosen: object) -> None:
    """The table's result is the solve's: a float32 weight has no table."""
    raw, report = invert_weight(weight, **chosen)
    want, own = invert_weight(weight.float(), **chosen)
    assert raw.dtype == torch.float32 and raw.is_contiguous() and not raw.requires_grad
    assert torch.equal(raw.view(torch.int32), want.view(torch.int32))
    assert report.converged and (report.num_steps >= own.num_steps or not weight.any())


@pytest.fixture(autouse=True)
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of elements that were solved for."""
    numbers: list[int] = []
    invert = inversion._invert_blocks

    def count(weight: torch.Tensor, *args: object) -> object:
        numbers.append(weight.numel())
        return invert(weight, *args)

    monkeypatch.setattr(inversion, "_invert_blocks", count)
    return numbers


@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_finite_value(dtype: torch.dtype, kind: tuple[str, str], beta: float, solved: list[int]) -> None:
    """Both zeros, subnormals, and what is too large for float32 (1e4 is far beyond any weight)."""
    values = finite_values(dtype)
    reachable = values[values.float().abs() < 1e4]
    assert_solved_alone(reachable, **options(*kind, beta))
    assert solved == [2 * ((len(reachable) - 6) // 6), len(reachable)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_near_the_end_of_the_dtype(kind: tuple[str, str]) -> None:
    """Where float32 overflows the solve refuses, and so does the table."""
    weight, chosen = finite_values(torch.bfloat16), options(*kind, 7.5)
    try:
        invert_weight(weight.float(), **chosen)
    except SELError as error:
        with pytest.raises(type(error), match="q_proj"):
            invert_weight(weight, **chosen)
    else:
        assert_solved_alone(weight, **chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_layouts(dtype: torch.dtype, normalize: bool, solved: list[int]) -> None:
    chosen = options("symexp", "mismatch", 7.5) | {
        "inner_multiplier": torch.tensor(1.1),
        "offset": torch.tensor([0.1]),
        "normalize_by_inner_mult": normalize,
    }
    weight = heavy_tailed(300, 400, dtype=dtype)
    layouts = [weight, weight.T, weight[:, ::2], weight.reshape(-1), weight.reshape(3, 100, 400).transpose(0, 2)]
    for layout in (*layouts, torch.nn.Parameter(weight)):
        assert_solved_alone(layout, **chosen)
    assert all(number < weight.numel() // 3 for number in solved[::2])


def test_zeros_alone(solved: list[int]) -> None:
    weight = torch.tensor([0.0, -0.0, 0.0], dtype=torch.bfloat16).expand(50, 3)
    assert_solved_alone(weight, **options("symexp", "mismatch", 7.5))
    assert solved == [0, 150]


def test_few_elements_and_scales_of_many_values_are_solved_for(solved: list[int]) -> None:
    weight = heavy_tailed(20, 30)
    assert_solved_alone(weight, **options("symexp", "mismatch", 7.5))
    weight = heavy_tailed(300, 400)
    chosen = options("symexp", "mismatch", 7.5) | {"exp_scale": torch.linspace(0.14, 0.2, 400)}
    assert_solved_alone(weight, **chosen)
    assert solved == [600, 600, 120_000, 120_000]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_weights_are_counted(dtype: torch.dtype, bad: float) -> None:
    weight = heavy_tailed(300, 400, dtype=dtype)
    weight[3, 4] = weight[299, 399] = bad
    with pytest.raises(SELError, match=r"q_proj.*\b2\b"):
        invert_weight(weight, **options("symexp", "mismatch", 7.5))


def test_a_value_that_the_weight_lacks_raises_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that fails somewhere between is not the weight's failure."""
    weight, chosen = heavy_tailed(300, 400), options("symexp", "mismatch", 7.5)
    want, _ = invert_weight(weight, **chosen)
    solve = inversion._invert_blocks

    def fail_between(values: torch.Tensor, *args: object) -> inversion.InversionReport:
        report = solve(values, *args)
        return report if values.shape == weight.shape else report._replace(converged=False)

    monkeypatch.setattr(inversion, "_invert_blocks", fail_between)
    raw, report = invert_weight(weight, **chosen)
    assert report.converged and torch.equal(raw, want)
