"""The layers that run a target module with its effective weight, and which of them a module gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peft_sel.config import SELConfig
from peft_sel.errors import ConfigError, DroppedBaseError, MixedBatchError, UnsupportedModuleError
from peft_sel.layer import SELLayer

BASE_ROWS = "__base__"  # PEFT's name, in adapter_names, for the untouched base


class SELModule(SELLayer, nn.Module):
    """A module that computes with one weight (Embedding, Conv1D, Conv1d to Conv3d), run with the effective weight."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter: str,
        config: SELConfig,
        *,
        name: str,
        hidden_size: int | None = None,
        convert: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        super().__init__(base_layer, name)
        self._active_adapter = adapter
        self.update_layer(adapter, config, hidden_size=hidden_size, convert=convert)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """Run the base layer: as it is where adapters are disabled or all merged, else with the effective weight.

        Args:
            x: Input.
            *args: Passed on to the base layer where it runs as it is.
            adapter_names: Adapter of each row of x, "__base__" for none; None runs the active adapters.
            **kwargs: Passed on like args.

        Returns:
            Output. With adapter_names, the rows of one adapter are those that it gives for them alone, bit for bit.

        Raises:
            DroppedBaseError: If the base weight has to run and was freed.
            MixedBatchError: If x has not one row per name.
        """
        if self.disable_adapters:
            if self.base_dropped is not None:
                raise DroppedBaseError(f"running {self.module_name} without its adapter", self.base_dropped)
            if self.merged:
                self.unmerge()
        elif adapter_names is not None:
            return self._run_rows(x, adapter_names)
        extra = [] if self.disable_adapters else self._active_unmerged()
        if not extra:
            return self.base_layer(x, *args, **kwargs)
        return self._run(self.get_running_weight([*self.merged_adapters, *extra]), x)

    def _run_rows(self, x: Tensor, names: list[str]) -> Tensor:
        """Run the rows of each adapter with its effective weight, those of others with the base layer."""
        if len(x) != len(names):
            raise MixedBatchError(
                names, f"names {len(names)} rows, and {self.module_name} runs {len(x)}", "give one name per row"
            )
        rows: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            rows.setdefault(name if name in self.sel_config else BASE_ROWS, []).append(index)
        if BASE_ROWS in rows and self.base_dropped is not None:
            raise DroppedBaseError(f"running rows of {self.module_name} without its adapter", self.base_dropped)
        results = [
            self.base_layer(x[group]) if name == BASE_ROWS else self._run(self.get_running_weight([name]), x[group])
            for name, group in rows.items()
        ]
        order = torch.tensor([index for group in rows.values() for index in group], device=x.device)
        return torch.cat(results)[order.argsort()]

    def _run(self, weight: Tensor, x: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        result: Tensor
        if self.transposed:
            result = torch.addmm(base.bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], base.nf)
        elif isinstance(base, nn.Embedding):
            result = nn.functional.embedding(
                x, weight, base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq, sparse=base.sparse
            )
            scale = self._get_embed_scale()
            result = result if scale is None else result * scale.to(result.dtype)
        else:
            result = base._conv_forward(x, weight, base.bias)
        return result

    def _active_unmerged(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.sel_config and name not in self.merged_adapters]

    def __repr__(self) -> str:
        return "symexplin." + super().__repr__()


class SELLinear(SELModule):
    """A torch.nn.Linear whose weight is the effective weight of the active adapters."""

    def _run(self, weight: Tensor, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, self.bias)


def choose_layer_class(name: str, module: Any) -> type[SELModule]:
    """Return the SEL layer for a module; raise UnsupportedModuleError if there is none."""
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention) or kind == "NonDynamicallyQuantizableLinear":  # its out_proj
        raise UnsupportedModuleError(name, kind, "torch.nn.MultiheadAttention reads weights without calling modules")
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        raise UnsupportedModuleError(name, kind, "it holds no parameter called weight")
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise UnsupportedModuleError(name, kind, "max_norm rewrites its weight while it runs")
    if type(module).forward is nn.Linear.forward:
        return SELLinear
    if type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, Conv1D.forward):
        return SELModule
    # Gemma's embedding multiplies by its attribute embed_scale; what else a subclass does is not known
    if isinstance(module, nn.Embedding) and (
        type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    ):
        return SELModule
    raise UnsupportedModuleError(name, kind)


def check_tokens(model: Any, config: SELConfig, targets: list[str]) -> None:
    """Raise if rows of a target module's weight, its own or a tied one, are also to be trained plainly.

    Args:
        model: The base model.
        config: Its trainable_token_indices; PEFT leaves modules_to_save out of the targets by itself.
        targets: Names of the target modules.

    Raises:
        ConfigError: If a weight would train in two ways.
    """
    if not (tokens := config.trainable_token_indices):
        return
    converted = [name for name, module in model.named_modules() if isinstance(module, SELLayer)]
    weights = {id(getattr(model.get_submodule(name), "weight", None)): name for name in [*targets, *converted]}
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for name, module in model.named_modules():
        listed = any(name.endswith(key) for key in tokens) if isinstance(tokens, dict) else module is embedding
        if listed and (found := weights.get(id(getattr(module, "weight", None)))) is not None:
            raise ConfigError(
                "trainable_token_indices", tokens, f"trains rows of {name}, whose weight the target {found} trains"
            )
