"""peft_sel.optim.groups: who is in which optimizer group, at which rate and decay (table of SPEC section 2)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer

from peft_sel import ScaleConfig, SELConfig, create_sel_optimizer, sel_param_groups
from peft_sel.errors import ConfigError, ParameterGroupError
from peft_sel.optim import check_param_groups

LR, DECAY = 2e-4, 0.01
PAPER = {
    "exp_scale": ScaleConfig(lr_mult=50.0, lr_mult_end=8.0),
    "linear_scale": ScaleConfig(lr_mult=50.0, lr_mult_end=8.0),
    "inner_multiplier": ScaleConfig(lr_mult=0.01, lr_mult_end=0.5),
    "residual_lr_mult": 0.5,
}
# SPEC section 2: k0, k1 of the paper, and what decays. The residual's k is further divided by its tensor's beta.
TABLE = {
    "raw": (1.0, 1.0, True),
    "exp_scale": (50.0, 8.0, True),
    "linear_scale": (50.0, 8.0, True),
    "inner_multiplier": (0.01, 0.5, False),
    "offset": (1.0, 1.0, False),
    "shift": (1.0, 1.0, False),
    "residual": (0.5, 0.5, True),
}


def make_base(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen2ForCausalLM:
    """A random Qwen2 of two layers, with biases on q, k and v that are not zero."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, **{**sizes, **options})
    model = Qwen2ForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


def make_model(**options: Any) -> PeftModel:
    return get_peft_model(make_base(), SELConfig(task_type="CAUSAL_LM", **options))


def groups_by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Map each trainable parameter's name to its group; fails unless each is in exactly one."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    members = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(names.values())
    return {names[id(parameter)]: group for group in groups for parameter in group["params"]}


def test_every_trainable_parameter_has_one_group_with_the_documented_settings() -> None:
    base = make_base()
    base.model.ln_extra = nn.LayerNorm(32)  # a norm by its class alone
    options = {"bias": "all", "modules_to_save": ["lm_head", "norm", "ln_extra"], "shift": "row", "offset": "column"}
    model = get_peft_model(base, SELConfig(r=4, anneal_steps=0.3, **options, **PAPER))
    assigned = groups_by_name(model, sel_param_groups(model, LR, DECAY))
    betas = dict(model.named_buffers())
    decayed_by_trainer = set(Trainer.get_decay_parameter_names(None, model))
    seen = {}
    for name, group in assigned.items():
        match = re.search(r"(.*)\.symexplin_(residual|[a-z_]+?)(_[ab])?\.default(\.\w+)?$", name)
        if match:
            role = match[2]
            k0, k1, decays = TABLE[role]
            if role == "residual":
                beta = betas[f"{match[1]}.symexplin_beta.default"].item()
                k0, k1 = k0 / beta, k1 / beta
            assert group["anneal_steps"] == 0.3
        else:
            role, k0, k1, decays = "other", 1.0, 1.0, name in decayed_by_trainer
        assert group["role"] == role
        assert (group["lr"], group["lr_mult"], group["lr_mult_end"]) == (LR * k0, k0, k1)
        assert group["weight_decay"] == (DECAY if decays else 0.0)
        seen[role] = seen.get(role, 0) + 1
    # 2 layers of 7 modules; scales and residual are pairs of tensors. Others: 6 biases, head, 5 norms, 2 of ln_extra
    assert seen == dict.fromkeys(("exp_scale", "linear_scale", "inner_multiplier", "residual"), 28) | {
        "raw": 14,
        "offset": 14,
        "shift": 14,
        "other": 14,
    }
    outside = {name: group["weight_decay"] for name, group in assigned.items() if group["role"] == "other"}
    assert {name for name, decay in outside.items() if decay} == {
        "base_model.model.lm_head.modules_to_save.default.weight"
    }
    assert {name.rpartition(".")[2] for name, decay in outside.items() if not decay} == {"bias", "weight"}


def test_groups_are_few_and_ordered_by_role() -> None:
    groups = sel_param_groups(make_model(r=2, bias="all", modules_to_save=["lm_head"]), LR)
    roles = [group["role"] for group in groups]
    assert roles[:4] == ["raw", "exp_scale", "linear_scale", "inner_multiplier"]
    assert roles[4:-2] == ["residual"] * 14  # auto: one beta per tensor
    assert roles[-2:] == ["other", "other"]
    assert groups[0]["lr"] == LR  # the rate that a stock Trainer logs
    one_beta = sel_param_groups(make_model(r=2, beta=7.5), LR)
    assert [group["role"] for group in one_beta] == ["raw", "exp_scale", "linear_scale", "inner_multiplier", "residual"]


def test_scale_config_overrides_the_decay_and_fixed_scales_have_no_group() -> None:
    model = make_model(
        r=0,
        exp_scale=ScaleConfig(weight_decay=False),
        linear_scale=None,
        inner_multiplier=ScaleConfig(weight_decay=True, lr_mult=3.0),
        offset=ScaleConfig("global", trainable=False),
    )
    groups = sel_param_groups(model, LR, DECAY)
    assert [(group["role"], group["weight_decay"], group["lr_mult"]) for group in groups] == [
        ("raw", DECAY, 1.0),
        ("exp_scale", 0.0, 1.0),
        ("inner_multiplier", DECAY, 3.0),
    ]
    groups_by_name(model, groups)


def test_train_raw_false_leaves_scales_and_residual() -> None:
    groups = sel_param_groups(make_model(train_raw=False, r=2, beta=5.0), LR)
    assert [group["role"] for group in groups] == ["exp_scale", "linear_scale", "inner_multiplier", "residual"]
    assert groups[-1]["lr_mult"] == 1 / 5.0


def test_adapters_keep_their_own_settings_and_share_groups_where_they_agree() -> None:
    model = make_model(r=0, beta=7.5, target_modules=["q_proj"])
    other = SELConfig(
        task_type="CAUSAL_LM", r=0, beta=7.5, target_modules=["q_proj"], exp_scale=ScaleConfig("row", lr_mult=50.0)
    )
    model.add_adapter("second", other)
    model.base_model.set_adapter(["default", "second"])
    groups = sel_param_groups(model, LR)
    assert [(group["role"], group["lr_mult"], len(group["params"])) for group in groups] == [
        ("raw", 1.0, 4),
        ("exp_scale", 1.0, 4),
        ("exp_scale", 50.0, 2),
        ("linear_scale", 1.0, 8),
        ("inner_multiplier", 1.0, 8),
    ]
    groups_by_name(model, groups)
    model.set_adapter("second")  # the first one is frozen now
    assert sum(len(group["params"]) for group in sel_param_groups(model, LR)) == 2 + 2 + 4 + 4


def test_one_step_and_the_whole_run_are_different_settings() -> None:
    model = make_model(r=0, target_modules=["q_proj"], anneal_steps=1)
    config = SELConfig(task_type="CAUSAL_LM", r=0, target_modules=["q_proj"], anneal_steps=1.0)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    kinds = [type(group["anneal_steps"]) for group in sel_param_groups(model, LR) if group["role"] == "raw"]
    assert kinds == [int, float]


def test_shared_parameters_count_once() -> None:
    model = make_model(r=0)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    model.base_model.model.model.layers[1].self_attn.q_proj = layer
    groups_by_name(model, sel_param_groups(model, LR))
    optimizer = create_sel_optimizer(model, lr=LR)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter is layer.symexplin_raw["default"] for parameter in members) == 1


def test_groups_are_the_same_in_a_second_process_and_survive_state_dict() -> None:
    options = {"r": 2, "bias": "all", "modules_to_save": ["lm_head", "norm"], **PAPER}
    first, second = make_model(**options), make_model(**options)

    def describe(groups: list[dict[str, Any]], model: nn.Module) -> list[Any]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [{**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in groups]

    optimizer, other = create_sel_optimizer(first, lr=LR), create_sel_optimizer(second, lr=10 * LR, weight_decay=0.5)
    assert describe(sel_param_groups(first, LR), first) == describe(sel_param_groups(second, LR), second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert describe(other.param_groups, second) == describe(optimizer.param_groups, first)


def test_optimizer_takes_other_classes_and_options() -> None:
    model = make_model(r=2)
    adam = create_sel_optimizer(model, lr=LR, betas=(0.8, 0.95), eps=1e-6)
    assert {(group["betas"], group["eps"]) for group in adam.param_groups} == {((0.8, 0.95), 1e-6)}
    sgd = create_sel_optimizer(model, torch.optim.SGD, lr=LR, weight_decay=0.2, momentum=0.9)
    assert type(sgd) is torch.optim.SGD
    assert [group["lr"] for group in sgd.param_groups] == [group["lr"] for group in adam.param_groups]
    assert {group["weight_decay"] for group in sgd.param_groups} == {0.2, 0.0}


@pytest.mark.parametrize("lr", [0.0, -1e-3, float("nan"), float("inf")])
def test_learning_rate_must_be_positive(lr: float) -> None:
    with pytest.raises(ConfigError, match=r"^lr="):
        create_sel_optimizer(make_model(r=0), lr=lr)


def test_weight_decay_must_not_be_negative() -> None:
    with pytest.raises(ConfigError, match=r"^weight_decay=-0\.1"):
        sel_param_groups(make_model(r=0), LR, -0.1)


def test_a_model_without_trainable_sel_parameters_is_an_error() -> None:
    with pytest.raises(ParameterGroupError, match=r"no trainable SEL parameter; convert it with get_peft_model"):
        create_sel_optimizer(make_base(), lr=LR)
    frozen = make_model(r=0).requires_grad_(False)
    frozen.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ParameterGroupError, match="is_trainable=True"):
        create_sel_optimizer(frozen, lr=LR)


def test_a_sel_tensor_without_a_role_is_an_error() -> None:
    model = make_model(r=0)
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    layer.symexplin_novelty = nn.ParameterDict({"default": nn.Parameter(torch.zeros(3))})
    with pytest.raises(ParameterGroupError, match=r"layers\.1\.mlp\.up_proj\.symexplin_novelty\.default is trainable"):
        sel_param_groups(model, LR)


def test_check_names_the_parameters_that_are_missing_or_doubled() -> None:
    model = make_model(r=0)
    groups = sel_param_groups(model, LR)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lost = groups[0]["params"].pop()
    with pytest.raises(ParameterGroupError, match=re.escape(names[id(lost)])):
        check_param_groups(model, groups)
    groups[0]["params"] += [lost, lost]
    with pytest.raises(ParameterGroupError, match=re.escape(names[id(lost)])):
        check_param_groups(model, groups)
    groups[0]["params"].pop()
    check_param_groups(model, groups)
    frozen = model.base_model.model.lm_head.weight
    groups[0]["params"].append(frozen)
    with pytest.raises(ParameterGroupError, match=r"lm_head\.weight"):
        check_param_groups(model, groups)


def test_sel_param_groups_checks_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft_sel.optim import groups

    make_group = groups._make_group
    monkeypatch.setattr(groups, "_make_group", lambda s, parameters, *rest: make_group(s, parameters[1:], *rest))
    with pytest.raises(ParameterGroupError, match="not in exactly one group"):
        sel_param_groups(make_model(r=0), LR)


def mup_scale(name: str, parameter: nn.Parameter) -> float:
    """A muP-like rule with three values: 32/fan_in for raw weights, 2 for exp_scale, 1 elsewhere."""
    if ".symexplin_raw." in name:
        return 32 / parameter.shape[1]
    return 2.0 if ".symexplin_exp_scale." in name else 1.0


def test_lr_scale_multiplies_the_roles_own_multipliers() -> None:
    model = make_model(r=2, beta=5.0, **PAPER)
    called = []

    def record(name: str, parameter: nn.Parameter) -> float:
        called.append((name, id(parameter)))
        return mup_scale(name, parameter)

    optimizer = create_sel_optimizer(model, lr=LR, weight_decay=DECAY, lr_scale=record)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert called == [(name, id(parameter)) for name, parameter in trainable]
    assigned = groups_by_name(model, optimizer.param_groups)
    for name, parameter in trainable:
        role = assigned[name]["role"]
        k0, k1, decays = TABLE[role]
        factor = mup_scale(name, parameter) / (5.0 if role == "residual" else 1.0)
        assert assigned[name]["lr_mult"] == pytest.approx(k0 * factor)
        assert assigned[name]["lr_mult_end"] == pytest.approx(k1 * factor)
        assert assigned[name]["lr"] == pytest.approx(LR * k0 * factor)
        assert assigned[name]["weight_decay"] == (DECAY if decays else 0.0)
    # one group per multiplier: fan_in is 32, or 48 for down_proj, and the other roles have one rate each
    assert [group["role"] for group in optimizer.param_groups].count("raw") == 2
    assert len(optimizer.param_groups) == 6
    # and both come to the weights: with gradients of 1, a step of SGD is the rate
    before = {name: parameter.detach().clone() for name, parameter in trainable}
    sgd = create_sel_optimizer(model, torch.optim.SGD, lr=LR, weight_decay=0.0, lr_scale=mup_scale)
    for _, parameter in trainable:
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    for name, parameter in trainable:
        torch.testing.assert_close(parameter.detach(), before[name] - assigned[name]["lr"])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None, "fast"])
def test_lr_scale_that_returns_no_positive_number_names_the_parameter(value: Any) -> None:
    model = make_model(r=0)
    with pytest.raises(
        ConfigError, match=r"^lr_scale=.*: for \S*layers.1.mlp.down_proj\.symexplin_raw\.default it must"
    ):
        sel_param_groups(model, LR, lr_scale=lambda name, _: value if "1.mlp.down_proj.symexplin_raw" in name else 1.0)
