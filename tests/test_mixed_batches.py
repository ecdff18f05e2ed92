"""adapter_names=: every row of a batch with its own adapter, and clear errors where that cannot be."""

from __future__ import annotations

import pytest
import torch
from models import make_tiny, train_steps
from peft import PeftModel, get_peft_model
from test_layer_types import LAYERS, make_layer
from torch import nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from peft_sel import SELConfig, SELError, SELLayer
from peft_sel.modules import SELModule, choose_layer_class

ROWS = ["other", "__base__", "default", "other", "default"]
TOKENS = torch.arange(60).reshape(5, 12)
GREEDY = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


def make_config(**options: object) -> SELConfig:
    return SELConfig(task_type="CAUSAL_LM", r=2, **options)


def make_two_adapters(**options: object) -> PeftModel:
    """Two trained adapters, of other modes and other modules."""
    model = get_peft_model(make_tiny(**options), make_config())
    train_steps(model, lr=0.3)
    model.add_adapter("other", make_config(mode="congruent", beta=3.0, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("other")
    train_steps(model, lr=0.3)
    model.set_adapter("default")
    return model.eval()


def run_alone(model: PeftModel, name: str, row: torch.Tensor, action: str = "forward", **options: object):
    """What a row gives with one adapter for the whole batch, or with none."""

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(row).logits if action == "forward" else model.generate(input_ids=row, **options)

    if name == "__base__":
        with model.disable_adapter():
            return call()
    model.set_adapter(name)
    result = call()
    model.set_adapter("default")
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", *LAYERS])
def test_rows_of_an_adapter_are_its_own_bit_for_bit(kind, dtype):
    if kind == "linear":
        base, inputs = nn.Linear(4, 6).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
        layer: SELModule = choose_layer_class("x", base)(base, "default", make_config(init_weights=False), name="x")
    else:
        layer, inputs = make_layer(kind, dtype, init_weights=False)
    layer.update_layer("other", SELConfig(r=2, mode="congruent", beta=3.0, init_weights=False))
    inputs = torch.cat([inputs, inputs.flip(0), inputs])[: len(ROWS)]
    with torch.no_grad():
        mixed = layer(inputs, adapter_names=[*ROWS, "elsewhere"][: len(inputs)])
        expected = {"__base__": layer.base_layer(inputs[[1]])}
        for name, rows in {"default": [2, 4], "other": [0, 3]}.items():
            layer.set_adapter(name)
            expected[name] = layer(inputs[[row for row in rows if row < len(inputs)]])
    for name, result in expected.items():
        rows = [row for row, other in enumerate(ROWS[: len(inputs)]) if other == name]
        assert torch.equal(mixed[rows], result), name
    assert not torch.equal(mixed[[0]], layer.base_layer(inputs[[0]]))


def test_logits_of_a_mixed_batch():
    model = make_two_adapters(dtype=torch.float64)
    with torch.no_grad():
        mixed = model(TOKENS, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        # float64 around the same weights: attention sums other batches in another order
        torch.testing.assert_close(mixed[[row]], run_alone(model, name, TOKENS[[row]]), rtol=1e-11, atol=1e-11)
    assert (mixed[2] - run_alone(model, "other", TOKENS[[2]])[0]).abs().max() > 1e-3


def test_gradients_reach_each_adapter_from_its_rows_alone():
    layer = choose_layer_class("x", base := nn.Linear(4, 6))(base, "default", make_config(), name="x")
    layer.update_layer("other", make_config())
    layer.set_adapter(["default", "other"])
    inputs, direction = torch.randn(5, 4), torch.randn(5, 6)
    (layer(inputs, adapter_names=ROWS) * direction).sum().backward()
    mixed = {name: layer.symexplin_raw[name].grad.clone() for name in ("default", "other")}
    for name, grad in mixed.items():
        layer.zero_grad()
        layer.set_adapter(name)
        rows = [row for row, other in enumerate(ROWS) if other == name]
        (layer(inputs[rows]) * direction[rows]).sum().backward()
        assert torch.equal(layer.symexplin_raw[name].grad, grad)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"generation_config": GenerationConfig(num_beams=2, **GREEDY)},
    ],
)
def test_generation_of_a_mixed_batch(options):
    model = make_two_adapters(dtype=torch.float64)
    options = options if "generation_config" in options else {**GREEDY, **options}
    mixed = model.generate(input_ids=TOKENS, adapter_names=ROWS, **options)
    copies = len(mixed) // len(ROWS)
    for row, name in enumerate(ROWS):
        alone = run_alone(model, name, TOKENS[[row]], "generate", **options)
        assert mixed[row * copies : (row + 1) * copies].tolist() == alone.tolist(), name
    assert not any(layer._forward_pre_hooks for layer in model.modules() if isinstance(layer, SELLayer))


def test_beams_of_the_model_s_own_generation_config():
    model = make_two_adapters(dtype=torch.float64)
    model.generation_config.num_beams = 2
    mixed = model.generate(input_ids=TOKENS, adapter_names=ROWS, **GREEDY)
    assert mixed.tolist() == model.generate(TOKENS, adapter_names=ROWS, num_beams=2, **GREEDY).tolist()
    for row, name in enumerate(ROWS):
        assert mixed[[row]].tolist() == run_alone(model, name, TOKENS[[row]], "generate", **GREEDY).tolist()
    for call in (model, model.generate):
        with pytest.raises(SELError, match="give one name per row"):
            call(input_ids=TOKENS[:4], adapter_names=ROWS[:2])


def test_beams_of_an_encoder_decoder():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    base = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).double()
    config = SELConfig(task_type="SEQ_2_SEQ_LM", init_weights=False)
    model = get_peft_model(base, config).eval()
    for layer in (module for module in model.modules() if isinstance(module, SELLayer)):
        nn.init.normal_(layer.symexplin_residual_b["default"])
    rows = ["default", "__base__", "default"]
    options = {"num_beams": 3, **GREEDY}
    mixed = model.generate(input_ids=TOKENS[:3], adapter_names=rows, **options)
    for row, name in enumerate(rows):
        alone = run_alone(model, name, TOKENS[[row]], "generate", **options)[0].tolist()
        assert mixed[row].tolist()[: len(alone)] == alone
    assert mixed[0].tolist() != run_alone(model, "__base__", TOKENS[[0]], "generate", **options)[0].tolist()


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (["default"] * 4 + ["typo"], "adapter_names='typo' is not in this model; it has default, other"),
        (["default"] * 3, r"names 3 rows, and model\.layers\.0\.self_attn\.q_proj runs 5"),
        ("default", "is no list of names"),
        ([0, 1, 2, 3, 4], "is no list of names"),
    ],
)
def test_names_that_cannot_be_followed(rows, match):
    model = make_two_adapters()
    expected = model(TOKENS).logits
    with pytest.raises(SELError, match=match):
        model(TOKENS, adapter_names=rows)
    assert torch.equal(model(TOKENS).logits, expected)


def test_states_that_cannot_mix():
    model = make_two_adapters()
    model.merge_adapter(["other"])
    with pytest.raises(SELError, match="meets the merged other; call unmerge_adapter first"):
        model(TOKENS, adapter_names=ROWS)
    model.unmerge_adapter()
    model.train()
    with pytest.raises(SELError, match=r"inference only; call model\.eval\(\)"):
        model(TOKENS, adapter_names=ROWS)
    dropped = get_peft_model(make_tiny(), make_config(base_weight="drop")).eval()
    with pytest.raises(SELError, match=r"running rows of .* freed with base_weight='drop'"):
        dropped(TOKENS, adapter_names=ROWS[1:3] * 2 + ROWS[1:2])


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [0, 1, 2, 12, 25]}])
def test_what_trains_beside_the_targets_follows_the_rows(options):
    model = get_peft_model(make_tiny(tie_word_embeddings=False), make_config(**options))
    train_steps(model, 2, lr=0.3)
    model.eval()
    with torch.no_grad():
        mixed = model(TOKENS, adapter_names=["default", "__base__"] * 2 + ["default"]).logits
    torch.testing.assert_close(mixed[[0]], run_alone(model, "default", TOKENS[[0]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[[1]], run_alone(model, "__base__", TOKENS[[1]]), rtol=1e-4, atol=1e-4)
    assert (mixed[[1]] - run_alone(model, "default", TOKENS[[1]])).abs().max() > 1e-2


@pytest.mark.parametrize("active", ["default", "other"])
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [0, 1, 2, 12, 25]}])
def test_rows_of_an_adapter_that_trains_nothing_beside_the_targets(options, active):
    model = get_peft_model(make_tiny(tie_word_embeddings=False), make_config(**options))
    train_steps(model, 2, lr=0.3)
    model.add_adapter("other", make_config(init_weights=False))
    model.set_adapter(active)
    model.eval()
    with torch.no_grad():
        mixed = model(TOKENS, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        alone = run_alone(model, name, TOKENS[[row]])
        torch.testing.assert_close(mixed[[row]], alone, rtol=1e-4, atol=1e-4)
