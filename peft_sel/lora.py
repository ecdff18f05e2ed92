"""An adapter as a LoRA, for programs that know no other kind: the best low-rank fit, and how far off it is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import convert_to_lora
from peft.utils import SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn

from peft_sel.errors import AdapterStateError, DroppedBaseError, LoraConversionError, list_names
from peft_sel.layer import SELLayer


@dataclass(frozen=True)
class LoraFit:
    """How well a LoRA fits the adapter it was made from.

    Attributes:
        relative_error: |delta - B @ A| / |delta| over all modules together, in the Frobenius norm; 0 where delta is 0.
        largest_relative_error: The same of the module where it is largest.
        largest_module: Name of that module.
        num_modules: Converted modules.
    """

    relative_error: float
    largest_relative_error: float
    largest_module: str
    num_modules: int


def save_as_lora(
    path: str | Path, model: nn.Module, rank: int | float, adapter_name: str = "default", progressbar: bool = False
) -> LoraFit:
    """Save an adapter as a LoRA, by peft.convert_to_lora, and report its error: a dense adapter has no low rank.

    Args:
        path: Folder for the LoRA's config and tensors.
        model: Model with the adapter.
        rank: Rank of every module, or in (0, 1] the share of each delta's squared norm that the LoRA must keep.
        adapter_name: The adapter.
        progressbar: Show the progress.

    Returns:
        The error: no LoRA of these ranks has a smaller one.

    Raises:
        AdapterStateError: If a converted module lacks the adapter, or the model has none.
        DroppedBaseError: If the base weights, and so the deltas, are gone.
        LoraConversionError: If the adapter has Embedding or convolution modules, biases or trained tokens, or a rank
            exceeds a module's size.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SELLayer)}
    _check_layers(layers, adapter_name, rank)
    config, tensors = convert_to_lora(model, rank=rank, adapter_name=adapter_name, progressbar=progressbar)
    for name, module in model.named_modules():  # with several adapters, PEFT takes the last one's
        if isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
            saved = module.modules_to_save[adapter_name].state_dict()
            tensors.update({f"{name}.{key}": tensor.contiguous() for key, tensor in saved.items()})
    sel_config = next(iter(layers.values())).sel_config[adapter_name]
    config.exclude_modules, config.task_type = copy.copy(sel_config.exclude_modules), sel_config.task_type
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME)
    config.save_pretrained(str(folder))
    return _measure_fit(layers, adapter_name, tensors)


def _check_layers(layers: dict[str, SELLayer], adapter_name: str, rank: int | float) -> None:
    lacking = sorted(name for name, layer in layers.items() if adapter_name not in layer.sel_config)
    if lacking or not layers:
        raise AdapterStateError(
            adapter_name,
            f"is not in {list_names(lacking, 3) or 'this model'}",
            "make the LoRA from a model that has only the adapter to be converted",
        )
    if next(iter(layers.values())).sel_config[adapter_name].trainable_token_indices:
        raise LoraConversionError(f"adapter {adapter_name!r}", "has trainable_token_indices, which PEFT cannot convert")
    for name, layer in layers.items():
        base: Any = layer.get_base_layer()
        if layer.base_dropped is not None:
            raise DroppedBaseError("save_as_lora", layer.base_dropped)
        shape = tuple(layer.base_weight.shape)  # base.weight of 4 bits is packed
        if len(shape) == 1:
            raise LoraConversionError(layer.weight_name, "is a bias, and a LoRA adapts matrices")
        if not layer.supports_lora_conversion(adapter_name):
            raise LoraConversionError(name, f"is a {type(base).__name__}, and only linear layers can become a LoRA")
        if isinstance(rank, int) and rank > min(shape):
            raise LoraConversionError(name, f"has a weight of shape {shape}, too small for {rank=}")


@torch.no_grad()
def _measure_fit(layers: dict[str, SELLayer], adapter_name: str, tensors: dict[str, Tensor]) -> LoraFit:
    total_error, total_norm = 0.0, 0.0
    worst, worst_name = -1.0, ""
    for name, layer in layers.items():
        delta = layer.get_delta_weight(adapter_name)
        fit = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        error = float((delta - (fit.T if layer.transposed else fit)).norm()) ** 2
        norm = float(delta.norm()) ** 2
        total_error, total_norm = total_error + error, total_norm + norm
        if _ratio(error, norm) > worst:
            worst, worst_name = _ratio(error, norm), name
    return LoraFit(_ratio(total_error, total_norm), worst, worst_name, len(layers))


def _ratio(squared_error: float, squared_norm: float) -> float:
    return (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
