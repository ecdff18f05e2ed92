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
