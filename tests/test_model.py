"""SELModel as PEFT's users meet it: convert, train, save, load, merge, switch, refuse."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from huggingface_hub import ModelCard
from models import NUM_TARGETS, assert_same_bits, clone_state, make_tiny, sel_layers, train_steps
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from peft_sel import ScaleConfig, SELConfig, SELError
from peft_sel.targets import default_target_modules

TOKENS = torch.arange(12)[None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def convert(model: nn.Module, **options: object) -> PeftModel:
    return get_peft_model(model, SELConfig(task_type="CAUSAL_LM", **options))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["mismatch", "congruent", "oppose", "exp_only"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_merge_at_zero_steps_is_the_base(family, mode, dtype):
    base = clone_state(make_tiny(family, dtype))
    model = convert(make_tiny(family, dtype), mode=mode)
    assert len(sel_layers(model)) == NUM_TARGETS
    assert_same_bits(model.merge_and_unload().state_dict(), base)


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"r": 0}, {"base_weight": "drop"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapted_and_merged_logits_are_equal(dtype, options, tmp_path):
    model = convert(make_tiny(dtype=dtype), **options)
    before = logits(model)
    train_steps(model)
    model.eval()
    adapted = logits(model)
    assert not torch.equal(before, adapted)
    model.save_pretrained(tmp_path)
    for low_cpu_mem_usage in (False, True):
        loaded = PeftModel.from_pretrained(make_tiny(dtype=dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
        assert torch.equal(logits(loaded), adapted)
        assert_same_bits(dict(sorted(loaded.state_dict().items())), dict(sorted(model.state_dict().items())))
    model.merge_adapter()
    assert torch.equal(logits(model), adapted)
    model.unmerge_adapter()
    assert torch.equal(logits(model.merge_and_unload(safe_merge=True)), adapted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_is_untouched_by_everything_but_merge(dtype, tmp_path):
    base = clone_state(make_tiny(dtype=dtype))
    base_logits = logits(make_tiny(dtype=dtype))
    model = convert(make_tiny(dtype=dtype))
    train_steps(model, 2)
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    model.save_pretrained(tmp_path)
    assert_same_bits(model.unload().state_dict(), base)


def test_unload_while_merged_gives_the_base():
    base = clone_state(make_tiny())
    model = convert(make_tiny())
    train_steps(model)
    model.merge_adapter()
    assert_same_bits(model.unload().state_dict(), base)


def test_merge_of_a_tied_head_leaves_the_embedding_alone():
    embedding = make_tiny().model.embed_tokens.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied targets in general
        model = convert(make_tiny(), target_modules=["lm_head"])
        train_steps(model)
        merged = model.merge_and_unload()
    assert torch.equal(merged.model.embed_tokens.weight, embedding)
    assert not torch.equal(merged.lm_head.weight, embedding)
    assert merged.config.tie_word_embeddings is False


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_raw_on_a_bf16_base_is_full_float32(low_cpu_mem_usage, tmp_path):
    model = convert(make_tiny(dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        make_tiny(dtype=torch.bfloat16), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage, is_trainable=True
    )
    for one in (model, loaded, model.to(torch.bfloat16), loaded.bfloat16()):
        for layer in sel_layers(one):
            raw = layer.symexplin_raw["default"]
            assert raw.dtype == torch.float32
            assert (raw != raw.bfloat16().float()).float().mean() > 0.9  # inverse images are rarely bf16 numbers
            assert layer.get_base_layer().weight.dtype == torch.bfloat16


def test_dropped_base_is_freed_and_missed_with_a_clear_error():
    model = convert(make_tiny(dtype=torch.bfloat16), base_weight="drop")
    expected = logits(convert(make_tiny(dtype=torch.bfloat16)))
    assert all(layer.get_base_layer().weight.numel() == 0 for layer in sel_layers(model))
    assert torch.equal(logits(model), expected)
    requests = (
        lambda: model.disable_adapter().__enter__(),
        model.unload,
        lambda: model.delete_adapter("default"),
        lambda: model.add_adapter("other", SELConfig(task_type="CAUSAL_LM")),
    )
    for request in requests:
        with pytest.raises(SELError, match="base_weight='drop'"):
            request()
    assert torch.equal(logits(model), expected)
    model.merge_adapter()
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected)


def test_several_adapters_switch_and_delete():
    model = convert(make_tiny(dtype=torch.bfloat16), mode="mismatch")
    first = logits(model)
    model.add_adapter("other", SELConfig(task_type="CAUSAL_LM", mode="congruent", beta=7.5, init_weights=False))
    assert torch.equal(logits(model), first)
    model.set_adapter("other")
    second = logits(model)
    assert not torch.equal(first, second)
    assert all(layer.symexplin_raw["other"].requires_grad for layer in sel_layers(model))
    assert not any(layer.symexplin_raw["default"].requires_grad for layer in sel_layers(model))
    model.base_model.set_adapter(["default", "other"])
    together = logits(model)
    model.merge_adapter()
    assert torch.equal(logits(model), together)
    model.unmerge_adapter()
    model.set_adapter("other")
    model.delete_adapter("default")
    assert torch.equal(logits(model), second)


def test_auto_class_and_load_adapter(tmp_path):
    make_tiny().save_pretrained(tmp_path / "base")
    base = type(make_tiny()).from_pretrained(tmp_path / "base")
    model = convert(base)
    train_steps(model)
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    loaded.load_adapter(tmp_path / "adapter", "again")
    loaded.set_adapter("again")
    assert torch.equal(logits(loaded), logits(model))


def test_beta_is_read_from_the_adapter_not_recomputed(tmp_path):
    model = convert(make_tiny())
    layer = sel_layers(model)[0]
    layer.symexplin_beta["default"].fill_(3.0)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), expected)


def test_only_the_adapter_is_trainable_and_scale_only_saves_no_raw(tmp_path):
    model = convert(make_tiny(), train_raw=False)
    trainable, total = model.get_nb_trainable_parameters()
    assert 0 < trainable < total
    assert all("symexplin_" in name for name, p in model.named_parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert not any(name.endswith("symexplin_raw") for name in saved)
    assert sum(name.endswith("symexplin_beta") for name in saved) == NUM_TARGETS


def test_fixed_scales_stay_fixed_and_are_saved(tmp_path):
    options = {"exp_scale": None, "linear_scale": ScaleConfig("row", trainable=False), "inner_multiplier": None}
    model = convert(make_tiny(), **options)
    before = {name: p.clone() for name, p in model.named_parameters() if "_scale" in name}
    model.set_adapter("default")
    train_steps(model, 2)
    assert before
    assert all(not p.requires_grad and torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    model.eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), logits(model))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_on_their_own(copier):
    model = convert(make_tiny(), train_raw=False)
    expected = logits(model)
    other = copier(model)
    train_steps(other)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(other.eval()), expected)


def test_editing_one_raw_weight_changes_that_weight_alone():
    base = clone_state(make_tiny(dtype=torch.bfloat16))
    model = convert(make_tiny(dtype=torch.bfloat16))
    layer = sel_layers(model)[3]
    with torch.no_grad():
        layer.symexplin_raw["default"][5, 7] += 1.0
    merged = model.merge_and_unload().state_dict()
    changed = {name: (merged[name] != base[name]).nonzero().tolist() for name in base}
    assert {name: where for name, where in changed.items() if where} == {f"{layer.module_name}.weight": [[5, 7]]}


def test_every_qwen_and_llama_family_has_default_targets():
    families = [name for name in CONFIG_MAPPING_NAMES if "qwen" in name or "llama" in name]
    assert {"qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen2_5_vl", "llama", "llama4"} <= set(families)
    assert all(default_target_modules(name) for name in families)
    assert default_target_modules("no_such_model") is None


# Bad input: one clear error, and the model is what it was.


def assert_refused(base: nn.Module, match: str, **options: object) -> None:
    state, names = clone_state(base), [name for name, _ in base.named_modules()]
    flags = [p.requires_grad for p in base.parameters()]
    with pytest.raises(SELError, match=match):
        convert(base, **options)
    assert [name for name, _ in base.named_modules()] == names
    assert_same_bits(base.state_dict(), state)
    assert [p.requires_grad for p in base.parameters()] == flags


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("beta", ["auto", 7.5])
@pytest.mark.parametrize("base_weight", ["keep", "drop"])
def test_non_finite_weight_is_named_and_nothing_is_converted(value, beta, base_weight):
    base = make_tiny()
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[2, 3] = value
    assert_refused(base, r"model\.layers\.1\.mlp\.up_proj\.weight holds 1", beta=beta, base_weight=base_weight)


def test_flat_slope_says_what_to_change():
    assert_refused(make_tiny(), r"q_proj\.weight.*linear_scale at", linear_scale=ScaleConfig(init=1.0))


def test_unsupported_module_is_named():
    assert_refused(make_tiny(), r"layers\.0\.input_layernorm is a Qwen2RMSNorm", target_modules=["input_layernorm"])


def test_no_match_is_an_error():
    with pytest.raises(ValueError, match="no_such_module"):
        convert(make_tiny(), target_modules=["no_such_module"])


def test_failing_second_adapter_leaves_the_first():
    model = convert(make_tiny())
    expected = logits(model)
    with pytest.raises(SELError, match="linear_scale"):
        model.add_adapter("other", SELConfig(task_type="CAUSAL_LM", linear_scale=ScaleConfig(init=1.0)))
    assert list(model.peft_config) == ["default"]
    assert all(list(layer.sel_config) == ["default"] for layer in sel_layers(model))
    assert torch.equal(logits(model), expected)


def test_adapter_of_another_shape_is_refused_and_rolled_back(tmp_path):
    convert(make_tiny()).save_pretrained(tmp_path)
    other = make_tiny(intermediate_size=64)
    state = clone_state(other)
    with pytest.raises(SELError, match=r"of another shape: .*mlp"):
        PeftModel.from_pretrained(other, tmp_path)
    assert_same_bits(other.state_dict(), state)
    model = convert(make_tiny(intermediate_size=64))
    expected = logits(model)
    with pytest.raises(SELError, match="of another shape"):
        model.load_adapter(tmp_path, "other")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(("change", "match"), [("missing", "missing: .*beta"), ("extra", "unexpected: .*nonsense")])
def test_incomplete_or_foreign_tensors_are_listed(change, match, tmp_path):
    convert(make_tiny()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(name for name in tensors if name.endswith("symexplin_beta"))
    if change == "missing":
        del tensors[key]
    else:
        tensors[key.replace("beta", "nonsense")] = torch.zeros(())
    save_file(tensors, file)
    with pytest.raises(SELError, match=match):
        PeftModel.from_pretrained(make_tiny(), tmp_path)


def test_trained_adapter_survives_a_bad_file(tmp_path):
    convert(make_tiny(intermediate_size=64)).save_pretrained(tmp_path)
    model = convert(make_tiny())
    train_steps(model)
    model.eval()
    expected = logits(model)
    with pytest.raises(SELError, match="of another shape"):
        model.load_adapter(tmp_path, "default")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("action", ["merge_adapter", "merge_and_unload"])
def test_safe_merge_of_a_broken_adapter_changes_nothing(action):
    base = make_tiny()
    state = clone_state(base)
    model = convert(base)
    with torch.no_grad():
        sel_layers(model)[-1].symexplin_raw["default"][0, 0] = float("nan")
    with pytest.raises(SELError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        getattr(model, action)(safe_merge=True)
    assert len(sel_layers(model)) == NUM_TARGETS
    assert_same_bits(model.unload().state_dict(), state)


def test_offloaded_base_is_refused():
    with torch.device("meta"):
        base = make_tiny.__globals__["Qwen2ForCausalLM"](make_tiny().config)
    with pytest.raises(SELError, match="meta device"):
        convert(base)


def test_congruent_init_warns_on_pretrained_weights():
    with pytest.warns(UserWarning, match="weakens the converted weights"):
        convert(make_tiny(), init="congruent")


def test_model_card_says_import(tmp_path):
    model = convert(make_tiny())
    for _ in range(2):
        model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "symexplin" in ModelCard.load(tmp_path / "README.md").data.tags
    assert card.count("import peft_sel  #") == 1
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "SYMEXPLIN"


def test_loading_without_the_import_names_the_type(tmp_path):
    convert(make_tiny()).save_pretrained(tmp_path)
    code = (
        "import sys; from peft import PeftConfig\n"
        "try: PeftConfig.from_pretrained(sys.argv[1])\n"
        "except KeyError as error: print(repr(error))\n"
        "import peft_sel; print(type(PeftConfig.from_pretrained(sys.argv[1])).__name__)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["KeyError('SYMEXPLIN')", "SELConfig"], done.stderr  # as README and card say


def test_low_memory_injection_makes_meta_tensors_only() -> None:
    model = inject_adapter_in_model(SELConfig(), make_tiny(), low_cpu_mem_usage=True)
    own = [tensor for name, tensor in model.state_dict().items() if "symexplin_" in name]
    assert own and all(tensor.is_meta for tensor in own)
