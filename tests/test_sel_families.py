"""Families (10.2) and normalize_by_inner_mult: the oracle, live slopes, round trips, both backends, refusals."""

from __future__ import annotations

import re
import shutil
from itertools import product

import numpy as np
import pytest
import reference
import torch
from test_inversion import all_bfloat16, assert_good_report, assert_same_bits, heavy_tailed
from test_kernels import SCALING
from test_transform import assert_gradients, draw_arguments

from peft_sel.errors import SELError
from peft_sel.kernels import WeightSpec, fold, use_backend
from peft_sel.numerics import effective_weight, effective_weight_gradients, invert_weight, start_value

NEUTRAL = {"linear_scale": 0.0, "inner_multiplier": 1.0, "offset": 0.0, "shift": 0.0}
# Every family and mode, plain and normalised; plain symexp has its own tests.
CASES = [
    (family, mode, normalize)
    for family, (modes, _) in reference.FAMILIES.items()
    for mode, normalize in product(modes, (False, True))
    if family != "symexp" or normalize
]
cases = pytest.mark.parametrize(("family", "mode", "normalize"), CASES)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def options(family: str, mode: str, normalize: bool) -> dict:
    return {"family": family, "mode": mode, "normalize_by_inner_mult": normalize}


def draw(family: str, seed: int, beta: float, dtype: torch.dtype, **more) -> tuple[torch.Tensor, dict]:
    """Raw weights over twelve decades and the family's scales, trained-looking."""
    raw, *values = draw_arguments(seed, beta, dtype, **more)
    scales = dict(zip(reference.SCALES, values, strict=True))
    if family == "damped":  # n > 0 and l near 1
        scales["offset"] = scales["offset"] + 0.5
        scales["linear_scale"] = scales["linear_scale"] * max(beta, 7.5)
    return raw, {name: scales[name] for name in reference.FAMILIES[family][1]}


def fill(scales: dict) -> list:
    """All five scales in the oracle's order."""
    return [scales.get(name, NEUTRAL.get(name)) for name in reference.SCALES]


def start_scales(family: str, beta: float, dtype: torch.dtype = torch.float32, multiplier: float = 1.0) -> dict:
    values = {name: reference.start_value(name, beta, family) for name in reference.FAMILIES[family][1]}
    return {
        name: torch.tensor(value, dtype=dtype) for name, value in (values | {"inner_multiplier": multiplier}).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0])
@cases
def test_every_family_matches_oracle(family, mode, normalize, beta, dtype) -> None:
    raw, scales = draw(family, 1, beta, dtype)
    got = effective_weight(raw, **scales, beta=beta, **options(family, mode, normalize))
    assert got.dtype == dtype
    seen_beta = float(torch.tensor(beta, dtype=dtype))
    want = reference.effective_weight(raw, *fill(scales), seen_beta, mode, family, normalize)
    z = seen_beta * abs(reference.wide(raw)) * reference.wide(scales["inner_multiplier"])
    alone = reference.effective_weight(raw, *fill(scales | {"linear_scale": 0.0}), seen_beta, mode, family, normalize)
    size = np.maximum(abs(want), abs(alone))  # of what is added, where the paths cancel
    # As for symexp, and two more: the division by m, and the product with the damping.
    assert np.max(abs(reference.wide(got) - want) / ((6 + 1.5 * z) * torch.finfo(dtype).eps * size)) <= 1


@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0])
@cases
def test_every_gradient_matches_finite_differences(family, mode, normalize, beta) -> None:
    """Closed form and autograd, both zeros among raw; with normalize, dm as well."""
    raw, scales = draw(family, 2, beta, torch.float64, shape=(8, 12))
    raw[:2, :2] = torch.tensor([[0.0, -0.0], [-0.0, 0.0]])
    scales = {name: scale.expand(raw.shape).clone() for name, scale in scales.items()}
    grad = torch.randn(raw.shape, dtype=torch.float64)
    every = reference.gradients(grad, raw, *fill(scales), beta, mode, family, normalize)
    names = ("raw", *scales)
    want = {name: every[name] for name in names}
    kind = options(family, mode, normalize)
    closed = effective_weight_gradients(grad, raw, **scales, beta=beta, names=names, **kind)
    assert_gradients(closed, want)
    leaves = [tensor.clone().requires_grad_() for tensor in (raw, *scales.values())]
    loss = (grad * effective_weight(leaves[0], **dict(zip(scales, leaves[1:], strict=True)), beta=beta, **kind)).sum()
    automatic = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    assert_gradients(dict(zip(names, automatic, strict=True)), want)
    assert (closed["raw"][raw == 0] != 0).sum() == (grad[raw == 0] != 0).sum() == 4


@cases
def test_signed_zeros_come_back(family, mode, normalize) -> None:
    raw = torch.tensor([0.0, -0.0, 0.5, -0.5])
    scales = start_scales(family, 8.0, multiplier=1.25)
    for dtype, needs_grad in product((torch.float32, torch.float64), (False, True)):  # other elementary functions each
        values = raw.to(dtype, copy=True).requires_grad_(needs_grad)
        result = effective_weight(values, **scales, beta=8.0, **options(family, mode, normalize))
        assert torch.signbit(result).tolist() == [False, True, False, True]


@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0, 60.0])
@cases
def test_every_bfloat16_value_round_trips_bit_for_bit(family, mode, normalize, beta) -> None:
    weight, scales = torch.cat([all_bfloat16(), torch.tensor([0.0, -0.0], dtype=torch.bfloat16)]), None
    for multiplier in (1.0, 0.9, 1.2):
        scales = start_scales(family, beta, multiplier=multiplier)
        raw, report = invert_weight(weight, **scales, beta=beta, **options(family, mode, normalize))
        assert raw.dtype == torch.float32 and report.converged and report.num_steps <= 12
        back = effective_weight(raw, **scales, beta=beta, **options(family, mode, normalize))
        assert_same_bits(back.to(torch.bfloat16), weight)


@pytest.mark.parametrize("beta", [0.3, 0.75, 1.0])
def test_damped_round_trips_at_low_curvature(beta: float) -> None:
    """Where the exponential path falls off: the linear one still reaches every weight."""
    weight, scales = all_bfloat16(), start_scales("damped", beta)
    kind = options("damped", "congruent", False)
    raw, report = invert_weight(weight, **scales, beta=beta, **kind)
    assert_same_bits(effective_weight(raw, **scales, beta=beta, **kind).to(torch.bfloat16), weight)
    assert report.num_steps <= 12


@pytest.mark.parametrize("offset", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("beta", [0.3, 0.75, 1.0, 1.001, 1.25, 7.5, 60.0])
def test_damped_converges_within_the_specs_steps(beta: float, offset: float) -> None:
    """Twelve, up to weights of 1e4, where Newton alone overshoots into the exponential."""
    magnitudes = 10 ** torch.linspace(-12, 4, 400, dtype=torch.float64)
    scales = start_scales("damped", beta, torch.float64) | {"offset": torch.tensor(offset, dtype=torch.float64)}
    weight = torch.cat([magnitudes, -magnitudes])
    raw, report = invert_weight(weight, **scales, beta=beta, **options("damped", "congruent", False))
    assert report.num_steps <= 12
    back = reference.effective_weight(raw, *fill(scales), beta, "congruent", "damped")
    z = beta * abs(reference.wide(raw))
    assert np.max(abs(back - weight.numpy()) / abs(weight.numpy()) / (4 + 1.2 * z)) <= torch.finfo(torch.float64).eps


@pytest.mark.parametrize("beta", [1.6, 7.5, 20.0])
@cases
def test_float64_solve_is_the_oracles_root(family, mode, normalize, beta) -> None:
    weight = torch.cat([heavy_tailed(3, (200,), torch.float64), 10 ** -torch.linspace(0, 12, 99, dtype=torch.float64)])
    scales = start_scales(family, beta, torch.float64, multiplier=1.125)
    raw, report = invert_weight(weight, **scales, beta=beta, **options(family, mode, normalize))
    want = reference.invert(weight, *fill(scales)[:4], beta, mode, family=family, normalize=normalize)
    assert report.converged and raw.dtype == torch.float64
    assert reference.relative_error(raw, want) <= 4e-15  # 2e-15 of the plain solve, and e/m, l/m, exp(-n), 1 - exp(-n)


@pytest.mark.parametrize("beta", [7.5, 20.0])
@cases
def test_float32_round_trip_stays_within_the_promised_ulps(family, mode, normalize, beta) -> None:
    weight, scales = heavy_tailed(1), start_scales(family, beta, multiplier=1.1)
    raw, _ = invert_weight(weight, **scales, beta=beta, **options(family, mode, normalize))
    back = effective_weight(raw, **scales, beta=beta, **options(family, mode, normalize))
    z = beta * 1.1 * abs(reference.wide(raw))
    assert np.max(reference.ulp_error(back, weight) / (4 + 1.2 * z)) <= 1


def test_sinh_has_a_closed_form() -> None:
    _, report = invert_weight(
        heavy_tailed(5), **start_scales("sinh", 7.5), beta=7.5, **options("sinh", "congruent", False)
    )
    assert_good_report(report)
    assert report.num_steps == 0


def test_normalised_multiplier_changes_the_curvature_and_not_the_gain_near_zero() -> None:
    small = torch.tensor(1e-9, dtype=torch.float64)
    for family, mode in (("symexp", "exp_only"), ("sinh", "congruent"), ("damped", "exp_only")):
        values = [
            effective_weight(
                small, **start_scales(family, 7.5, torch.float64, m), beta=7.5, **options(family, mode, True)
            )
            for m in (0.5, 1.0, 2.0)
        ]
        # z = 1.5e-8 at most: the curvature shows in the eighth digit only.
        assert max(values) / min(values) - 1 < 1e-7
    plain = [
        effective_weight(small, torch.tensor(0.1), None, torch.tensor(m), beta=7.5, mode="exp_only") for m in (0.5, 2.0)
    ]
    assert plain[1] / plain[0] == pytest.approx(4)


def make_fold(family: str, mode: str, normalize: bool, dtype: torch.dtype, shape=(331, 517)) -> tuple:
    """A fold with row and column scales and a residual."""
    patterns = tuple(
        (name, "column" if name == "offset" else "row_col_mult") for name in reference.FAMILIES[family][1][:4]
    )
    rows, columns = shape
    generator = torch.Generator().manual_seed(5)

    def near(center: float, size: int) -> torch.Tensor:
        return (center * (1 + 0.1 * torch.rand(size, generator=generator, dtype=torch.float64))).to(dtype)

    scales = {}
    for name, pattern in patterns:
        center = {"offset": 0.4}.get(name, reference.start_value(name, 7.5, family))
        if pattern == "column":
            scales[name] = {"column": near(center, columns)}
        else:
            scales[name] = {"row": near(center**0.5, rows), "column": near(center**0.5, columns)}
    raw = 0.05 * torch.randn(shape, generator=generator, dtype=torch.float64)
    raw[0, :2] = torch.tensor([0.0, -0.0])
    residual = (near(0.1, 2 * columns).reshape(2, columns), near(0.01, 2 * rows).reshape(rows, 2))
    spec = WeightSpec(mode, patterns, SCALING, dtype, family, normalize)
    return spec, raw.to(dtype), torch.tensor(7.5), scales, residual


def pull_back(case: tuple, grad: torch.Tensor) -> list[torch.Tensor]:
    _, raw, _, scales, residual = case
    tensors = [raw, *(part for parts in scales.values() for part in parts.values()), *residual]
    for tensor in tensors:
        tensor.requires_grad_()
    return list(torch.autograd.grad(fold(*case), tensors, grad))


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("family", "mode", "normalize", "compiler"),
    [
        ("sinh", "congruent", False, "aot_eager"),  # the compiled backend has been through inductor by then
        ("damped", "congruent", True, "aot_eager"),
        pytest.param("sinh", "congruent", True, "inductor", marks=pytest.mark.slow),  # up to half a minute of compiling
        pytest.param("damped", "exp_only", False, "inductor", marks=pytest.mark.slow),
        pytest.param("symexp", "mismatch", True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_both_backends_and_a_traced_fold_agree(family, mode, normalize, compiler) -> None:
    """The bits of values and of raw's gradient, signs of zero too; sums to 1e-6 of those in float64."""
    case = make_fold(family, mode, normalize, torch.float32)
    grad = torch.randn(case[1].shape)
    values, grads = [], []
    for name in ("compiled", "reference"):
        with use_backend(name):
            values += [fold(*case), fold(*case[:4])]
            grads.append(pull_back(case, grad))
    for got, want in ((values[0], values[2]), (values[1], values[3])):
        assert_same_bits(got.detach(), want.detach())
    assert torch.equal(grads[0][0], grads[1][0])
    double = pull_back(make_fold(family, mode, normalize, torch.float64), grad.double())
    for got, want in zip(grads[0], double, strict=True):
        assert (got.double() - want).norm() <= 1e-6 * want.norm()
    with torch.no_grad():
        traced = torch.compile(lambda raw: fold(case[0], raw, *case[2:4]), backend=compiler, fullgraph=True)
        assert_same_bits(traced(case[1].detach()), values[3].detach())


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ({"family": "sinh", "mode": "mismatch"}, "mode='mismatch': family='sinh' has only congruent"),
        ({"family": "damped", "mode": "oppose"}, "mode='oppose': family='damped' has only congruent and exp_only"),
        ({"family": "sinh", "mode": "congruent", "offset": torch.tensor(0.5)}, "offset.*only exp_scale, inner_mult"),
        ({"family": "damped", "mode": "congruent", "shift": torch.tensor(0.0)}, "shift.*family='damped' has no such"),
        ({"family": "damped", "mode": "congruent"}, "offset=(None|0.0).*above 0"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(kind: dict, match: str) -> None:
    for function in (effective_weight, invert_weight):
        with pytest.raises(SELError, match=match):
            function(torch.ones(2), torch.tensor(0.1), beta=8.0, **kind)


@pytest.mark.parametrize("offset", [0.0, -0.5])
def test_damped_needs_a_positive_offset(offset: float) -> None:
    scales = start_scales("damped", 7.5) | {"offset": torch.tensor(offset)}
    with pytest.raises(SELError, match=rf"offset={offset}: k_proj: family='damped' needs n above 0"):
        invert_weight(torch.ones(2), **scales, beta=7.5, name="k_proj", **options("damped", "congruent", False))


def test_damped_without_linear_path_needs_curvature() -> None:
    for mode, scales in (
        ("exp_only", start_scales("damped", 1.0)),
        ("congruent", start_scales("damped", 1.0) | {"linear_scale": None}),
    ):
        with pytest.raises(SELError, match=r"beta=1\.0: k_proj: .*reaches no large weight"):
            invert_weight(torch.ones(2), **scales, beta=1.0, name="k_proj", **options("damped", mode, False))


def test_unknown_scale_names_list_the_known() -> None:
    known = re.escape(", ".join(reference.SCALES))
    with pytest.raises(SELError, match=f"scale='exp_scael': unknown; choose one of {known}"):
        start_value("exp_scael", 7.5)
    with pytest.raises(SELError, match=known):
        effective_weight_gradients(*[torch.ones(2)] * 3, beta=1.0, mode="congruent", names=("outer_multiplier",))


@pytest.mark.parametrize("family", reference.FAMILIES)
def test_starts_are_the_specs(family: str) -> None:
    for name, beta in product(reference.FAMILIES[family][1], (0.75, 7.5, 20.0)):
        assert start_value(name, beta, family) == reference.start_value(name, beta, family)
