"""Adapters of stacked experts as files: saved, loaded, merged into split and stacked checkpoints, inspected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import assert_same_bits, clone_state
from moe import FAMILIES, TARGETS, convert_moe, logits, make_config, make_moe, parameter_layers, perturb
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from peft_sel import SELError, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint, plan

ADAPTER_FILE = "adapter_model.safetensors"


def save_pair(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
    """Save a base checkpoint, and a perturbed adapter of it beside."""
    make_moe(family, dtype).save_pretrained(folder / "base")
    model = convert_moe(load_base(folder), **options)
    perturb(model)
    model.save_pretrained(folder / "adapter")


def load_base(folder: Path, name: str = "base") -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").eval()


def load_pair(folder: Path, **options: object) -> PeftModel:
    return PeftModel.from_pretrained(load_base(folder), folder / "adapter", **options).eval()


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("train_raw", [False, True])
def test_a_saved_adapter_comes_back_bit_for_bit(tmp_path, train_raw, low_cpu_mem_usage):
    save_pair(tmp_path, train_raw=train_raw, target_parameters=[*TARGETS, "mlp.gate.weight"])
    fresh = convert_moe(load_base(tmp_path), train_raw=train_raw, target_parameters=[*TARGETS, "mlp.gate.weight"])
    perturb(fresh)
    loaded = load_pair(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded), logits(fresh))
    saved = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert all(".symexplin_" in name for name in saved)
    owner = "base_model.model.model.layers.0.mlp.experts.sel_parameters.gate_up_proj"
    assert saved[f"{owner}.symexplin_beta"].shape == (4,)
    assert (f"{owner}.symexplin_raw" in saved) is train_raw


@pytest.mark.parametrize("train_raw", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_merging_files_equals_merging_in_memory(tmp_path, family, train_raw):
    save_pair(tmp_path, family, train_raw=train_raw, target_parameters=[*TARGETS, "q_proj.weight"])
    adapted = load_pair(tmp_path)
    expected = logits(adapted)
    report = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert list(before) == list(after)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == report.tensors_merged
    assert all(".experts." in name or ".q_proj." in name for name in changed)
    plain = load_base(tmp_path, "out")
    assert torch.equal(logits(plain), expected)
    assert_same_bits(plain.state_dict(), adapted.merge_and_unload().state_dict())


def test_an_untrained_adapter_merges_into_the_same_bytes_and_a_router_finds_its_name(tmp_path):
    base = make_moe("mixtral", torch.float16)
    base.save_pretrained(tmp_path / "base")
    convert_moe(base, target_parameters=[*TARGETS, "mlp.gate.weight"]).save_pretrained(tmp_path / "adapter")
    report = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert any("block_sparse_moe.gate" in name for name in before)
    assert report.tensors_merged == 2 * (4 * 3 + 1)
    assert_same_bits(after, before)


def stack_on_disk(folder: Path) -> None:
    """Store the experts of the base as one tensor each, as some checkpoints have them."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        parent = f"model.layers.{layer}.mlp.experts"
        members = [[tensors.pop(f"{parent}.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(4)]
        tensors[f"{parent}.gate_up_proj"] = torch.stack([torch.cat(member[:2]) for member in members])
        tensors[f"{parent}.down_proj"] = torch.stack([member[2] for member in members])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_stacked_and_split_and_sharded_bases_merge_alike(tmp_path, dtype):
    save_pair(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    merge_checkpoint(base, adapter, tmp_path / "split", dtype=dtype)
    model = load_base(tmp_path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 4
    merge_checkpoint(tmp_path / "sharded", adapter, tmp_path / "from_shards", dtype=dtype)
    stack_on_disk(base)
    merge_checkpoint(base, adapter, tmp_path / "stacked", dtype=dtype)
    expected = load_base(tmp_path, "split").state_dict()
    for name in ("from_shards", "stacked"):
        assert_same_bits(load_base(tmp_path, name).state_dict(), expected)
    assert expected["model.layers.0.mlp.experts.down_proj"].dtype == (dtype or torch.bfloat16)


def test_each_matrix_is_computed_once_though_its_halves_lie_apart(tmp_path, monkeypatch):
    save_pair(tmp_path)
    names, compute = [], plan.rebuild_weight

    def count(*args: object, name: str, **kwargs: object) -> torch.Tensor:
        names.append(name)
        return compute(*args, name=name, **kwargs)

    monkeypatch.setattr(plan, "rebuild_weight", count)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert len(names) == len(set(names)) == 2 * 2 * 4


@pytest.mark.parametrize("case", ["missing expert", "uneven", "transposed", "other sizes"])
def test_a_base_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, case):
    save_pair(tmp_path)
    base, key = tmp_path / "base", "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors = load_file(base / "model.safetensors")
    message = "have no counterpart in .*: model.layers.0.mlp.experts.gate_up_proj"
    if case == "missing expert":
        del tensors[key]
    elif case == "uneven":
        tensors[key] = tensors[key][:-1].clone()
    elif case == "other sizes":
        message = r"does not fit model.layers.0.mlp.experts.gate_up_proj of shape \(4, 46, 32\)"
        for name in [name for name in tensors if "layers.0.mlp.experts" in name and "down" not in name]:
            tensors[name] = tensors[name][:-1].clone()
    else:
        message = "stores model.layers.0.mlp.experts.gate_up_proj in another layout than transformers runs .Transpose"
        config = json.loads((base / "config.json").read_text())
        config["text_config"] = {"model_type": "qwen3_vl_moe"}
        (base / "config.json").write_text(json.dumps(config))
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(SELError, match=message):
        merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("case", ["missing", "fewer experts", "beta"])
def test_an_adapter_file_that_does_not_fit_is_refused_and_the_model_is_as_before(tmp_path, case):
    save_pair(tmp_path)
    tensors = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    key = "base_model.model.model.layers.1.mlp.experts.sel_parameters.down_proj.symexplin_beta"
    if case == "missing":
        del tensors[key]
    elif case == "beta":
        tensors[key][2] = -1.0
    else:
        tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, tmp_path / "adapter" / ADAPTER_FILE, {"format": "pt"})
    base = load_base(tmp_path)
    structure, state = str(base), clone_state(base)
    with pytest.raises(SELError, match="must be positive" if case == "beta" else "down_proj.symexplin_beta"):
        PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert str(base) == structure
    assert_same_bits(base.state_dict(), state)
    if case != "beta":
        with pytest.raises(SELError, match=r"beta|down_proj"):
            merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("train_raw", [False, True])
def test_inspecting_an_adapter_reports_each_stack(tmp_path, train_raw):
    save_pair(tmp_path, train_raw=train_raw, linear_scale="lora")
    reports = {report.name: report for report in inspect_checkpoint(tmp_path / "adapter")}
    model = load_pair(tmp_path)
    for layer in parameter_layers(model):
        report = reports[layer.module_name.replace("experts.", "experts.sel_parameters.")]
        assert report.error is None and report.shape == tuple(layer.base_weight.shape)
        assert report.beta == pytest.approx(layer.symexplin_beta["default"].mean().item())
        exp_scale = layer.symexplin_exp_scale["default"]
        expanded = exp_scale.row[:, :, None] * exp_scale.column[:, None, :]
        start = (1 / layer.symexplin_beta["default"]).mean()
        assert report.scale_means["exp_scale"] == pytest.approx((expanded.mean() / start).item(), rel=1e-5)
        product = layer.symexplin_residual_b["default"] @ layer.symexplin_residual_a["default"]
        assert report.residual_norm == pytest.approx(product.norm().item(), rel=1e-5)


def test_inspecting_a_checkpoint_rehearses_each_expert_as_it_would_be_converted(tmp_path):
    make_moe("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "base")
    config = make_config(target_modules=None, target_parameters=[*TARGETS, "mlp.gate.weight"])
    reports = {report.name: report for report in inspect_checkpoint(tmp_path / "base", config=config)}
    assert all(report.num_differing == 0 for report in reports.values())
    model = convert_moe(load_base(tmp_path), target_parameters=config.target_parameters)
    expected = {}
    for layer in parameter_layers(model):
        betas = layer.symexplin_beta["default"]
        names = [f"{layer.module_name}[{expert}]" for expert in range(4)] if layer.stack else [layer.module_name]
        expected.update(zip(names, betas.reshape(-1).tolist(), strict=True))
    assert {name: report.beta for name, report in reports.items() if ".mlp." in name} == expected
    stack_on_disk(tmp_path / "base")
    again = {report.name: report for report in inspect_checkpoint(tmp_path / "base", config=config)}
    assert again == reports
    plain = inspect_checkpoint(tmp_path / "base")  # the default leaves experts alone
    assert plain and all(".self_attn." in report.name for report in plain)
