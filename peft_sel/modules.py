"""The layers that run a target module with its effective weight, and which of them a module gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peft_sel.config import SELConfig
from peft_sel.errors import DroppedBaseError, UnsupportedModuleError
from peft_sel.layer import SELLayer


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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the base layer: as it is where adapters are disabled or merged, else with the effective weight."""
        if self.disable_adapters:
            if self.base_dropped is not None:
                raise DroppedBaseError(f"running {self.module_name} without its adapter", self.base_dropped)
            if self.merged:
                self.unmerge()
        adapters = [] if self.disable_adapters or self.merged else self._present_adapters()
        if not adapters:
            return self.base_layer(x, *args, **kwargs)
        return self._run(self.get_combined_weight(adapters), x)

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

    def _present_adapters(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.sel_config]

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
