"""Taking an adapter out of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper, _get_submodules
from torch import nn

from peft_sel.experts import SELHolder, remove_empty
from peft_sel.layer import SELLayer
from peft_sel.modules import SELModule


def iter_sel_layers(model: nn.Module) -> Iterator[SELLayer]:
    """Yield the SEL layers of a model."""
    return (module for module in model.modules() if isinstance(module, SELLayer))


def remove_adapter(model: nn.Module, adapter_name: str) -> None:
    """Take an adapter out of every layer and wrapper, and those without adapters out of the model."""
    for layer in list(iter_sel_layers(model)):
        if adapter_name in layer.sel_config:
            layer.discard_adapter(adapter_name)
    for name, module in reversed(list(model.named_modules())):  # what lies inside a holder first
        replacement: Any = None
        if isinstance(module, SELHolder):
            remove_empty(module.sel_parameters)
            replacement = None if module.sel_parameters else module.base_layer
        elif isinstance(module, SELModule):
            remove_empty(module.sel_parameters)
            replacement = None if module.sel_config else module.base_layer
        elif isinstance(module, AuxiliaryTrainingWrapper) and adapter_name in module._adapters:
            if module._adapters == {adapter_name}:
                replacement = module.original_module
            else:
                active = [other for other in module.active_adapters if other != adapter_name]
                module.delete_adapter(adapter_name, new_active_adapters=active)
        if replacement is not None:
            parent, _, child_name = _get_submodules(model, name)
            setattr(parent, child_name, replacement)
