"""Makes SEL known to PEFT: the only file that touches PEFT's tables."""

from __future__ import annotations

import peft.utils
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from peft_sel.config import SELConfig
from peft_sel.model import SELModel

# Not "SEL": transformers looks for the lower-case type in parameter names, and "sel" is a part of "self_attn".
PEFT_TYPE_NAME = "SYMEXPLIN"


def add_peft_type(name: str) -> None:
    """Add a member to the enum PeftType, which cannot be subclassed: equal to, looked up and pickled like any other."""
    if name in PeftType.__members__:
        return
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = PeftType  # type: ignore[attr-defined]
    member._sort_order_ = len(PeftType.__members__)  # type: ignore[attr-defined]
    type.__setattr__(PeftType, name, member)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member


def register() -> None:
    """Register SELConfig and SELModel with PEFT; a second call does nothing."""
    add_peft_type(PEFT_TYPE_NAME)
    if PeftType(PEFT_TYPE_NAME) not in PEFT_TYPE_TO_CONFIG_MAPPING:
        peft.utils.register_peft_method(
            name=PEFT_TYPE_NAME.lower(), config_cls=SELConfig, model_cls=SELModel, prefix=SELModel.prefix
        )
