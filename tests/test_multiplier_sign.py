"""normalize_by_inner_mult and an inner multiplier that training brought to 0: refused where weights leave training."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import torch
from biased import make_biased
from models import assert_same_bits, clone_state, make_tiny
from moe import convert_moe, make_moe
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from test_layer import make_layer
from test_merge import ADAPTER_FILE, make_adapter, save_base
from torch import nn

from peft_sel import ScaleConfig, SELConfig, SELError, SELLayer, merge_checkpoint
from peft_sel.errors import MultiplierSignError
from peft_sel.logs import collect_scale_means
from peft_sel.modules import SELLinear


def reach(layer: SELLinear, value: float) -> None:
    """Bring the smallest value of the inner multiplier to value, by one of its parts."""
    scale = layer.scales("default")["inner_multiplier"]
    with torch.no_grad():
        part = next(part for part in ("value", "row", "column", "base") if part in scale.part_names)
        getattr(scale, part)[-1] = value


@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_a_multiplier_that_reaches_zero_is_named_when_it_is_logged_or_merged(pattern: str) -> None:
    model = nn.Sequential(make_layer(inner_multiplier=pattern, normalize_by_inner_mult=True))
    layer = model[0]
    for bad in (0.0, -0.5):
        reach(layer, 0.5)
        collect_scale_means(model), layer.merge(), layer.unmerge()
        reach(layer, bad)
        before = layer.get_base_layer().weight
        for action in (lambda: collect_scale_means(model), layer.merge):
            with pytest.raises(MultiplierSignError, match=r"inner multiplier to (-0.5|0|-0).*log_curvature"):
                action()
        assert layer.get_base_layer().weight is before and not layer.merged
    with pytest.raises(MultiplierSignError, match=r"^block\.proj\.weight: "):
        layer.merge()


def test_multipliers_that_are_not_divided_by_or_are_logarithms_may_be_negative() -> None:
    for options in (
        {},
        {"log_curvature": True, "normalize_by_inner_mult": True},
        {"inner_multiplier": ScaleConfig("row", transform="exp"), "normalize_by_inner_mult": True},
    ):
        layer = make_layer(**options)
        reach(layer, -1.0)
        layer.merge(safe_merge=True)


def test_a_file_whose_multiplier_reached_zero_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter", steps=0, normalize_by_inner_mult=True).folder
    tensors = load_file(adapter / ADAPTER_FILE)
    tensors["base_model.model.model.layers.1.mlp.up_proj.symexplin_inner_multiplier.column"][3] = -0.25
    save_file(tensors, adapter / ADAPTER_FILE, metadata={"format": "pt"})
    with pytest.raises(MultiplierSignError, match=r"layers\.1\.mlp\.up_proj.*-0.25"):
        merge_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_saving_names_the_module_and_an_earlier_checkpoint_loads_over_it(tmp_path: Path) -> None:
    model = get_peft_model(make_tiny(), SELConfig(normalize_by_inner_mult=True))
    model.save_pretrained(tmp_path / "earlier")
    good = clone_state(model)
    layer = next(module for module in model.modules() if isinstance(module, SELLayer))
    reach(layer, -2.0)
    with pytest.raises(MultiplierSignError, match=r"^model\.layers\.0\.self_attn\.q_proj: training brought"):
        model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / ADAPTER_FILE).exists()
    model.load_adapter(tmp_path / "earlier", "default")
    assert_same_bits(model.state_dict(), good)
    model.save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("options", [{}, {"log_curvature": True, "normalize_by_inner_mult": True}])
def test_saving_leaves_other_multipliers_alone(tmp_path: Path, options: dict) -> None:
    model = get_peft_model(make_tiny(), SELConfig(**options))
    reach(next(module for module in model.modules() if isinstance(module, SELLayer)), -2.0)
    model.save_pretrained(tmp_path / "adapter")


def test_one_expert_whose_multiplier_reached_zero_is_enough(tmp_path: Path) -> None:
    adapted = convert_moe(make_moe("qwen3_moe"), normalize_by_inner_mult=True)
    stack = next(module for module in adapted.modules() if isinstance(module, SELLayer))
    with torch.no_grad():
        stack.scales("default")["inner_multiplier"].row[2, 5] = 0.0
    for action in (lambda: adapted.save_pretrained(tmp_path), lambda: collect_scale_means(adapted), stack.merge):
        with pytest.raises(MultiplierSignError, match=r"layers\.0\.mlp\.experts\."):
            action()


@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_saving_with_converted_biases_knows_their_patterns(pattern: str, tmp_path: Path) -> None:
    """A bias has global or row where its weight has rows and columns."""
    config = SELConfig(inner_multiplier=pattern, normalize_by_inner_mult=True, bias="sel_only")
    model = get_peft_model(make_biased(), config)
    model.save_pretrained(tmp_path / "good")
    bias = next(layer for layer in model.modules() if isinstance(layer, SELLayer) and layer.base_weight.dim() == 1)
    reach(bias, -2.0)
    with pytest.raises(MultiplierSignError, match=r"q_proj\.bias: training brought"):
        model.save_pretrained(tmp_path / "bad")


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("action", ["merge_adapter", "merge_and_unload"])
def test_a_merge_that_fails_at_the_last_layer_has_changed_none(action: str, safe_merge: bool) -> None:
    model = get_peft_model(make_tiny(), SELConfig(normalize_by_inner_mult=True))
    layers = [module for module in model.modules() if isinstance(module, SELLayer)]
    reach(layers[-1], -2.0)
    before = clone_state(model)
    with pytest.raises(MultiplierSignError):
        getattr(model, action)(safe_merge=safe_merge)
    assert [module for module in model.modules() if isinstance(module, SELLayer)] == layers
    assert not any(layer.merged for layer in layers)
    assert_same_bits(model.state_dict(), before)


def test_a_frozen_raw_weight_that_overflows_stops_a_merge_before_its_first_layer() -> None:
    base = make_tiny(dtype=torch.bfloat16)
    with torch.no_grad():
        base.model.layers[-1].mlp.down_proj.weight[0, 0] = 1e30
    model = get_peft_model(base, SELConfig(train_raw=False)).half()
    layers = [module for module in model.modules() if isinstance(module, SELLayer)]
    with pytest.raises(SELError):
        model.merge_adapter()
    assert not any(layer.merged for layer in layers)
