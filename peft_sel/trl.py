"""What TRL's trainers do to a model: a reference beside the adapter, and casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from peft_sel.config import RAW_DTYPES
from peft_sel.conversion import wide_dtype
from peft_sel.errors import AdapterStateError, DroppedBaseError
from peft_sel.layer import SELLayer
from peft_sel.removal import iter_sel_layers

TRAINED, REFERENCE = "default", "ref"  # what they call the adapter in training, and the frozen one it is compared with


def is_reference(configs: Mapping[str, Any], adapter: str) -> bool:
    """Whether a new adapter is the reference that TRL makes of an adapter which the model came with.

    Its DPO, KTO, GRPO and RLOO trainers add one with the very configuration of the trained adapter. They then copy the
    parameters that have ".default." in their names, which of SEL's are the scales only.

    Args:
        configs: The adapters' configurations, the new one's included.
        adapter: Name of the new one.

    Returns:
        Whether it is to start as a copy.
    """
    return adapter == REFERENCE and configs[adapter] is configs.get(TRAINED)


@torch.no_grad()
def copy_adapter(model: nn.Module, source: str, target: str) -> None:
    """Copy what one adapter computes its weights from into another of the same configuration, all bits of it.

    Args:
        model: The model.
        source: The adapter to copy.
        target: The one to overwrite.
    """
    for layer in iter_sel_layers(model):
        if source in layer.sel_config:
            beta = layer.symexplin_beta[target] = layer.symexplin_beta[source].clone()
            for copy, tensor in zip(layer.tensors(target), layer.tensors(source), strict=True):
                copy.copy_(tensor)
            for scale in layer.scales(target).values():
                scale.reset_start(beta)
            if not layer.sel_config[target].train_raw:
                layer.refresh_frozen_raw(target)


def check_trainer(trainer: Any) -> None:
    """Raise if a new trainer could not train its SEL model, or not as configured.

    Args:
        trainer: A transformers Trainer; what TRL's have besides is optional.

    Raises:
        DroppedBaseError: If its reference model is the base model, and the base weights are gone.
        AdapterStateError: If tensors of an adapter have lost their dtype.
    """
    computes_reference = getattr(trainer, "ref_model", trainer) is None and getattr(trainer, "beta", 0) != 0
    for layer in iter_sel_layers(trainer.model):
        if computes_reference and layer.base_dropped is not None:
            raise DroppedBaseError(f"{type(trainer).__name__}, whose reference is the base model,", layer.base_dropped)
        for adapter in layer.sel_config:
            _check_dtypes(layer, adapter)


def _check_dtypes(layer: SELLayer, adapter: str) -> None:
    """Raise if a parameter of an adapter is of another dtype than its configuration says."""
    config = layer.sel_config[adapter]
    raw = layer.symexplin_raw.get(adapter)
    for tensor in layer.tensors(adapter):
        if tensor.dtype != (RAW_DTYPES[config.raw_dtype] if tensor is raw else wide_dtype(config)):
            name = str(tensor.dtype).removeprefix("torch.")
            raise AdapterStateError(
                adapter,
                f"was cast to {name}, in which small steps are lost: so TRL does on a base of 4 or 8 bits",
                "load the base in 16 bits, or train with SELTrainer on token ids",
            )
