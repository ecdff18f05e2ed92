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
        with pytest.raises(SELError, match=rf"adapter '{name}' has a name that is a part of .*; choose another;"):
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


def test_names_of_modules_that_no_adapter_saves_are_free(tmp_path: Path) -> None:
    model = convert(make_tiny(), target_modules=["q_proj"])
    for name in ("norm", "mlp", "v_proj", "dense"):
        model.add_adapter(name, make_config(init_weights=False, target_modules=["k_proj"]))
    model.save_pretrained(tmp_path)
    for name in model.peft_config:
        model.set_adapter(name)
        folder = tmp_path if name == "default" else tmp_path / name
        assert equal(logits(PeftModel.from_pretrained(make_tiny(), folder)), logits(model))


def test_a_regex_that_matches_insides_of_converted_modules_makes_no_name_a_part() -> None:
    model = convert(make_tiny(), target_modules=r".*\.q_proj.*")
    model.add_adapter("other", make_config(target_modules=r".*\.q_proj.*"))
    assert list(model.peft_config) == ["default", "other"]


def test_what_another_adapter_targets_or_trains_whole_is_no_name() -> None:
    model = convert(make_tiny(), target_modules=["q_proj"])
    for name, options in (
        ("mlp", {"target_modules": ["up_proj"]}),
        ("norm", {"target_modules": ["k_proj"], "modules_to_save": ["norm"]}),
        ("k_proj", {"target_modules": ["v_proj"], "bias": "all"}),
    ):
        base = make_biased() if "bias" in options else make_tiny()
        adapted = get_peft_model(base, make_config(target_modules=["q_proj"]))
        with pytest.raises(SELError, match=f"adapter '{name}' has a name .*; choose another"):
            adapted.add_adapter(name, make_config(**options))
    model.add_adapter("mlp", make_config(target_modules=["q_proj"]))
    with pytest.raises(SELError, match=r"adapter 'mlp' has a name .*delete it first, or load it under another name"):
        model.add_adapter("other", make_config(target_modules=["up_proj"]))
    assert list(model.peft_config) == ["default", "mlp"]


def test_a_module_that_is_trained_whole_cannot_hold_modules_of_another_adapter(tmp_path: Path) -> None:
    inside, whole = {"target_modules": ["q_proj"]}, {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]}
    for first, second, message in (
        (inside, whole, r"modules_to_save=\['self_attn'\]: model.layers.0.self_attn has modules that another"),
        (whole, inside, r"target_modules=.*q_proj lies in model.layers.0.self_attn, which another adapter trains"),
    ):
        model = get_peft_model(make_tiny(), make_config(**first))
        with pytest.raises(SELError, match=message):
            model.add_adapter("other", make_config(**second))
        model.save_pretrained(tmp_path)
        assert equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), logits(model))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_two_adapters_may_train_one_module_whole(name: str, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": [name]}
    model = get_peft_model(make_tiny(tie_word_embeddings=False), make_config(init_weights=False, **options))
    model.add_adapter("other", make_config(init_weights=False, **options))
    model.set_adapter("other")
    model.save_pretrained(tmp_path)
    assert equal(
        logits(PeftModel.from_pretrained(make_tiny(tie_word_embeddings=False), tmp_path / "other")), logits(model)
    )
