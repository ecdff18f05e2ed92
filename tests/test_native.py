"""The native backend: the reference's bits where nothing is summed, and loud where it cannot be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import reference as oracle
import torch
from test_compiled import SHAPE, WITHOUT_LORA, draw, relative_error
from test_kernels import Case, backward, same_pattern

from peft_sel.kernels import WeightSpec, _select_backend, compiled, fold, native, reference, use_backend

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the native backend needs a C++ compiler")
DEFAULT = dict.fromkeys(oracle.SCALES[:3], "row_col_mult")
MODES = ("mismatch", "congruent", "oppose", "exp_only")
SHAPES = [SHAPE, (1, 33), (33, 1), (64, 256), (1023, 65)]  # whole, cut and single tiles and chunks


def transpose(case: Case) -> Case:
    """Lay raw as transformers' Conv1D does."""
    return case._replace(raw=case.raw.detach().T.contiguous().T)


def run_both(case: Case, grad: torch.Tensor) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return folds, with and without residual, and gradients of both backends, the reference second."""
    folds, grads = [], []
    for name in ("native", "reference"):
        with use_backend(name):
            folds += [fold(*case), fold(*case._replace(residual=None))]
            grads.append(backward(case, grad))
    return folds, grads


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("patterns", [DEFAULT, WITHOUT_LORA, same_pattern("row"), {"exp_scale": "column"}])
def test_elementwise_results_have_the_bits_of_the_reference(mode: str, patterns: dict[str, str]) -> None:
    """The residual apart, whose product is summed in another order: SPEC allows an ulp on 2e-4 of the elements."""
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for lay in (lambda case: case, transpose):
                case = lay(draw(mode, patterns, shape, torch.float32)).require_grad().with_result(dtype)
                grad = torch.randn(shape).to(dtype)
                (with_residual, plain, wanted_with, wanted), (gots, wants) = run_both(case, grad)
                assert torch.equal(plain, wanted) and plain.stride() == case.raw.stride()
                assert torch.equal(gots[0], wants[0])  # of raw
                if dtype == torch.bfloat16:
                    different = with_residual != wanted_with
                    assert different.sum() <= max(1, 2e-4 * different.numel())
                torch.testing.assert_close(with_residual, wanted_with, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("patterns", [DEFAULT, WITHOUT_LORA, same_pattern("row_col_add")])
@pytest.mark.parametrize("lay", [lambda case: case, transpose], ids=["plain", "transposed"])
def test_sums_agree_with_float64(mode: str, patterns: dict[str, str], lay: object) -> None:
    double = draw(mode, patterns, SHAPE, torch.float64).require_grad()
    case = lay(draw(mode, patterns, SHAPE, torch.float32)).require_grad()
    grad = torch.randn(SHAPE)
    with use_backend("native"):
        gots = backward(case, grad)
    for got, want in zip(gots, backward(double, grad.double()), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()  # 0 for a linear scale that exp_only has no use for


@pytest.mark.parametrize("mode", MODES)
def test_large_small_and_special_numbers_have_the_bits_of_the_reference(mode: str) -> None:
    raw = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-30, 1e-6, -3.0, 12.0, 40.0, -80.0, 1e3, 3e38, torch.inf, -torch.inf, torch.nan]
    )
    case = draw(mode, WITHOUT_LORA, (1, len(raw)), torch.float32)._replace(raw=raw[None], residual=None)
    (_, got, _, want), (gots, wants) = run_both(case.require_grad(), torch.ones(1, len(raw)))
    assert torch.equal(got.view(torch.int32)[:, :-1], want.view(torch.int32)[:, :-1]) and got[0, -1].isnan()
    torch.testing.assert_close(gots[0], wants[0], rtol=0, atol=0, equal_nan=True)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    case = draw("mismatch", WITHOUT_LORA, (512, 517), torch.float32).require_grad()
    grad, threads, results = torch.randn(512, 517), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with use_backend("native"):
                results.append([fold(*case).detach(), *backward(case, grad)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for more in results[1:] for one, other in zip(results[0], more, strict=True))


@pytest.mark.parametrize("rank", [1, 8, 40])
def test_a_residual_of_any_rank(rank: int) -> None:
    case, double = (draw("mismatch", DEFAULT, SHAPE, dtype) for dtype in (torch.float32, torch.float64))
    factors = torch.randn(rank, SHAPE[1]), 0.1 * torch.randn(SHAPE[0], rank)
    case = case._replace(residual=factors).require_grad()
    double = double._replace(residual=tuple(factor.detach().double() for factor in factors)).require_grad()
    grad = torch.randn(SHAPE)
    with use_backend("native"):
        folded, gots = fold(*case), backward(case, grad)
    assert relative_error(folded.detach(), fold(*double).detach()) <= 1e-6
    for got, want in zip(gots, backward(double, grad.double()), strict=True):
        assert relative_error(got, want) <= 1e-6


def test_a_multiplier_that_the_result_is_divided_by() -> None:
    case = draw("mismatch", DEFAULT, SHAPE, torch.float32)
    case = case._replace(spec=case.spec._replace(normalize_by_inner_mult=True)).require_grad()
    (_, got, _, want), (gots, wants) = run_both(case, torch.randn(SHAPE))
    assert torch.equal(got, want) and torch.equal(gots[0], wants[0])
    assert all(relative_error(got, want.double()) <= 1e-6 for got, want in zip(gots, wants, strict=True))


def test_only_the_gradients_asked_for_are_formed() -> None:
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32)
    trained = [case.scales["exp_scale"]["row"], case.scales["offset"]["column"], case.residual[1]]
    for tensor in trained:
        tensor.requires_grad_()
    both = []
    for name in ("native", "reference"):
        with use_backend(name):
            both.append(torch.autograd.grad(fold(*case).sum(), trained))
    assert all(relative_error(got, want.double()) <= 1e-6 for got, want in zip(*both, strict=True))


def test_what_it_leaves_to_the_others() -> None:
    large = torch.zeros(512, 512)
    spec = WeightSpec("mismatch", (("exp_scale", "global"),), 1.0, torch.float32)
    for raw in (large, large[:1], large.T, torch.zeros(512, 1)):
        assert _select_backend(spec, raw, True) is native
    for raw in (large[:, ::2], large.double(), large[:0]):
        assert _select_backend(spec, raw, True) is reference
    assert _select_backend(spec._replace(patterns=(("exp_scale", "lora"),)), large, True) is reference
    assert _select_backend(spec._replace(family="sinh", mode="congruent"), large, True) is compiled
    assert _select_backend(spec._replace(dtype=torch.float64), large, True) is not native


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_defaults_of_the_process_do_not_reach_it(dtype: torch.dtype) -> None:
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32).require_grad()
    grad = torch.randn(SHAPE)
    with use_backend("native"):
        want = [fold(*case).detach(), *backward(case, grad)]
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                got = [fold(*case).detach(), *backward(case, grad)]
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_sums_over_very_many_rows() -> None:
    """More rows than chunks of 64: longer chunks."""
    shape = (64 * native.MAX_CHUNKS + 37, 3)
    case = draw("mismatch", DEFAULT, shape, torch.float32).require_grad()
    double = draw("mismatch", DEFAULT, shape, torch.float64).require_grad()
    grad = torch.randn(shape)
    with use_backend("native"):
        gots = backward(case, grad)
    for got, want in zip(gots, backward(double, grad.double()), strict=True):
        assert relative_error(got, want) <= 2e-6


def test_parts_that_do_not_fit_are_refused() -> None:
    case = draw("mismatch", DEFAULT, SHAPE, torch.float32)
    a, b = case.residual
    with use_backend("native"), pytest.raises(RuntimeError, match="invalid for input"):
        fold(*case._replace(residual=(a, b[:, :1])))
    with use_backend("native"), pytest.raises(RuntimeError, match="invalid for input"):
        fold(*case._replace(scales={**case.scales, "exp_scale": {"row": torch.ones(7), "column": torch.ones(517)}}))


def test_the_weight_of_a_backward_pass_has_the_bits_of_a_fold() -> None:
    for lay in (lambda case: case, transpose):
        case = lay(draw("oppose", WITHOUT_LORA, SHAPE, torch.float32)).with_result(torch.bfloat16)
        weight = torch.empty_like(case.raw, dtype=torch.bfloat16)
        names = ("raw", *case.scales)
        with torch.no_grad(), use_backend("native"):
            a, b = case.residual
            scaled = a, b * case.spec.residual_scaling
            native.pull_back(case.spec, torch.randn(SHAPE), case.raw, case.beta, case.scales, names, scaled, weight)
            assert torch.equal(weight, fold(*case))


def test_nothing_outside_the_arrays_is_touched() -> None:
    """In a process of its own, which the first element beyond one ends."""
    script = Path(__file__).with_name("guarded.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-400:]}{done.stderr[-2000:]}"
