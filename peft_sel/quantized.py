"""Linear layers with a quantised weight: dequantised once into raw, dense after a merge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft.utils.quantization_utils import QuantizationBackend, resolve_quantization_backend
from torch import Tensor, nn

from peft_sel.config import SELConfig
from peft_sel.errors import UnsupportedModuleError
from peft_sel.modules import SELLinear


def find_quantization(module: nn.Module) -> QuantizationBackend | None:
    """Return PEFT's access to a quantised weight (bitsandbytes, HQQ, torchao, ...), None for an ordinary module."""
    # torchao's class wants a way to quantise again; nothing here does.
    return resolve_quantization_backend(module, get_apply_tensor_subclass=NotImplemented)


def check_dequantizable(name: str, module: nn.Module, base_weight: str = "keep") -> bool:
    """Return whether a module has a quantised weight.

    Args:
        name: Module name.
        module: A target module.
        base_weight: Where the configuration wants the weight.

    Returns:
        True for a linear layer that SELQuantizedLinear can run, False for an ordinary module.

    Raises:
        UnsupportedModuleError: If the weight is quantised and cannot be read or moved, or the module is no linear
            layer.
    """
    backend = find_quantization(module)
    if backend is None:
        return False
    kind, quantizer = type(module).__name__, backend.backend_name
    if base_weight == "cpu":
        raise UnsupportedModuleError(name, kind, "a quantised weight stays where it is: base_weight='keep' or 'drop'")
    if not (isinstance(module, nn.Linear) or quantizer == "hqq"):
        raise UnsupportedModuleError(name, kind, f"quantised by {quantizer}, which is supported for linear layers only")
    try:
        backend.get_base_weight(module)
    except Exception as error:  # each quantiser has its own
        raise UnsupportedModuleError(name, kind, f"its {quantizer} weight cannot be dequantised: {error}") from error
    return True


class SELQuantizedLinear(SELLinear):
    """A quantised linear layer: runs quantised while adapters are disabled, dense with an adapter or merged."""

    holds_base_weight = False

    def __init__(
        self,
        base_layer: nn.Module,
        adapter: str,
        config: SELConfig,
        *,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._is_dense = False  # whether a dense layer stands in the place of the quantised one
        self._quantized: list[nn.Module] = []  # the quantised layer meanwhile; a list, so not registered
        self.dense_dtype = dtype or _dequantize(base_layer).dtype
        super().__init__(base_layer, adapter, config, **options)

    @property
    def base_weight(self) -> Tensor:
        """The base layer's weight, dequantised anew at each access."""
        if self._is_dense:
            return super().base_weight
        return _dequantize(self.get_base_layer()).to(self.dense_dtype)

    @property
    def base_dtype(self) -> torch.dtype:
        """Dtype of the base weight, without dequantising it."""
        return super().base_dtype if self._is_dense else self.dense_dtype

    @property
    def base_dropped(self) -> str | None:
        """Name of the adapter that freed the base weight, or None."""
        return super().base_dropped if self._is_dense else None

    def _fold_inputs(self, adapter: str, dtype: torch.dtype | None = None) -> Any:
        return super()._fold_inputs(adapter, dtype or self.dense_dtype)

    def _put_dense(self) -> None:
        base: Any = self.get_base_layer()
        dense = nn.Linear(base.in_features, base.out_features, bias=False, device="meta").train(base.training)
        dense.weight = nn.Parameter(self.base_weight, requires_grad=False)
        bias = base.bias
        if bias is not None and bias.dtype != self.dense_dtype:
            bias = nn.Parameter(bias.detach().to(self.dense_dtype), requires_grad=bias.requires_grad)
        dense.bias = bias
        self._put(dense, True)
        self._quantized.append(base)

    def _put_back(self) -> None:
        if self._quantized:
            self._put(self._quantized.pop(), False)

    def _put(self, base: nn.Module, is_dense: bool) -> None:
        self.base_layer, self._is_dense = base, is_dense
        if self.bias_layer is not None:  # its parameter is that of the layer in place
            self.bias_layer.move_to(base)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put a dense layer with the effective weight in the place of the quantised one, which unmerge restores.

        Args:
            safe_merge: Check the merged weight for NaN and infinity first.
            adapter_names: Adapters to merge; None for all active ones.
        """
        if not self._is_dense:
            self._put_dense()
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if not self.merged:
                self._put_back()

    def unmerge(self) -> None:
        """Put the quantised layer back."""
        if self.bias_layer is not None and self._quantized:
            self.bias_layer.unmerge()  # the dense layer takes its merged bias along
        super().unmerge()
        self._put_back()

    def drop_base_weight(self) -> None:
        """Free the quantised weight."""
        if not self._is_dense:
            self._put_dense()
            self._quantized.clear()
        super().drop_base_weight()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for module in self._quantized:
            module._apply(fn)
        return super()._apply(fn, recurse)


def _dequantize(module: nn.Module) -> Tensor:
    backend: Any = find_quantization(module)
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):  # a forward pass in eval mode has laid the weight out anew
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse, dequantize_4bit

        return dequantize_4bit(*_convert_weight_packed_for_cpu_inverse(weight.data, copy.copy(state)))
    return backend.get_base_weight(module).detach()


def settle_quantization(model: Any) -> None:
    """After a merge, let a model that holds no quantised weight any more be saved as an ordinary one.

    Args:
        model: A transformers model, quantised or not; other models are left as they are.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    if any(find_quantization(module) is not None for module in model.modules()):
        warnings.warn(
            "some modules of the merged model are still quantised, so that loading it after save_pretrained would "
            "quantise the merged weights again: target every quantised module, or dequantise the others before saving",
            stacklevel=2,
        )
    else:
        quantizer.remove_quantization_config(model)
