"""What an adapter may train beside its targets, and what is refused or rolled back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import (
    NUM_TARGETS,
    assert_same_bits,
    clone_state,
    convert,
    logits,
    make_config,
    make_tiny,
    sel_layers,
    train_steps,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file

from peft_sel import SELError, merge_checkpoint


def test_which_modules():
    names = [layer.module_name for layer in sel_layers(convert(make_tiny(), layers_to_transform=[1]))]
    assert len(names) == NUM_TARGETS // 2 and all(".1." in name for name in names)
    for options in ({"exclude_modules": ["q_proj", "mlp.up_proj"]}, {"modules_to_save": ["q_proj", "up_proj"]}):
        names = [layer.module_name for layer in sel_layers(convert(make_tiny(), **options))]
        assert len(names) == NUM_TARGETS - 4 and not any(name.endswith(("q_proj", "up_proj")) for name in names)


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}, {"bias": "all"}]
)
def test_what_trains_beside_the_targets(options, tmp_path):
    base = make_tiny(tie_word_embeddings=False)
    before, state = logits(base), clone_state(base)
    model = convert(base, **options)
    train_steps(model, 2, lr=0.3)
    model.eval()
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_tiny(tie_word_embeddings=False), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)
    if options != {"bias": "all"}:  # which PEFT trains in place
        with model.disable_adapter():
            assert torch.equal(logits(model), before)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), expected)
    assert list(merged.state_dict()) == list(state)


def test_trained_tokens_are_not_lost_by_a_merge_of_files(tmp_path):
    make_tiny().save_pretrained(tmp_path / "base")
    convert(make_tiny(), trainable_token_indices=[1]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(SELError, match="trainable_tokens_delta"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target_modules": ["embed_tokens"], "trainable_token_indices": [1]}, r"rows of model\.embed_tokens, whose"),
        ({"target_modules": ["lm_head"], "trainable_token_indices": [1]}, r"whose weight the target lm_head trains"),
        ({"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [1]}}, r"the target lm_head"),
    ],
)
def test_a_weight_trains_in_one_way(options, match):
    base = make_tiny()
    names, state = [name for name, _ in base.named_modules()], clone_state(base)
    with pytest.raises(SELError, match=match):
        convert(base, **options)
    assert [name for name, _ in base.named_modules()] == names
    assert_same_bits(base.state_dict(), state)


def damage(file: Path, change: str) -> None:
    tensors = load_file(file)
    if change == "shape":
        tensors = {key: value[:-1].clone() if ".lm_head" in key else value for key, value in tensors.items()}
    elif change == "extra":
        tensors["base_model.model.model.nonsense"] = torch.zeros(3)
    else:
        tensors = {key: value for key, value in tensors.items() if not key.endswith("q_proj.base_layer.bias")}
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("shape", r"of another shape: base_model\.model\.lm_head\..* is \(95, 32\) .* and \(96, 32\)"),
        ("extra", r"\(unexpected: base_model\.model\.model\.nonsense\)"),
        ("bias", r"\(missing: base_model.*layers\.0.*q_proj\.base_layer\.bias, base_model.*layers\.1"),
    ],
)
def test_broken_tensors_beside_the_targets_are_listed(change, match, tmp_path):
    options = {"modules_to_save": ["lm_head"], "bias": "all"}
    convert(make_tiny(tie_word_embeddings=False), **options).save_pretrained(tmp_path)
    damage(tmp_path / "adapter_model.safetensors", change)
    base = make_tiny(tie_word_embeddings=False)
    names, flags = [n for n, _ in base.named_modules()], [p.requires_grad for p in base.parameters()]
    with pytest.raises(SELError, match=match):
        PeftModel.from_pretrained(base, tmp_path)
    assert [n for n, _ in base.named_modules()] == names and [p.requires_grad for p in base.parameters()] == flags
    model = convert(base, modules_to_save=["lm_head"])
    train_steps(model, 1, lr=0.3)
    expected = logits(model)
    with pytest.raises(SELError, match=match):
        model.load_adapter(tmp_path, "other")
    assert torch.equal(logits(model), expected)
    assert model.get_model_status().available_adapters == ["default"]


@pytest.mark.parametrize("tokens", [[1000], {"embed_tokens": [1], "nothing": [1]}])
def test_tokens_that_do_not_exist_leave_the_base_as_it_was(tokens):
    base = make_tiny()
    names = [name for name, _ in base.named_modules()]
    with pytest.raises((IndexError, ValueError)):  # PEFT's own
        convert(base, trainable_token_indices=tokens)
    assert [name for name, _ in base.named_modules()] == names


def test_tokens_of_an_embedding_that_another_adapter_converted():
    model = convert(make_tiny(tie_word_embeddings=False), target_modules=["embed_tokens"])
    with pytest.raises(SELError, match=r"whose weight the target model\.embed_tokens trains"):
        model.add_adapter("other", make_config(trainable_token_indices=[1]))
    assert model.get_model_status().available_adapters == ["default"]
