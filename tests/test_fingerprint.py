"""Which base an adapter was made from: the hash, what is recorded, and what meets another base."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import (
    NUM_TARGETS,
    assert_same_bits,
    clone_state,
    convert,
    fingerprint,
    logits,
    make_config,
    make_tiny,
    sel_layers,
    train_steps,
)
from moe import convert_moe, make_moe
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from peft_sel import SELConfig, SELError, merge_checkpoint
from peft_sel.checkpoint import plan
from peft_sel.cli import main
from peft_sel.errors import ConfigError, OtherBaseError
from peft_sel.modules import SELLinear
from peft_sel.numerics import fingerprint as numerics_fingerprint
from peft_sel.numerics import fingerprint_weight, hash_stack, hash_weight, matches_fingerprint

MASK = (1 << 64) - 1
CONFIG_FILE = "adapter_config.json"
FIRST = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def split_mix(number: int) -> int:
    """The SplitMix64 generator's value at a number, as its authors define it."""
    state = number * 0x9E3779B97F4A7C15 & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def slow_hash(weight: torch.Tensor) -> str:
    factors = np.array([split_mix(index + 1) | 1 for index in range(1 << 14)], dtype=np.uint64)
    values = weight.float().flatten().numpy().view(np.int32).astype(np.int64).view(np.uint64)
    blocks = [values[start : start + (1 << 14)] for start in range(0, len(values), 1 << 14)]
    sums = [(block * factors[: len(block)]).sum(dtype=np.uint64) for block in blocks]
    data = str(tuple(weight.shape)).encode() + np.array(sums, dtype="<u8").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (300, 500), (7,), (0, 4), (2, 3, 1, 4)])
def test_the_hash_is_that_of_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) ** 3).to(dtype)
    assert hash_weight(weight, "float32") == slow_hash(weight)
    assert hash_weight(weight, "bfloat16") == slow_hash(weight.bfloat16())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 500).to(dtype)
    recorded = fingerprint_weight(weight)
    assert matches_fingerprint(recorded, weight.clone())
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    lowest = 29 if dtype == torch.float64 else 0  # float32 has 29 bits less
    for place in (0, 16383, 16384, weight.numel() - 1):
        for bit in (lowest, 8 * weight.element_size() - 1):
            changed = weight.clone()
            flat = changed.view(kind).view(-1)
            flat[place] ^= (1 << bit) if bit < 8 * weight.element_size() - 1 else torch.iinfo(kind).min
            assert not matches_fingerprint(recorded, changed), (place, bit)


def test_places_and_shapes_count() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    swapped = weight.clone()
    swapped[0, 0], swapped[2, 3] = weight[2, 3], weight[0, 0]
    for other in (swapped, weight.reshape(4, 3), weight.T.contiguous(), weight.flatten(), weight.flip(0)):
        assert fingerprint_weight(other) != fingerprint_weight(weight)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for first, second in ((0.0, -0.0), tuple(nans)):
        assert hash_weight(torch.full((2,), first), "float32") != hash_weight(torch.tensor([first, second]), "float32")


def test_strides_threads_and_grouping_do_not_count(monkeypatch) -> None:
    weight = torch.randn(500, 600)
    expected = fingerprint_weight(weight)
    with monkeypatch.context() as patch:
        for count in (2, 3, 256):  # on accelerators
            patch.setitem(numerics_fingerprint.BLOCKS_AT_ONCE, "cpu", count)
            assert fingerprint_weight(weight) == expected
    wide = torch.randn(500, 1200)
    wide[:, ::2] = weight
    assert fingerprint_weight(weight.T.contiguous().T) == expected
    assert fingerprint_weight(wide[:, ::2]) == expected
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert fingerprint_weight(weight) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("made", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_one_checkpoint_is_known_in_another_dtype(stored, made, loaded) -> None:
    checkpoint = (torch.randn(40, 30) ** 3).to(stored)
    other = checkpoint.clone()
    other[3, 4] *= 1.5
    recorded = fingerprint_weight(checkpoint.to(made))
    if not (stored == torch.float32 and {made, loaded} == {torch.bfloat16, torch.float16}):  # each lost other bits
        assert matches_fingerprint(recorded, checkpoint.to(loaded))
    assert not matches_fingerprint(recorded, other.to(loaded))


def test_a_stack_is_hashed_by_its_matrices() -> None:
    stack = torch.randn(3, 5, 4)
    combined = hash_stack(slow_hash(matrix) for matrix in stack)
    assert fingerprint_weight(stack, stacked=True).split()[0] == f"float32:{combined}"
    assert not matches_fingerprint(fingerprint_weight(stack, True), stack[[1, 0, 2]], True)


def save_adapter(folder: Path, base: nn.Module | None = None, **options: Any) -> dict[str, str]:
    """Save a trained adapter of the tiny model; return what it records."""
    model = convert(make_tiny(dtype=torch.bfloat16) if base is None else base, **options)
    train_steps(model)
    model.save_pretrained(folder)
    return read_record(folder)


def read_record(folder: Path) -> dict[str, str]:
    record: dict[str, str] = json.loads((folder / CONFIG_FILE).read_text())["base_fingerprint"]
    return record


def make_other(name: str = FIRST, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The tiny model with one bit of one weight changed."""
    model = make_tiny(dtype=dtype)
    with torch.no_grad():
        model.get_parameter(name).view(torch.int16)[-1, -1] ^= 1
    return model


@pytest.mark.parametrize("options", [{}, {"base_weight": "drop"}, {"base_weight": "cpu"}, {"train_raw": False}])
def test_saving_records_each_target(options, tmp_path: Path) -> None:
    base = make_tiny(dtype=torch.bfloat16)
    expected = {name: fingerprint_weight(tensor) for name, tensor in base.named_parameters() if "_proj.w" in name}
    record = save_adapter(tmp_path, base, **options)
    assert len(record) == NUM_TARGETS
    assert record == expected
    assert "check_base" not in json.loads((tmp_path / CONFIG_FILE).read_text())
    assert PeftConfig.from_pretrained(tmp_path).base_fingerprint == record


def test_every_kind_of_target_is_recorded_by_its_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    nn.init.normal_(gpt2.transformer.h[0].attn.c_attn.bias)
    expected = {
        name: fingerprint_weight(tensor)
        for name, tensor in gpt2.named_parameters()
        if name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias")
    }
    convert(gpt2, target_modules=["c_attn", "wte"], bias="sel_only").save_pretrained(tmp_path / "gpt2")
    assert read_record(tmp_path / "gpt2") == expected
    moe = make_moe()
    names = [name for name, tensor in moe.named_parameters() if tensor.dim() == 3 or name.endswith("gate.weight")]
    expected = {name: fingerprint_weight(p, p.dim() == 3) for name in names for p in [moe.get_parameter(name)]}
    model = convert_moe(moe, target_parameters=["gate_up_proj", "down_proj", "mlp.gate.weight"])
    model.save_pretrained(tmp_path / "moe")
    assert len(expected) == 6
    assert read_record(tmp_path / "moe") == expected


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("train_raw", [True, False])
def test_another_base_is_refused_and_left_as_it_was(tmp_path: Path, train_raw: bool, low_cpu_mem_usage: bool) -> None:
    save_adapter(tmp_path, train_raw=train_raw)
    base = make_other("model.layers.1.mlp.up_proj.weight")
    state, before = clone_state(base), fingerprint(base)
    what = "embeddings and norms" if train_raw else "recomputed from this base"
    with pytest.raises(OtherBaseError, match=rf"the values of model\.layers\.1\.mlp\.up_proj\.weight show.*{what}"):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    loaded = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage, check_base=False)
    assert len(sel_layers(loaded)) == NUM_TARGETS


def test_the_base_itself_is_accepted_in_every_dtype(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    for dtype in DTYPES:
        PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16).to(dtype), tmp_path)


@pytest.mark.parametrize("base_weight", ["keep", "cpu", "drop"])
def test_a_refused_base_is_not_moved_or_freed(tmp_path: Path, base_weight: str) -> None:
    save_adapter(tmp_path, base_weight=base_weight)
    base = make_other()
    state, before = clone_state(base), fingerprint(base)
    with pytest.raises(OtherBaseError):
        PeftModel.from_pretrained(base, tmp_path)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)


def test_load_adapter_refuses_and_keeps_the_others(tmp_path: Path) -> None:
    record = save_adapter(tmp_path)
    model = convert(make_other())
    expected, before = logits(model), fingerprint(model)
    with pytest.raises(OtherBaseError, match="adapter 'second' was made from another base"):
        model.load_adapter(tmp_path, "second")
    assert fingerprint(model) == before
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)
    model.add_adapter("second", SELConfig.from_pretrained(tmp_path, check_base=False))
    model.load_adapter(tmp_path, "second")
    model.save_pretrained(tmp_path / "out", selected_adapters=["second"])  # which now belongs to this base
    again = read_record(tmp_path / "out" / "second")
    assert [name for name in record if again[name] != record[name]] == [FIRST]


def test_a_configuration_that_was_refused_is_refused_again(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    config = SELConfig.from_pretrained(tmp_path)
    for _ in range(2):
        with pytest.raises(OtherBaseError):
            PeftModel.from_pretrained(make_other(), tmp_path, config=config)
    PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path, config=config)


def test_the_base_is_found_under_a_merged_adapter(tmp_path: Path) -> None:
    record = save_adapter(tmp_path)
    model = convert(make_tiny(dtype=torch.bfloat16), base_weight="cpu")
    train_steps(model)
    model.merge_adapter()
    with pytest.warns(UserWarning, match="Unmerging the model first"):  # PEFT does, after it has converted
        model.load_adapter(tmp_path, "second")
    assert {layer.fingerprint_name: layer.base_fingerprint["second"] for layer in sel_layers(model)} == record


def test_copying_and_deleting_adapters(tmp_path: Path) -> None:
    record = save_adapter(tmp_path)
    model = copy.deepcopy(PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path))
    model.add_adapter("second", make_config(target_modules=["v_proj"]))
    model.set_adapter("second")
    model.delete_adapter("default")
    assert all("default" not in layer.base_fingerprint for layer in sel_layers(model))
    model.save_pretrained(tmp_path / "out")
    names = [name for name in record if "v_proj" in name]
    assert read_record(tmp_path / "out" / "second") == {name: record[name] for name in names}


def test_a_configuration_used_for_a_new_adapter_of_another_base(tmp_path: Path) -> None:
    record = save_adapter(tmp_path)
    model = get_peft_model(make_other(), SELConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path / "out")
    again = read_record(tmp_path / "out")
    assert [name for name in record if again[name] != record[name]] == [FIRST]


def edit_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / CONFIG_FILE).read_text())
    change(content)
    (folder / CONFIG_FILE).write_text(json.dumps(content))


def test_an_adapter_from_before_is_not_checked(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    edit_record(tmp_path, lambda content: content.pop("base_fingerprint"))
    PeftModel.from_pretrained(make_other(), tmp_path)


TEXTS = (
    "",
    "float32",
    "sha512:0123456789abcdef",
    "float32:",
    "float32:a:b",
    "float32:0123456789abcde",
    "float32:0123456789ABCDEF",
)


@pytest.mark.parametrize("value", [["a"], {"a": 1}, *({"a": text} for text in TEXTS)])
def test_what_is_no_record_is_refused(value: Any, tmp_path: Path) -> None:
    save_adapter(tmp_path)
    edit_record(tmp_path, lambda content: content.update(base_fingerprint=value))
    with pytest.raises(ConfigError, match="base_fingerprint="):
        PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path)


def test_a_base_without_values_is_a_warning(tmp_path: Path) -> None:
    record = save_adapter(tmp_path)
    with torch.device("meta"):
        empty = make_tiny(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=rf"{FIRST} is on the meta device; this base is not checked") as warned:
        loaded = PeftModel.from_pretrained(empty, tmp_path, low_cpu_mem_usage=True)
    assert len([warning for warning in warned if "is on the meta device" in str(warning.message)]) == 1
    assert loaded.peft_config["default"].base_fingerprint == record
    with torch.device("meta"):
        empty = make_tiny(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=rf"{FIRST} is on the meta device; this base is not recorded"):
        get_peft_model(empty, make_config(), low_cpu_mem_usage=True)


def test_draws_record_nothing(tmp_path: Path) -> None:
    assert save_adapter(tmp_path, init_target="xavier_uniform") == {}
    PeftModel.from_pretrained(make_other(), tmp_path)


@pytest.mark.parametrize("train_raw", [True, False])
def test_merging_files_refuses_another_base(train_raw: bool, tmp_path: Path, capsys) -> None:
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    make_tiny(dtype=torch.bfloat16).save_pretrained(base)
    save_adapter(adapter, AutoModelForCausalLM.from_pretrained(base), train_raw=train_raw)
    merge_checkpoint(base, adapter, tmp_path / "merged")
    make_other("model.layers.1.mlp.up_proj.weight").save_pretrained(tmp_path / "other")
    what = "embeddings and norms" if train_raw else "recomputed from this base"
    with pytest.raises(OtherBaseError, match=rf"from another base \({base}\), .*1\.mlp\.up_proj\.weight show.*{what}"):
        merge_checkpoint(tmp_path / "other", adapter, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged", "other"]
    assert main(["merge", str(tmp_path / "other"), str(adapter), str(out)]) == 2
    assert "--any-base" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "other"), str(adapter), str(out), "--any-base"]) == 0
    merged, found = load_file(tmp_path / "merged" / "model.safetensors"), load_file(out / "model.safetensors")
    assert (merged.keys() == found.keys()) and all(
        torch.equal(merged[name], found[name]) for name in merged if train_raw
    )


def list_rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the weights that merges compute from now on."""
    names: list[str] = []
    rebuild = plan.rebuild_weight

    def record(*args: Any, name: str, **options: Any) -> torch.Tensor:
        names.append(name)
        return rebuild(*args, name=name, **options)

    monkeypatch.setattr(plan, "rebuild_weight", record)
    return names


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"bias": "sel_only", "beta": 5.0}])
def test_a_merge_into_another_base_fails_at_once(options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One differing tensor, late in the merge, is not used; of a base that differs altogether no tensor is."""
    late = "model.layers.1.mlp.up_proj.weight"
    save_adapter(tmp_path / "adapter", **options)
    make_other(late).save_pretrained(tmp_path / "late")
    model = make_tiny(dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.endswith("bias") else 1.5)
    model.save_pretrained(tmp_path / "other")
    rebuilt = list_rebuilt(monkeypatch)
    with pytest.raises(OtherBaseError, match=late):
        merge_checkpoint(tmp_path / "late", tmp_path / "adapter", tmp_path / "out")
    assert rebuilt and late not in rebuilt
    rebuilt.clear()
    with pytest.raises(OtherBaseError, match=r"the values of model\.layers\..*\.weight show"):
        merge_checkpoint(tmp_path / "other", tmp_path / "adapter", tmp_path / "out")
    assert not rebuilt
    merge_checkpoint(tmp_path / "other", tmp_path / "adapter", tmp_path / "out", check_base=False)


def test_each_of_several_adapters_is_checked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny(dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "first", base)
    save_adapter(tmp_path / "second", make_other("model.layers.1.mlp.down_proj.weight"), target_modules=["down_proj"])
    first_layer = "model.layers.0.mlp.down_proj.weight"
    edit_record(tmp_path / "second", lambda content: content["base_fingerprint"].pop(first_layer))
    rebuilt = list_rebuilt(monkeypatch)
    with pytest.raises(
        OtherBaseError, match=r"second was made from another base.* of model\.layers\.1\.mlp\.down_proj"
    ):
        merge_checkpoint(tmp_path / "base", [tmp_path / "first", tmp_path / "second"], tmp_path / "out")
    assert not rebuilt


def test_merging_knows_a_float32_checkpoint_that_was_trained_in_bf16(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16))
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("train_raw", [True, False])
def test_merging_experts_refuses_another_base(train_raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_moe(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    model = convert_moe(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), train_raw=train_raw)
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name].view(torch.int16)[-1, -1] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SELError, match=r"the values of model\.layers\.1\.mlp\.experts\.gate_up_proj show"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "second")
    assert not (tmp_path / "second").exists()
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "second", check_base=False)
    tensors["model.layers.0.mlp.experts.3.down_proj.weight"].view(torch.int16)[-1, -1] ^= 1  # of the smallest stack
    save_file(tensors, file, metadata={"format": "pt"})
    rebuilt = list_rebuilt(monkeypatch)
    with pytest.raises(OtherBaseError, match=r"model\.layers\.0\.mlp\.experts\.down_proj show"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "third")
    assert not rebuilt


@pytest.mark.parametrize("train_raw", [True, False])
def test_a_quantised_base_has_no_values_to_compare(train_raw: bool, tmp_path: Path, monkeypatch) -> None:
    record = save_adapter(tmp_path, train_raw=train_raw)
    monkeypatch.setattr(SELLinear, "holds_base_weight", False)  # as SELQuantizedLinear says
    assert save_adapter(tmp_path / "quantised") == {}
    with pytest.warns(UserWarning, match=rf"{FIRST} is quantised; this base is not checked to be the one") as warned:
        loaded = PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path)
    assert len([warning for warning in warned if "is quantised" in str(warning.message)]) == 1
    loaded.save_pretrained(tmp_path / "out")
    assert read_record(tmp_path / "out") == record
