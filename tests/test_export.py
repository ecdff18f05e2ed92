"""export_weights: what a merge would put into the base, and nothing else."""

from __future__ import annotations

import io
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import assert_same_bits, convert, logits, make_tiny, train_steps
from moe import TARGETS, convert_moe, make_moe, perturb
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM

from peft_sel import export_weights, merge_checkpoint, save_adapter
from peft_sel.checkpoint import export, merge
from peft_sel.cli import main
from peft_sel.errors import BrokenMergeError, CheckpointError, ConfigError, OtherBaseError, OutputExistsError

FILE = "adapter_model.safetensors"
MODEL = "model.safetensors"


def make_trained(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PeftModel:
    """Train a few steps; base and adapter are in folder."""
    base = make_tiny(dtype=dtype)
    base.save_pretrained(folder / "base")
    model = convert(base, **options)
    train_steps(model, 2)
    save_adapter(model.eval(), folder / "adapter")
    return model


def flip_a_bit(file: Path, name: str) -> None:
    tensors = load_file(file)
    tensors[name].view(torch.int16)[-1, -1] ^= 1
    save_file(tensors, file, {"format": "pt"})


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return dict(sorted(tensors.items()))


VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "scales only": {"train_raw": False},
    "biases": {"bias": "sel_only", "beta": 5.0},
    "saved modules": {"bias": "all", "modules_to_save": ["norm"]},
    "rich": {"shift": "row", "offset": "column", "mode": "congruent", "r": 3, "residual_alpha": 7.0},
}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5_000])
@pytest.mark.parametrize("name", VARIANTS)
def test_holds_what_a_merge_changes(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = make_trained(tmp_path, **VARIANTS[name])
    expected = logits(model)
    targets = {
        path.replace("base_model.model.", "") for path, module in model.named_modules() if hasattr(module, "sel_config")
    }
    base_dir = tmp_path / "base" if name == "scales only" else None
    report = export_weights(tmp_path / "adapter", tmp_path / "out", base_dir=base_dir, max_shard_bytes=max_shard_bytes)
    exported = load_tensors(tmp_path / "out")
    assert report.tensors == len(exported) and report.out_dir == tmp_path / "out"
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert report.bytes_written == sum(sizes) and (len(sizes) > 1) == (max_shard_bytes < 10**6)
    merged = model.merge_and_unload()
    state = {key: value for key, value in sorted(merged.state_dict().items()) if key in exported}
    assert_same_bits(exported, state)
    weights = {key for key in exported if key.endswith("proj.weight")}
    assert {f"{path}.weight" for path in targets if path.endswith("proj")} == weights and len(weights) == 14
    plain = make_tiny(dtype=torch.bfloat16)
    plain.load_state_dict(exported, strict=False)
    assert torch.equal(logits(plain), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_round_once(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_trained(tmp_path, torch.float32)
    export_weights(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    state = model.merge_and_unload().state_dict()
    exported = load_tensors(tmp_path / "out")
    assert_same_bits(exported, {key: state[key].to(dtype) for key in exported})


def test_counters_and_masks_keep_their_dtype(tmp_path: Path) -> None:
    make_trained(tmp_path, modules_to_save=["norm"])
    kept = {"count": torch.tensor(1001), "mask": torch.tensor([True, False]), "mean": torch.tensor([1.0])}
    prefix = "base_model.model.model.norm.modules_to_save."
    tensors = load_file(tmp_path / "adapter" / FILE) | {f"{prefix}{name}": value for name, value in kept.items()}
    save_file(tensors, tmp_path / "adapter" / FILE, {"format": "pt"})
    export_weights(tmp_path / "adapter", tmp_path / "out")
    exported = load_tensors(tmp_path / "out")
    expected = {**kept, "mean": kept["mean"].bfloat16()}
    for name, tensor in expected.items():
        found = exported[f"model.norm.{name}"]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_stacked_experts_have_the_names_of_the_model(tmp_path: Path) -> None:
    model = convert_moe(make_moe(dtype=torch.bfloat16), target_parameters=TARGETS, init_weights=False)
    save_adapter(model, tmp_path / "adapter")
    export_weights(tmp_path / "adapter", tmp_path / "out")
    state = model.merge_and_unload().state_dict()
    exported = load_tensors(tmp_path / "out")
    assert len(exported) == 4
    assert_same_bits(exported, {key: state[key] for key in exported})


@pytest.mark.parametrize("train_raw", [True, False])
@pytest.mark.parametrize(("saved_as", "adapted_as"), [("CausalLM", "bare"), ("bare", "CausalLM")])
def test_a_base_with_the_prefix_on_one_side_only(
    saved_as: str, adapted_as: str, train_raw: bool, tmp_path: Path
) -> None:
    autos = {"CausalLM": AutoModelForCausalLM, "bare": AutoModel}
    tiny = make_tiny(dtype=torch.bfloat16)
    (tiny if saved_as == "CausalLM" else tiny.model).save_pretrained(tmp_path / "base")
    model = convert(autos[adapted_as].from_pretrained(tmp_path / "base"), task_type=None, train_raw=train_raw)
    perturb(model)
    save_adapter(model, tmp_path / "adapter")
    export_weights(tmp_path / "adapter", tmp_path / "out", base_dir=tmp_path / "base")
    state, exported = model.merge_and_unload().state_dict(), load_tensors(tmp_path / "out")
    assert_same_bits(exported, {key: state[key] for key in exported})
    name = next(key for key in load_file(tmp_path / "base" / MODEL) if "layers.1.mlp.up_proj" in key)
    flip_a_bit(tmp_path / "base" / MODEL, name)
    with pytest.raises(OtherBaseError, match=r"layers\.1\.mlp\.up_proj"):
        export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("train_raw", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_base_with_split_experts(family: str, train_raw: bool, tmp_path: Path) -> None:
    make_moe(family, torch.bfloat16).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = convert_moe(base, target_parameters=[*TARGETS, "mlp.gate.weight"], train_raw=train_raw)
    perturb(model)
    save_adapter(model, tmp_path / "adapter")
    export_weights(tmp_path / "adapter", tmp_path / "out", base_dir=tmp_path / "base")
    state, exported = model.merge_and_unload().state_dict(), load_tensors(tmp_path / "out")
    assert len(exported) == 6
    assert_same_bits(exported, {key: state[key] for key in exported})
    names = [key for key in load_file(tmp_path / "base" / MODEL) if "layers.1." in key and "experts.3." in key]
    assert len(names) == 3
    flip_a_bit(tmp_path / "base" / MODEL, names[0])
    with pytest.raises(OtherBaseError, match=r"layers\.1\.mlp\.experts\.(gate_up|down)_proj"):
        export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["text_config"] = {"model_type": "qwen3_vl_moe"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"base: stores model.layers.0.mlp.experts.* in another layout"):
        export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base")
    if train_raw:
        export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base", check_base=False)
        assert_same_bits(load_tensors(tmp_path / "second"), exported)


def test_a_dense_adapter_is_compared_with_what_the_base_holds(tmp_path: Path) -> None:
    make_trained(tmp_path)
    tensors = load_file(tmp_path / "base" / MODEL)
    save_file({key: tensors[key] for key in tensors if "layers.1" not in key}, tmp_path / "base" / MODEL)
    export_weights(tmp_path / "adapter", tmp_path / "out", base_dir=tmp_path / "base")
    flip_a_bit(tmp_path / "base" / MODEL, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(OtherBaseError, match=r"layers\.0\.mlp\.up_proj.*embeddings and norms.*check_base=False"):
        export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base")
    export_weights(tmp_path / "adapter", tmp_path / "second", base_dir=tmp_path / "base", check_base=False)
    assert_same_bits(load_tensors(tmp_path / "out"), load_tensors(tmp_path / "second"))


def test_refusals_write_nothing(tmp_path: Path) -> None:
    make_trained(tmp_path)
    make_trained(tmp_path / "scales", train_raw=False)
    adapter, scales, out = tmp_path / "adapter", tmp_path / "scales" / "adapter", tmp_path / "new" / "out"
    make_tiny(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    other = make_tiny()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    tokens = convert(make_tiny(), trainable_token_indices=[1])
    save_adapter(tokens, tmp_path / "tokens")
    for source, options, error, message in (
        (adapter, {"dtype": torch.int8}, ConfigError, "dtype=torch.int8"),
        (adapter, {"max_shard_bytes": 0}, ConfigError, "max_shard_bytes=0"),
        (scales, {}, CheckpointError, "name the base checkpoint with base_dir"),
        (
            scales,
            {"base_dir": tmp_path / "other"},
            OtherBaseError,
            r"scales.*layers\.1\.mlp\.up_proj.*check_base=False",
        ),
        (
            scales,
            {"base_dir": tmp_path / "small"},
            CheckpointError,
            r"small: does not hold model.layers.1.*; name the base checkpoint that the adapter was made from$",
        ),
        (tmp_path / "tokens", {}, CheckpointError, "trains single rows of a weight .*; merge it instead"),
        (tmp_path / "base", {}, CheckpointError, "holds no adapter_config.json"),
    ):
        with pytest.raises(error, match=message):
            export_weights(source, out, **options)
        assert not out.parent.exists()
    with pytest.raises(OutputExistsError, match=r"base already exists; .* or remove this one first$"):
        export_weights(adapter, tmp_path / "base")
    export_weights(scales, out, base_dir=tmp_path / "other", check_base=False)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(30.0, CheckpointError, "beyond the range"), (float("nan"), BrokenMergeError, "q_proj")],
)
def test_values_that_do_not_fit(value: float, error: type[Exception], message: str, tmp_path: Path) -> None:
    make_trained(tmp_path, r=0, beta=1.0)
    tensors = load_file(tmp_path / "adapter" / FILE)
    tensors["base_model.model.model.layers.1.self_attn.q_proj.symexplin_raw"][0, 0] = value
    save_file(tensors, tmp_path / "adapter" / FILE, {"format": "pt"})
    with pytest.raises(error, match=message):
        export_weights(tmp_path / "adapter", tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_on_terminals(progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trained(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    report = export_weights(tmp_path / "adapter", tmp_path / "out", progress=progress)
    last = sys.stderr.getvalue().split("\r")[-1]
    assert (last.startswith("export: 100%|") and f"| {report.tensors}/{report.tensors} [" in last) is progress


@pytest.mark.parametrize(("module", "maker"), [(export, export._Weights), (merge, merge.Plan)])
def test_a_bar_is_full_when_the_last_tensor_is_made(
    module: ModuleType, maker: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trained(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(module, "tqdm", partial(tqdm, mininterval=0))
    compute, shown = maker.compute, []
    monkeypatch.setattr(maker, "compute", lambda *a: shown.append(sys.stderr.getvalue()) or compute(*a))
    if module is export:
        export_weights(tmp_path / "adapter", tmp_path / "out")
    else:
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert "| 1/" in shown[-1] and "100%" not in shown[-1] and "100%" in sys.stderr.getvalue()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trained(tmp_path, train_raw=False)
    command = ["export", str(tmp_path / "adapter"), str(tmp_path / "out")]
    assert main(command) == 2 and "base_dir" in capsys.readouterr().err
    assert main([*command, "--base", str(tmp_path / "base"), "--dtype", "float16", "--max-shard-size", "9000"]) == 0
    assert "14 tensors" in capsys.readouterr().out
    assert {tensor.dtype for tensor in load_tensors(tmp_path / "out").values()} == {torch.float16}
