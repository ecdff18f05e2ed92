"""Newton's method in C++: the raw weights of plain torch and of the oracle, for any shape, scales and threads."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import reference
import torch

from peft_sel.errors import ConvergenceError, NonFiniteWeightError
from peft_sel.numerics import InversionReport, invert_weight, newton

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

RULES = ("mismatch", "congruent", "oppose")
SHAPES = [(), (1,), (33,), (1, 1), (1, 1023), (1023, 1), (3, 1023), (257, 33), (5, 7, 11), (2, 3, 1)]


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, InversionReport]]:
    """invert_weight as it is without the library."""

    def invert(*args: object, **options: object) -> tuple[torch.Tensor, InversionReport]:
        with monkeypatch.context() as patch:
            patch.setattr(newton, "load_library", lambda: None)
            return invert_weight(*args, **options)

    return invert


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def all_sizes(count: int) -> torch.Tensor:
    """Weights from 1e-38 to 100, subnormals and zeros, of both signs."""
    sizes = 10 ** (40 * torch.rand(count, dtype=torch.float64) - 38)
    smallest = 2.0**-149
    special = torch.tensor([0.0, smallest, 5 * smallest, 1e-40, 2.0**-126, 100.0], dtype=torch.float64)
    sizes = torch.cat([sizes, special]).float()
    return torch.cat([sizes, -sizes])


def heavy_tailed(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) ** 3 * 0.05


def draw_scales(beta: float, shape: tuple[int, ...], patterns: str) -> list[torch.Tensor]:
    """[e, l, m, n] around their starts, of each pattern: global, a row, a column, or p for their product."""
    first, last = (*shape[:1], *(1,) * (len(shape) - 1)), shape[-1:]

    def spread(size: tuple[int, ...]) -> torch.Tensor:
        return 0.95 + 0.1 * torch.rand(size)

    def scale(pattern: str) -> torch.Tensor:
        if pattern == "p":
            return spread(first) * spread(last)
        return spread({"g": (), "r": first, "c": last}[pattern])

    e, l, m, n = map(scale, patterns)  # noqa: E741
    return [e / beta, l * 0.6 / max(beta, 7.5), m, 0.1 * n]


def assert_rounded_alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both solve to 1e-12, a 50,000th of the distance of float32 values: one in so many may round the other way."""
    assert got.dtype == want.dtype == torch.float32 and got.shape == want.shape and got.is_contiguous()
    assert torch.equal(torch.signbit(got), torch.signbit(want))
    apart = (got.contiguous().view(torch.int32).long() - want.contiguous().view(torch.int32).long()).abs()
    assert not apart.numel() or (apart.max() <= 1 and (apart > 0).sum() <= 1 + apart.numel() // 50_000)


@pytest.mark.parametrize("beta", [0.3, 1.6, 7.5, 20.0, 60.0])
@pytest.mark.parametrize("mode", RULES)
def test_roots_are_the_oracles_and_those_of_plain_torch(mode: str, beta: float, torch_alone: Callable) -> None:
    weight = all_sizes(300)
    for offset, multiplier, normalize in ((0.0, 1.0, False), (0.2, 1.25, False), (-0.1, 0.75, True)):
        values = (1 / beta, 0.7 / max(beta, 7.5), multiplier, offset)
        scales = [torch.tensor(value) for value in values]
        options = {"beta": beta, "mode": mode, "normalize_by_inner_mult": normalize}
        raw, report = invert_weight(weight, *scales, **options)
        plain, _ = torch_alone(weight, *scales, **options)
        assert report.converged is True and newton.LIBRARY_FLOAT32_STEPS < report.num_steps <= 5
        assert 0 < report.max_relative_residual < 1e-12
        assert torch.equal(torch.signbit(raw), torch.signbit(weight))
        # Rounded once, from what is good to a thousandth of a unit.
        want = reference.invert(weight, *scales, torch.tensor(beta).item(), mode, normalize=normalize)
        assert max(reference.ulp_error(raw, want).max(), reference.ulp_error(plain, want).max()) <= 0.5 + 1e-3
        assert_rounded_alike(raw, plain)


@pytest.mark.parametrize("patterns", ["gggg", "rcrc", "crgr", "pppp", "gcgg"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_structured_scales(shape: tuple[int, ...], patterns: str, torch_alone: Callable) -> None:
    weight = heavy_tailed(shape)
    scales = draw_scales(9.0, shape, patterns)
    for mode in RULES:
        raw, report = invert_weight(weight, *scales, beta=9.0, mode=mode)
        want, _ = torch_alone(weight, *scales, beta=9.0, mode=mode)
        assert report.converged
        assert_rounded_alike(raw, want)


@pytest.mark.parametrize("patterns", ["gggg", "rcpg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layouts_and_dtypes(dtype: torch.dtype, patterns: str, torch_alone: Callable) -> None:
    whole = heavy_tailed((70, 90)).to(dtype)
    layouts = [whole.T, whole[:, ::2], whole[3:, 1:], whole[:1].expand(40, 90), whole.view(7, 10, 90).transpose(0, 2)]
    for weight in (*layouts, torch.nn.Parameter(whole)):
        before = weight.detach().clone()
        scales = draw_scales(9.0, tuple(weight.shape), patterns)
        raw, _ = invert_weight(weight, *scales, beta=9.0, mode="mismatch")
        assert not raw.requires_grad and torch.equal(weight, before)
        assert_rounded_alike(raw, torch_alone(weight, *scales, beta=9.0, mode="mismatch")[0])


def test_scales_of_more_dimensions_than_the_weight() -> None:
    weight, scales = heavy_tailed((40,)), draw_scales(9.0, (40,), "gcgg")
    want, _ = invert_weight(weight, *scales, beta=9.0, mode="mismatch")
    got, _ = invert_weight(weight, *(scale.reshape(1, 1, -1) for scale in scales), beta=9.0, mode="mismatch")
    assert torch.equal(got, want)


@pytest.mark.parametrize("patterns", ["gggg", "rcpg"])
def test_any_number_of_threads_gives_the_same_bits(patterns: str, restored_threads: None) -> None:
    weight = heavy_tailed((331, 257))
    assert weight.numel() > 2 * newton.MIN_PARALLEL_ELEMENTS
    scales = draw_scales(9.0, (331, 257), patterns)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(invert_weight(weight, *scales, beta=9.0, mode="mismatch"))
    assert all(torch.equal(raw, results[0][0]) and report == results[0][1] for raw, report in results)
    # Nor does a weight depend on those beside it, but for the steps that its tile takes.
    part, _ = invert_weight(weight[7:], *draw_rows(scales, 7), beta=9.0, mode="mismatch")
    assert_rounded_alike(part, results[0][0][7:])


def draw_rows(scales: list[torch.Tensor], start: int) -> list[torch.Tensor]:
    """The rows from start on of what has rows."""
    return [scale[start:] if scale.dim() == 2 and len(scale) > 1 else scale for scale in scales]


def coefficients(growth: float, curvature: float, linear: float) -> newton.Coefficients:
    return newton.Coefficients(*(torch.tensor(v, dtype=torch.float64) for v in (growth, curvature, linear, 0.0)))


@pytest.mark.parametrize("mode", RULES)
def test_the_reported_residual_is_the_largest_there_is(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after its float32 steps, the solve returns what it has evaluated, unrounded."""
    monkeypatch.setattr(newton, "MAX_STEPS", newton.LIBRARY_FLOAT32_STEPS)
    q, b, l = 0.125, 8.0, 0.0625  # noqa: E741
    weight = torch.cat([heavy_tailed((600,)), torch.tensor([0.0, -0.0])])
    raw = weight.clone()
    steps, residual = newton.solve_in_place(newton.load_library(), raw, coefficients(q, b, l), mode)
    assert steps == newton.LIBRARY_FLOAT32_STEPS
    reached = reference.effective_weight(raw, q, l, 1.0, 0.0, 0.0, b, mode)
    want = reference.relative_error(reached, weight)
    # A few float64 roundings of numbers as large as the weight.
    assert want > 1e-8 and abs(residual - want) <= 20 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("position", [0, 255, 256, 700, 999])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_residual_hides_a_weight_that_is_not_finite(bad: float, position: int) -> None:
    weight = heavy_tailed((1000,))
    want, bad_tile = weight.clone(), position // 256
    newton.solve_in_place(newton.load_library(), want, coefficients(0.125, 8.0, 0.0625), "mismatch")
    weight[position] = bad
    _, residual = newton.solve_in_place(newton.load_library(), weight, coefficients(0.125, 8.0, 0.0625), "mismatch")
    assert not residual <= newton.MAX_RESIDUAL
    others = torch.arange(1000) // 256 != bad_tile
    assert torch.equal(weight[others], want[others])


@pytest.mark.parametrize("mode", RULES)
def test_a_weight_out_of_reach_is_an_error_that_names_it(mode: str) -> None:
    weight = heavy_tailed((40, 40))
    scales = [torch.tensor(1 / 60), torch.tensor(1 / 60), None, None]
    weight[3, 3] = 3e38  # exp(b * x) would have to be 2e40, which float32 lacks: far from where its steps end
    with pytest.raises(ConvergenceError, match="q_proj"):
        invert_weight(weight, *scales, beta=60.0, mode=mode, name="q_proj")
    weight[3, 3] = math.inf
    with pytest.raises(NonFiniteWeightError, match="q_proj"):
        invert_weight(weight, *scales, beta=60.0, mode=mode, name="q_proj")


def test_what_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    e = l = torch.tensor(0.125)  # noqa: E741

    class Other(torch.Tensor):
        pass

    weight = heavy_tailed((4, 4))
    for case, values, scales, options in (
        ("float32", weight, [e, l], {"mode": "mismatch"}),
        ("few bf16", weight.bfloat16(), [e, l], {"mode": "mismatch"}),
        ("float64", weight.double(), [e, l], {"mode": "mismatch"}),
        ("subclass", weight.as_subclass(Other), [e, l], {"mode": "mismatch"}),
        ("no linear path", weight, [e, torch.zeros(())], {"mode": "mismatch"}),
        ("exp_only", weight, [e, l], {"mode": "exp_only"}),
        ("sinh", weight, [e], {"mode": "congruent", "family": "sinh"}),
        ("damped", weight, [e, l, None, torch.tensor(0.5)], {"mode": "congruent", "family": "damped"}),
        ("empty", weight[:0], [e, l], {"mode": "mismatch"}),
    ):
        monkeypatch.setattr(newton, "load_library", functools.partial(asked.append, case))
        raw, report = invert_weight(values, *scales, beta=8.0, **options)
        assert report.converged and np.isfinite(np.asarray(raw)).all()
    assert asked == ["float32", "few bf16"]
