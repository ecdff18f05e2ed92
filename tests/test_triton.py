"""The Triton backend: chosen on GPUs only, loud when broken; processes of their own run and compile its kernels.

Triton reads TRITON_INTERPRET when it is imported, once for a process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from test_kernels import MIXED, backward, draw_case

from peft_sel.kernels import WeightSpec, _select_backend, compiled, fold, triton_backend, use_backend

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
KERNELS = "peft_sel.kernels.triton_kernels"
SPEC = WeightSpec("mismatch", (("exp_scale", "global"),), 1.0, torch.float32)


def run_tests(name: str, **environment: str) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / name)]
    done = subprocess.run(
        command, cwd=folder.parent, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_kernels_agree_in_the_interpreter() -> None:
    run_tests("triton_cases.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    run_tests("triton_compile.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_kernels_agree_on_a_gpu() -> None:
    assert torch.cuda.is_available()
    run_tests("triton_cases.py", TRITON_INTERPRET="0")


def test_only_gpus_choose_it_and_only_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.zeros(512, 512)
    assert triton_backend.can_run(SPEC, raw) and _select_backend(SPEC, raw, True) is not triton_backend
    fold(SPEC, raw, torch.tensor(1.0), {"exp_scale": {"value": torch.ones(1)}})
    assert KERNELS not in sys.modules  # nor, by it, Triton: no other test of this process imports them
    on_gpu = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for module in (triton_backend, compiled):
        monkeypatch.setattr(module, "can_run", lambda *_: True)
    assert _select_backend(SPEC, on_gpu, True) is triton_backend
    monkeypatch.setattr(triton_backend, "can_run", lambda *_: False)
    assert _select_backend(SPEC, on_gpu, True) is compiled


def test_what_it_does_not_take_goes_to_the_reference() -> None:
    small = torch.zeros(3, 5)
    for raw in (small, small[1:], small.T, small.bfloat16(), torch.nn.Parameter(small)):
        assert triton_backend.can_run(SPEC, raw)
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(3, 5)
    lora = SPEC._replace(patterns=(("exp_scale", "lora"),))
    for spec, raw in (
        (SPEC, small[:0]),
        (SPEC, small.double()),
        (SPEC, fake),
        (lora, small),
        (SPEC._replace(dtype=torch.float64), small),
    ):
        assert not triton_backend.can_run(spec, raw)
    case = draw_case("mismatch", MIXED, (6, 7)).require_grad()  # float64, and a scale of pattern lora
    grad, results = torch.randn(6, 7, dtype=torch.float64), []
    for name in ("triton", "reference"):
        with use_backend(name):
            results.append([fold(*case), *backward(case, grad)])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


def test_without_triton_it_warns_once_and_the_reference_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(triton_backend, "_failed", False)
    patterns = {name: pattern for name, pattern in MIXED.items() if pattern != "lora"}
    case = draw_case("mismatch", patterns, (6, 7), torch.float32).require_grad()
    grad = torch.randn(6, 7)
    with use_backend("triton"):
        with pytest.warns(
            UserWarning, match=r"Triton does not work here \(ModuleNotFoundError: .*triton.*goes on without it"
        ):
            first = fold(*case)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = [fold(*case), *backward(case, grad)]
        monkeypatch.setattr(triton_backend, "_failed", False)
        with torch.no_grad(), pytest.warns(UserWarning, match="Triton does not work here"):
            third = triton_backend.pull_back(case.spec, grad, case.raw.detach(), case.beta, case.scales, ("raw",), None)
    assert not triton_backend.can_run(case.spec, case.raw)
    with use_backend("reference"):
        want = [fold(*case), *backward(case, grad)]
    assert torch.equal(first, want[0]) and torch.equal(third[0], want[1])
    assert all(torch.equal(got, other) for got, other in zip(second, want, strict=True))
