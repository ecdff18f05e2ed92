"""Tied weights: one that the user did not name never changes, in memory, in files and after loading these."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from models import bits, clone_state, make_heavy_tailed
from peft import PeftModel, get_peft_model
from test_families import FAMILIES, logits, take_step
from torch import nn

from peft_sel import SELConfig, SELError, merge_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
# family: embedding and head
TIED = {
    "qwen2": ("model.embed_tokens", "lm_head"),
    "qwen3_vl": ("model.language_model.embed_tokens", "lm_head"),
    "gpt2": ("transformer.wte", "lm_head"),
    "opt": ("model.decoder.embed_tokens", "lm_head"),
    "bert": ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    "t5": ("decoder.embed_tokens", "lm_head"),
}
ON_DISK = ("qwen2", "qwen3_vl", "gpt2", "opt")  # BERT and T5 tie more than two tensors
WHICH = {"embedding": [0], "head": [1], "both": [0, 1]}


def save_base(family: str, folder: Path) -> None:
    name, options, _ = FAMILIES[family]
    options = {**options, "tie_word_embeddings": True}
    if "text_config" in options:
        options["text_config"] = {**options["text_config"], "tie_word_embeddings": True}
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class._from_config(model_class.config_class(**options), dtype=torch.bfloat16)
    make_heavy_tailed(model)
    for parameter in model.parameters():
        if not parameter.any():  # biases start at 0, as those that a file lacks
            nn.init.normal_(parameter)
    model.save_pretrained(folder)


def load(family: str, folder: Path) -> nn.Module:
    model_class = getattr(transformers, FAMILIES[family][0])
    return model_class.from_pretrained(folder, dtype=torch.bfloat16).eval()


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    after = model.state_dict()
    assert after.keys() == before.keys()
    return {name for name, tensor in after.items() if not torch.equal(bits(tensor), bits(before[name]))}


@pytest.mark.parametrize("options", [{}, {"train_raw": False}], ids=["dense", "frozen raw"])
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("family", TIED)
def test_only_the_named_weights_change(family, which, options, tmp_path: Path):
    save_base(family, tmp_path / "base")
    base = load(family, tmp_path / "base")
    before = clone_state(base)
    targets = [TIED[family][index] for index in WHICH[which]]
    model = get_peft_model(base, SELConfig(target_modules="|".join(map(re.escape, targets)), **options))
    take_step(model, family)
    adapted = logits(model.eval(), family)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    expected = {f"{name}.weight" for name in targets}
    assert changed(merged, before) == expected
    assert torch.equal(logits(merged, family), adapted)
    merged.save_pretrained(tmp_path / "in_memory")
    folders = ["in_memory"]
    if family in ON_DISK:
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "files", progress=False)
        folders.append("files")
    else:
        with pytest.raises(SELError, match=r"cannot be untied from files; .*merge_and_unload"):
            merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "files", progress=False)
    for folder in folders:
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
        assert not config.get("text_config", {}).get("tie_word_embeddings", False)
        reloaded = load(family, tmp_path / folder)
        assert changed(reloaded, before) == expected
        assert torch.equal(logits(reloaded, family), adapted)
    loaded = PeftModel.from_pretrained(load(family, tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(loaded, family), adapted)


def test_a_merge_elsewhere_keeps_the_tie(tmp_path: Path):
    save_base("qwen2", tmp_path / "base")
    model = get_peft_model(load("qwen2", tmp_path / "base"), SELConfig())
    take_step(model, "qwen2")
    merged = model.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert merged.config.tie_word_embeddings is True


def adapt_embedding(model: nn.Module, module: str) -> PeftModel:
    adapted = get_peft_model(model, SELConfig(target_modules=r".*\.(q_proj|q)", modules_to_save=[module]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    return adapted


def make_embedding_adapter(model: nn.Module, folder: Path, module: str) -> None:
    adapt_embedding(model, module).save_pretrained(folder)


UNKNOWN = {
    "another class": {"architectures": ["MyQwen2ForCausalLM"]},
    "another type": {"architectures": ["MyForCausalLM"], "model_type": "my_type"},
    "nested": {"architectures": None, "model_type": "my_type", "tie_word_embeddings": None, "text_config": {}},
}


@pytest.mark.parametrize("which", UNKNOWN)
def test_a_tie_of_an_unknown_class_is_not_broken(which, tmp_path: Path):
    save_base("qwen2", tmp_path / "base")
    make_embedding_adapter(load("qwen2", tmp_path / "base"), tmp_path / "adapter", "embed_tokens")
    path = tmp_path / "base" / "config.json"
    changes = {**UNKNOWN[which], **({"text_config": {"tie_word_embeddings": True}} if which == "nested" else {})}
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(SELError, match=r"cannot be untied from files; .*merge_and_unload"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    config |= {"tie_word_embeddings": False, "text_config": {}}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)


def test_an_embedding_without_a_head_has_no_tie(tmp_path: Path):
    save_base("qwen2", tmp_path / "both")
    load("qwen2", tmp_path / "both").model.save_pretrained(tmp_path / "base")
    load_bare = transformers.AutoModel.from_pretrained
    make_embedding_adapter(load_bare(tmp_path / "base"), tmp_path / "adapter", "embed_tokens")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    before = load_bare(tmp_path / "base").embed_tokens.weight
    assert torch.equal(load_bare(tmp_path / "out").embed_tokens.weight, before * 1.5)


BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
BART |= {f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("ffn_dim", "attention_heads")}
OPT_SIZES = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
OPT_SIZES |= {
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 32,
    "model_type": "opt",
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BLIP2 = {"text_config": OPT_SIZES, "vision_config": {**SMALL, "image_size": 16, "patch_size": 8}}
BLIP2 |= {"qformer_config": {**SMALL, "vocab_size": 64, "encoder_hidden_size": 32}, "num_query_tokens": 2}
INNER = {
    "head": ("BartForConditionalGeneration", BART, "lm_head"),
    "shared": ("BartForSequenceClassification", BART, "model.shared"),
    "nested": ("Blip2ForConditionalGeneration", BLIP2, "language_model.model.decoder.embed_tokens"),
}


@pytest.mark.parametrize("which", INNER)
def test_ties_of_inner_models_are_not_broken(which, tmp_path: Path):
    name, options, module = INNER[which]
    model_class = getattr(transformers, name)
    model_class(model_class.config_class(**options)).save_pretrained(tmp_path / "base")
    base = model_class.from_pretrained(tmp_path / "base")
    ends = {end for pair in base.get_expanded_tied_weights_keys(all_submodels=True).items() for end in pair}
    assert f"{module}.weight" in ends
    make_embedding_adapter(base, tmp_path / "adapter", module)
    with pytest.raises(SELError, match=r"cannot be untied from files; .*merge_and_unload"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)


T5_SIZES = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8}
SEVERAL = {
    "bart shared": ("BartForConditionalGeneration", BART, "shared"),
    "bart decoder": ("BartForConditionalGeneration", BART, "decoder.embed_tokens"),
    "bart classifier": ("BartForSequenceClassification", BART, "shared"),
    "t5 shared": ("T5ForConditionalGeneration", T5_SIZES, "shared"),
}


@pytest.mark.parametrize("which", SEVERAL)
def test_a_merge_parts_one_of_several_tied_weights(which, tmp_path: Path):
    name, options, module = SEVERAL[which]
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**options, tie_word_embeddings=True))
    merged = adapt_embedding(model, module).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded, info = model_class.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    assert changed(loaded, clone_state(merged)) == set()
