"""Stacked experts in training: gradient checkpointing, optimizer groups, logged scales, scales alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import assert_same_bits, train_steps
from moe import TARGETS, TOKENS, convert_moe, logits, make_moe, parameter_layers, perturb
from torch import Tensor

from peft_sel import ScaleConfig, create_sel_optimizer, sel_param_groups
from peft_sel.logs import collect_scale_means


def gradients(reentrant: bool | None) -> dict[str, Tensor]:
    model = convert_moe(make_moe("qwen2_moe"), target_parameters=[*TARGETS, "mlp.gate.weight"])
    perturb(model)
    model.train()
    if reentrant is not None:
        model.enable_input_require_grads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name is that of both transformers 5.10 and 5.24
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if ".symexplin_" not in name)
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    expected = gradients(None)
    assert all(bool(grad.abs().sum() > 0) for grad in expected.values())
    assert_same_bits(gradients(reentrant), expected)


def test_every_stacked_parameter_is_in_one_group_and_trains():
    options = {"exp_scale": ScaleConfig(lr_mult=50.0, lr_mult_end=8.0), "linear_scale": "lora", "residual_lr_mult": 0.5}
    model = convert_moe(make_moe(), target_parameters=[*TARGETS, "mlp.gate.weight"], **options)
    assert collect_scale_means(model)["exp_scale/gate_up_proj"] == pytest.approx(1.0, abs=1e-5)
    assert collect_scale_means(model)["linear_scale/down_proj"] == pytest.approx(1.0, abs=1e-5)
    groups = sel_param_groups(model, 1e-3)
    rates = {id(p): (group["role"], group["lr"]) for group in groups for p in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups)
    assert len(rates) == sum(p.requires_grad for p in model.parameters())
    for layer in parameter_layers(model):
        mean = layer.symexplin_beta["default"].double().log().mean().exp().item()
        assert rates[id(layer.symexplin_residual_b["default"])] == ("residual", pytest.approx(5e-4 / mean, rel=1e-6))
        assert rates[id(layer.symexplin_exp_scale["default"].row)] == ("exp_scale", 1e-3 * 50)
    optimizer = create_sel_optimizer(model, lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(2):  # A moves once B is no longer zero
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_training_with_frozen_raw_moves_the_scales_alone():
    model = convert_moe(make_moe(), train_raw=False, r=0)
    assert not any(".symexplin_raw" in name for name, _ in model.named_parameters())
    before = [layer.symexplin_raw_frozen["default"].clone() for layer in parameter_layers(model)]
    expected = logits(model)
    train_steps(model, 2)
    assert not torch.equal(logits(model), expected)
    after = [layer.symexplin_raw_frozen["default"] for layer in parameter_layers(model)]
    assert all(map(torch.equal, before, after))
