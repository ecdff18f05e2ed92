"""The compiled backend: same bits as the reference on a CPU, used only where it pays off, and loud when it breaks."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

from peft_sel.kernels import COMPILED, REFERENCE, WeightSpec, compiled, fold, select_backend
from peft_sel.kernels.blocks import Scales, fold_weight, pull_back
from peft_sel.numerics import SCALE_NAMES, init_parts
from peft_sel.numerics.elementary import exp, expm1

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
SHAPE = (331, 517)  # two blocks, neither a multiple of a vector
BETA = torch.tensor(3.0)
SCALING = 0.5
NAMES = ("raw", *SCALE_NAMES, "residual_a", "residual_b")


def make_scales(patterns: dict[str, str]) -> Scales:
    scales = {name: init_parts(pattern, 0.25, SHAPE, rank=2) for name, pattern in patterns.items()}
    return {
        name: {part: tensor + 0.02 * torch.randn_like(tensor) for part, tensor in parts.items()}
        for name, parts in scales.items()
    }


@pytest.fixture
def compile_at_once(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_AFTER_WEIGHTS", 0)
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_failed", False)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor, about itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("mode", "patterns"),
    [
        ("mismatch", dict.fromkeys(SCALE_NAMES[:3], "row_col_mult")),
        ("oppose", dict(zip(SCALE_NAMES, ("row_col_add", "lora", "column", "row", "global"), strict=True))),
    ],
)
def test_same_bits_as_the_reference(mode, patterns, dtype, compile_at_once):
    scales = make_scales(patterns)
    raw = 0.3 * torch.randn(SHAPE) * torch.exp(torch.randn(SHAPE))
    raw[0, :2] = torch.tensor([0.0, -0.0])
    residual = torch.randn(4, SHAPE[1]), 0.1 * torch.randn(SHAPE[0], 4)
    grad = torch.randn(SHAPE).to(dtype)
    spec = WeightSpec(mode, tuple(patterns.items()), SCALING, dtype)
    for pair in (residual, None):
        folds = [fold_weight(backend, spec, raw, BETA, scales, pair) for backend in (COMPILED, REFERENCE)]
        assert torch.equal(*folds)
    both = [pull_back(backend, spec, grad, raw, BETA, scales, residual, NAMES) for backend in (COMPILED, REFERENCE)]
    flat = [[g.raw, g.residual_a, g.residual_b, *(t for p in g.scales.values() for t in p.values())] for g in both]
    assert all(torch.equal(one, other) for one, other in zip(*flat, strict=True))
    assert len(compiled._functions) == 3 and not compiled._failed


def test_nothing_is_compiled_before_it_pays_off(monkeypatch):
    monkeypatch.setattr(compiled, "_weights_done", 0)
    monkeypatch.setattr(compiled, "COMPILE_AFTER_WEIGHTS", 3 * SHAPE[0] * SHAPE[1])
    raw = torch.randn(SHAPE, requires_grad=True)
    assert [select_backend(raw).name for _ in range(4)] == ["reference", "reference", "compiled", "compiled"]


def test_a_broken_compiler_warns_once_and_changes_nothing(compile_at_once, monkeypatch):
    def break_down(*args, **kwargs):
        def call(*args, **kwargs):
            raise RuntimeError("\nno compiler here\nmore")

        return call

    monkeypatch.setattr(torch, "compile", break_down)
    raw, scales = torch.randn(SHAPE), {"exp_scale": {"value": torch.tensor(0.3)}}
    spec = WeightSpec("exp_only", (("exp_scale", "global"),), 1.0, torch.float32)
    with pytest.warns(UserWarning, match=r"RuntimeError: no compiler here more\).*g\+\+"):
        first = fold(spec, raw, BETA, scales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = fold(spec, raw, BETA, scales)
    expected = fold_weight(REFERENCE, spec, raw, BETA, scales, None)
    assert torch.equal(first, expected) and torch.equal(second, expected)


def test_float64_is_left_to_the_reference():
    assert select_backend(torch.zeros(1, 1, dtype=torch.float64)) is REFERENCE


@pytest.mark.parametrize(("function", "exact"), [(expm1, torch.expm1), (exp, torch.exp)])
def test_elementary_functions_are_within_one_ulp(function, exact):
    x = torch.cat([torch.logspace(-44, 0, 100_000), torch.linspace(0, 87, 200_000)])
    x = torch.cat([x, -x])
    expected = exact(x.double())
    ulp = torch.finfo(torch.float32).eps * expected.abs().clamp_min(1e-38)
    assert ((function(x).double() - expected).abs() / ulp).max() <= 1.0
    special = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), 200.0, -200.0])
    assert torch.equal(function(special).nan_to_num(7.0), exact(special).nan_to_num(7.0))


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_whole_model_compile_keeps_expm1_accurate():
    # Inductor's own expm1 is exp(x) - 1 on a CPU: hundreds of ulp off for small weights
    raw = torch.logspace(-30, 0, 4096).reshape(64, 64)
    spec = WeightSpec("exp_only", (("exp_scale", "global"),), 1.0, torch.float32)
    scales = {"exp_scale": {"value": torch.tensor(1 / 3.0)}}
    traced = torch.compile(lambda raw: fold(spec, raw, BETA, scales), fullgraph=True)(raw)
    torch.testing.assert_close(traced, fold(spec, raw, BETA, scales), rtol=8 * torch.finfo(torch.float32).eps, atol=0)
