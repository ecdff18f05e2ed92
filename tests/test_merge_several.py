"""Merging several adapters file to file: the sum that merge_and_unload gives, bit for bit, and what cannot be added."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from biased import make_biased, plant_biases
from models import assert_same_bits, logits, make_tiny
from moe import TARGETS, make_moe
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from peft_sel import ScaleConfig, SELConfig, merge_checkpoint
from peft_sel.errors import BrokenMergeError, CheckpointError, ConfigError

ADAPTER_FILE = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL = {"train_raw": False, "r": 3, "residual_alpha": 7.0}
RICH = {"exp_scale": ScaleConfig("lora", rank=2), "linear_scale": None, "offset": "column", "shift": "global", "r": 0}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "both dense": [{}, {"mode": "congruent", "beta": 7.5}],
    "three kinds": [{}, SMALL, RICH],
    "two small ones": [SMALL, {**SMALL, "r": 0}],
    "five": [{}, SMALL, RICH, {"r": 0}, {"mode": "congruent"}],
    "float64 raw": [{"raw_dtype": "float64"}, {}],
    "not the same modules": [
        {"target_modules": ["q_proj", "k_proj", "up_proj"]},
        {"target_modules": ["k_proj"], **SMALL},
    ],
    "biases": [{"bias": "sel_only"}, {"bias": "sel_only", "train_raw": False}, {}],
    "a saved module": [{}, {"modules_to_save": ["norm"]}],
    "plain biases": [{"bias": "all"}, SMALL],
}


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Move every trainable tensor by a tenth, and zeros too."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * (0.1 * parameter.abs() + 1e-3)).to(parameter.dtype))


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def save_adapters(base: Path, configs: list[dict[str, Any]], autos: Sequence[Any] = ()) -> list[Path]:
    """Save a perturbed adapter for each configuration, all made from the same base, beside it."""
    folders = []
    for number, options in enumerate(configs):
        auto = autos[number] if autos else AutoModelForCausalLM
        model = get_peft_model(auto.from_pretrained(base, dtype="auto"), SELConfig(**options))
        perturb(model, number)
        folders.append(base.parent / f"adapter{number}")
        model.save_pretrained(folders[-1])
    return folders


def load_together(base: Path, folders: list[Path]) -> PeftModel:
    """Load a base with several adapters, all active."""
    model = PeftModel.from_pretrained(load(base), folders[0], folders[0].name)
    for folder in folders[1:]:
        model.load_adapter(folder, folder.name)
    model.base_model.set_adapter([folder.name for folder in folders])
    return model.eval()


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return dict(sorted(tensors.items()))


CASES = [(name, torch.bfloat16) for name in PAIRS] + [("three kinds", torch.float16), ("biases", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_merge_and_unload_bit_for_bit(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    base, configs = tmp_path / "base", PAIRS[name]
    make_biased(dtype=dtype).save_pretrained(base, max_shard_size="12KB")
    folders = save_adapters(base, configs)
    report = merge_checkpoint(base, folders, tmp_path / "out")
    together = load_together(base, folders)
    expected = logits(together)
    together.merge_and_unload(adapter_names=[folder.name for folder in folders]).save_pretrained(tmp_path / "in_memory")
    out, before = read_all(tmp_path / "out"), read_all(base)
    assert_same_bits(out, read_all(tmp_path / "in_memory"))
    assert torch.equal(logits(load(tmp_path / "out")), expected)
    changed = {name for name in out if not torch.equal(out[name], before[name])}
    assert 0 < len(changed) <= report.tensors_merged
    assert json.loads((tmp_path / "out" / INDEX).read_text()) == json.loads((base / INDEX).read_text())


@pytest.mark.parametrize("second", [AutoModelForCausalLM, AutoModel])  # which calls its modules by other names
@pytest.mark.parametrize("target", [None, torch.float32, torch.float16])
def test_the_sum_in_plain_torch(tmp_path: Path, target: torch.dtype | None, second: Any) -> None:
    base = tmp_path / "base"
    make_tiny(dtype=torch.bfloat16).save_pretrained(base)
    folders = save_adapters(base, [{}, SMALL], [AutoModelForCausalLM, second])
    for folder in folders:
        merge_checkpoint(base, folder, tmp_path / f"{folder.name}_wide", dtype=torch.float32)
    merge_checkpoint(base, folders, tmp_path / "out", dtype=target)
    before, out = read_all(base), read_all(tmp_path / "out")
    one, other = (read_all(tmp_path / f"{folder.name}_wide") for folder in folders)
    sums = {
        name: (weight + ((one[name] - weight.float()) + (other[name] - weight.float()))).to(target or weight.dtype)
        for name, weight in before.items()
        if "_proj." in name and weight.dim() == 2
    }
    assert_same_bits({name: out[name] for name in sums}, sums)
    plain = {name: weight.to(target or weight.dtype) for name, weight in before.items() if name not in sums}
    assert_same_bits({name: out[name] for name in plain}, plain)
    assert any(not torch.equal(out[name].float(), one[name]) for name in out)


TIED: list[list[dict[str, Any]]] = [
    [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["lm_head"], **SMALL}],
    [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens"]}],
    [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"], **SMALL}],
]


@pytest.mark.parametrize("configs", TIED, ids=str)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_tied_tensors_part(tmp_path: Path, configs: list[dict[str, Any]]) -> None:
    base = tmp_path / "base"
    make_tiny(dtype=torch.bfloat16).save_pretrained(base)
    folders = save_adapters(base, configs)
    merge_checkpoint(base, folders, tmp_path / "out")
    together = load_together(base, folders)
    expected, plain = logits(together), load(tmp_path / "out")
    assert plain.config.tie_word_embeddings is False
    assert torch.equal(logits(plain), expected)
    merged = together.merge_and_unload(adapter_names=[folder.name for folder in folders])
    assert_same_bits(plain.state_dict(), merged.state_dict())


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(tmp_path: Path, stacked: bool) -> None:
    base = tmp_path / "base"
    make_moe("qwen3_moe", torch.bfloat16).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    for parent in [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)] if stacked else []:
        members = [[tensors.pop(f"{parent}.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(4)]
        tensors[f"{parent}.gate_up_proj"] = torch.stack([torch.cat(member[:2]) for member in members])
        tensors[f"{parent}.down_proj"] = torch.stack([member[2] for member in members])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    options = {"target_modules": [], "target_parameters": TARGETS}
    folders = save_adapters(
        base, [options, {**options, **SMALL}, {"target_modules": ["q_proj"], "target_parameters": TARGETS[:1]}]
    )
    merge_checkpoint(base, folders, tmp_path / "out")
    together = load_together(base, folders)
    expected = logits(together)
    plain = load(tmp_path / "out")
    assert torch.equal(logits(plain), expected)
    assert_same_bits(
        plain.state_dict(), together.merge_and_unload(adapter_names=[f.name for f in folders]).state_dict()
    )


def test_a_saved_block_of_experts_reaches_the_split_tensors(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_moe("qwen3_moe", torch.bfloat16).save_pretrained(base)
    folders = save_adapters(base, [{"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}])
    report = merge_checkpoint(base, folders, tmp_path / "out")
    adapted = load_together(base, folders)
    expected = logits(adapted)
    plain = load(tmp_path / "out")
    assert torch.equal(logits(plain), expected)
    assert_same_bits(plain.state_dict(), adapted.merge_and_unload().state_dict())
    before, after = read_all(base), read_all(tmp_path / "out")
    assert (
        sum(not torch.equal(after[name], before[name]) for name in before) == report.tensors_merged == 2 * (1 + 1 + 12)
    )


def test_chained_training_is_two_merges(tmp_path: Path) -> None:
    make_tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "first" / "base")
    (first,) = save_adapters(tmp_path / "first" / "base", [{}])
    merge_checkpoint(tmp_path / "first" / "base", first, tmp_path / "second" / "base")
    (second,) = save_adapters(tmp_path / "second" / "base", [SMALL])
    merge_checkpoint(tmp_path / "second" / "base", second, tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(load_together(tmp_path / "second" / "base", [second])))


def make_untied(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = PhiConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False, pad_token_id=0)
    plant_biases(PhiForCausalLM(config)).to(torch.bfloat16).save_pretrained(folder / "base")
    return folder / "base"


CONFLICTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "saved twice": ("lm_head.bias", [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]),
    "converted, then saved": ("lm_head.weight", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]),
    "saved, then converted": ("lm_head.weight", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}]),
    "plain biases twice": ("lm_head.bias", [{"bias": "all"}, {"bias": "all"}]),
    "plain and converted biases": ("model.layers.0.mlp.fc1.bias", [{"bias": "all"}, {"bias": "sel_only"}]),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize(("name", "configs"), CONFLICTS.values(), ids=CONFLICTS)
def test_what_cannot_be_added_is_refused(tmp_path: Path, name: str, configs: list[dict[str, Any]]) -> None:
    base = make_untied(tmp_path)
    folders = save_adapters(base, [{"target_modules": ["q_proj", "fc1"], **options} for options in configs])
    message = f"{folders[1]}: and {folders[0]} both change {name}, which can't be added up"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        merge_checkpoint(base, folders, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter0", "adapter1"}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_copies_of_a_frozen_bias_are_no_conflict(tmp_path: Path) -> None:
    base = make_untied(tmp_path)
    folders = save_adapters(base, [{"target_modules": ["lm_head"]}, {"target_modules": ["lm_head"], **SMALL}])
    assert all("base_model.model.lm_head.base_layer.bias" in load_file(folder / ADAPTER_FILE) for folder in folders)
    merge_checkpoint(base, folders, tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(load_together(base, folders)))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.bias"] += 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its copy of the base weight lm_head\.bias differs"):
        merge_checkpoint(base, folders[0], tmp_path / "other")


def test_no_adapter_and_one_that_does_not_fit(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tiny(dtype=torch.bfloat16).save_pretrained(base)
    (folder,) = save_adapters(base, [{}])
    with pytest.raises(ConfigError, match=r"adapter_dir=\[\]: name at least one"):
        merge_checkpoint(base, [], tmp_path / "out")
    make_tiny(dtype=torch.bfloat16, intermediate_size=40).save_pretrained(tmp_path / "other" / "base")
    (other,) = save_adapters(tmp_path / "other" / "base", [{}])
    for folders in ([folder, other], [other, folder]):
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(other))}.*does not fit model\.layers\.0\.mlp"):
            merge_checkpoint(base, folders, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder"):
        merge_checkpoint(base, [folder, tmp_path / "nowhere"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_adapter_is_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tiny(dtype=torch.bfloat16).save_pretrained(base)
    folders = save_adapters(base, [{"target_modules": ["q_proj"]}, {"target_modules": ["up_proj"]}])
    tensors = load_file(folders[1] / ADAPTER_FILE)
    tensors["base_model.model.model.layers.1.mlp.up_proj.symexplin_raw"][0, 3] = torch.nan
    save_file(tensors, folders[1] / ADAPTER_FILE, {"format": "pt"})
    with pytest.raises(
        BrokenMergeError, match=rf"adapter {re.escape(str(folders[1]))} seems to be broken: model\.layers\.1\.mlp"
    ):
        merge_checkpoint(base, folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
