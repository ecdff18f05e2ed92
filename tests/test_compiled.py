"""The compiled backend: the reference's bits where nothing is summed, one kernel for all shapes, loud when broken."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from test_kernels import MIXED, Case, backward, draw_case, same_pattern

from peft_sel.kernels import WeightSpec, _select_backend, compiled, fold, native, reference, use_backend

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
WITHOUT_LORA = {**MIXED, "inner_multiplier": "row_col_mult", "linear_scale": "row_col_add"}
SHAPE = (331, 517)  # neither is a multiple of a chunk of rows or of a vector


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "can_run", lambda *_: False)  # it would come first
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_failed", False)
    monkeypatch.setattr(compiled, "_weights_folded", 0)


def draw(mode: str, patterns: dict[str, str], shape: tuple[int, int], dtype: torch.dtype) -> Case:
    """A trained-looking weight with z = beta*m*|w| of about 0.3, as after a conversion."""
    case = draw_case(mode, patterns, shape, dtype)
    return case._replace(raw=0.15 * case.raw)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "patterns", "dtype"),
    [
        ("mismatch", same_pattern("row_col_mult"), torch.float32),  # from here on in inductor's cache
        ("oppose", WITHOUT_LORA, torch.bfloat16),
        ("congruent", same_pattern("global"), torch.float16),
    ],
)
def test_agrees_with_the_reference(mode: str, patterns: dict[str, str], dtype: torch.dtype) -> None:
    """Same bits where nothing is summed; gradients within 1e-6 of those in float64, as issue D asks."""
    double = draw(mode, patterns, SHAPE, torch.float64)
    case = draw(mode, patterns, SHAPE, torch.float32).require_grad().with_result(dtype)
    grad = torch.randn(SHAPE).to(dtype)
    results, grads = [], []
    for name in ("compiled", "reference"):
        with use_backend(name):
            results += [fold(*case), fold(*case._replace(residual=None))]
            grads.append(backward(case, grad))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert torch.equal(grads[0][0], grads[1][0])  # of raw
    for got, want in zip(grads[0], backward(double.require_grad(), grad.double()), strict=True):
        assert relative_error(got, want) <= 1e-6
    assert len(compiled._functions) == 3 and not compiled._failed


@needs_compiler
def test_one_kernel_serves_every_shape_and_context() -> None:
    shapes = [(576, 576), (1536, 576), (192, 576), (129, 1023), (4096, 16)]
    with torch._dynamo.config.patch(error_on_recompile=True), use_backend("compiled"):
        for shape in shapes:
            case = draw("mismatch", same_pattern("row_col_mult"), shape, torch.float32)
            double = draw("mismatch", same_pattern("row_col_mult"), shape, torch.float64)
            with torch.no_grad():
                fold(*case)
            with torch.inference_mode():
                fold(*case)
            with torch.autocast("cpu", torch.bfloat16):
                fold(*case.require_grad())
            grad = torch.randn(shape)
            gots = backward(case, grad)
            with use_backend("reference"):
                wants = backward(double.require_grad(), grad.double())
            assert all(relative_error(got, want) <= 1e-6 for got, want in zip(gots, wants, strict=True))
    assert len(compiled._functions) == 2 and not compiled._failed


@needs_compiler
def test_a_transposed_weight_agrees_with_the_reference() -> None:
    """As in transformers' Conv1D, whose gradient may lie either way."""
    case = draw("mismatch", same_pattern("row_col_mult"), SHAPE, torch.float32)
    case = case._replace(raw=case.raw.T.contiguous().T).require_grad()
    double = draw("mismatch", same_pattern("row_col_mult"), SHAPE, torch.float64).require_grad()
    grad = torch.randn(SHAPE)
    wants = backward(double, grad.double())
    with use_backend("compiled"):
        folded, grads = fold(*case), [backward(case, grad), backward(case, grad.T.contiguous().T)]
    with use_backend("reference"):
        assert torch.equal(folded, fold(*case))
    for gots in grads:
        assert all(relative_error(got, want) <= 1e-6 for got, want in zip(gots, wants, strict=True))
    assert not compiled._failed


@needs_compiler
def test_only_the_gradients_asked_for_are_formed() -> None:
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32)
    trained = [case.scales["exp_scale"]["row"], case.scales["exp_scale"]["column"], case.scales["offset"]["column"]]
    for tensor in trained:
        tensor.requires_grad_()
    both = []
    for name in ("compiled", "reference"):
        with use_backend(name):
            both.append(torch.autograd.grad(fold(*case).sum(), trained))
    assert all(relative_error(got, want.double()) <= 1e-6 for got, want in zip(*both, strict=True))


def test_small_sliced_and_double_weights_are_left_to_the_reference() -> None:
    large = torch.zeros(512, 512)
    spec = WeightSpec("mismatch", (("exp_scale", "global"),), 1.0, torch.float32)
    assert _select_backend(spec, large, True) is compiled
    for raw in (large[:100], torch.zeros(64, 2048), torch.zeros(1 << 16, 8), large[:, ::2], large.double(), large[:0]):
        assert _select_backend(spec, raw, True) is reference
    assert _select_backend(spec._replace(patterns=(("exp_scale", "lora"),)), large, True) is reference


def test_folds_are_compiled_once_that_pays_off_and_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.zeros(512, 512)
    monkeypatch.setattr(compiled, "FOLD_AFTER_WEIGHTS", 3 * raw.numel())
    spec = WeightSpec("mismatch", (("exp_scale", "global"),), 1.0, torch.float32)
    assert _select_backend(spec, raw, True) is compiled
    assert [_select_backend(spec, raw, False) is compiled for _ in range(4)] == [False, False, True, True]


def test_a_state_that_torch_compiles_anew_for_gets_functions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives up on a function at its ninth state, and a full graph with it."""
    monkeypatch.setattr(compiled, "_compile", lambda function, *_: function)
    monkeypatch.setattr(torch, "get_num_threads", iter(range(1, 11)).__next__)
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32)
    with use_backend("compiled"):
        for _ in range(10):
            fold(*case)
    assert len(compiled._functions) == 10


def test_a_broken_compiler_warns_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*args: object, **kwargs: object) -> object:
        def call(*args: object) -> None:
            raise RuntimeError("\nno compiler here\nmore")

        return call

    monkeypatch.setattr(torch, "compile", break_down)
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32).require_grad()
    grad = torch.randn(SHAPE)
    with pytest.warns(UserWarning, match=r"RuntimeError: no compiler here more\).*g\+\+"):
        first = backward(case, grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = backward(case, grad)
    with use_backend("reference"):
        want = backward(case, grad)
    for got in (first, second):
        assert all(relative_error(one, other.double()) <= 1e-6 for one, other in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo instantiates it
@pytest.mark.parametrize("pattern", ["row_col_mult", "lora"])
def test_inside_another_compilation_nothing_is_unrolled(pattern: str) -> None:
    """The graph of a weight of nine blocks is about that of a weight of one."""
    sizes = []
    for rows in (64, 576):
        graphs: list[torch.fx.GraphModule] = []
        case = draw("mismatch", same_pattern(pattern), (rows, 512), torch.float32)

        def collect(graph: torch.fx.GraphModule, _: object, graphs=graphs) -> object:
            graphs.append(graph)
            return graph

        traced = torch.compile(lambda raw, case=case: fold(*case._replace(raw=raw)), backend=collect, fullgraph=True)
        with use_backend("reference"):
            assert torch.equal(traced(case.raw), fold(*case))
        (graph,) = graphs
        sizes.append(len(graph.graph.nodes))
    assert sizes[1] < 1.1 * sizes[0]


def test_running_out_of_memory_is_no_broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda *_, **__: run_out)
    with pytest.raises(torch.OutOfMemoryError):
        backward(draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32).require_grad(), torch.randn(SHAPE))
    assert not compiled._failed
