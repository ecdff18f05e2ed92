"""Newton inversion: bit-exact round trips, the oracle's roots, and the inputs that it must refuse."""

from __future__ import annotations

import math
import re

import mpmath
import numpy as np
import pytest
import reference
import torch

from peft_sel.errors import SELError
from peft_sel.numerics import InversionReport, effective_weight, invert_weight, newton

BETAS = (1.6, 7.5, 12.0, 20.0, 60.0)
INVERTIBLE = ("congruent", "mismatch", "oppose", "exp_only")
MAX_STEPS = 5  # the bound, with SPEC.md's starting scales


@pytest.fixture(autouse=True, params=["with the library", "torch alone"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch alone":
        monkeypatch.setattr(newton, "load_library", lambda: None)


def start_scales(beta: float, dtype: torch.dtype = torch.float32, offset: float = 0.0, multiplier: float = 1.0) -> list:
    """SPEC.md's starting values as the layer passes them: [e, l, m, n, s], scalars."""
    values = (1 / beta, 1 / max(beta, 7.5), multiplier, offset, 0.0)
    return [torch.tensor(value, dtype=dtype) for value in values]


def product_scales(beta: float, rows: int, columns: int) -> list:
    """The default row_col_mult start: the float32 products sqrt(v)*sqrt(v), not v itself."""

    def product(value: float) -> torch.Tensor:
        root = torch.tensor(math.sqrt(value))
        return root.expand(rows, 1) * root.expand(1, columns)

    return [product(1 / beta), product(1 / max(beta, 7.5)), product(1.0), None, None]


def all_bfloat16() -> torch.Tensor:
    """The 5,377 positive bf16 values in [2^-40, 4], and their negatives."""
    bits = torch.arange((127 - 40) << 7, ((127 + 2) << 7) + 1, dtype=torch.int16)
    values = bits.view(torch.bfloat16)
    assert len(values) == 5377 and values[0] == 2.0**-40 and values[-1] == 4
    return torch.cat([values, -values])


def all_float16() -> torch.Tensor:
    """Every finite fp16 value: subnormals, both zeros, up to 65504."""
    bits = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16)
    return torch.cat([bits, -bits])


def heavy_tailed(seed: int, shape=(96, 64), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Student-t-like weights with a pretrained tensor's tail: median near 0.02, largest near 10."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (0.02 * normal * spread ** (-1 / 1.5)).clamp(-10, 10).to(dtype)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    assert torch.equal(got.contiguous().view(integer), want.contiguous().view(integer))


def assert_within_ulps(raw: torch.Tensor, weight: torch.Tensor, scales: list, beta: float, mode: str) -> None:
    """float32 raw and float32 arithmetic: at most SPEC.md's 4 + 1.2*z ulp from the weight."""
    back = effective_weight(raw, *scales, beta=beta, mode=mode)
    multiplier = 1.0 if scales[2] is None else scales[2]
    z = beta * abs(reference.wide(raw)) * reference.wide(multiplier)
    assert np.max(reference.ulp_error(back, weight) / (4 + 1.2 * z)) <= 1


def assert_good_report(report: InversionReport, raw_dtype: torch.dtype = torch.float32) -> None:
    assert report.converged is True
    assert 0 <= report.num_steps <= MAX_STEPS
    # float32: a thousandth of a rounding of raw; float64: 1 + z (z <= 8 here) roundings, and a few of the evaluation.
    bound = 1e-3 * torch.finfo(torch.float32).eps if raw_dtype == torch.float32 else 40 * torch.finfo(raw_dtype).eps
    assert 0 <= report.max_relative_residual <= bound


@pytest.mark.parametrize("mode", reference.MODES)
def test_oracle_inverse_agrees_with_50_digits(mode: str) -> None:
    e, l, m, n, beta = 0.125, 0.0625, 1.125, 0.25, 8.0  # noqa: E741
    weights = [sign * y for y in (1e-12, 1e-4, 0.05, 1.25, 9.25) for sign in (1, -1)]
    got = reference.invert(weights, e, l, m, n, beta, mode)
    with mpmath.workdps(50):
        for w, x in zip(weights, got, strict=True):
            lam = {"mismatch": math.copysign(l, w), "congruent": l, "oppose": -l, "exp_only": 0.0}[mode]
            q, b = e * mpmath.exp(-mpmath.mpf(n)), mpmath.mpf(beta * m)
            root = mpmath.findroot(
                lambda t, w=w, q=q, b=b, lam=lam: q * mpmath.expm1(b * t) + lam * t - abs(w), abs(mpmath.mpf(float(x)))
            )
            assert abs(float(x) - math.copysign(float(root), w)) <= 2.3e-16 * abs(float(x))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", INVERTIBLE)
def test_every_bfloat16_value_round_trips_bit_for_bit(mode: str, beta: float) -> None:
    weight = all_bfloat16()
    scales = start_scales(beta)
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert raw.dtype == torch.float32
    assert_good_report(report)
    assert_same_bits(effective_weight(raw, *scales, beta=beta, mode=mode).to(torch.bfloat16), weight)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", ["congruent", "mismatch"])
def test_bfloat16_round_trips_through_the_default_products(mode: str, beta: float) -> None:
    """With sqrt(v)*sqrt(v) in float32 the solve must invert that product, not 1/beta."""
    weight = all_bfloat16().reshape(2, 5377)
    scales = product_scales(beta, *weight.shape)
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert_good_report(report)
    assert_same_bits(effective_weight(raw, *scales, beta=beta, mode=mode).to(torch.bfloat16), weight)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", INVERTIBLE)
def test_every_float16_value_round_trips_bit_for_bit(mode: str, beta: float) -> None:
    weight = all_float16()
    scales = start_scales(beta)
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert report.converged
    assert_same_bits(effective_weight(raw, *scales, beta=beta, mode=mode).to(torch.float16), weight)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", INVERTIBLE)
def test_float32_round_trip_stays_within_the_promised_ulps(mode: str, beta: float) -> None:
    weight = heavy_tailed(1)
    for scales in (start_scales(beta), product_scales(beta, *weight.shape)):
        raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
        assert_good_report(report)
        assert_within_ulps(raw, weight, scales, beta, mode)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", INVERTIBLE)
def test_float64_solve_is_the_oracles_root(mode: str, beta: float) -> None:
    """2e-15 relative, nine float64 roundings, from 1e-12 to 10."""
    generator = torch.Generator().manual_seed(2)
    weight = 10 ** (13 * torch.rand(400, generator=generator, dtype=torch.float64) - 12)
    weight = torch.cat([weight, -weight, heavy_tailed(3, (400,), torch.float64)])
    scales = start_scales(beta, torch.float64)
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert raw.dtype == torch.float64
    assert_good_report(report, torch.float64)
    want = reference.invert(weight, *scales[:4], beta, mode)
    assert reference.relative_error(raw, want) <= 2e-15


@pytest.mark.parametrize("mode", INVERTIBLE)
def test_float32_raw_is_the_rounded_root_of_the_float32_map(mode: str) -> None:
    """beta and the scales count as the float32 values of the forward pass; the root is rounded once (0.5 ulp)."""
    beta = 13.7  # not a float32 value
    weight = heavy_tailed(4, (400,))
    scales = start_scales(beta)
    raw, _ = invert_weight(weight, *scales, beta=beta, mode=mode)
    want = reference.invert(weight, *scales[:4], torch.tensor(beta).item(), mode)
    # The solve itself is good to a thousandth of an ulp.
    assert reference.ulp_error(raw, want).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", INVERTIBLE)
def test_offset_and_multiplier_away_from_neutral(mode: str, beta: float) -> None:
    for offset, multiplier in ((0.4, 1.0), (-0.3, 1.0), (0.0, 0.8), (0.0, 1.3), (0.2, 1.1)):
        scales = start_scales(beta, torch.float64, offset, multiplier)
        weight = heavy_tailed(5, (20, 10), torch.float64)
        raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
        assert report.converged
        want = reference.invert(weight, *scales[:4], beta, mode)
        # exp(-n) and beta*m are rounded once more each.
        assert reference.relative_error(raw, want) <= 3e-15

        single = [scale.float() for scale in scales]
        bf16 = weight.to(torch.bfloat16)
        raw, _ = invert_weight(bf16, *single, beta=beta, mode=mode)
        assert_same_bits(effective_weight(raw, *single, beta=beta, mode=mode).to(torch.bfloat16), bf16)


@pytest.mark.parametrize("mode", INVERTIBLE)
def test_row_and_column_shaped_scales(mode: str) -> None:
    rows, columns, beta = 24, 40, 12.0
    generator = torch.Generator().manual_seed(6)
    scales = [
        (0.8 + 0.5 * torch.rand(rows, 1, generator=generator)) / beta,
        (0.5 + 0.5 * torch.rand(1, columns, generator=generator)) * 0.6 / beta,
        0.9 + 0.2 * torch.rand(rows, columns, generator=generator),
        -0.1 + 0.2 * torch.rand(1, columns, generator=generator),
        torch.zeros(rows, 1),
    ]
    weight = heavy_tailed(7, (rows, columns)).to(torch.bfloat16)
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert report.converged
    assert_same_bits(effective_weight(raw, *scales, beta=beta, mode=mode).to(torch.bfloat16), weight)
    want = reference.invert(weight, *scales[:4], beta, mode)
    # exp(-n) may be rounded to float32 as in the forward pass, at most 1 ulp, and the root once.
    assert reference.relative_error(raw, want) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("mode", INVERTIBLE)
def test_zeros_subnormal_and_huge_weights(mode: str) -> None:
    smallest = 2.0**-149
    magnitudes = torch.tensor([0.0, smallest, 37 * smallest, 1e-40, 2.0**-126, 1e-30, 100.0, 1e4])
    weight = torch.cat([magnitudes, -magnitudes])
    for beta in BETAS:
        scales = start_scales(beta)
        raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
        assert report.converged
        assert torch.equal(torch.signbit(raw), torch.signbit(weight))
        assert_within_ulps(raw, weight, scales, beta, mode)


@pytest.mark.parametrize("mode", ["congruent", "mismatch"])
def test_bfloat16_subnormals_round_trip_bit_for_bit(mode: str) -> None:
    bits = torch.arange(0, 1 << 7, dtype=torch.int16).view(torch.bfloat16)
    weight = torch.cat([bits, -bits])
    scales = start_scales(7.5)
    raw, _ = invert_weight(weight, *scales, beta=7.5, mode=mode)
    assert_same_bits(effective_weight(raw, *scales, beta=7.5, mode=mode).to(torch.bfloat16), weight)


@pytest.mark.parametrize("beta", [7.5, 20.0])
def test_congruent_init_weakens_negative_weights_by_twice_the_linear_path(beta: float) -> None:
    weight = heavy_tailed(8, (30, 20), torch.float64)
    scales = start_scales(beta, torch.float64)
    raw, report = invert_weight(weight, *scales, beta=beta, mode="mismatch", init="congruent")
    assert_good_report(report, torch.float64)
    want = reference.invert(weight, *scales[:4], beta, "mismatch", init="congruent")
    assert reference.relative_error(raw, want) <= 2e-15
    started = effective_weight(raw, *scales, beta=beta, mode="mismatch")
    weaker = torch.where(weight < 0, 2 * raw.abs() / max(beta, 7.5), 0.0)
    # The round trip of a float64 raw costs (4 + 1.2*z) ulp, at most 3e-15 relative for z < 7.
    assert torch.all((started - (weight + weaker)).abs() <= 4e-15 * weight.abs())
    assert (weaker > 0).any()


def test_shapes_layouts_and_absent_scales() -> None:
    beta = 7.5
    full, absent = start_scales(beta), [*start_scales(beta)[:2], None, None, None]
    flat = heavy_tailed(9, (60,))
    want, _ = invert_weight(flat, *full, beta=beta, mode="mismatch")
    for weight in (flat.reshape(6, 10), flat.reshape(3, 4, 5), flat.reshape(60), flat[:1].reshape(())):
        before = weight.clone()
        raw, _ = invert_weight(weight, *absent, beta=beta, mode="mismatch")
        assert raw.shape == weight.shape
        assert_same_bits(raw.flatten(), want[: weight.numel()])
        assert torch.equal(before, weight)
    transposed = flat.reshape(6, 10).T
    assert not transposed.is_contiguous()
    raw, _ = invert_weight(transposed, *absent, beta=beta, mode="mismatch")
    assert_same_bits(raw, want.reshape(6, 10).T)
    strided, _ = invert_weight(flat[::3], *absent, beta=beta, mode="mismatch")
    assert_same_bits(strided, want[::3])


@pytest.mark.parametrize("shape", [(700, 300), (210_000,), (3, 250, 280)])
def test_large_weights_of_any_rank_use_their_own_scales(shape: tuple[int, ...]) -> None:
    """More weights than one block holds, with a scale per first index, one per last index and one per weight."""
    generator = torch.Generator().manual_seed(12)

    def spread(center: float, *size: int) -> torch.Tensor:
        return center * (0.8 + 0.4 * torch.rand(size, generator=generator, dtype=torch.float64))

    first, last = (shape[0], *(1,) * (len(shape) - 1)), shape[-1:]
    beta = 7.5
    scales = [spread(1 / beta, *first), spread(0.5 / beta, *last), spread(1.0, *shape), torch.zeros(()), None]
    weight = heavy_tailed(13, shape, torch.float64)
    raw, report = invert_weight(weight, *scales, beta=beta, mode="mismatch")
    assert_good_report(report, torch.float64)
    back = reference.effective_weight(raw, *scales[:4], 0.0, beta, "mismatch")
    # One rounding of raw, 1 + z <= 8 times steeper in the weight, and the solve's few.
    assert reference.relative_error(back, weight) <= 20 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_weight(shape: tuple[int, ...]) -> None:
    raw, report = invert_weight(torch.zeros(shape), *start_scales(7.5), beta=7.5, mode="mismatch")
    assert raw.shape == shape and raw.dtype == torch.float32
    assert report.converged is True


def test_weight_that_requires_grad_gives_a_plain_raw() -> None:
    weight = torch.nn.Parameter(heavy_tailed(10, (4, 4)))
    raw, _ = invert_weight(weight, *start_scales(7.5), beta=7.5, mode="mismatch")
    assert not raw.requires_grad and raw.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weight_names_the_tensor_and_counts(bad: float, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 5, dtype=dtype)
    weight[1, 1] = weight[2, 3] = weight[4, 0] = bad
    with pytest.raises(SELError, match=r"model\.layers\.0\.q_proj\.weight.*\b3\b"):
        invert_weight(weight, *start_scales(7.5), beta=7.5, mode="mismatch", name="model.layers.0.q_proj.weight")


@pytest.mark.parametrize("mode", ["mismatch", "oppose"])
@pytest.mark.parametrize(("offset", "multiplier"), [(0.0, 1.0), (0.3, 1.2)])
def test_slope_rule(mode: str, offset: float, multiplier: float) -> None:
    """q*b >= 1.25*l: a start 1e-5 inside passes, 1e-5 outside is refused (float32 scales resolve 1e-7)."""
    beta = 8.0
    e, _, m, n, s = start_scales(beta, torch.float32, offset, multiplier)
    limit = e.item() * math.exp(-n.item()) * beta * m.item() / 1.25
    weight = torch.tensor([[0.5, -0.5], [1e-6, -3.0]])
    inside = torch.tensor(limit * (1 - 1e-5))
    _, report = invert_weight(weight, e, inside, m, n, s, beta=beta, mode=mode)
    assert report.converged
    outside = torch.tensor(limit * (1 + 1e-5))
    with pytest.raises(SELError, match=r"mlp\.up_proj.*linear_scale"):
        invert_weight(weight, e, outside, m, n, s, beta=beta, mode=mode, name="mlp.up_proj")
    # One bad element is enough.
    column = torch.stack([inside * 0.1, outside]).reshape(1, 2)
    with pytest.raises(SELError, match="linear_scale"):
        invert_weight(weight, e, column, m, n, s, beta=beta, mode=mode)


@pytest.mark.parametrize("mode", ["congruent", "exp_only"])
def test_slope_rule_spares_modes_that_subtract_nothing(mode: str) -> None:
    beta, weight = 8.0, heavy_tailed(11, (8, 8)).to(torch.bfloat16)
    scales = [torch.tensor(1 / beta), torch.tensor(1.0), None, None, None]
    raw, report = invert_weight(weight, *scales, beta=beta, mode=mode)
    assert report.converged
    assert_same_bits(effective_weight(raw, *scales, beta=beta, mode=mode).to(torch.bfloat16), weight)


def test_shift_must_start_at_zero() -> None:
    scales = start_scales(7.5)
    for shift in (torch.tensor(0.1), torch.tensor([[0.0, -1e-3]])):
        with pytest.raises(SELError, match=r"k_proj.*shift"):
            invert_weight(torch.ones(2, 2), *scales[:4], shift, beta=7.5, mode="mismatch", name="k_proj")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "both"),
        ("init", "xavier"),
        ("family", "tanh"),
        ("beta", 0.0),
        ("beta", -7.5),
        ("beta", float("nan")),
        ("beta", float("inf")),
    ],
)
def test_unusable_option_is_an_error_that_names_it(field: str, value: object) -> None:
    options = {"beta": 7.5, "mode": "mismatch", "init": "exact", "family": "symexp", field: value}
    with pytest.raises(SELError, match=re.escape(f"{field}={value!r}")):
        invert_weight(torch.ones(2, 2), *start_scales(7.5), **options)


@pytest.mark.parametrize(
    ("position", "value"), [(0, 0.0), (0, -0.1), (1, -0.1), (2, 0.0), (2, -1.0), (0, float("nan"))]
)
def test_scale_out_of_its_starting_range_is_an_error_that_names_it(position: int, value: float) -> None:
    """SPEC.md section 2: e > 0, l >= 0, m > 0 at the start; one bad element of a row is enough."""
    scales = start_scales(7.5)
    scales[position] = torch.tensor([[float(scales[position])], [value]])
    with pytest.raises(SELError, match=reference.SCALES[position]):
        invert_weight(torch.ones(2, 2), *scales, beta=7.5, mode="congruent")
