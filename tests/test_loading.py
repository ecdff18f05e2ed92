"""What loading an adapter computes: nothing that the file holds already."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
from peft import PeftModel, get_peft_model

from peft_sel import SELConfig, SELError, layer


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
