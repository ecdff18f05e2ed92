"""Makes SEL known to PEFT: the only file that touches PEFT's tables and functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import peft.peft_model
import peft.utils
from peft import PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor

from peft_sel.card import update_card
from peft_sel.config import SELConfig
from peft_sel.loading import await_tensors
from peft_sel.model import SELModel
from peft_sel.sharded import GatheredAdapters, gather_adapters, is_sharded_model, write_from_first

# Not "SEL": transformers looks for the lower-case type in parameter names, and "sel" is a part of "self_attn".
PEFT_TYPE_NAME = "SYMEXPLIN"
GATHERER_MARK = "gathers_sel_adapters"  # an attribute of the function that does
CARD_MARK = "keeps_what_users_wrote"  # an attribute of the function that does
READER_MARK = "reads_sel_adapters"  # an attribute of the function that reads them
QUIET_MARK = "wraps_sel_models_quietly"  # an attribute of the function that does


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


def quieten_wrapping() -> None:
    """Let PEFT wrap a SEL model without a warning that its user could do nothing about; a second call does nothing.

    PEFT asks each model for `is_gradient_checkpointing`, which transformers has renamed and warns of.
    """
    stock = PeftModel.__init__
    if hasattr(stock, QUIET_MARK):
        return

    @wraps(stock)
    def wrap_model(self: PeftModel, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(peft_config, SELConfig):  # a scope for its filters would let others' warnings be repeated
            return stock(self, model, peft_config, *args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return stock(self, model, peft_config, *args, **kwargs)

    setattr(wrap_model, QUIET_MARK, True)
    setattr(PeftModel, "__init__", wrap_model)  # noqa: B010


def extend_loading(read: Callable[..., dict[str, Tensor] | None]) -> None:
    """Let PEFT load SEL adapters without inverting anything, and read them by our function; a second call does nothing.

    PEFT looks for one file by its name, pickled if there is no other, and reads it to the first GPU beside the model.
    Ours never opens a pickled one, also reads shards, and maps them into memory, from where load_state_dict copies
    each tensor to its place. PEFT first adds an adapter as if it were new and then loads over it: meanwhile nothing is
    converted (await_tensors).

    Args:
        read: Takes folder or hub id, device, PEFT's key_mapping, and a dictionary of options for the hub; returns None
            for what is no SEL adapter, which then goes PEFT's way.
    """
    stock = peft.peft_model.load_peft_weights
    if hasattr(stock, READER_MARK):
        return

    @wraps(stock)
    def load_peft_weights(
        model_id: str, device: Any = None, key_mapping: dict[str, str] | None = None, **options: Any
    ) -> dict[str, Tensor]:
        found = read(model_id, device, key_mapping, options)
        if found is not None:
            return found
        tensors: dict[str, Tensor] = stock(model_id, device=device, key_mapping=key_mapping, **options)
        return tensors

    setattr(load_peft_weights, READER_MARK, True)
    peft.peft_model.load_peft_weights = load_peft_weights
    model: Any = peft.peft_model.PeftModel
    model.from_pretrained = classmethod(await_tensors()(model.from_pretrained.__func__))
    model.load_adapter = await_tensors()(model.load_adapter)


def extend_saving() -> None:
    """Let save_pretrained save a SEL model that FSDP2 shards; a second call does nothing.

    PEFT would write what each process holds, and fails at that. Here all processes gather tensor after tensor, so all
    have to call it, and the first one writes; if it cannot, all have an error. PEFT's get_peft_model_state_dict still
    gives the shards, which accelerate's sharded checkpoints take.
    """
    stock, stock_state = PeftModel.save_pretrained, peft.peft_model.get_peft_model_state_dict
    if hasattr(stock, GATHERER_MARK):
        return
    signature = inspect.signature(stock)

    @wraps(stock_state)
    def get_state(
        model: Any, state_dict: Any = None, adapter_name: str = "default", **options: Any
    ) -> dict[str, Tensor]:
        if isinstance(state_dict, GatheredAdapters):
            return state_dict[adapter_name]
        tensors: dict[str, Tensor] = stock_state(model, state_dict, adapter_name, **options)
        return tensors

    @wraps(stock)
    def save_pretrained(self: PeftModel, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        gathers = isinstance(getattr(self, "base_model", None), SELModel) and is_sharded_model(self)
        if not gathers or call.arguments["kwargs"].get("state_dict") is not None:
            stock(self, *args, **kwargs)
            return
        adapters, option = (call.arguments[name] for name in ("selected_adapters", "save_embedding_layers"))
        kwargs["state_dict"] = gather_adapters(self, adapters, option)
        write_from_first({}, lambda _: stock(self, *args, **kwargs))

    setattr(save_pretrained, GATHERER_MARK, True)
    setattr(peft.peft_model, "get_peft_model_state_dict", get_state)  # noqa: B010
    setattr(PeftModel, "save_pretrained", save_pretrained)  # noqa: B010


def extend_cards() -> None:
    """Let PEFT update the card of a SEL adapter without losing what a user wrote there; a second call does nothing."""
    stock = PeftModel.create_or_update_model_card
    if hasattr(stock, CARD_MARK):
        return

    @wraps(stock)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        if isinstance(getattr(self, "base_model", None), SELModel):
            configs: dict[str, Any] = self.peft_config
            folders = {name: path for config in configs.values() for name, path in config.base_folders.items()}
            contents = configs["default"].contents if "default" in configs else None  # what the folder itself holds
            update_card(Path(output_dir), lambda folder: stock(self, str(folder)), contents, folders)
        else:
            stock(self, output_dir)

    setattr(create_or_update_model_card, CARD_MARK, True)
    setattr(PeftModel, "create_or_update_model_card", create_or_update_model_card)  # noqa: B010
