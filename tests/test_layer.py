"""SELLinear by itself: gradients of its parameters, choice of beta, dtypes, merge and unmerge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from models import bits, convert, make_config, make_tiny, sel_layers
from torch import nn

from peft_sel import ScaleConfig, SELConfig, SELError
from peft_sel.modules import SELLinear
from peft_sel.numerics import SCALE_NAMES

ROWS, COLUMNS, RANK = 3, 4, 2
STARTLESS = ("offset", "shift")  # scales that start at 0


def make_layer(dtype: torch.dtype = torch.float64, bias: bool = True, **options: object) -> SELLinear:
    base = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    with torch.no_grad():
        base.weight[0, 0], base.weight[1, 2] = 0.0, -0.0
    defaults = {"beta": 3.0, "r": RANK, "raw_dtype": "float64" if dtype == torch.float64 else "float32"}
    return SELLinear(base, "default", SELConfig(**{**defaults, **options}), name="block.proj")


def parts_of(layer: SELLinear) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(scale.named_parameters()) for name, scale in layer.scales("default").items()}


def expand_scales(layer: SELLinear, changes: dict[str, np.ndarray]) -> list[np.ndarray | float]:
    """The five scales of the layer by the oracle, with some of their parts replaced."""
    config = layer.sel_config["default"]
    neutral = {"inner_multiplier": 1.0, "offset": 0.0, "shift": 0.0, "linear_scale": 0.0}
    values: list[np.ndarray | float] = []
    for scale in SCALE_NAMES:
        parts = {part: changes.get(f"{scale}.{part}", p) for part, p in parts_of(layer).get(scale, {}).items()}
        values.append(reference.expand(getattr(config, scale).pattern, parts) if parts else neutral[scale])
    return values


def oracle_weight(layer: SELLinear, changes: dict[str, np.ndarray]) -> np.ndarray:
    """The layer's effective weight by the oracle, with some of its parameters replaced."""
    config, raw, values = layer.sel_config["default"], layer.symexplin_raw["default"], expand_scales(layer, changes)
    weight = reference.effective_weight(raw, *values, float(layer.symexplin_beta["default"]), config.mode)
    a = reference.wide(changes.get("residual_a", layer.symexplin_residual_a["default"]))
    b = reference.wide(changes.get("residual_b", layer.symexplin_residual_b["default"]))
    return weight + config.residual_scaling * b @ a


def named_tensors(layer: SELLinear) -> dict[str, nn.Parameter]:
    tensors = {f"{scale}.{part}": p for scale, parts in parts_of(layer).items() for part, p in parts.items()}
    tensors["residual_a"] = layer.symexplin_residual_a["default"]
    tensors["residual_b"] = layer.symexplin_residual_b["default"]
    return tensors


@pytest.mark.parametrize("pattern", reference.PATTERNS)
@pytest.mark.parametrize("mode", reference.MODES)
def test_parameter_gradients_match_finite_differences(mode, pattern):
    allowed = "column" if pattern == "row_col_mult" else pattern  # which may not start at 0
    scales = {name: ScaleConfig(allowed if name in STARTLESS else pattern, rank=2) for name in SCALE_NAMES}
    layer = make_layer(mode=mode, residual_alpha=3.0, **scales)
    with torch.no_grad():  # away from the start, where products with a zero factor have no gradient
        for name, tensor in named_tensors(layer).items():
            tensor.add_(0.1 * torch.rand_like(tensor) + (0.1 if name.endswith("b") else 0.0))
    inputs, direction = torch.randn(5, COLUMNS, dtype=torch.float64), torch.randn(5, ROWS, dtype=torch.float64)
    (layer(inputs) * direction).sum().backward()
    weight_grad = reference.wide(direction.T @ inputs)
    for name, tensor in named_tensors(layer).items():
        expected = reference.differentiate(
            lambda value, name=name: (weight_grad * oracle_weight(layer, {name: value})).sum(), tensor
        )
        assert reference.relative_error(tensor.grad, expected) <= 1e-6, name
    raw = layer.symexplin_raw["default"]
    elementwise = reference.gradients(weight_grad, raw, *expand_scales(layer, {}), 3.0, mode)["raw"]
    assert reference.relative_error(raw.grad, elementwise) <= 1e-6
    assert (raw.grad[raw == 0] != 0).all() and (raw == 0).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_reaches_float32_parameters(dtype):
    layer = make_layer(dtype)
    layer(torch.randn(2, COLUMNS, dtype=dtype)).sum().backward()
    own = [p for name, p in layer.named_parameters() if name.startswith("symexplin_")]
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in own)
    assert layer.symexplin_residual_b["default"].grad.any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_conversion_keeps_the_output(dtype, bias):
    layer = make_layer(dtype, bias)
    inputs = torch.randn(2, COLUMNS, dtype=dtype)
    # float32: 4 + 1.2z ulp per weight and the same again in the sum; float64: a solve of 2e-15 per weight
    tolerance = {torch.float32: 16, torch.float64: 32}.get(dtype, 0) * torch.finfo(dtype).eps
    torch.testing.assert_close(layer(inputs), layer.base_layer(inputs), rtol=tolerance, atol=tolerance)


def test_autocast_casts_the_weight_as_it_would_a_plain_one():
    layer = make_layer(torch.float32)
    inputs = torch.randn(2, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        adapted = layer(inputs)
        plain = nn.functional.linear(inputs, layer.get_effective_weight("default").detach(), layer.bias)
    assert adapted.dtype == torch.bfloat16 and torch.equal(adapted, plain)


def test_merge_and_unmerge_a_hundred_times():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = make_layer(dtype, init_weights=False)
        before = layer.get_base_layer().weight
        original = before.detach().clone()
        for _ in range(100):
            layer.merge()
            assert not torch.equal(layer.get_base_layer().weight, original)
            layer.unmerge()
        assert layer.get_base_layer().weight is before
        assert torch.equal(bits(before), bits(original))


def test_choice_of_beta():
    def beta(**options):
        return float(make_layer(torch.float32, **options).symexplin_beta["default"])

    assert beta(beta=7.5) == 7.5
    assert beta(beta="width") == pytest.approx(7.5 * (min(ROWS, COLUMNS) / 1024) ** 0.85, rel=1e-6)
    assert beta(beta=7.5, beta_pattern={"other": 2.0, "proj": 3.0, r"block\.proj": 4.0}) == 3.0
    layer = make_layer(torch.float32, beta="auto", beta_rms=0.6)
    rms = float(layer.get_base_layer().weight.detach().double().square().mean().sqrt())
    assert float(layer.symexplin_beta["default"]) == pytest.approx(0.6 / rms, rel=1e-6)


def test_dtype_casts_reach_the_base_only():
    layer = make_layer(torch.float32)
    raw = layer.symexplin_raw["default"]
    for cast in (layer.half, layer.bfloat16, lambda: layer.to(torch.float16), layer.double):
        cast()
        assert all(tensor.dtype == torch.float32 for tensor in named_tensors(layer).values())
        assert layer.symexplin_raw["default"] is raw and raw.dtype == torch.float32
    assert layer.get_base_layer().weight.dtype == torch.float64
    assert layer.get_effective_weight("default").dtype == torch.float64


def test_raw_dtype_on_request():
    layer = make_layer(torch.bfloat16, raw_dtype="bfloat16")
    assert layer.symexplin_raw["default"].dtype == torch.bfloat16
    assert layer.scales("default")["exp_scale"].row.dtype == torch.float32


def test_zero_weight_says_which_rule_it_uses():
    base = nn.Linear(COLUMNS, ROWS)
    nn.init.zeros_(base.weight)
    with pytest.warns(UserWarning, match=r"block\.proj\.weight is all zeros"):
        layer = SELLinear(base, "default", SELConfig(), name="block.proj")
    assert torch.equal(bits(layer.get_effective_weight("default")), bits(base.weight))


def test_integer_weight_is_refused():
    base = nn.Linear(COLUMNS, ROWS)
    base.weight = nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=torch.int8), requires_grad=False)
    with pytest.raises(SELError, match=r"block\.proj is a Linear .*int8"):
        SELLinear(base, "default", SELConfig(), name="block.proj")


@pytest.mark.parametrize("options", [{}, {"r": 2}, {"train_raw": False}])
def test_tensors_are_an_adapters_parameters_in_their_order(options: dict[str, Any]) -> None:
    model = convert(make_tiny(), **options)
    model.add_adapter("other", make_config(r=1))
    for layer in sel_layers(model):
        for adapter in ("default", "other"):
            own = [p for name, p in layer.named_parameters() if adapter in name.split(".")]
            assert [id(tensor) for tensor in layer.tensors(adapter)] == [id(parameter) for parameter in own]
