"""The layers that run a target module with its effective weight and bias, which one a module gets, and its removal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from peft_sel.accumulation import find_shared_weights
from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS
from peft_sel.errors import DroppedBaseError, MixedBatchError, UnsupportedModuleError
from peft_sel.experts import SELParameter
from peft_sel.kernels import linear
from peft_sel.layer import SELLayer
from peft_sel.shapes import vector_config

BASE_ROWS = "__base__"  # PEFT's name, in adapter_names, for the untouched base


class SELModule(SELLayer, nn.Module):
    """A module that computes with one weight (Embedding, Conv1D, Conv1d to Conv3d), run with the effective weight.

    The adapters of its bias, if bias="sel_only" asks for them, are in sel_parameters.
    """

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
        self.sel_parameters = nn.ModuleDict()
        self._active_adapter = adapter
        self.update_layer(adapter, config, hidden_size=hidden_size, convert=convert)

    @property
    def bias_layer(self) -> SELParameter | None:
        """The adapters of the bias, None where it has none."""
        layers: Any = self.sel_parameters._modules
        layer: SELParameter | None = layers.get(BIAS)
        return layer

    def update_layer(
        self, adapter: str, config: SELConfig, *, hidden_size: int | None = None, convert: bool = True
    ) -> None:
        """Add an adapter to the weight, and to the bias if there is one and config.bias is "sel_only".

        Args:
            adapter: Name of the adapter.
            config: Its configuration.
            hidden_size: Width of the model, for beta="width".
            convert: False leaves all tensors without values, which are to be loaded.

        Raises:
            SELError: If the weight or the bias cannot be converted.
        """
        super().update_layer(adapter, config, hidden_size=hidden_size, convert=convert)
        base: Any = self.get_base_layer()
        if config.bias != "sel_only" or base._parameters.get(BIAS) is None:
            return
        layer = self.bias_layer
        if layer is None:
            layer = SELParameter(base, BIAS, f"{self.module_name}.{BIAS}")
            layer._active_adapter = self._active_adapter
            self.sel_parameters[BIAS] = layer
        layer.update_layer(adapter, vector_config(config), hidden_size=hidden_size, convert=convert)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """Run the base layer as it is where adapters are disabled or all merged, else with effective weight and bias.

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
        bias = self._get_active_bias()
        if not extra and bias is None:
            return self._run_base(x, *args, **kwargs)
        bias = self._own_bias() if bias is None else bias
        if extra:
            return self._run_adapters([*self.merged_adapters, *extra], bias, x)
        return self._run(self.fetch_base_weight() if self.base_is_away else self.weight, bias, x)

    def _run_base(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the base layer, with a copy of its weight for this pass if that is in CPU memory."""
        if not self.base_is_away:
            result: Tensor = self.base_layer(x, *args, **kwargs)
            return result
        return functional_call(self.base_layer, {"weight": self.fetch_base_weight()}, (x, *args), kwargs)

    def _get_active_bias(self) -> Tensor | None:
        """Return the effective bias of the active adapters; None for the bias that the base layer holds."""
        if (layer := self.bias_layer) is None:
            return None
        if self.disable_adapters:
            layer.unmerge()
            return None
        bias: Tensor | None = layer()
        return bias

    def _own_bias(self) -> Tensor | None:
        """Return the bias that the base layer holds, None where it has none."""
        bias: Tensor | None = getattr(self.get_base_layer(), BIAS, None)
        return bias

    def _run_rows(self, x: Tensor, names: list[str]) -> Tensor:
        """Run the rows of each adapter with its effective weight and bias, those of others with the base layer."""
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
            self._run_base(x[group]) if name == BASE_ROWS else self._run_adapter(name, x[group])
            for name, group in rows.items()
        ]
        order = torch.tensor([index for group in rows.values() for index in group], device=x.device)
        return torch.cat(results)[order.argsort()]

    def _run_adapter(self, adapter: str, x: Tensor) -> Tensor:
        layer = self.bias_layer
        has_bias = layer is not None and adapter in layer.sel_config
        bias = layer.get_effective_weight(adapter) if layer is not None and has_bias else self._own_bias()
        return self._run(self.get_running_weight([adapter]), bias, x)

    def _run_adapters(self, adapters: list[str], bias: Tensor | None, x: Tensor) -> Tensor:
        return self._run(self.get_running_weight(adapters), bias, x)

    def _run(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        result: Tensor
        if self.transposed:
            assert bias is not None
            result = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], base.nf)
        elif isinstance(base, nn.Embedding):
            result = nn.functional.embedding(
                x, weight, base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq, sparse=base.sparse
            )
            scale = self._get_embed_scale()
            result = result if scale is None else result * scale.to(result.dtype)
        else:
            result = base._conv_forward(x, weight, bias)
        return result

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base layer, with the adapters merged into weight and bias if asked to: PEFT calls this."""
        for layer in (self, self.bias_layer) if merge else ():
            if layer is not None:
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        if self.base_is_away:
            self.put_base_back()
        return self.get_base_layer()

    def __repr__(self) -> str:
        return "symexplin." + super().__repr__()


class SELLinear(SELModule):
    """A torch.nn.Linear whose weight is the effective weight of the active adapters."""

    def _run_adapters(self, adapters: list[str], bias: Tensor | None, x: Tensor) -> Tensor:
        keeps = self.keeps_weight_for_backward or find_shared_weights(self) is not None
        if len(adapters) > 1 or not torch.is_grad_enabled() or keeps:
            return super()._run_adapters(adapters, bias, x)
        return linear(x, bias, *self._fold_inputs(adapters[0]))

    def _run(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, bias)


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
