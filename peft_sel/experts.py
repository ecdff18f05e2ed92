"""Parameters that are not a module's weight, such as biases and the stacked experts of transformers: a layer each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from transformers.modeling_layers import GradientCheckpointingLayer

from peft_sel.config import SELConfig
from peft_sel.conversion import HOLDER_NAME, resolve_beta
from peft_sel.errors import DroppedBaseError, UnsupportedParameterError
from peft_sel.layer import SELLayer

TRANSPOSED_KINDS = ("Llama4TextExperts",)  # (num_experts, d_in, d_out), and nothing on the module that says so
MIN_EXPERT_DIMS = 3


class SELParameter(SELLayer, nn.Module):
    """The adapters of one named parameter: a matrix, a stack of experts (num_experts, d_out, d_in), or a bias.

    Every expert is a matrix with its own curvature, scales and residual; they are stored as stacked tensors, one set
    for each parameter. The module that owns the parameter runs inside a SELHolder; that of a bias, in a SELModule.
    """

    def __init__(self, owner: nn.Module, parameter_name: str, name: str) -> None:
        nn.Module.__init__(self)
        self.parameter_name = parameter_name
        super().__init__(owner, name)

    def _adopt(self, base_layer: Any) -> None:
        # In a list, so that it is not registered: the holder has it already.
        self._owner = [base_layer]
        weight = getattr(base_layer, self.parameter_name)
        self.stack = tuple(weight.shape[:-2])
        kind = type(base_layer).__name__
        self.transposed = bool(self.stack) and (getattr(base_layer, "is_transposed", False) or kind in TRANSPOSED_KINDS)
        sides = (*weight.shape, 1) if weight.dim() == 1 else weight.shape[-2:]
        self.out_features, self.in_features = sides[::-1] if self.transposed else sides

    @property
    def base_layer(self) -> nn.Module:
        """The module that owns the parameter."""
        return self._owner[0]

    def move_to(self, owner: nn.Module) -> None:
        """Serve the parameter of this name in another module, which takes the place of its owner."""
        self._owner[0] = owner

    @property
    def weight_name(self) -> str:
        """How errors call the parameter."""
        return self.module_name

    def _choose_beta(self, config: SELConfig, weight: Tensor, hidden_size: int | None) -> Tensor:
        """Return the curvature of each matrix: (num_experts,), or 0-d for a single one."""
        if not self.stack:
            value = resolve_beta(config, self.module_name, weight, hidden_size, self.weight_name)
            return torch.tensor(value, dtype=torch.float32)
        names = [f"{self.weight_name}[{index}]" for index in range(len(weight))]
        values = [
            resolve_beta(config, self.module_name, matrix, hidden_size, name)
            for name, matrix in zip(names, weight.unbind(), strict=True)
        ]
        return torch.tensor(values, dtype=torch.float32)

    def forward(self) -> Tensor | None:
        """Return what the owner has to run with; None for the parameter that it holds (disabled, merged, not active).

        Returns:
            The effective value in the parameter's dtype, or None.

        Raises:
            DroppedBaseError: If the adapters are disabled and one of them freed the parameter.
        """
        if self.disable_adapters:
            if self.base_dropped is not None:
                raise DroppedBaseError(f"running {self.module_name} without its adapter", self.base_dropped)
            if self.merged:
                self.unmerge()
        extra = [] if self.disable_adapters else self._active_unmerged()
        if extra:
            return self.get_running_weight([*self.merged_adapters, *extra])
        return self.fetch_base_weight() if self.base_is_away else None

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Say no: LoRA's own layers hold one matrix, and no bias.

        Args:
            adapter_name: Name of the adapter.

        Returns:
            False.
        """
        return False

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, None]:
        return getattr(base_layer, self.parameter_name).device, None

    def __repr__(self) -> str:
        return f"symexplin.SELParameter({self.parameter_name}, adapters={list(self.sel_config)})"


class SELHolder(nn.Module):
    """Runs a module with the effective values of its target parameters, which the module reads as its own."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.sel_parameters = nn.ModuleDict()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base layer, whose own parameters are in place again afterwards, whatever happens."""
        candidates = {name: layer() for name, layer in self.sel_parameters.items()}
        weights = {name: weight for name, weight in candidates.items() if weight is not None}
        if not weights:
            return self.base_layer(*args, **kwargs)
        return functional_call(self.base_layer, weights, args, kwargs, tie_weights=False)

    def __getattr__(self, name: str) -> Any:
        """Answer for the base layer, with effective values: some models read a router's weight from outside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base_layer", HOLDER_NAME) or name.startswith("_"):
                raise
        layers: Any = self.sel_parameters
        weight = layers[name]() if name in layers else None
        return getattr(self.base_layer, name) if weight is None else weight

    def add_adapter(self, parameter_name: str, adapter: str, config: SELConfig, *, name: str, **options: Any) -> None:
        """Add an adapter to one of the module's parameters.

        Args:
            parameter_name: Its name in the module.
            adapter: Name of the adapter.
            config: Its configuration.
            name: Its name in the model.
            **options: Passed on to update_layer.

        Raises:
            UnsupportedParameterError: If it is not a matrix or a stack of matrices, or cannot be put in its place.
            SELError: If it cannot be inverted.
        """
        is_new = parameter_name not in self.sel_parameters
        if is_new:
            _check_parameter(self.base_layer, parameter_name, name)
            self.sel_parameters[parameter_name] = SELParameter(self.base_layer, parameter_name, name)
        layer: Any = self.sel_parameters[parameter_name]
        if is_new:
            layer._active_adapter = adapter
        layer.update_layer(adapter, config, **options)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base layer, with the adapters merged into its parameters if asked to: PEFT calls this."""
        layers: Any = self.sel_parameters
        for layer in layers.values():
            if merge:
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
            if layer.base_is_away:
                layer.put_base_back()
        return self.base_layer

    def __repr__(self) -> str:
        return "symexplin." + super().__repr__()


def remove_empty(layers: nn.ModuleDict) -> None:
    """Remove the layers of parameters that have no adapter any more."""
    for name in [name for name, layer in layers.items() if not layer.sel_config]:
        del layers[name]


def place_holder(parent: nn.Module, child_name: str, child: nn.Module) -> SELHolder:
    """Return the holder of a module, and put a new one in the module's place if there is none.

    Args:
        parent: Its parent; one that became a holder stands for the module it holds.
        child_name: The module's name there.
        child: The module, its holder, or the base layer of the holder parent.

    Returns:
        The holder.
    """
    if isinstance(child, SELHolder):
        return child
    if isinstance(parent, SELHolder):
        if child is parent.base_layer:
            return parent
        parent = parent.base_layer
    holder = SELHolder(child)
    setattr(parent, child_name, holder)
    return holder


def _check_parameter(module: nn.Module, parameter_name: str, name: str) -> None:
    """Raise unless a parameter is a matrix or a stack of matrices that a module reads while it runs."""
    parameter = module._parameters[parameter_name]
    shape = None if parameter is None else tuple(parameter.shape)
    if shape is None or len(shape) not in (2, 3):
        raise UnsupportedParameterError(name, f"has the shape {shape}, and only matrices and stacks of them are")
    if isinstance(module, _ConvNd):
        raise UnsupportedParameterError(name, "is a convolution's kernel: name its module in target_modules, which are")
    if isinstance(module, GradientCheckpointingLayer):
        raise UnsupportedParameterError(
            name, "belongs to a layer that gradient checkpointing runs a second time with the base parameter"
        )


def find_parameters(model: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """Find the parameters that target_parameters names, by PEFT's rule: the whole name or its end after a dot.

    Args:
        model: The model, with or without adapters.
        names: The field's value.

    Returns:
        For each of names, the full names of the parameters, without what adapters put between.
    """
    known = list(_iter_parameter_names(model))
    return {name: [full for full in known if full == name or full.endswith(f".{name}")] for name in names}


def find_untouched_experts(model: nn.Module) -> list[str]:
    """Return the names of expert parameters (three dimensions, not a convolution's) that no adapter converts."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, _ConvNd) or is_internal(path):
            continue
        converted: Any = ()
        if path.endswith(".base_layer"):
            holder = model.get_submodule(path.removesuffix(".base_layer"))
            converted = holder.sel_parameters if isinstance(holder, SELHolder) else ()
        names += [
            _strip_wrappers(f"{path}.{name}")
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == MIN_EXPERT_DIMS and "expert" in path and name not in converted
        ]
    return names


def _iter_parameter_names(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if not is_internal(path):
            yield from (_strip_wrappers(f"{path}.{name}").removeprefix(".") for name in module._parameters)


def is_internal(path: str) -> bool:
    """Whether a module is a part of the adapters of a parameter."""
    return f".{HOLDER_NAME}." in f".{path}."


def _strip_wrappers(name: str) -> str:
    return name.replace(".base_layer.", ".")
