"""What of a converted model is saved as an adapter, and what is loaded into one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from peft_sel.card import summarize_tensors
from peft_sel.checks import check_base, check_gathered, check_loadable, check_multipliers, check_saved
from peft_sel.coexistence import check_complete
from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS, PREFIX
from peft_sel.errors import AdapterStateError, OffloadedError
from peft_sel.loading import current_load
from peft_sel.removal import iter_sel_layers
from peft_sel.sharded import agreeing, drop_awaited, shard_as

CHECKPOINTED = "_checkpoint_wrapped_module."  # in names of modules, from accelerate's fsdp_activation_checkpointing


class SavedTensors(dict[str, Tensor]):
    """The tensors in an adapter's folder, by key, and the configuration beside them, which PEFT's copy keeps.

    Args:
        tensors: The tensors.
        config: The configuration; the model's own is another where the adapter's name is taken, as when resuming.
    """

    def __init__(self, tensors: dict[str, Tensor], config: SELConfig) -> None:
        super().__init__(tensors)
        self.config = config

    def copy(self) -> SavedTensors:
        """Copy the dictionary, not the tensors."""
        return SavedTensors(self, self.config)


class _Unwrapped:
    """A model whose modules have the names that its state_dict gives them, without FSDP's activation checkpointing."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules."""
        return ((name.replace(CHECKPOINTED, ""), module) for name, module in self.model.named_modules())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's."""
        state: dict[str, Tensor] = self.model.state_dict()
        return state


class SavedTuner(BaseTuner):
    """Checks what is saved and loaded."""

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        """Select what belongs to an adapter, for saving; refuse what is not in memory or has no value.

        The configuration, which is saved next, gets the fingerprints of the base that the adapter has in this model,
        and what its card says of the tensors.
        """
        names: Any = _Unwrapped(model)
        own: dict[str, Tensor] = super()._get_adapter_state_dict(
            names, config, adapter_name, state_dict, unwanted_adapter_names
        )
        if state_dict and not own:
            raise AdapterStateError(adapter_name, "has no tensor in the state_dict to save", "give that of this model")
        if (key := next((key for key, tensor in own.items() if tensor.is_meta), None)) is not None:
            raise OffloadedError(key, "values")
        check_gathered(model, adapter_name, own)
        if state_dict:  # in other processes than the first it may be empty
            check_complete(names.named_modules(), adapter_name, own)
        check_multipliers(config, own, adapter_name)
        config.base_fingerprint = {
            layer.fingerprint_name: layer.base_fingerprint[adapter_name]
            for layer in iter_sel_layers(model)
            if adapter_name in layer.base_fingerprint
        }
        fixed = [name for name, scale in config.scale_configs().items() if not scale.trainable]
        config.contents = summarize_tensors({**own, **_find_others(model, adapter_name)}, PREFIX, fixed)
        return own

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Map saved keys to the model's, after checking that each tensor is there and fits: nothing loads by halves."""
        saved = state_dict.config if isinstance(state_dict, SavedTensors) else config
        names: Any = _Unwrapped(model)
        mapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(names, config, adapter_name, state_dict)
        # PEFT saves the base layer of a targeted lm_head along; loading it would overwrite a tied embedding.
        copies = (".base_layer.weight", *([".base_layer.bias"] if getattr(config, BIAS) == "sel_only" else []))
        mapped = {key: value for key, value in mapped.items() if not key.endswith(copies)}
        with agreeing():
            check_loadable(model, mapped)
            state = model.state_dict()
            own = super()._get_adapter_state_dict(names, config, adapter_name, state, [])
            check_saved(
                own, mapped, state, adapter_name, partial(cls._remove_adapter_name_from_key, adapter_name=adapter_name)
            )
            for layer in iter_sel_layers(model):
                layer.check_base_is_finite(adapter_name)
            check_base(iter_sel_layers(model), adapter_name, config, saved)
        if (load := current_load()) is not None:
            load.loaded.append(adapter_name)
            load.undo.callback(_restore_biases, _copy_base_biases(model, mapped))
        for layer in iter_sel_layers(model):
            layer.keep_record(adapter_name, saved.base_fingerprint.get(layer.fingerprint_name))
            layer.drop_if_pending()
        return drop_awaited(model, iter_sel_layers(model), own, shard_as(state, mapped))


def _find_others(model: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    """Return what an adapter trains in modules_to_save and tokens, which PEFT saves beside what is the tuner's."""
    wrappers = (module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper))
    named = (item for wrapper in wrappers for item in wrapper.named_parameters() if adapter_name in item[0].split("."))
    return {str(id(parameter)): parameter for _, parameter in named}


def _copy_base_biases(model: nn.Module, mapped: dict[str, Tensor]) -> list[tuple[nn.Module, nn.Parameter, Tensor]]:
    """Return the biases of the base that a load writes to (bias="all"): module, parameter, and a copy of its values."""
    names = [key.rpartition(".")[0] for key in mapped if key.endswith(f".{BIAS}") and f".{PREFIX}" not in key]
    modules = [module for name, module in model.named_modules() if name in names]
    return [(m, m._parameters[BIAS], m._parameters[BIAS].detach().clone()) for m in modules if BIAS in m._parameters]


@torch.no_grad()
def _restore_biases(copies: list[tuple[nn.Module, nn.Parameter, Tensor]]) -> None:
    for module, bias, values in copies:
        module._parameters[BIAS] = bias
        bias.copy_(values)
