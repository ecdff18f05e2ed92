"""bias="sel_only": biases of target modules in SEL space, from conversion to merge, beside the weights' adapters."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from biased import TOKENS, convert, logits, make_biased, perturb
from models import assert_same_bits, bits, clone_state, make_tiny, train_steps, ulp_distance
from peft import get_peft_model
from test_layer_types import LAYERS
from torch import nn
from torch.func import functional_call

from peft_sel import ScaleConfig, SELConfig, SELError, sel_param_groups
from peft_sel.experts import SELParameter
from peft_sel.logs import collect_scale_means
from peft_sel.lora import save_as_lora
from peft_sel.modules import SELModule, choose_layer_class
from peft_sel.shapes import vector_config

MODES = ["mismatch", "congruent", "oppose", "exp_only"]
KINDS = {"linear": (lambda: nn.Linear(4, 6), lambda: torch.randn(2, 3, 4)), **LAYERS}
BIASED_KINDS = ["linear", "Conv1D", "Conv1d", "Conv3d"]
BIAS_NAMES = [f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in "qkv"]


def bias_layers(model: nn.Module) -> list[SELParameter]:
    return [module for module in model.modules() if isinstance(module, SELParameter)]


def make_layer(kind: str, dtype: torch.dtype = torch.float32, **options: object) -> tuple[SELModule, torch.Tensor]:
    make, make_input = KINDS[kind]
    base, inputs = make().to(dtype), make_input().to(dtype)
    with torch.no_grad():
        base.bias.copy_(10 * torch.randn(base.bias.shape))
    config = SELConfig(r=2, bias="sel_only", **options)
    return choose_layer_class("x", base)(base, "default", config, name="x"), inputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_biases_come_back_bit_for_bit(dtype, mode):
    base = make_biased(dtype=dtype)
    state, plain = clone_state(base), logits(base)
    model = convert(base, mode=mode)
    assert len(bias_layers(model)) == len(BIAS_NAMES)
    assert torch.equal(logits(model), plain)
    assert_same_bits(model.merge_and_unload().state_dict(), state)


@pytest.mark.parametrize("mode", MODES)
def test_float32_biases_come_back_within_the_bound(mode):
    base = make_biased()
    state = clone_state(base)
    model = convert(base, mode=mode, beta=7.5)
    raw = {f"{layer.module_name}": layer.symexplin_raw["default"].detach() for layer in bias_layers(model)}
    merged = model.merge_and_unload().state_dict()
    assert sorted(raw) == sorted(BIAS_NAMES)
    for name, value in raw.items():
        assert bool((ulp_distance(merged[name], state[name]) <= 4 + 1.2 * 7.5 * value.abs()).all()), name
        assert torch.equal(merged[name].signbit(), state[name].signbit())


def test_beta_is_the_biases_own():
    base = make_biased()
    rms = {name: float(base.get_parameter(name).detach().double().square().mean().sqrt()) for name in BIAS_NAMES}
    model = convert(base, beta_pattern={r"0.*q_proj\.bias": 0.5, "k_proj": 6.0})
    for layer in bias_layers(model):
        expected = 0.5 if layer.module_name == BIAS_NAMES[0] else 0.3 / rms[layer.module_name]
        assert float(layer.symexplin_beta["default"]) == pytest.approx(expected, rel=1e-6)
    assert float(model.get_submodule(f"base_model.model.{BIAS_NAMES[1][:-5]}").symexplin_beta["default"]) == 6.0


def test_a_bias_of_zeros_takes_the_width_rule_and_says_so():
    base = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(base[0].bias)
    with pytest.warns(UserWarning, match=r"0\.bias is all zeros.*width rule"):
        model = get_peft_model(base, SELConfig(target_modules=["0"], bias="sel_only"))
    layer = bias_layers(model)[0]
    assert float(layer.symexplin_beta["default"]) == pytest.approx(7.5 * (3 / 1024) ** 0.85)
    layer.get_effective_weight("default").sum().backward()
    assert bool((layer.symexplin_raw["default"].grad != 0).all())


def test_scales_of_a_vector():
    scales = {"exp_scale": "row", "linear_scale": "column", "inner_multiplier": "row_col_mult", "shift": "row_col_add"}
    config = SELConfig(bias="sel_only", offset=ScaleConfig("lora", init=0.2, lr_mult=3.0), **scales, r=4)
    resolved = {name: scale.pattern for name, scale in vector_config(config).scale_configs().items()}
    assert list(resolved.values()) == ["row", "global", "global", "row", "row"]
    assert vector_config(config).offset == ScaleConfig("row", init=0.2, lr_mult=3.0)
    layer = convert(make_biased(), offset="column").get_submodule(f"base_model.model.{BIAS_NAMES[0][:-5]}").bias_layer
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes.pop("symexplin_raw.default") == (32,)
    assert set(shapes.values()) == {(1,)} and len(shapes) == 4


@pytest.mark.parametrize("mode", ["mismatch", "congruent", "oppose"])
@pytest.mark.parametrize("kind", BIASED_KINDS)
def test_gradients_are_the_oracles(kind, mode):
    scales = {"exp_scale": "row", "inner_multiplier": ScaleConfig("row", transform="exp"), "shift": "global"}
    options = {"offset": "column", "beta": 0.05, "mode": mode, "raw_dtype": "float64", "init_weights": False}
    layer, inputs = make_layer(kind, torch.float64, **options, **scales)
    bias = layer.bias_layer
    with torch.no_grad():
        bias.symexplin_raw["default"][:2] = torch.tensor([0.0, -0.0])
        bias.symexplin_shift["default"].value.fill_(0.05)
    outputs = layer(inputs)
    direction = torch.randn_like(outputs)
    (outputs * direction).sum().backward()
    channels = -1 if kind in ("linear", "Conv1D") else 1
    pulled = direction.movedim(channels, -1).reshape(-1, bias.out_features).sum(0)
    raw = bias.symexplin_raw["default"]
    parts = {name: scale.parts(bias.symexplin_beta["default"]) for name, scale in bias.scales("default").items()}
    values = {name: next(iter(part.values())).detach() for name, part in parts.items()}
    arguments = [values[name] for name in reference.SCALES]
    beta = float(bias.symexplin_beta["default"])
    expected = reference.gradients(pulled, raw, *arguments, beta, mode)
    folded = reference.effective_weight(raw, *arguments, beta, mode)
    base = layer.get_base_layer()
    plain = functional_call(
        base, {"weight": layer.get_effective_weight("default"), "bias": torch.tensor(folded.astype(float))}, (inputs,)
    )
    torch.testing.assert_close(outputs, plain, rtol=1e-12, atol=1e-12)  # float64
    tolerance = {"rtol": 1e-6, "atol": 1e-7}  # steps of 1e-6 in long double
    torch.testing.assert_close(raw.grad, torch.tensor(expected["raw"].astype(float)), **tolerance)
    for name, scale in bias.scales("default").items():
        gradient = torch.tensor(expected[name].astype(float))
        gradient = gradient * values[name] if scale.config.transform == "exp" else gradient
        wanted = gradient if scale.pattern == "row" else gradient.sum(0, keepdim=True)
        torch.testing.assert_close(next(scale.parameters()).grad, wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BIASED_KINDS)
def test_adapted_equals_merged_and_merges_come_undone(kind, dtype):
    layer, inputs = make_layer(kind, dtype, init_weights=False)
    base = layer.get_base_layer()
    kept, original = (base.weight, base.bias), [bits(base.weight).clone(), bits(base.bias).clone()]
    model = nn.Sequential(layer)
    adapted = model(inputs)
    own_bias = functional_call(base, {"weight": layer.get_effective_weight("default")}, (inputs,))
    assert not torch.equal(adapted, own_bias)
    for _ in range(100):
        layer.merge(), layer.bias_layer.merge()
        assert not torch.equal(base.bias, kept[1])
        layer.unmerge(), layer.bias_layer.unmerge()
    assert (base.weight is kept[0], base.bias is kept[1]) == (True, True)
    assert torch.equal(bits(base.weight), original[0]) and torch.equal(bits(base.bias), original[1])
    layer.merge()  # of the weight alone
    assert torch.equal(model(inputs), adapted)
    layer.bias_layer.merge()
    assert torch.equal(model(inputs), adapted)
    assert list(base._parameters) == ["weight", "bias"]
    layer.enable_adapters(False)
    assert torch.equal(model(inputs), base(inputs)) and base.bias is kept[1]


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"base_weight": "drop"}])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_model_merges_without_a_bit_of_difference(family, options):
    base = make_biased(family)
    state, plain = clone_state(base), logits(base)
    model = convert(base, **options)
    perturb(model)
    adapted = logits(model)
    assert not torch.equal(adapted, plain)
    model.merge_adapter(safe_merge=True)
    assert torch.equal(logits(model), adapted)
    model.unmerge_adapter()
    assert torch.equal(logits(model), adapted)
    if options == {"base_weight": "drop"}:
        for layer in bias_layers(model):  # small, and kept
            assert torch.equal(bits(layer.base_weight), bits(state[layer.module_name]))
        with pytest.raises(SELError, match="disable_adapter"), model.disable_adapter():
            pass
    else:
        with model.disable_adapter():  # and no warning of PEFT's that it would not be the base model
            assert torch.equal(logits(model), plain)
        assert_same_bits(copy.deepcopy(model).unload().state_dict(), state)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), adapted)
    assert list(merged.state_dict()) == list(state)
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, state[name])}
    biases = {name for name in changed if name.endswith("bias")}
    targets = ("q_proj", "k_proj", "v_proj") if family == "qwen2" else ("c_attn", "c_fc")
    assert biases == {name for name in state if name.endswith("bias") and name.split(".")[-2] in targets}


def test_base_biases_stay_frozen_and_unchanged():
    base = make_biased()
    state = clone_state(base)
    model = convert(base)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".symexplin_" in name for name in trained)
    assert sum("sel_parameters.bias." in name for name in trained) == 6 * 4  # raw and three scales
    before = clone_state(model)
    train_steps(model, 3)
    after = model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert (
        moved <= trained and {name for name in trained if "v_proj.sel_parameters.bias.symexplin_raw" in name} <= moved
    )
    model.set_adapter("default")
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert_same_bits(model.unload().state_dict(), state)


def test_every_bias_parameter_has_its_group():
    model = convert(make_biased(), linear_scale=ScaleConfig(lr_mult=5.0, weight_decay=False), shift="row")
    groups = sel_param_groups(model, 1e-3, weight_decay=0.1)
    found = {id(p): (g["role"], g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    expected = {
        "raw": (1e-3, 0.1),
        "exp_scale": (1e-3, 0.1),
        "linear_scale": (5e-3, 0.0),
        "inner_multiplier": (1e-3, 0.0),
        "shift": (1e-3, 0.0),
    }
    for layer in bias_layers(model):
        for name, parameter in layer.named_parameters():
            role = name.split(".")[0].removeprefix("symexplin_")
            assert found.pop(id(parameter)) == (role, *expected[role])
    names = {f"exp_scale/{name}_proj.bias" for name in "qkv"}
    assert names == {name for name in collect_scale_means(model) if "bias" in name and name.startswith("exp_scale")}
    means = [collect_scale_means(model)[name] for name in names]
    assert means == pytest.approx([1.0] * 3, rel=1e-7)  # float32 against the start in float64


def test_adapters_with_other_settings_of_bias():
    base = make_biased()
    state, plain = clone_state(base), logits(base)
    model = convert(base, bias="none", target_modules=["q_proj", "k_proj"])
    options = {"r": 0, "target_modules": ["q_proj", "v_proj"], "bias": "sel_only"}
    model.add_adapter("other", SELConfig(mode="congruent", beta=0.1, **options))
    model.add_adapter("third", SELConfig(train_raw=False, **options))
    alone = {}
    for seed, adapter in enumerate(("default", "other", "third")):
        perturb(model, adapter, seed)
        model.set_adapter(adapter)
        alone[adapter] = logits(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert all(f".{adapter}" in name for name in trained)
        assert any("sel_parameters.bias" in name for name in trained) is (adapter != "default")
    query = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    model.base_model.set_adapter(["default", "other", "third"])
    together = logits(model)
    own = query.get_base_layer().bias
    deltas = [query.bias_layer.get_effective_weight(name) - own for name in ("other", "third")]
    assert torch.equal(query.bias_layer(), own + torch.stack(deltas).sum(0))
    model.merge_adapter(["other"])
    torch.testing.assert_close(logits(model), together)  # the sums have another order
    model.unmerge_adapter()
    assert torch.equal(logits(model), together)
    names = ["third", "__base__", "default", "other", "third"]
    mixed = model(TOKENS[[0, 0, 0, 0, 1]], adapter_names=names).logits
    for row, name in ((1, "__base__"), (2, "default"), (3, "other")):
        torch.testing.assert_close(mixed[row], (plain if name == "__base__" else alone[name])[0])
    torch.testing.assert_close(mixed[[0, 4]], alone["third"])
    model.set_adapter("other")
    with pytest.warns(UserWarning, match="'default' is now"):
        model.delete_adapter("other")
    assert torch.equal(logits(model), alone["default"])
    model.set_adapter("third")
    assert torch.equal(logits(model), alone["third"])
    model.delete_adapter("default")
    assert torch.equal(logits(model), alone["third"])
    assert_same_bits(model.unload().state_dict(), state)


def test_a_bias_joins_the_active_adapter_whatever_its_name():
    base = nn.Linear(4, 6)
    layer = choose_layer_class("x", base)(base, "mine", SELConfig(bias="sel_only", r=0, init_weights=False), name="x")
    inputs = torch.randn(2, 4)
    own = [layer.get_effective_weight("mine"), layer.bias_layer.get_effective_weight("mine")]
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, *own))


@pytest.mark.parametrize("kind", BIASED_KINDS)
def test_rows_have_the_bias_of_their_adapter(kind):
    layer, inputs = make_layer(kind, init_weights=False)
    layer.update_layer("plain", SELConfig(r=2, init_weights=False))
    layer.update_layer("other", SELConfig(r=0, bias="sel_only", beta=0.1, init_weights=False))
    inputs, names = torch.cat([inputs] * 4)[:4], ["other", "plain", "default", "__base__"]
    mixed = layer(inputs, adapter_names=names)
    for row, name in enumerate(names[:-1]):
        layer.set_adapter(name)
        layer.bias_layer.set_adapter(name)
        assert torch.equal(mixed[[row]], layer(inputs[[row]])), name
    assert torch.equal(mixed[[3]], layer.base_layer(inputs[[3]]))


def test_a_bias_that_cannot_be_converted_leaves_the_model_as_it_was():
    base = make_biased()
    base.model.layers[1].self_attn.v_proj.bias.data[3] = torch.nan
    state, modules, flags = clone_state(base), str(base), [p.requires_grad for p in base.parameters()]
    with pytest.raises(SELError, match=r"layers\.1\.self_attn\.v_proj\.bias holds 1 NaN"):
        convert(base)
    assert_same_bits(base.state_dict(), state)
    assert (str(base), [p.requires_grad for p in base.parameters()]) == (modules, flags)
    model = convert(base, bias="none")
    before, modules = clone_state(model), str(model)
    with pytest.raises(SELError, match=r"v_proj\.bias holds 1 NaN"):
        model.add_adapter("other", SELConfig(bias="sel_only", r=0))
    assert_same_bits(model.state_dict(), before)
    assert str(model) == modules


def test_modules_without_a_bias_and_of_one_output():
    base = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 1), nn.LayerNorm(1))
    nn.init.constant_(base[1].bias, -3.0)
    plain = base(torch.ones(2, 4))
    model = get_peft_model(base, SELConfig(target_modules=["0", "1"], bias="sel_only", init_weights=True))
    assert [layer.module_name for layer in bias_layers(model)] == ["1.bias"]
    assert bias_layers(model)[0].symexplin_raw["default"].shape == (1,)
    torch.testing.assert_close(model(torch.ones(2, 4)), plain)
    merged = model.merge_and_unload()
    assert (merged[1].bias.shape, type(merged[0]), type(merged[2])) == ((1,), nn.Linear, nn.LayerNorm)


def test_all_trains_the_base_biases_plainly_as_before():
    model = convert(make_biased(), bias="all")
    assert not bias_layers(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(name.endswith("base_layer.bias") for name in trained) == len(BIAS_NAMES)
    before, modules = clone_state(model), str(model)
    with pytest.raises(ValueError, match="supports only 1 adapter with bias"):
        model.add_adapter("other", SELConfig(bias="sel_only", r=0))
    assert_same_bits(model.state_dict(), before)
    assert str(model) == modules


def test_casts_reach_the_base_bias_only_merged_or_not():
    model = convert(make_biased())
    perturb(model)
    raw = clone_state(bias_layers(model)[0])
    expected = {name: make_biased().get_parameter(name).half() for name in BIAS_NAMES}
    model.merge_adapter()
    model.half()
    model.unmerge_adapter()
    assert_same_bits(bias_layers(model)[0].state_dict(), raw)
    unloaded = model.unload()
    assert all(torch.equal(unloaded.get_parameter(name), value) for name, value in expected.items())


def test_what_is_refused(tmp_path):
    with pytest.raises(SELError, match=r"q_proj\.bias is a bias, and a LoRA adapts matrices"):
        save_as_lora(tmp_path / "lora", convert(make_biased()), rank=2)
    with pytest.raises(SELError, match="adapter 'bias' has a name that names biases"):
        get_peft_model(make_tiny(), SELConfig(), adapter_name="bias")
    with pytest.raises(SELError, match="matches no target module"):
        convert(make_biased(), bias="none", beta_pattern={r"q_proj\.bias": 1.0})
