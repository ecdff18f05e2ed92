"""The Triton kernels against the reference and the oracle; test_triton.py runs this file in processes of its own.

On a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as oracle
import torch
import triton
import triton.language as tl
from test_kernels import BETA, MIXED, Case, backward, draw_case, same_pattern

from peft_sel.kernels import fold, triton_backend, triton_kernels, use_backend
from peft_sel.numerics import elementary, invert_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHOUT_LORA = {**MIXED, "inner_multiplier": "row_col_mult"}
BY_COLUMN = same_pattern("column")
FAMILY_CASES = [(family, mode, scales) for family, (modes, scales) in oracle.FAMILIES.items() for mode in modes]
SHAPES = [(1, 1), (1, 33), (33, 1), (5, 1023), (70, 130)]


@pytest.fixture(autouse=True)
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "reference", None)  # what it falls back to
    if DEVICE == "cpu":  # the interpreter takes as long for a small tile as for a large one
        monkeypatch.setattr(triton_backend, "FOLD_TILE", (64, 256))
        monkeypatch.setattr(triton_backend, "PULL_BACK_TILE", (32, 128))
        monkeypatch.setattr(triton_backend, "SEGMENT", 64)


def draw(
    mode: str, patterns: dict[str, str], shape: tuple[int, int], family: str = "symexp", residual: bool = False
) -> Case:
    """A trained-looking float32 weight with z = beta*m*|w| of about 0.3, as after a conversion; both zeros among it."""
    case = draw_case(mode, patterns, shape, torch.float32, residual=residual)
    return case._replace(raw=0.15 * case.raw, spec=case.spec._replace(family=family))


def move(case: Case, device: str) -> Case:
    return case._replace(
        raw=case.raw.detach().to(device),
        beta=case.beta.to(device),
        scales={n: {p: t.detach().to(device) for p, t in parts.items()} for n, parts in case.scales.items()},
        residual=None if case.residual is None else tuple(t.detach().to(device) for t in case.residual),
    )


def fold_by(backend: str, case: Case) -> torch.Tensor:
    with use_backend(backend):
        return fold(*move(case, DEVICE if backend == "triton" else "cpu")).cpu()


def pull_back_by(backend: str, case: Case, grad: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of raw, the parts of the scales in their order, and the residual."""
    device = DEVICE if backend == "triton" else "cpu"
    with use_backend(backend):
        return [result.cpu() for result in backward(move(case, device).require_grad(), grad.to(device))]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got, want) and torch.equal(torch.signbit(got), torch.signbit(want))


def expand_oracle(case: Case) -> list[np.ndarray]:
    """The scales as the map uses them: float32 products and sums of the parts; absent ones neutral."""
    neutral = {"linear_scale": 0.0, "inner_multiplier": 1.0, "offset": 0.0, "shift": 0.0}
    patterns = dict(case.spec.patterns)
    return [
        oracle.expand(patterns[name], case.scales[name]).astype(np.float32) if name in patterns else neutral[name]
        for name in oracle.SCALES
    ]


def elementwise_oracle(case: Case, grad: torch.Tensor, mode: str | None = None) -> dict[str, np.ndarray]:
    spec = case.spec
    arguments = grad, case.raw, *expand_oracle(case), BETA, mode or spec.mode, spec.family, spec.normalize_by_inner_mult
    return oracle.gradients(*arguments)


def norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(float)))


@triton.jit
def elementary_kernel(x_ptr, expm1_ptr, exp_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(expm1_ptr + at, triton_kernels.expm1(x), mask=at < size)
    tl.store(exp_ptr + at, triton_kernels.exp(x), mask=at < size)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # numpy, of NaN to an integer
def test_expm1_and_exp_have_the_bits_of_numerics() -> None:
    x = torch.cat([torch.logspace(-44, 3.1, 40_000), torch.linspace(80, 110, 20_000), torch.rand(20_000)])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])])
    results = torch.empty(2, len(x), device=DEVICE)
    grid = (triton.cdiv(len(x), 1 << 14),)
    elementary_kernel[grid](x.to(DEVICE), *results, len(x), BLOCK=1 << 14, enable_fp_fusion=False)
    for got, function in zip(results.cpu(), (elementary.expm1, elementary.exp), strict=True):
        want = function(x)
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bits(got.nan_to_num(7.0, np.inf, -np.inf), want.nan_to_num(7.0, np.inf, -np.inf))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", oracle.MODES)
def test_folds_have_the_bits_of_the_reference(mode: str, shape: tuple[int, int]) -> None:
    for patterns, residual, dtype in (
        (WITHOUT_LORA, False, torch.float32),
        (dict.fromkeys(oracle.SCALES[:3], "row_col_mult"), True, torch.bfloat16),
        ({"exp_scale": "global", "linear_scale": "row"}, True, torch.float16),
    ):
        case = draw(mode, patterns, shape, residual=residual).with_result(dtype)
        assert same_bits(fold_by("triton", case), fold_by("reference", case)), (patterns, dtype)


@pytest.mark.parametrize(
    ("family", "mode", "scales", "normalize"),
    [(*case, True) for case in FAMILY_CASES] + [(*case, False) for case in FAMILY_CASES[-3:]],
)
def test_families_and_gradients_of_raw_have_the_bits_of_the_reference(
    family: str, mode: str, scales: tuple[str, ...], normalize: bool
) -> None:
    patterns = {name: WITHOUT_LORA[name] for name in scales}
    case = draw(mode, patterns, (33, 70), family)
    case = case._replace(spec=case.spec._replace(normalize_by_inner_mult=normalize))
    assert same_bits(fold_by("triton", case), fold_by("reference", case))
    grad = torch.randn(33, 70)
    gots, wants = (pull_back_by(backend, case, grad) for backend in ("triton", "reference"))
    assert same_bits(gots[0], wants[0])
    elementwise = elementwise_oracle(case, grad)
    check_sums(case, gots[1:], elementwise)


def check_sums(case: Case, gots: list[torch.Tensor], elementwise: dict[str, np.ndarray]) -> None:
    """Each part's gradient against the oracle's elementwise gradients, reduced as SPEC says: within 1e-6.

    Relative to the norm of what is summed where that is larger: a single sum of random signs may come out near 0.
    """
    results = iter(gots)
    for name, pattern in case.spec.patterns:
        parts = {part: oracle.wide(tensor) for part, tensor in case.scales[name].items()}
        for part in parts:
            got, terms = next(results), elementwise[name]
            assert got.shape == case.scales[name][part].shape and got.dtype == torch.float32
            if pattern == "row_col_mult":
                terms = terms * (parts["column"] if part == "row" else parts["row"][:, None])
            want = {"value": terms.sum(), "row": terms.sum(1), "column": terms.sum(0)}[part]
            if case.spec.mode == "exp_only" and name == "linear_scale":
                assert not got.any()
            else:
                size = max(norm(want), norm(terms))
                assert norm(oracle.wide(got) - want) <= 1e-6 * size, (name, pattern, part)


@pytest.mark.parametrize("mode", oracle.MODES)
def test_elementwise_gradients_are_within_4_and_z_ulp_of_the_oracle(mode: str) -> None:
    """A single row with scales by column: each sum has one term. In ulp of the terms' sizes, where they cancel."""
    case = draw(mode, BY_COLUMN, (1, 501))
    grad = torch.randn(1, 501)
    gots = [got.reshape(1, -1) for got in pull_back_by("triton", case, grad)]
    wants = elementwise_oracle(case, grad)
    sizes = wants if mode == "exp_only" else elementwise_oracle(case, grad, "congruent")
    z = BETA * oracle.expand("column", case.scales["inner_multiplier"]) * abs(oracle.wide(case.raw))
    for got, name in zip(gots, ("raw", *oracle.SCALES), strict=True):
        unit = np.spacing(abs(sizes[name]).astype(np.float32))
        assert np.max(abs(oracle.wide(got) - wants[name]) / unit / (4 + z)) <= 1, name


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        ("global", torch.float32),
        ("row", torch.bfloat16),
        ("column", torch.float16),
        ("row_col_mult", torch.bfloat16),
        ("row_col_add", torch.float32),
    ],
)
def test_sums_are_within_1e6_of_the_oracle(pattern: str, dtype: torch.dtype) -> None:
    """100 x 130 weights are several tiles and segments each way."""
    case = draw("mismatch", same_pattern(pattern), (100, 130)).with_result(dtype)
    grad = torch.randn(100, 130).to(dtype)
    gots = pull_back_by("triton", case, grad)
    check_sums(case, gots[1:], elementwise_oracle(case, grad))
    if DEVICE == "cuda":
        again = pull_back_by("triton", case, grad)
        assert all(torch.equal(got, other) for got, other in zip(gots, again, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_strides_change_nothing(layout: str) -> None:
    """A transposed raw (transformers' Conv1D) or a slice, with gradients that lie either way or are expanded."""
    case = draw("mismatch", WITHOUT_LORA, (45, 70), residual=True)
    raw = case.raw.T.contiguous().T if layout == "transposed" else torch.stack([case.raw, case.raw], 2)[:, :, 1]
    assert not raw.is_contiguous() and torch.equal(raw, case.raw)
    strided = case._replace(raw=raw)
    assert same_bits(fold_by("triton", strided).contiguous(), fold_by("triton", case))
    for grad in (torch.randn(45, 70), torch.randn(70, 45).T, torch.ones(()).expand(45, 70)):
        gots = pull_back_by("triton", strided, grad)
        assert same_bits(gots[0], pull_back_by("reference", case, grad)[0])
        check_sums(case, gots[1:-2], elementwise_oracle(case, grad))


def test_only_the_gradients_asked_for_are_formed() -> None:
    case = move(draw("mismatch", WITHOUT_LORA, (45, 70)), DEVICE)
    trained = [case.scales["offset"]["column"], case.scales["linear_scale"]["row"]]
    for tensor in trained:
        tensor.requires_grad_()
    grad = torch.randn(45, 70)
    with use_backend("triton"):
        gots = torch.autograd.grad(fold(*case), trained, grad.to(DEVICE))
    elementwise = elementwise_oracle(move(case, "cpu"), grad)
    for got, want in zip(gots, (elementwise["offset"].sum(0), elementwise["linear_scale"].sum(1)), strict=True):
        assert norm(oracle.wide(got.cpu()) - want) <= 1e-6 * norm(want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_weight_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 130) ** 3 * 0.02).to(dtype)
    case = draw("mismatch", {"exp_scale": "row_col_mult", "linear_scale": "row_col_mult"}, (40, 130)).with_result(dtype)
    scales = [torch.outer(parts["row"], parts["column"]) for parts in case.scales.values()]
    raw, _ = invert_weight(weight, *scales, beta=BETA, mode="mismatch")
    assert torch.equal(fold_by("triton", case._replace(raw=raw)), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_raw_weight_of_sixteen_bits(dtype: torch.dtype) -> None:
    case = draw("oppose", WITHOUT_LORA, (33, 40))
    case = case._replace(raw=case.raw.to(dtype))
    assert same_bits(fold_by("triton", case), fold_by("reference", case))
    grad = torch.randn(33, 40)
    assert same_bits(pull_back_by("triton", case, grad)[0], pull_back_by("reference", case, grad)[0])


def test_not_a_number_stays_one() -> None:
    case = draw("mismatch", {"exp_scale": "global"}, (3, 5))
    case.raw[1, 2] = float("nan")
    with np.errstate(invalid="ignore"):
        assert torch.equal(fold_by("triton", case).isnan(), case.raw.isnan())


def test_an_untrained_residual_keeps_the_sign_of_zero() -> None:
    """B starts at 0; -0.0 + 0.0 would be 0.0."""
    case = draw("mismatch", {"exp_scale": "row", "linear_scale": "row"}, (3, 5), residual=True)
    case.residual[1].zero_()
    got = fold_by("triton", case)
    assert got[0, 1] == 0 and torch.signbit(got[0, 1])
    assert same_bits(got, fold_by("triton", case._replace(residual=None)))
