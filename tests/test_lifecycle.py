"""Odd orders and broken input: nothing is lost, half-done or silently wrong."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from models import NUM_TARGETS, assert_same_bits, clone_state, fingerprint, make_tiny, sel_layers, train_steps
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from peft_sel import ScaleConfig, SELConfig, SELError

TOKENS = torch.arange(12)[None]


def make_config(**options: object) -> SELConfig:
    return SELConfig(task_type="CAUSAL_LM", **options)


def convert(model: nn.Module, **options: object) -> PeftModel:
    return get_peft_model(model, make_config(**options))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("options", [{"linear_scale": ScaleConfig(init=1.0)}, {}])
def test_a_second_adapter_of_one_name_is_refused_and_the_first_keeps_its_training(options):
    base = make_tiny()
    model = convert(base)
    train_steps(model)
    model.eval()
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, that the model has adapters already
        with pytest.raises(SELError, match="'default' is already"):
            get_peft_model(base, make_config(**options))
        with pytest.raises(SELError, match="'default' is already"):
            inject_adapter_in_model(make_config(**options), base)
    assert torch.equal(logits(model), expected)


def test_dropping_the_base_beside_another_adapter_is_refused():
    model = convert(make_tiny(), train_raw=False)
    expected = logits(model)
    with pytest.raises(SELError, match="would free the base weights, which default may need"):
        model.add_adapter("other", make_config(base_weight="drop"))
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)


def test_safe_merge_looks_at_the_sum_with_what_is_merged():
    model = convert(make_tiny(dtype=torch.float16))
    model.add_adapter("other", make_config())
    layer = sel_layers(model)[0]
    with torch.no_grad():
        for adapter in ("default", "other"):  # 8 * 100 * 50 = 40000 each: finite alone, not together
            layer.symexplin_residual_a[adapter].fill_(100.0)
            layer.symexplin_residual_b[adapter].fill_(50.0)
    model.merge_adapter(["default"], safe_merge=True)
    with pytest.raises(SELError, match=layer.module_name):
        model.merge_adapter(["other"], safe_merge=True)
    assert all(layer.merged_adapters == ["default"] for layer in sel_layers(model))


@pytest.mark.parametrize("options", [{}, {"base_weight": "drop"}])
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_while_merged(cast, options):
    model = convert(make_tiny(), **options)
    model.merge_adapter()
    getattr(model, cast)()
    model.unmerge_adapter()
    dtypes = {p.dtype for name, p in model.named_parameters() if "symexplin_" not in name}
    assert len(dtypes) == 1 and torch.float32 not in dtypes
    assert torch.isfinite(logits(model)).all()
    assert logits(model).dtype in dtypes


@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
def test_truncated_file_is_refused_before_anything_is_converted(options, tmp_path):
    convert(make_tiny(), **options).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    base = make_tiny()
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(SELError, match=r"adapter_model\.safetensors: is truncated or corrupt"):
        PeftModel.from_pretrained(base, tmp_path)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    model = convert(make_tiny())
    with pytest.raises(SELError, match="truncated or corrupt"):
        model.load_adapter(tmp_path, "other")
    assert list(model.peft_config) == ["default"]


def edit(folder, suffix, value):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(name for name in tensors if name.endswith(suffix))
    tensors[key] = value(tensors[key])
    save_file(tensors, file)


BROKEN = {
    "negative beta": ("symexplin_beta", lambda t: -t, "beta=-.*symexplin_beta must be positive"),
    "NaN beta": ("symexplin_beta", lambda t: t * float("nan"), "beta=nan"),
    "another dtype": ("symexplin_exp_scale.row", lambda t: t.half(), "float16 in the file and .* float32 in the model"),
    "another shape": ("symexplin_exp_scale.row", lambda t: t[:-1].clone(), "in the file and"),
}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_tensors_are_refused_and_the_base_is_as_it_was(broken, options, low_cpu_mem_usage, tmp_path):
    suffix, value, match = BROKEN[broken]
    convert(make_tiny(), **options).save_pretrained(tmp_path)
    edit(tmp_path, suffix, value)
    base = make_tiny()
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(SELError, match=match):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    model = convert(make_tiny())
    with pytest.raises(SELError, match=match):
        model.load_adapter(tmp_path, "other", low_cpu_mem_usage=low_cpu_mem_usage)
    assert list(model.peft_config) == ["default"]
    assert all(list(layer.sel_config) == ["default"] for layer in sel_layers(model))


def test_scale_only_adapter_on_a_broken_base(tmp_path):
    convert(make_tiny(), train_raw=False).save_pretrained(tmp_path)
    base = make_tiny()
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    before = fingerprint(base)
    with pytest.raises(SELError, match=r"up_proj\.weight holds 1 NaN"):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=True)
    assert fingerprint(base) == before


def test_replicas_without_registered_parameters_compute_the_same():
    # what torch.nn.DataParallel makes of a module: parameters become plain attributes
    model = convert(make_tiny())
    expected = logits(model)
    for layer in sel_layers(model):
        for scale in layer.scales("default").values():
            for name in scale.part_names:
                value = scale._parameters.pop(name)
                object.__setattr__(scale, name, value.detach())
    assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings(
    "ignore:Model (has|with) `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`"
)
def test_saving_while_merged_into_a_tied_head_leaves_the_embedding(tmp_path):
    model = convert(make_tiny(), target_modules=["lm_head"])
    train_steps(model)
    model.eval()
    expected = logits(model)
    model.merge_adapter()
    model.save_pretrained(tmp_path)
    base = make_tiny()
    embedding = base.model.embed_tokens.weight.clone()
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(base.model.embed_tokens.weight, embedding)
    assert torch.equal(logits(loaded), expected)


def test_parametrized_linear_is_refused():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(SELError, match="target module 0 is a Parametrized"):
        get_peft_model(model, SELConfig(target_modules=["0"]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"beta": 1e39}, r"beta=1e\+39: model\.layers\.0"),
        ({"beta": 1e-46}, r"beta=1e-46: model\.layers\.0"),
        ({"beta_pattern": {"qproj": 1.0}}, "beta_pattern='qproj': matches no target"),
    ],
)
def test_values_that_only_a_model_can_judge(options, match):
    base = make_tiny()
    before = fingerprint(base)
    with pytest.raises(SELError, match=match):
        convert(base, **options)
    assert fingerprint(base) == before


def test_all_linear_skips_the_head():
    model = convert(make_tiny(), target_modules="all-linear", beta_pattern={"q_proj": 3.0})
    layers = sel_layers(model)
    assert len(layers) == NUM_TARGETS
    betas = [float(layer.symexplin_beta["default"]) for layer in layers if layer.module_name.endswith("q_proj")]
    assert betas == [3.0, 3.0]


def test_saved_config_says_what_was_done(tmp_path):
    convert(make_tiny(), mode="oppose", beta=7.5, offset=ScaleConfig("column", lr_mult=2.0)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["mode"], saved["beta"], saved["offset"]["lr_mult"], saved["shift"]) == ("oppose", 7.5, 2.0, None)
