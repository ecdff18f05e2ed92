"""What loading an adapter computes: nothing that the file holds already."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import peft.peft_model
import pytest
import torch
from models import (
    NUM_TARGETS,
    assert_same_bits,
    bits,
    clone_state,
    convert,
    fingerprint,
    logits,
    make_tiny,
    sel_layers,
    train_steps,
)
from moe import make_moe
from peft import PeftModel, PeftModelForCausalLM, get_peft_model

from peft_sel import SELConfig, SELError, layer
from peft_sel.loading import await_tensors


@pytest.mark.parametrize("base_weight", ["keep", "cpu", "drop"])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_load_inverts_nothing(low_cpu_mem_usage, base_weight, tmp_path: Path, monkeypatch):
    model = convert(make_tiny(dtype=torch.bfloat16), base_weight=base_weight)
    train_steps(model)
    model.eval().save_pretrained(tmp_path)
    expected = logits(model)
    calls: Counter[str] = Counter()
    for name in ("invert_at_start", "tabulate_at_start"):
        plain = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *args, name=name, plain=plain: (calls.update([name]), plain(*args))[1])
    base = make_tiny(dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert calls == {}
    assert torch.equal(bits(logits(loaded)), bits(expected))
    if base_weight == "drop":
        assert all(layer.base_weight.numel() == 0 for layer in sel_layers(loaded))
    else:  # beside another adapter a base is not dropped
        loaded.load_adapter(tmp_path, "other", low_cpu_mem_usage=low_cpu_mem_usage)
        assert calls == {}
        loaded.set_adapter("other")
        assert torch.equal(bits(logits(loaded)), bits(expected))


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_raw_weights_are_inverted_once(dtype, low_cpu_mem_usage, tmp_path: Path, monkeypatch):
    model = convert(make_tiny(dtype=dtype), train_raw=False)
    train_steps(model)
    model.eval().save_pretrained(tmp_path)
    calls: Counter[str] = Counter()
    plain = layer.SELLayer._invert
    monkeypatch.setattr(layer.SELLayer, "_invert", lambda *args: (calls.update(["inversion"]), plain(*args))[1])
    loaded = PeftModel.from_pretrained(make_tiny(dtype=dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert calls == {"inversion": NUM_TARGETS}
    assert torch.equal(bits(logits(loaded)), bits(logits(model)))


@pytest.mark.parametrize("base_weight", ["cpu", "drop"])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_load_that_fails_leaves_the_base(low_cpu_mem_usage, base_weight, tmp_path: Path):
    convert(make_tiny(), base_weight=base_weight).save_pretrained(tmp_path)
    model = make_tiny(hidden_size=64)
    before, state = fingerprint(model), clone_state(model)
    with pytest.raises(SELError, match="do not fit this model"):
        PeftModel.from_pretrained(model, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert fingerprint(model) == before
    assert_same_bits(model.state_dict(), state)


@pytest.mark.parametrize("first", ["train", "forward", "merge", "add"])
def test_a_configuration_from_a_folder_drops_without_a_load_too(first, tmp_path: Path):
    convert(make_tiny(), base_weight="drop").save_pretrained(tmp_path)
    model = get_peft_model(make_tiny(), SELConfig.from_pretrained(tmp_path))
    if first == "train":
        model.train()
    elif first == "forward":
        logits(model)
    elif first == "merge":
        model.merge_adapter()
        model.unmerge_adapter()
    else:
        with pytest.raises(SELError, match="freed with"):
            model.add_adapter("other", SELConfig())
    if first != "add":
        assert all(layer.base_weight.numel() == 0 for layer in sel_layers(model))
    assert torch.equal(logits(model), logits(convert(make_tiny())))
    assert all(layer.base_weight.numel() == 0 for layer in sel_layers(model))


def test_a_configuration_from_a_folder_converts_without_a_load(tmp_path: Path):
    base = make_tiny(dtype=torch.bfloat16)
    trained = convert(make_tiny(dtype=torch.bfloat16))
    train_steps(trained)
    trained.save_pretrained(tmp_path)
    PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path)
    expected = logits(base)
    assert torch.equal(bits(logits(get_peft_model(base, SELConfig.from_pretrained(tmp_path)))), bits(expected))


@pytest.mark.parametrize("train_raw", [True, False])
def test_a_load_whose_files_cannot_be_read_leaves_no_adapter_without_values(train_raw, tmp_path: Path, monkeypatch):
    convert(make_tiny(), train_raw=train_raw).save_pretrained(tmp_path)

    def fail(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr("peft.peft_model.load_peft_weights", fail)
    base = make_tiny()
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(OSError, match="the disk is gone"):
        PeftModel.from_pretrained(base, tmp_path)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    model = convert(base)
    before, state = fingerprint(model), clone_state(model)
    with pytest.raises(OSError, match="the disk is gone"):
        model.load_adapter(tmp_path, "other")
    assert fingerprint(model) == before and list(model.peft_config) == ["default"]
    assert_same_bits(model.state_dict(), state)


def break_copying(monkeypatch):
    """Let what PEFT does with the tensors of an adapter fail behind the checks."""
    plain = peft.peft_model.set_peft_model_state_dict

    def fail(*args, **kwargs):
        plain(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr("peft.peft_model.set_peft_model_state_dict", fail)


@pytest.mark.parametrize(
    "options",
    [
        {"base_weight": "drop"},
        {"bias": "all"},
        {"train_raw": False},
        {"bias": "sel_only", "beta_pattern": {"bias": 5.0}},
    ],
)
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_load_that_is_interrupted_behind_its_checks_leaves_the_base(
    low_cpu_mem_usage, options, tmp_path: Path, monkeypatch
):
    model = convert(make_tiny(), **options)
    train_steps(model)
    model.save_pretrained(tmp_path)
    break_copying(monkeypatch)
    base = make_tiny()
    before, state, expected = fingerprint(base), clone_state(base), logits(base)
    with pytest.raises(KeyboardInterrupt):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    assert torch.equal(logits(base), expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_load_that_fails_beside_a_trained_adapter_leaves_that_trainable(error, tmp_path: Path, monkeypatch):
    convert(make_tiny()).save_pretrained(tmp_path)
    model = convert(make_tiny())
    before, state = fingerprint(model), clone_state(model)
    add, calls = layer.SELLayer.update_layer, []

    def fail_at_the_third(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error
        add(*args, **kwargs)

    monkeypatch.setattr(layer.SELLayer, "update_layer", fail_at_the_third)
    for action in (lambda: model.load_adapter(tmp_path, "other"), lambda: model.add_adapter("other", SELConfig())):
        calls.clear()
        with pytest.raises(error):
            action()
        assert fingerprint(model) == before and list(model.peft_config) == ["default"]
        assert_same_bits(model.state_dict(), state)
    calls[:] = [()] * 3
    model.load_adapter(tmp_path, "other")  # the name is free


def test_a_refused_load_over_a_fresh_adapter_leaves_that(tmp_path: Path):
    convert(make_tiny(hidden_size=64)).save_pretrained(tmp_path)
    model = convert(make_tiny())
    before, state = fingerprint(model), clone_state(model)
    with pytest.raises(SELError, match="do not fit this model"):
        model.load_adapter(tmp_path, "default")
    assert fingerprint(model) == before and list(model.peft_config) == ["default"]
    assert_same_bits(model.state_dict(), state)


def test_an_adapter_that_is_added_within_a_load_is_refused(tmp_path: Path, monkeypatch):
    convert(make_tiny()).save_pretrained(tmp_path)
    plain = PeftModelForCausalLM.__init__

    def add_another(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.add_adapter("second", SELConfig())

    monkeypatch.setattr(PeftModelForCausalLM, "__init__", add_another)
    base = make_tiny()
    before = fingerprint(base)
    with pytest.raises(SELError, match="was added while another adapter is loaded"):
        PeftModel.from_pretrained(base, tmp_path)
    assert fingerprint(base) == before
    with await_tensors():  # and the next load is not impaired
        pass


def test_a_warning_that_is_an_error_leaves_no_adapter():
    base = make_moe()
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(UserWarning, match="stay as they are"):
        get_peft_model(base, SELConfig(target_modules="all-linear"))
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
