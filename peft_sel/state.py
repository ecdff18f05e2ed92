"""What of a converted model is saved as an adapter, and what is loaded into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from peft_sel.checks import check_base, check_gathered, check_loadable, check_multipliers, check_saved
from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS
from peft_sel.errors import AdapterStateError, OffloadedError, SELError
from peft_sel.removal import iter_sel_layers, remove_adapter
from peft_sel.sharded import agreeing, drop_awaited, shard_as

CHECKPOINTED = "_checkpoint_wrapped_module."  # in names of modules, from accelerate's fsdp_activation_checkpointing

_take_out: ContextVar[list[Callable[[], None]] | None] = ContextVar("_take_out", default=None)


@contextmanager
def await_tensors() -> Iterator[None]:
    """Let adapters that are added meanwhile wait for the tensors of a load, which must follow: nothing is inverted.

    If it fails, they are taken out of their models again. Within another such block this one changes nothing.
    """
    if _take_out.get() is not None:
        yield
        return
    take_out: list[Callable[[], None]] = []
    token = _take_out.set(take_out)
    try:
        yield
    except BaseException:
        for undo in take_out:
            undo()
        raise
    finally:
        _take_out.reset(token)


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
    """Checks what is saved and loaded; an adapter that cannot be loaded is taken out again."""

    def _roll_back(self, model: nn.Module, adapter_name: str) -> None:
        """Take an adapter out again."""
        raise NotImplementedError

    def _awaits_tensors(self) -> bool:
        """Whether an adapter that is added now gets its tensors from a load, in await_tensors."""
        return _take_out.get() is not None

    def _undo_if_not_loaded(self, model: nn.Module, adapter_name: str) -> None:
        """Have an adapter taken out again if the load that it awaits fails."""
        if (take_out := _take_out.get()) is not None:
            take_out.append(partial(self._forget, model, adapter_name))

    def _forget(self, model: nn.Module, adapter_name: str) -> None:
        self.peft_config.pop(adapter_name, None)
        self._roll_back(model, adapter_name)

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

        The configuration, which is saved next, gets the fingerprints of the base that the adapter has in this model.
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
        check_multipliers(config, own, adapter_name)
        config.base_fingerprint = {
            layer.fingerprint_name: layer.base_fingerprint[adapter_name]
            for layer in iter_sel_layers(model)
            if adapter_name in layer.base_fingerprint
        }
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
        try:
            with agreeing():
                check_loadable(model, mapped)
                state = model.state_dict()
                own = super()._get_adapter_state_dict(names, config, adapter_name, state, [])
                check_saved(
                    own,
                    mapped,
                    state,
                    adapter_name,
                    partial(cls._remove_adapter_name_from_key, adapter_name=adapter_name),
                )
                for layer in iter_sel_layers(model):
                    layer.check_base_is_finite(adapter_name)
                check_base(iter_sel_layers(model), adapter_name, config, saved)
        except SELError:
            layers = [layer for layer in iter_sel_layers(model) if adapter_name in layer.sel_config]
            if all(layer.is_untouched(adapter_name) for layer in layers):
                model.peft_config.pop(adapter_name, None)
                tuner = getattr(model, "base_model", None)
                if isinstance(tuner, SavedTuner):
                    tuner._roll_back(tuner.model, adapter_name)
                else:
                    remove_adapter(model, adapter_name)
            raise
        for layer in iter_sel_layers(model):
            layer.keep_record(adapter_name, saved.base_fingerprint.get(layer.fingerprint_name))
            layer.drop_if_pending()
        return drop_awaited(model, iter_sel_layers(model), own, shard_as(state, mapped))
