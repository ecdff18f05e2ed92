"""Names of adapters that are parts of saved keys, by which PEFT would leave tensors of the others out."""

from __future__ import annotations

from pathlib import Path

import pytest
from biased import make_biased
from models import convert, fingerprint, logits, make_config, make_tiny
from moe import convert_moe, make_moe
from peft import PeftModel, get_peft_model
from torch import equal

from peft_sel import SELConfig, SELError


def test_a_second_adapter_cannot_be_called_like_a_part_of_a_key() -> None:
    model = convert(make_tiny(), target_modules=["q_proj"])
    before = fingerprint(model)
    for name in ("1", "q_proj", "model", "row", "weight", "symexplin_raw"):
        with pytest.raises(SELError, match=rf"adapter '{name}' has a name that stands for .*choose another name"):
            model.add_adapter(name, make_config(target_modules=["k_proj"]))
    assert fingerprint(model) == before and list(model.peft_config) == ["default"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("b", {"exp_scale": "lora"}), ("value", {"exp_scale": "global"})],
)
def test_parts_of_scales_are_names_where_no_adapter_has_them(name: str, options: dict, tmp_path: Path) -> None:
    plain, other = make_config(target_modules=["q_proj"]), make_config(target_modules=["q_proj"], **options)
    for first, second in ((other, plain), (plain, other)):
        model = get_peft_model(make_tiny(), first, adapter_name=name if second is other else "default")
        with pytest.raises(SELError, match=f"adapter '{name}' has a name"):
            model.add_adapter("default" if second is other else name, second)
    model = get_peft_model(make_tiny(), plain)
    model.add_adapter(name, plain)
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    assert equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), logits(model))


def test_one_adapter_alone_may_have_any_such_name_and_is_saved_whole(tmp_path: Path) -> None:
    model = get_peft_model(make_tiny(), make_config(init_weights=False, target_modules=["q_proj"]), adapter_name="1")
    model.save_pretrained(tmp_path)
    with pytest.raises(SELError, match="adapter '1' has a name"):
        model.add_adapter("other", make_config(target_modules=["q_proj"]))
    loaded = PeftModel.from_pretrained(make_tiny(), tmp_path / "1")
    assert equal(logits(loaded), logits(model))


def test_stacked_experts_and_biases_have_names_of_their_own() -> None:
    model = convert_moe(make_moe("qwen3_moe"))
    biased = get_peft_model(make_biased(), SELConfig(bias="sel_only", exp_scale="row_col_add", mode="congruent"))
    for adapted, name in ((model, "gate_up_proj"), (model, "sel_parameters"), (biased, "sel_parameters")):
        with pytest.raises(SELError, match=f"adapter '{name}' has a name"):
            adapted.add_adapter(name, adapted.peft_config["default"])


@pytest.mark.parametrize("lost", ["symexplin_raw.default", "symexplin_exp_scale.default.row"])
def test_saving_a_state_dict_that_lacks_a_tensor_is_refused(lost: str, tmp_path: Path) -> None:
    model = convert(make_tiny(), target_modules=["q_proj"])
    state = model.state_dict()
    del state[f"base_model.model.model.layers.1.self_attn.q_proj.{lost}"]
    with pytest.raises(SELError, match=rf"saved without base_model\..*layers\.1\.self_attn\.q_proj\.{lost}"):
        model.save_pretrained(tmp_path, state_dict=state)
    assert not (tmp_path / "adapter_model.safetensors").exists()
