"""expm1 and exp: accurate, and the same bits eager and compiled."""

from __future__ import annotations

import shutil

import pytest
import torch

from peft_sel.kernels import WeightSpec, fold
from peft_sel.numerics.elementary import exp, expm1

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


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
    scales, beta = {"exp_scale": {"value": torch.tensor(1 / 3.0)}}, torch.tensor(3.0)
    traced = torch.compile(lambda raw: fold(spec, raw, beta, scales), fullgraph=True)(raw)
    assert torch.equal(traced, fold(spec, raw, beta, scales))
