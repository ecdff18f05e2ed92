"""The choice of beta."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from peft_sel.errors import SELError
from peft_sel.numerics import auto_beta, width_beta


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_beta_is_c_over_rms(dtype: torch.dtype) -> None:
    weight = (0.19 * torch.randn(96, 160, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = math.sqrt(math.fsum(value * value for value in weight.double().flatten().tolist()) / weight.numel())
    # 15,360 squares summed in float64: the error stays far below 1e-13; a float32 sum would miss by about 1e-7.
    assert auto_beta(weight) == pytest.approx(0.3 / exact, rel=1e-13)
    assert auto_beta(weight, beta_rms=0.23) == pytest.approx(0.23 / exact, rel=1e-13)
    assert isinstance(auto_beta(weight), float)


def test_auto_beta_sums_in_float64() -> None:
    """16,384 small squares beside a large one: a float32 sum loses them; and 1e-30 squared underflows there."""
    weight = torch.full((1, 16385), 2.0**-12)
    weight[0, 0] = 2.0**6
    exact = math.sqrt((2.0**12 + 16384 * 2.0**-24) / 16385)
    assert auto_beta(weight) == pytest.approx(0.3 / exact, rel=1e-14)
    assert auto_beta(torch.full((2, 2), 1e-30)) == pytest.approx(0.3 / 1e-30, rel=1e-6)  # 1e-60 is below float32


def test_auto_beta_is_one_number_for_any_layout() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    assert auto_beta(weight.T) == pytest.approx(auto_beta(weight), rel=1e-14)  # order of summation only
    assert auto_beta(-weight) == auto_beta(weight)


def test_all_zero_tensor_uses_the_width_rule_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"q_proj\.bias"):
        beta = auto_beta(torch.zeros(1024, 2048), name="q_proj.bias")
    assert beta == pytest.approx(7.5, rel=1e-15)  # width of a bare tensor: the smaller side


def test_a_usual_tensor_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto_beta(torch.ones(3, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weight_is_an_error_that_names_it(bad: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = bad
    with pytest.raises(SELError, match=r"layers\.3\.up_proj"):
        auto_beta(weight, name="layers.3.up_proj")


@pytest.mark.parametrize("beta_rms", [0.0, -0.3, float("nan"), float("inf")])
def test_beta_rms_must_be_positive(beta_rms: float) -> None:
    with pytest.raises(SELError, match="beta_rms"):
        auto_beta(torch.ones(3, 3), beta_rms=beta_rms)


@pytest.mark.parametrize(("hidden_size", "printed"), [(1024, "7.5"), (2048, "13.5"), (3072, "19.1")])
def test_width_beta_gives_the_printed_values(hidden_size: int, printed: str) -> None:
    assert f"{width_beta(hidden_size):.1f}" == printed
    assert width_beta(hidden_size) == pytest.approx(7.5 * (hidden_size / 1024) ** 0.85, rel=1e-15)
