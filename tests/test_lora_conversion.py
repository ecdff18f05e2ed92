"""save_as_lora: the best low-rank fit of an adapter, by the singular values alone, and its error."""

from __future__ import annotations

import pytest
import torch
from models import NUM_TARGETS, TOKENS, make_tiny, train_steps
from peft import PeftModel, convert_to_lora, get_peft_model
from test_layer_types import make_gpt2
from torch import nn

from peft_sel import SELConfig, SELError, SELLayer, save_as_lora


def convert(model: nn.Module, **options: object) -> PeftModel:
    return get_peft_model(model, SELConfig(**{"task_type": "CAUSAL_LM", "r": 2, **options}))


def tails(model: nn.Module, rank: int) -> dict[str, tuple[float, float]]:
    """The squared norm of each delta beyond its largest singular values, and all of it, from merged weights."""
    before = {name: p.detach().double().clone() for name, p in model.named_parameters() if "base_layer.weight" in name}
    model.merge_adapter()
    after = {name: p.detach().double().clone() for name, p in model.named_parameters() if name in before}
    model.unmerge_adapter()
    values = {name: torch.linalg.svdvals(after[name] - before[name]) ** 2 for name in before}
    return {name: (float(value[rank:].sum()), float(value.sum())) for name, value in values.items()}


@pytest.mark.parametrize("options", [{}, {"exclude_modules": ["o_proj"]}, {"target_modules": r".*\.[qv]_proj"}])
def test_error_is_that_of_the_singular_values_and_full_rank_is_the_model(options, tmp_path):
    model = convert(make_tiny(), **options)
    train_steps(model, 3, lr=0.3)
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    fit = save_as_lora(tmp_path / "low", model, rank=4)
    squares = tails(model, 4)
    relative = {name: (tail / total) ** 0.5 for name, (tail, total) in squares.items()}
    tail, total = (sum(column) for column in zip(*squares.values(), strict=True))
    # float32 deltas and products: 1e-7 of the weights, which are some 10 times the deltas
    assert fit.relative_error == pytest.approx((tail / total) ** 0.5, rel=1e-3)
    assert fit.largest_relative_error == pytest.approx(max(relative.values()), rel=1e-3)
    assert relative[f"{fit.largest_module}.base_layer.weight"] == pytest.approx(max(relative.values()), rel=1e-3)
    assert 0.01 < fit.relative_error < 1 and fit.num_modules == len(squares)

    full = save_as_lora(tmp_path / "full", model, rank=1.0)
    assert full.relative_error < torch.finfo(torch.float32).eps ** 0.5  # a share of 1 of the squared norm, in float32
    loaded = PeftModel.from_pretrained(make_tiny(), tmp_path / "full").eval()
    with torch.no_grad():
        exact = loaded(TOKENS).logits
        coarse = PeftModel.from_pretrained(make_tiny(), tmp_path / "low").eval()(TOKENS).logits
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    assert (coarse - expected).abs().max() > 10 * (exact - expected).abs().max()
    assert sum(hasattr(module, "lora_A") for module in loaded.modules()) == len(squares)


def test_outputs_of_one_layer_stay_within_the_singular_value_bound(tmp_path):
    model = convert(base := nn.Sequential(nn.Linear(24, 16)), target_modules=["0"], task_type=None)
    weight = base[0].get_base_layer().weight.detach().double()
    inputs = torch.randn(64, 24)
    (model(inputs) * torch.randn(64, 16)).sum().backward()
    with torch.no_grad():
        base[0].symexplin_raw["default"].add_(base[0].symexplin_raw["default"].grad, alpha=1e-2)
        save_as_lora(tmp_path, model, rank=5)
        delta = base[0].get_effective_weight("default").double() - weight
        lora = PeftModel.from_pretrained(nn.Sequential(base[0].get_base_layer()), tmp_path)
        distance = (lora(inputs) - model(inputs)).double().norm(dim=1)
    next_value = torch.linalg.svdvals(delta)[5]
    bound = next_value * inputs.double().norm(dim=1)
    assert (distance <= bound * (1 + 1e-4)).all()
    assert distance.max() > 0.3 * bound.max()


def test_conv1d_lies_the_other_way(tmp_path):
    model = convert(make_gpt2(torch.float32), target_modules=["c_attn", "c_fc"])
    train_steps(model, 2, lr=0.3)
    model.eval()
    save_as_lora(tmp_path, model, rank=32)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        loaded = PeftModel.from_pretrained(make_gpt2(torch.float32), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_peft_converts_too_and_an_untrained_adapter_has_no_error(tmp_path):
    model = convert(make_tiny(dtype=torch.bfloat16))
    _, tensors = convert_to_lora(model, rank=2)
    assert len(tensors) == 2 * NUM_TARGETS
    fit = save_as_lora(tmp_path, model, rank=2)
    assert fit.num_modules == NUM_TARGETS


def test_modules_to_save_are_those_of_the_adapter(tmp_path):
    model = convert(make_tiny(tie_word_embeddings=False), modules_to_save=["lm_head"])
    train_steps(model, 2, lr=0.3)
    model.add_adapter("other", SELConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["lm_head"]))
    model.eval()
    save_as_lora(tmp_path, model, rank=1.0)
    loaded = PeftModel.from_pretrained(make_tiny(tie_word_embeddings=False), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_become_a_lora(tmp_path):
    folder = tmp_path / "lora"
    model = convert(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), target_modules=["0", "1"], task_type=None)
    with pytest.raises(SELError, match=r"0 is a Embedding, and only linear layers can become a LoRA; merge"):
        save_as_lora(folder, model, rank=2)
    with pytest.raises(TypeError, match="do not support LoRA conversion"):
        convert_to_lora(model, rank=2)
    with pytest.raises(SELError, match="'default' has trainable_token_indices, which PEFT cannot convert"):
        save_as_lora(folder, convert(make_tiny(), trainable_token_indices=[1]), rank=2)
    model = convert(make_tiny())
    with pytest.raises(SELError, match=r"'typo' is not in base_model\.model.* and 11 more; make the LoRA from"):
        save_as_lora(folder, model, rank=2, adapter_name="typo")
    with pytest.raises(SELError, match=r"k_proj has a weight of shape \(16, 32\), too small for rank=17"):
        save_as_lora(folder, model, rank=17)
    with pytest.raises(SELError, match="save_as_lora needs the base weights, which adapter 'default' freed"):
        save_as_lora(folder, convert(make_tiny(), base_weight="drop"), rank=2)
    with pytest.raises(SELError, match="'default' is not in this model"):
        save_as_lora(folder, make_tiny(), rank=2)
    assert not folder.exists()


def test_merged_or_not_the_lora_is_the_same(tmp_path):
    model = convert(make_tiny())
    train_steps(model, 1, lr=0.3)
    before = save_as_lora(tmp_path, model, rank=4)
    model.merge_adapter()
    assert save_as_lora(tmp_path, model, rank=4) == before
    assert all(layer.merged for layer in model.modules() if isinstance(layer, SELLayer))
