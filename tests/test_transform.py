"""peft_sel.numerics.transform against the oracle."""

from __future__ import annotations

import re

import mpmath
import numpy as np
import pytest
import reference
import torch

from peft_sel.errors import SELError
from peft_sel.numerics import effective_weight, effective_weight_gradients

BETAS = (1.6, 7.5, 20.0, 60.0)
NAMES = ("raw", *reference.SCALES)


def draw_arguments(seed: int, beta: float, dtype: torch.dtype, shape=(64, 48), shift=True) -> list[torch.Tensor]:
    """Raw weights over twelve decades (z up to 12), both signs, and trained-looking scales of every broadcast shape."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *size: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64)

    rows, columns = shape
    magnitude = 10 ** uniform(-11, 1, rows, columns) * 1.2 / beta
    raw = magnitude * torch.where(uniform(0, 1, rows, columns) < 0.5, -1.0, 1.0)
    scales = [
        uniform(0.8, 1.4, rows, columns) / beta,
        uniform(0.5, 1.1, 1, columns) / max(beta, 7.5),
        uniform(0.95, 1.05, rows, 1),
        uniform(-0.2, 0.2, 1, columns),
        uniform(0.01, 0.1) if shift else torch.zeros((), dtype=torch.float64),
    ]
    return [tensor.to(dtype) for tensor in (raw, *scales)]


def assert_matches_oracle(arguments: list[torch.Tensor], beta: float, mode: str, dtype: torch.dtype) -> None:
    got = effective_weight(*arguments, beta=beta, mode=mode)
    assert got.dtype == dtype and got.shape == arguments[0].shape
    # float32 arithmetic sees beta rounded to float32.
    seen_beta = float(torch.tensor(beta, dtype=dtype))
    want = reference.effective_weight(*arguments, seen_beta, mode)
    z = seen_beta * abs(reference.wide(arguments[0])) * reference.wide(arguments[3])
    # The two paths cancel where they have opposite signs: the bound applies to the size of what is added.
    size = np.maximum(abs(want), abs(reference.effective_weight(*arguments, seen_beta, "exp_only")))
    # Three roundings reach z (beta*m, times |w|, plus s) at eps/2 each, and at most eight the factors and the sum.
    allowed = (4 + 1.5 * z) * torch.finfo(dtype).eps * size
    assert np.max(abs(reference.wide(got) - want) / allowed) <= 1


@pytest.mark.parametrize("mode", reference.MODES)
def test_oracle_is_the_printed_formula(mode: str) -> None:
    """The oracle's expm1 form equals SPEC.md's exp(a - n) - exp(-n), evaluated with 60 digits."""
    with mpmath.workdps(60):
        for w in (-2.0, -0.3, -1e-9, 1e-9, 0.02, 1.1):
            e, l, m, n, s, beta = (mpmath.mpf(v) for v in (0.25, 0.125, 1.0625, 0.375, 0.0625, 7.5))  # noqa: E741
            a = beta * abs(w) * m + s
            S = mpmath.sign(w) * e * (mpmath.exp(a - n) - mpmath.exp(-n))
            L = w * l
            want = {"mismatch": S + abs(w) * l, "congruent": S + L, "oppose": S - L, "exp_only": S}[mode]
            got = reference.effective_weight(w, 0.25, 0.125, 1.0625, 0.375, 0.0625, 7.5, mode)
            assert abs(float(got) - float(want)) <= 1e-15 * abs(float(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", reference.MODES)
def test_matches_oracle(mode: str, beta: float, dtype: torch.dtype) -> None:
    assert_matches_oracle(draw_arguments(1, beta, dtype), beta, mode, dtype)
    assert_matches_oracle(draw_arguments(2, beta, dtype, shift=False), beta, mode, dtype)


@pytest.mark.parametrize("mode", reference.MODES)
def test_float64_is_used_throughout(mode: str) -> None:
    """z <= 13 makes (4 + 1.5*z) eps 5.2e-15; cancelling paths (l up to 1.1/beta) may double it."""
    arguments = draw_arguments(3, 7.5, torch.float64, shift=False)
    want = reference.effective_weight(*arguments, 7.5, mode)
    assert reference.relative_error(effective_weight(*arguments, beta=7.5, mode=mode), want) <= 1e-14


@pytest.mark.parametrize("mode", reference.MODES)
def test_signed_zeros_come_back(mode: str) -> None:
    raw = torch.tensor([0.0, -0.0, 0.5, -0.5])
    for scales in ((None,) * 4, (torch.tensor(0.1), torch.tensor(1.1), torch.tensor(0.3), torch.tensor(0.0))):
        result = effective_weight(raw, torch.tensor(0.125), *scales, beta=8.0, mode=mode)
        assert result[:2].tolist() == [0.0, 0.0]
        assert torch.signbit(result).tolist() == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", reference.MODES)
def test_absent_scales_are_neutral_ones_bit_for_bit(mode: str, dtype: torch.dtype) -> None:
    raw, e, l, m, n, _ = draw_arguments(4, 7.5, dtype)  # noqa: E741
    neutral = [torch.tensor(value, dtype=dtype) for value in (0.0, 1.0, 0.0, 0.0)]
    given = [l, m, n, torch.tensor(0.05, dtype=dtype)]
    for missing in range(16):
        absent = [None if missing >> i & 1 else given[i] for i in range(4)]
        filled = [neutral[i] if missing >> i & 1 else given[i] for i in range(4)]
        got = effective_weight(raw, e, *absent, beta=7.5, mode=mode)
        assert torch.equal(got, effective_weight(raw, e, *filled, beta=7.5, mode=mode))


@pytest.mark.parametrize("mode", reference.MODES)
def test_broadcast_scales_equal_expanded_ones_bit_for_bit(mode: str) -> None:
    raw, *scales = draw_arguments(5, 7.5, torch.float32)
    expanded = [scale.expand(raw.shape).contiguous() for scale in scales]
    before = [tensor.clone() for tensor in (raw, *scales)]
    got = effective_weight(raw, *scales, beta=7.5, mode=mode)
    assert torch.equal(got, effective_weight(raw, *expanded, beta=7.5, mode=mode))
    assert torch.equal(got.T, effective_weight(raw.T, *[scale.T for scale in expanded], beta=7.5, mode=mode))
    assert all(torch.equal(old, new) for old, new in zip(before, (raw, *scales), strict=True))  # inputs untouched


def test_any_shape() -> None:
    scale = torch.tensor(0.125)
    for shape in ((0,), (0, 4), (), (3,), (2, 3, 4)):
        result = effective_weight(torch.ones(shape), scale, scale, None, None, None, beta=8.0, mode="mismatch")
        assert result.shape == shape


def assert_gradients(got: dict[str, torch.Tensor], want: dict[str, np.ndarray]) -> None:
    """The issue asks for 1e-6 relative; differences of the wide oracle resolve 1e-9 of the largest element."""
    assert set(got) == set(want)
    for name, value in got.items():
        allowed = 1e-9 * abs(want[name]) + 1e-12 * abs(want[name]).max() + np.finfo(np.float64).tiny
        assert np.max(abs(reference.wide(value) - want[name]) / allowed) <= 1, name


@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0])
@pytest.mark.parametrize("mode", reference.MODES)
def test_gradients_match_finite_differences(mode: str, beta: float) -> None:
    """Closed form and autograd, elementwise, for raw and all five scales, both signs and both zeros."""
    raw, *scales = draw_arguments(6, beta, torch.float64, shape=(8, 12))
    raw[:2, :2] = torch.tensor([[0.0, -0.0], [-0.0, 0.0]])
    scales = [scale.expand(raw.shape).clone() for scale in scales]
    scales[0][3] *= -1  # exp_scale may turn negative while training
    grad = torch.randn(raw.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    want = reference.gradients(grad, raw, *scales, beta, mode)

    closed = effective_weight_gradients(grad, raw, *scales, beta=beta, mode=mode, names=NAMES)
    assert_gradients(closed, want)

    leaves = [tensor.clone().requires_grad_() for tensor in (raw, *scales)]
    loss = (grad * effective_weight(*leaves, beta=beta, mode=mode)).sum()
    automatic = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    assert_gradients(dict(zip(NAMES, automatic, strict=True)), want)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_named_gradients_are_computed(name: str) -> None:
    raw, *scales = draw_arguments(8, 7.5, torch.float64, shape=(4, 5))
    every = effective_weight_gradients(raw, raw, *scales, beta=7.5, mode="mismatch", names=NAMES)
    one = effective_weight_gradients(raw, raw, *scales, beta=7.5, mode="mismatch", names=(name,))
    assert set(one) == {name}
    assert torch.equal(one[name], every[name])


@pytest.mark.parametrize("mode", reference.MODES)
def test_gradient_at_zero_is_one_sided_and_alive(mode: str) -> None:
    """At +0.0 and -0.0 the slope is e*exp(-n)*beta*m + sl with the zero's own sign, not autograd's 0."""
    beta, e, l, m, n = 7.5, 0.25, 0.125, 1.25, 0.5  # noqa: E741
    raw = torch.tensor([0.0, -0.0], dtype=torch.float64, requires_grad=True)
    scales = [torch.tensor(value, dtype=torch.float64) for value in (e, l, m, n, 0.0)]
    result = effective_weight(raw, *scales, beta=beta, mode=mode)
    (slope,) = torch.autograd.grad(result.sum(), raw)
    closed = effective_weight_gradients(torch.ones_like(raw), raw, *scales, beta=beta, mode=mode, names=("raw",))["raw"]
    steep = e * np.exp(-n) * beta * m
    want = {"mismatch": (steep + l, steep - l), "congruent": (steep + l,) * 2, "oppose": (steep - l,) * 2}.get(
        mode, (steep, steep)
    )
    for got in (slope, closed):
        assert got.tolist() == pytest.approx(want, rel=1e-14)  # a handful of float64 roundings


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [("mode", "both", "congruent"), ("mode", "", "congruent"), ("family", "tanh", "symexp")],
)
def test_unknown_choice_is_an_error_that_lists_the_known(field: str, value: str, known: str) -> None:
    options = {"mode": "mismatch", "family": "symexp", field: value}
    with pytest.raises(SELError, match=known):
        effective_weight(torch.ones(2), torch.tensor(0.1), None, None, None, None, beta=8.0, **options)


@pytest.mark.parametrize("beta", [0.0, -7.5, float("nan"), float("inf")])
def test_unusable_beta_is_an_error_that_names_it(beta: float) -> None:
    with pytest.raises(SELError, match=re.escape(f"beta={beta!r}")):
        effective_weight(torch.ones(2), torch.tensor(0.1), None, None, None, None, beta=beta, mode="mismatch")
