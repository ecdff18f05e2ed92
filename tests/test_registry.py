"""The enum member and the tables that make SEL a PEFT method."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
from models import make_config, make_tiny
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
    LoraConfig,
    PeftModel,
    PeftType,
    get_peft_model,
)
from transformers import PreTrainedModel

from peft_sel import SELConfig, SELModel
from peft_sel.registry import quieten_wrapping, register


def test_member_behaves_like_any_other():
    member = PeftType.SYMEXPLIN
    assert member is PeftType("SYMEXPLIN") is PeftType["SYMEXPLIN"]
    assert isinstance(member, PeftType) and isinstance(member, str)
    assert member == "SYMEXPLIN" and member.value == member.name == "SYMEXPLIN"
    assert hash(member) == hash("SYMEXPLIN")
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert json.dumps(member) == '"SYMEXPLIN"'
    assert member in list(PeftType) and len(set(PeftType)) == len(list(PeftType))
    assert repr(member) == "<PeftType.SYMEXPLIN: 'SYMEXPLIN'>"


def test_no_parameter_name_of_transformers_holds_the_type():
    # transformers marks adapter keys by this substring; "sel" would be in self_attn
    assert PeftType.SYMEXPLIN.value.lower() not in "model.layers.0.self_attn.q_proj.weight"


def test_registering_again_changes_nothing():
    before = dict(PEFT_TYPE_TO_CONFIG_MAPPING), list(PeftType)
    register()
    assert (dict(PEFT_TYPE_TO_CONFIG_MAPPING), list(PeftType)) == before
    assert PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.SYMEXPLIN] is SELConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.SYMEXPLIN] is SELModel


@pytest.mark.skipif(not hasattr(PreTrainedModel, "is_activation_checkpointing"), reason="nothing is renamed")
def test_no_warning_that_a_caller_can_do_nothing_about(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_peft_model(make_tiny(), make_config(task_type="CAUSAL_LM")).save_pretrained(tmp_path)
        PeftModel.from_pretrained(make_tiny(), tmp_path)
    assert [str(warning.message) for warning in caught] == []
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # a caller's own, and those of other methods
        assert not make_tiny().is_gradient_checkpointing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_peft_model(make_tiny(), LoraConfig(target_modules=["q_proj"]))
    assert any("is_gradient_checkpointing" in str(warning.message) for warning in caught)


def test_wrapping_with_another_method_repeats_no_warning_that_was_shown():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            get_peft_model(make_tiny(), LoraConfig(target_modules=["q_proj"]))
            warnings.warn("of this line", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == ["of this line"]


def test_quietening_again_changes_nothing():
    before = PeftModel.__init__
    quieten_wrapping()
    assert PeftModel.__init__ is before
