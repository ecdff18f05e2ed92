"""bias="sel_only" as files: saved, loaded, merged file to file, inspected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from biased import convert, load_base, logits, make_biased, perturb, plant_biases, save_pair
from models import assert_same_bits, bits
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PhiConfig, PhiForCausalLM

from peft_sel import SELConfig, SELError, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint, render

ADAPTER_FILE = "adapter_model.safetensors"
RICH = {"exp_scale": "row", "linear_scale": "lora", "inner_multiplier": None, "offset": "column", "shift": "global"}
OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "scales only": {"train_raw": False},
    "rich scales, base dropped": {**RICH, "base_weight": "drop", "mode": "congruent"},
    "sinh": {"family": "sinh", "mode": "congruent"},
    "damped": {"family": "damped", "mode": "congruent"},
    "variants": {"log_curvature": True, "normalize_by_inner_mult": True, "normalizer": "fixed"},
    "from scratch": {"init_target": "xavier_uniform"},
}


def load_sorted(folder: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(folder / "model.safetensors").items()))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_saved_adapter_comes_back_bit_for_bit(tmp_path, options, low_cpu_mem_usage):
    model = save_pair(tmp_path, **options)
    saved = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert all(".symexplin_" in key for key in saved)  # no base bias, which PEFT saves for any "..._only"
    raw = [key for key in saved if key.endswith("q_proj.sel_parameters.bias.symexplin_raw")]
    assert len(raw) == (0 if options == OPTIONS["scales only"] else 2)
    loaded = PeftModel.from_pretrained(load_base(tmp_path), tmp_path / "adapter", low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert_same_bits(get_peft_model_state_dict(loaded), get_peft_model_state_dict(model))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", torch.bfloat16), ("qwen2", torch.float32), ("gpt2", torch.float16)]
)
def test_merging_files_equals_merging_in_memory(tmp_path, family, dtype, options):
    model = save_pair(tmp_path, family, dtype, **options)
    adapted = logits(model)
    report = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    model.merge_and_unload().save_pretrained(tmp_path / "in_memory")
    out, base = load_sorted(tmp_path / "out"), load_sorted(tmp_path / "base")
    assert_same_bits(out, load_sorted(tmp_path / "in_memory"))
    assert torch.equal(logits(load_base(tmp_path, "out")), adapted)
    changed = {name for name in out if not torch.equal(out[name], base[name])}
    assert sum(name.endswith("bias") for name in changed) == (6 if family == "qwen2" else 4)
    assert report.tensors_merged == (14 + 6 if family == "qwen2" else 4 + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_steps_give_the_bytes_of_the_base(tmp_path, dtype):
    base = make_biased(dtype=dtype)
    base.save_pretrained(tmp_path / "base")
    convert(base, train_raw=False).save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    assert_same_bits(load_sorted(tmp_path / "out"), load_sorted(tmp_path / "base"))


def make_phi() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False, pad_token_id=0))
    return plant_biases(model).to(torch.bfloat16).eval()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # PEFT saves a targeted head's base along
def test_a_targeted_head_with_a_bias(tmp_path):
    make_phi().save_pretrained(tmp_path / "base")
    targets = ["lm_head", "fc1"]
    model = get_peft_model(make_phi(), SELConfig(task_type="CAUSAL_LM", target_modules=targets, bias="sel_only"))
    perturb(model)
    adapted = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    assert "base_model.model.lm_head.base_layer.bias" in load_file(tmp_path / "adapter" / ADAPTER_FILE)
    loaded = PeftModel.from_pretrained(load_base(tmp_path), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), adapted)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    model.merge_and_unload().save_pretrained(tmp_path / "in_memory")
    assert_same_bits(load_sorted(tmp_path / "out"), load_sorted(tmp_path / "in_memory"))
    assert torch.equal(logits(load_base(tmp_path, "out")), adapted)
    other = load_base(tmp_path)
    other.lm_head.bias.data += 1
    expected = other.lm_head.bias.detach().clone()
    unloaded = PeftModel.from_pretrained(other, tmp_path / "adapter", check_base=False).unload()
    assert torch.equal(unloaded.lm_head.bias, expected)  # the file's copy is not loaded


def test_two_adapters_are_saved_apart(tmp_path):
    model = convert(make_biased())
    model.add_adapter("other", SELConfig(r=0, bias="sel_only", target_modules=["v_proj"]))
    perturb(model), perturb(model, "other", seed=2)
    model.eval().save_pretrained(tmp_path)
    for adapter, folder in (("default", tmp_path), ("other", tmp_path / "other")):
        model.set_adapter(adapter)
        loaded = PeftModel.from_pretrained(make_biased(), folder).eval()
        assert torch.equal(logits(loaded), logits(model)), adapter


@pytest.mark.parametrize("part", ["symexplin_raw", "symexplin_exp_scale.value", "symexplin_beta"])
def test_a_file_that_lacks_a_part_of_a_bias_is_refused(tmp_path, part):
    save_pair(tmp_path)
    file = tmp_path / "adapter" / ADAPTER_FILE
    tensors = load_file(file)
    del tensors[f"base_model.model.model.layers.1.self_attn.k_proj.sel_parameters.bias.{part}"]
    save_file(tensors, file, {"format": "pt"})
    base = load_base(tmp_path)
    structure = str(base)
    with pytest.raises(SELError, match=rf"k_proj\.sel_parameters\.bias\.{part}"):
        PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert str(base) == structure
    with pytest.raises(SELError, match=r"k_proj\.sel_parameters\.bias"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_bias_of_another_length_is_refused(tmp_path):
    save_pair(tmp_path)
    base = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    shutil.copytree(tmp_path / "base", tmp_path / "short")
    save_file({**base, name: base[name][:-1].clone()}, tmp_path / "short" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SELError, match=r"does not fit model\.layers\.0\.self_attn\.q_proj\.bias of shape \(31,\)"):
        merge_checkpoint(tmp_path / "short", tmp_path / "adapter", tmp_path / "out", progress=False)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_inspect_reports_on_biases(tmp_path, options):
    save_pair(tmp_path, **options)
    config = SELConfig(bias="sel_only", **options)
    reports = {r.name: r for r in inspect_checkpoint(tmp_path / "base", config=config, progress=False)}
    biases = [name for name in reports if name.endswith("bias")]
    assert len(biases) == 6 and all(reports[name].round_trip == "identical" for name in biases)
    without = inspect_checkpoint(tmp_path / "base", config=SELConfig(), progress=False)
    assert [r.name for r in without] == [name for name in reports if not name.endswith("bias")]
    adapter = {r.name: r for r in inspect_checkpoint(tmp_path / "adapter", progress=False)}
    found = adapter["model.layers.0.self_attn.q_proj.sel_parameters.bias"]
    assert (found.error, found.residual_norm) == (None, None)
    assert found.beta == pytest.approx(reports["model.layers.0.self_attn.q_proj.bias"].beta)
    assert found.shape == (() if options == OPTIONS["scales only"] else (32,))
    assert list(found.scale_means) == [name for name, s in config.scale_configs().items() if s.trainable]
    assert "with errors" not in render(list(adapter.values()))


def test_base_biases_stay_what_they_were_on_load(tmp_path):
    save_pair(tmp_path)
    other = load_base(tmp_path)
    biases = {name: p.detach().clone() for name, p in other.named_parameters() if name.endswith("bias")}
    loaded = PeftModel.from_pretrained(other, tmp_path / "adapter", is_trainable=True)
    trained = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert any("sel_parameters.bias" in name for name in trained) and all(".symexplin_" in name for name in trained)
    unloaded = loaded.unload()
    assert all(torch.equal(bits(unloaded.get_parameter(name)), bits(bias)) for name, bias in biases.items())
