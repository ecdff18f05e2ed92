"""init_target: the weights that training from scratch starts from, measured against torch's Xavier and the oracle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from models import FAMILIES, NUM_TARGETS, assert_same_bits, bits, clone_state, make_tiny, train_steps
from moe import make_moe
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peft_sel import SELConfig, SELLayer, merge_checkpoint, sel_param_groups
from peft_sel.conversion import draw_target
from peft_sel.errors import ConfigError

XAVIER = {"xavier_uniform": nn.init.xavier_uniform_, "xavier_normal": nn.init.xavier_normal_}
EPS = torch.finfo(torch.float32).eps


def scratch(**options: Any) -> SELConfig:
    return SELConfig(**{"init_target": "xavier_uniform", "init": "congruent", "r": 0, **options})


def convert(base: nn.Module, seed: int = 7, **options: Any) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(base, scratch(**options))


def layers(model: nn.Module) -> list[SELLayer]:
    return [module for module in model.modules() if isinstance(module, SELLayer)]


def draws(model: nn.Module, target: str = "xavier_uniform", seed: int = 7) -> list[Tensor]:
    """What torch's own Xavier gives for the converted weights, one after the other."""
    torch.manual_seed(seed)
    return [XAVIER[target](torch.empty(layer.base_weight.shape)) for layer in layers(model)]


@pytest.mark.parametrize("target", XAVIER)
@pytest.mark.parametrize(("mode", "init"), [("congruent", "congruent"), ("congruent", "exact"), ("mismatch", "exact")])
def test_the_start_is_the_xavier_draw_to_float32_rounding(target: str, mode: str, init: str) -> None:
    model = convert(make_tiny("qwen3"), mode=mode, init=init, init_target=target, offset="column")
    assert len(layers(model)) == NUM_TARGETS
    for layer, draw in zip(layers(model), draws(model, target), strict=True):
        effective, raw = layer.get_effective_weight("default").detach(), layer.symexplin_raw["default"].detach()
        z = layer.symexplin_beta["default"] * raw.abs()
        # 4 roundings of the map, and raw's own, magnified by the slope of exp(z): SPEC section 3
        assert ((effective - draw).abs() <= (4 + 1.2 * z) * EPS * draw.abs()).all()


@pytest.mark.parametrize(
    "options",
    [
        {"normalizer": "fixed", "mode": "mismatch"},
        {"log_curvature": True, "mode": "mismatch"},
        {"log_curvature": True, "normalize_by_inner_mult": True, "mode": "mismatch"},
        {"family": "sinh", "mode": "congruent", "offset": None},
        {"family": "damped", "mode": "congruent", "offset": "column"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_every_variant_starts_at_the_draw(options: dict[str, Any]) -> None:
    model = convert(make_tiny("qwen3"), init="exact", **options)
    for layer, draw in zip(layers(model), draws(model), strict=True):
        # the bound above has at most z = 0.6 here; a variant has a rounding or two more
        torch.testing.assert_close(layer.get_effective_weight("default").detach(), draw, rtol=8 * EPS, atol=0)


def test_mismatched_initialisation_weakens_negative_weights_by_twice_the_linear_path() -> None:
    model = convert(make_tiny("qwen3"), mode="mismatch")
    for layer, draw in zip(layers(model), draws(model), strict=True):
        beta = layer.symexplin_beta["default"].item()
        # as the paper says: e, m, n at their starts; the oracle takes the float32 values of the products r * c
        scales, curvature = layer.scales("default"), layer.symexplin_beta["default"]
        e, l, m = (  # noqa: E741
            scales[name].parts(curvature) for name in ("exp_scale", "linear_scale", "inner_multiplier")
        )
        e, l, m = (reference.expand("row_col_mult", parts).astype(np.float32) for parts in (e, l, m))  # noqa: E741
        want_raw = reference.invert(draw, e, l, m, 0, beta, "mismatch", init="congruent")
        linear = abs(want_raw) * reference.wide(l)
        want = reference.wide(draw) + np.where(draw.numpy() < 0, 2 * linear, 0)
        effective = layer.get_effective_weight("default").detach()
        # the bound of the congruent rule, whose terms these are: |draw| = |E| + |L|
        bound = (4 + 1.2 * beta * abs(want_raw)) * EPS * abs(reference.wide(draw))
        assert (abs(reference.wide(effective) - want) <= bound).all()
        weakened = 1 - (effective / draw)[draw < 0]
        assert weakened.min() > 0.03  # the linear path's share is no rounding error


def test_modules_are_drawn_with_torchs_fans_and_embeddings_keep_their_values() -> None:
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(6, 8, (3, 5), groups=2), "conv1d": Conv1D(24, 40), "embed": nn.Embedding(50, 16)}
    )
    table = model["embed"].weight.detach().clone()
    names = ["conv", "conv1d", "embed"]
    converted = convert(model, target_modules=names, mode="congruent")
    torch.manual_seed(7)
    want = [nn.init.xavier_uniform_(torch.empty(8, 3, 3, 5)), nn.init.xavier_uniform_(torch.empty(40, 24)), table]
    for layer, draw in zip(layers(converted), want, strict=True):
        assert torch.allclose(layer.get_effective_weight("default"), draw, rtol=8 * EPS, atol=0)


def test_each_expert_is_a_draw_of_its_own() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = convert(make_moe(), target_modules=[], target_parameters=names, mode="congruent")
    assert layers(model)
    for layer in layers(model):
        stack = layer.get_effective_weight("default").detach()
        bound = math.sqrt(6 / (stack.shape[1] + stack.shape[2]))
        largest = stack.abs().amax((1, 2))
        assert (largest <= bound * (1 + 8 * EPS)).all() and (largest > 0.9 * bound).all()
        assert not torch.allclose(stack[0], stack[1])


def test_a_seed_gives_a_start_whatever_the_base_holds() -> None:
    first = convert(make_tiny("qwen3"))
    other_values = make_tiny("qwen3", torch.bfloat16)
    for same in (convert(make_tiny("qwen3")), convert(other_values)):
        for one, two in zip(layers(first), layers(same), strict=True):
            assert torch.equal(one.symexplin_raw["default"], two.symexplin_raw["default"])
            assert torch.equal(one.symexplin_beta["default"], two.symexplin_beta["default"])
    other = convert(make_tiny("qwen3"), seed=8)
    assert not torch.equal(layers(first)[0].symexplin_raw["default"], layers(other)[0].symexplin_raw["default"])


def test_a_float64_weight_is_drawn_in_float64_and_a_vector_stays() -> None:
    drawn = draw_target(scratch(), torch.zeros(6, 4, dtype=torch.float64))
    assert drawn.dtype == torch.float64 and not torch.equal(drawn, drawn.float().double())
    vector = torch.ones(4)
    assert draw_target(SELConfig(), drawn) is drawn and draw_target(scratch(), vector) is vector


def test_beta_follows_the_draw_or_the_width() -> None:
    auto = convert(make_tiny("qwen3"))
    for layer, draw in zip(layers(auto), draws(auto), strict=True):
        product = layer.symexplin_beta["default"].item() * draw.double().square().mean().sqrt().item()
        assert 0.23 <= product <= 0.36 and product == pytest.approx(0.3, rel=2 * EPS)
    width = convert(make_tiny("qwen3"), beta="width")  # from the configuration, also for the 32 x 48 weights
    betas = {layer.symexplin_beta["default"].item() for layer in layers(width)}
    assert betas == {torch.tensor(7.5 * (32 / 1024) ** 0.85).item()}


def test_the_base_stays_for_disable_adapter_and_unload() -> None:
    base = make_tiny("qwen3")
    before, tokens = clone_state(base), torch.arange(12)[None]
    logits = base(tokens).logits.detach()
    model = convert(base, r=2)
    train_steps(model)
    assert not torch.allclose(model(tokens).logits, logits)
    with model.disable_adapter():
        assert torch.equal(model(tokens).logits, logits)
    assert_same_bits(model.unload().state_dict(), before)


@pytest.mark.parametrize("base_weight", ["keep", "drop"])
def test_a_saved_adapter_loads_and_merges_on_any_base(tmp_path: Path, base_weight: str) -> None:
    model = convert(make_tiny("qwen3"), r=2, base_weight=base_weight)
    train_steps(model)
    model.save_pretrained(tmp_path / "adapter")
    config_class, model_class = FAMILIES["qwen3"]
    stranger = model_class(config_class(**make_tiny("qwen3").config.to_diff_dict()))
    stranger.save_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(stranger, tmp_path / "adapter")
    for one, two in zip(layers(model), layers(loaded), strict=True):
        effective = one.get_effective_weight("default")
        assert torch.equal(bits(effective), bits(two.get_effective_weight("default")))
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", progress=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for layer in layers(model):
        name = layer.module_name.removeprefix("base_model.model.")
        assert torch.equal(merged[f"{name}.weight"], layer.get_effective_weight("default"))


def test_from_scratch_the_multipliers_are_the_papers() -> None:
    model = convert(make_tiny("qwen3"), r=2, beta=7.5, offset="column", linear_scale={"lr_mult": 3.0})
    found = {group["role"]: (group["lr_mult"], group["lr_mult_end"]) for group in sel_param_groups(model, 1e-3)}
    assert found == {
        "raw": (1.0, 1.0),
        "exp_scale": (50.0, 8.0),
        "linear_scale": (3.0, 3.0),
        "inner_multiplier": (0.01, 0.5),
        "offset": (1.0, 1.0),
        "residual": (0.5 / 7.5, 0.5 / 7.5),
    }
    options = {"exp_scale": {"lr_mult_end": 2.0}, "residual_lr_mult": 4.0, "beta": 8.0, "r": 2}
    found = {g["role"]: (g["lr_mult"], g["lr_mult_end"]) for g in sel_param_groups(convert(make_tiny(), **options), 1)}
    assert found["exp_scale"] == (50.0, 2.0) and found["residual"] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_target": "xavier"}, r"init_target='xavier': unknown; .*xavier_uniform"),
        ({"train_raw": False}, r"init_target='xavier_uniform': train_raw=False rebuilds raw from the base weights"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scratch(**options)


def test_only_pretrained_targets_are_warned_of_the_congruent_rule() -> None:
    convert(make_tiny())  # a warning would be an error
    with pytest.warns(UserWarning, match="weakens the converted weights"):
        get_peft_model(make_tiny(), SELConfig(init="congruent"))


def test_a_converted_bias_keeps_its_own_values() -> None:
    base = make_tiny("qwen2")
    for name, tensor in base.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(tensor)
    biases = {name: tensor.clone() for name, tensor in base.named_parameters() if name.endswith("bias")}
    model = convert(base, bias="sel_only", mode="congruent")
    found = {layer.module_name: layer for layer in layers(model) if layer.parameter_name == "bias"}
    assert found.keys() == biases.keys() and len(found) == 6
    for name, layer in found.items():
        torch.testing.assert_close(layer.get_effective_weight("default").detach(), biases[name], rtol=8 * EPS, atol=0)
