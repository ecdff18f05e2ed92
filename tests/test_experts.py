"""Parameters named by target_parameters: the stacked experts of transformers, routers, and what else is no weight."""

from __future__ import annotations

import copy
import pickle
import warnings

import moe
import pytest
import reference
import torch
from models import assert_same_bits, bits, clone_state, fingerprint, make_tiny, ulp_distance
from moe import (
    FAMILIES,
    TARGETS,
    convert_moe,
    first_experts,
    logits,
    make_config,
    make_moe,
    parameter_layers,
    perturb,
)
from peft import get_layer_status, get_peft_model
from torch import Tensor, nn

from peft_sel import SELConfig, SELError
from peft_sel.experts import SELHolder, SELParameter

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_converting_and_merging_untrained_experts_returns_every_bit(family, dtype):
    base = make_moe(family, dtype)
    state, structure, expected = clone_state(base), str(base), logits(base)
    model = convert_moe(base)
    assert len(parameter_layers(model)) == 4  # 2 layers x (gate_up_proj, down_proj)
    assert all(layer.stack == (4,) for layer in parameter_layers(model))
    assert torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    merged = model.merge_and_unload()
    assert str(merged) == structure
    assert_same_bits(merged.state_dict(), state)


def test_float32_experts_return_within_the_promised_ulp():
    base = make_moe()
    state = clone_state(base)
    merged = convert_moe(base, r=0).merge_and_unload().state_dict()
    betas = {
        name: 0.3 / w.double().square().mean((1, 2), keepdim=True).sqrt() for name, w in state.items() if w.dim() == 3
    }
    for name, beta in betas.items():
        distance = ulp_distance(merged[name], state[name])
        assert bool((distance <= 4 + 1.2 * beta * state[name].abs()).all()), name  # SPEC: 4 + 1.2*z, z <= beta*|W|
    assert len(betas) == 4


def expand(layer: SELParameter, expert: int) -> list[object]:
    """The five scales of one expert by the oracle."""
    values: dict[str, object] = {"offset": 0.0, "shift": 0.0}
    for name, scale in layer.scales("default").items():
        parts = {part: value[expert] for part, value in scale.named_parameters()}
        values[name] = reference.expand(scale.pattern, parts)
    return [values[name] for name in reference.SCALES]


def member_weight(layer: SELParameter, expert: int) -> tuple[Tensor, Tensor]:
    """Effective weight of one expert by the oracle, and what the layer makes of it, both as (d_out, d_in)."""
    raw, config = layer.symexplin_raw["default"][expert], layer.sel_config["default"]
    matrix, beta = raw.T if layer.transposed else raw, float(layer.symexplin_beta["default"][expert])
    weight = reference.effective_weight(matrix, *expand(layer, expert), beta, config.mode)
    a, b = (reference.wide(t["default"][expert]) for t in (layer.symexplin_residual_a, layer.symexplin_residual_b))
    actual = layer.get_effective_weight("default", torch.float32)[expert].detach()
    weight = torch.from_numpy((weight + config.residual_scaling * b @ a).astype("float64"))
    return weight, actual.T if layer.transposed else actual


@pytest.mark.parametrize("pattern", ["row_col_mult", "row", "column", "global", "row_col_add", "lora"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_each_expert_is_a_matrix_with_its_own_curvature_scales_and_residual(family, pattern):
    base = make_moe(family)
    with torch.no_grad():
        first_experts(base).gate_up_proj[1] *= 30
    weight = first_experts(base).gate_up_proj.detach().double()
    model = convert_moe(base, exp_scale=pattern, residual_alpha=3.0)
    perturb(model)
    layer = parameter_layers(model)[0]
    rms = weight.square().mean((1, 2)).sqrt()
    torch.testing.assert_close(layer.symexplin_beta["default"].double(), 0.3 / rms, rtol=1e-6, atol=0)
    d_in, d_out = (32, 48)
    assert (layer.in_features, layer.out_features) == (d_in, d_out)
    assert tuple(layer.symexplin_residual_a["default"].shape) == (4, 2, d_in)
    assert tuple(layer.symexplin_residual_b["default"].shape) == (4, d_out, 2)
    for expert in range(4):
        expected, actual = member_weight(layer, expert)
        # The transform is good to a few ulp of its size, the residual's product to a few of its terms'.
        tolerance = 8 * torch.finfo(torch.float32).eps * (expected.abs() + 3 / 2)
        assert bool(((actual - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("autocast", [False, True])
def test_adapted_and_merged_agree_in_every_experts_implementation(implementation, autocast):
    base = make_moe("qwen3_moe", experts_implementation=implementation)
    assert base.config._experts_implementation == implementation
    plain = logits(base)
    model = convert_moe(base)
    perturb(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        adapted = logits(model)
        assert not torch.equal(adapted, plain)
        model.merge_adapter()
        assert torch.equal(logits(model), adapted)
        model.unmerge_adapter()
        assert torch.equal(logits(model.merge_and_unload()), adapted)


def test_the_gradient_of_raw_is_the_plain_gradient_times_the_slope():
    model = convert_moe(make_moe(), r=0)
    layer = parameter_layers(model)[0]
    raw = layer.symexplin_raw["default"]
    upstream = torch.randn(raw.shape)
    layer.get_effective_weight("default").backward(upstream)
    expert = 2
    beta = float(layer.symexplin_beta["default"][expert])
    expected = reference.gradients(upstream[expert], raw[expert], *expand(layer, expert), beta, "mismatch")["raw"]
    expected = torch.from_numpy(expected.astype("float64")).float()
    torch.testing.assert_close(raw.grad[expert], expected, rtol=1e-5, atol=1e-7)


def test_the_owner_gets_its_parameter_back_whatever_happens():
    model = convert_moe(make_moe())
    experts = first_experts(model)
    own = experts.base_layer.gate_up_proj
    with pytest.raises((TypeError, AttributeError)):
        experts(torch.zeros(1, 32))
    assert experts.base_layer.gate_up_proj is own
    assert experts.base_layer.num_experts == experts.num_experts == 4
    effective = parameter_layers(model)[0].get_effective_weight("default")
    assert torch.equal(experts.gate_up_proj, effective)  # a read from outside sees what runs


def test_a_hundred_merges_leave_the_base_alone():
    base = make_moe("qwen3_moe", torch.bfloat16)
    state, own = clone_state(base), [first_experts(base).gate_up_proj, first_experts(base).down_proj]
    plain, model = logits(base), convert_moe(base)
    perturb(model)
    adapted = logits(model)
    for _ in range(100):
        model.merge_adapter()
        model.unmerge_adapter()
    module = first_experts(model).base_layer
    assert module.gate_up_proj is own[0] and module.down_proj is own[1]
    assert torch.equal(logits(model), adapted)
    model.merge_adapter()
    assert all(status.merged_adapters == ["default"] for status in get_layer_status(model))
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.merge_adapter()
    assert_same_bits(model.unload().state_dict(), state)


def test_adapters_on_different_parameters_add_up_and_come_and_go():
    base = make_moe()
    state, plain = clone_state(base), logits(base)
    model = convert_moe(base, target_parameters=TARGETS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, that the model has adapters already
        model.add_adapter("other", make_config(mode="congruent", beta=2.0, r=0, exp_scale="row", train_raw=False))
    perturb(model), perturb(model, "other", seed=2)
    gate_up, down = parameter_layers(model)[:2]
    assert list(gate_up.sel_config) == ["default", "other"] and list(down.sel_config) == ["other"]
    alone = {}
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        alone[adapter] = logits(model)
        assert not torch.equal(alone[adapter], plain)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, p in model.named_parameters() if f".{adapter}" in n and ".symexplin_" in n
        }
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    own = gate_up.base_weight
    deltas = [gate_up.get_effective_weight(name, torch.float32) - own for name in ("default", "other")]
    assert torch.equal(first_experts(model).gate_up_proj, own + torch.stack(deltas).sum(0))
    model.merge_adapter(["other"])
    assert torch.equal(logits(model), both)  # default stays active
    with pytest.warns(UserWarning, match="additionally merging default"):
        model.merge_adapter()
    assert torch.equal(logits(model), both)
    model.unmerge_adapter()
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), alone["default"])
    assert [list(layer.sel_config) for layer in (gate_up, down)] == [["default"], []]
    assert_same_bits(model.unload().state_dict(), state)


def test_target_modules_of_a_second_adapter_do_not_reach_parameters_of_that_name():
    model = convert_moe(make_moe("qwen2_moe"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, that the model has adapters already
        model.add_adapter("other", SELConfig(target_modules=["down_proj"], r=2))
    assert all(list(layer.sel_config) == ["default"] for layer in parameter_layers(model))
    converted = [status.name for status in get_layer_status(model) if "other" in status.available_adapters]
    assert converted == [f"model.model.layers.{index}.mlp.shared_expert.down_proj" for index in (0, 1)]


@pytest.mark.parametrize("names", [TARGETS, TARGETS[:1]])
def test_dropping_the_base_frees_it_and_merges_the_same(names):
    kept = convert_moe(make_moe(), target_parameters=names)
    dropped = convert_moe(make_moe(), target_parameters=names, base_weight="drop")
    perturb(kept), perturb(dropped)
    assert first_experts(dropped).base_layer.gate_up_proj.numel() == 0
    assert torch.equal(logits(dropped), logits(kept))
    with pytest.raises(SELError, match="base_weight='keep'"), dropped.disable_adapter():
        pass
    dropped.merge_adapter()
    dropped.unmerge_adapter()
    assert_same_bits(dropped.merge_and_unload().state_dict(), kept.merge_and_unload().state_dict())


def test_copies_and_pickles_run_alike_and_apart():
    model = convert_moe(make_moe())
    perturb(model)
    expected = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), expected)
        perturb(twin, seed=3)
        assert not torch.equal(logits(twin), expected)
        twin.merge_adapter()
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.half().float()), expected) is False  # the base did lose bits
    assert all(layer.symexplin_raw["default"].dtype == torch.float32 for layer in parameter_layers(model))


def test_a_matrix_named_as_a_parameter_equals_its_module_named_as_a_target():
    torch.manual_seed(1)
    by_module = get_peft_model(make_tiny(), SELConfig(target_modules=["gate_proj"], r=2))
    torch.manual_seed(1)
    by_name = get_peft_model(make_tiny(), make_config(target_parameters=["gate_proj.weight"]))
    perturb(by_module), perturb(by_name)
    assert torch.equal(logits(by_name), logits(by_module))
    assert_same_bits(by_name.merge_and_unload().state_dict(), by_module.merge_and_unload().state_dict())


def test_a_router_is_converted_where_it_is_named_and_only_there():
    base = make_moe("qwen3_moe", torch.bfloat16)
    gate, expected = base.model.layers[0].mlp.gate.weight, logits(base)
    model = convert_moe(base)
    assert not isinstance(model.base_model.model.model.layers[0].mlp.gate, SELHolder) and not gate.requires_grad
    model = convert_moe(make_moe("qwen3_moe", torch.bfloat16), target_parameters=["mlp.gate.weight"])
    assert torch.equal(logits(model), expected)
    perturb(model)
    changed = logits(model)
    assert not torch.equal(changed, expected)
    assert torch.equal(logits(model.merge_and_unload()), changed)


class Mixer(nn.Module):
    """A module with a matrix, a vector and a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.randn(4, 4) ** 3), nn.Parameter(torch.ones(4))
        self.inner, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.table) * self.gain


@pytest.mark.parametrize(
    "targets", [{"target_modules": ["inner"]}, {"target_parameters": ["0.table", "0.inner.weight"]}], ids=str
)
def test_what_lies_inside_the_owner_may_be_a_target_too(targets):
    base = nn.Sequential(Mixer())
    state, x = clone_state(base), torch.randn(2, 4)
    model = get_peft_model(copy.deepcopy(base), make_config(**{"target_parameters": ["0.table"], **targets}))
    perturb(model)
    adapted = model(x)
    inner = model.base_model.model[0].base_layer.inner
    with torch.no_grad():
        layer = inner.sel_parameters.weight if isinstance(inner, SELHolder) else inner
        weight = layer.get_effective_weight("default")
        table = model.base_model.model[0].sel_parameters.table()
        by_hand = nn.functional.linear(x @ table, weight, state["0.inner.bias"]) * state["0.gain"]
    assert torch.equal(adapted, by_hand)
    assert torch.equal(copy.deepcopy(model).merge_and_unload()(x), adapted)
    restored = model.unload()
    assert [name for name, _ in restored.named_modules()] == [name for name, _ in base.named_modules()]
    assert_same_bits(restored.state_dict(), state)


CONFLICTS = {
    "layers": ({"layers_to_transform": [0]}, "layers_to_transform=.* name the layers there, as in '0.mlp.experts"),
    "excluded": ({"exclude_modules": ["experts"]}, "layers.0.mlp.experts.gate_up_proj is under exclude_modules"),
    "excluded by name": (
        {"exclude_modules": r".*down_proj"},
        "layers.0.mlp.experts.down_proj is under exclude_modules",
    ),
    "saved": ({"modules_to_save": ["mlp"]}, "layers.0.mlp.experts.gate_up_proj is under .* modules_to_save"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_fields_that_peft_would_ignore_are_refused(case):
    options, message = CONFLICTS[case]
    base = make_moe()
    before = fingerprint(base)
    with pytest.raises(SELError, match=message):
        convert_moe(base, **options)
    assert fingerprint(base) == before


REFUSED = {
    "unknown": (["mlp.experts.up_gate"], "target_parameters='mlp.experts.up_gate': is the end of no parameter's name"),
    "text": ("0.table", "target_parameters='0.table': give a list of names"),
    "root": (["top"], "Targeting an nn.Parameter on the top-level module is not supported"),
    "vector": (["0.gain"], r"target parameter 0.gain has the shape \(4,\)"),
    "kernel": (["0.conv.weight"], "target parameter 0.conv.weight is a convolution's kernel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_nothing_changes(case):
    names, message = REFUSED[case]
    base = nn.Sequential(Mixer())
    base.top = nn.Parameter(torch.randn(4, 4))
    before, state = fingerprint(base), clone_state(base)
    if isinstance(names, list) and case != "unknown":
        names = ["0.table", *names]
    with pytest.raises(ValueError if case == "root" else SELError, match=message):
        get_peft_model(base, make_config(target_modules=["inner"], target_parameters=names))
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)


@pytest.mark.parametrize("beside", [False, True])
def test_one_bad_expert_is_named_and_the_model_is_as_before(beside):
    base = make_moe()
    with torch.no_grad():
        base.model.layers[1].mlp.experts.down_proj[3, 1, 1] = float("nan")
    names = ["0.mlp.experts.down_proj"]
    owner = convert_moe(base, target_parameters=names) if beside else None
    before, state = fingerprint(base), clone_state(base)
    message = r"model.layers.1.mlp.experts.down_proj\[3\] holds 1 NaN"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, that the model has adapters already
        with pytest.raises(SELError, match=message):
            convert_moe(base) if owner is None else owner.add_adapter("other", make_config())
    assert fingerprint(base) == before
    assert all(torch.equal(bits(value), bits(state[name])) for name, value in base.state_dict().items())


@pytest.mark.parametrize("targets", ["all-linear", None])
def test_experts_left_alone_are_named_once_with_the_way_to_convert_them(targets):
    base = make_moe("mixtral")
    with pytest.warns(UserWarning, match="layers.0.mlp.experts.gate_up_proj") as caught:
        get_peft_model(base, SELConfig(target_modules=targets, r=0))
    assert sum("expert parameters" in str(warning.message) for warning in caught) == 1
    assert any(f"target_parameters={TARGETS}" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("targets", ["all-linear", None])
def test_experts_come_on_top_of_the_modules_that_are_chosen(targets):
    base = make_moe("qwen3_moe", torch.bfloat16)
    state = clone_state(base)
    model = get_peft_model(base, make_config(target_modules=targets))
    names = {status.name.rpartition(".")[2] for status in get_layer_status(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert_same_bits(model.merge_and_unload().state_dict(), state)


def test_beta_pattern_reaches_parameters():
    model = convert_moe(make_moe(), beta_pattern={r"0\.mlp\.experts\.gate_up_proj": 4.0})
    betas = [layer.symexplin_beta["default"] for layer in parameter_layers(model)]
    assert torch.equal(betas[0], torch.full((4,), 4.0)) and not (betas[2] == 4.0).any()


def test_experts_do_not_run_row_by_row() -> None:
    model = convert_moe(make_moe())
    with pytest.raises(
        SELError, match=r"adapter_names='default' meets the target parameter .*experts\.\w+_proj, .*one batch"
    ):
        model(moe.TOKENS, adapter_names=["default"] * len(moe.TOKENS))
