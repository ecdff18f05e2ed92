"""The tuner layer: owns the parameters and adapter names of one target module; the formulas are in numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import _get_in_out_features, check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peft_sel.accumulation import SharedWeights, find_shared_weights
from peft_sel.base import BaseWeightLayer
from peft_sel.config import RAW_DTYPES, SELConfig
from peft_sel.conversion import (
    HOLDER_NAME,
    PREFIX,
    add_differences,
    check_readable,
    check_usable,
    draw_target,
    fold_weight,
    init_residual,
    invert_at_start,
    make_spec,
    makes_meta_parameters,
    resolve_beta,
    tabulate_at_start,
    wide_dtype,
)
from peft_sel.errors import BrokenMergeError, DroppedBaseError, OffloadedError
from peft_sel.kept import KeptWeights
from peft_sel.kernels import Scales, WeightSpec
from peft_sel.numerics import SCALE_NAMES, InversionReport
from peft_sel.shapes import matrix_shape
from peft_sel.sharded import (
    BUFFERS,
    check_whole,
    choose_device,
    excuse_omitted,
    is_layer_sharded,
    is_sharded,
    omit_buffers,
)
from peft_sel.structured import StructuredScale

PERTURBATION = 0.05  # relative, of init_weights=False


def _refresh_after_load(layer: SELLayer, keys: Any) -> None:
    """Recompute what follows from loaded values: the starts of the scales, and the raw weight of frozen adapters."""
    layer.kept_weights.clear()
    excuse_omitted(layer, keys)
    is_whole = not (is_sharded(layer.base_weight) or layer.base_weight.is_meta)
    for adapter, beta in layer.symexplin_beta.items():
        for scale in layer.scales(adapter).values():
            scale.reset_start(beta)
        if layer.sel_config[adapter].train_raw:
            continue
        if is_whole:
            layer.refresh_frozen_raw(adapter)
        elif adapter in layer.symexplin_raw_frozen:
            del layer.symexplin_raw_frozen[adapter]  # until a pass has the whole base weight


class SELLayer(BaseWeightLayer):
    """Adapter state and merge logic of one target weight; mixed into an nn.Module."""

    adapter_layer_names = (
        "symexplin_raw",
        *(PREFIX + name for name in SCALE_NAMES),
        "symexplin_residual_a",
        "symexplin_residual_b",
    )
    other_param_names = (
        "symexplin_raw_frozen",
        "_table_dtypes",
        "symexplin_beta",
        "symexplin_transposed",
        "sel_config",
        "inversion_report",
        "base_fingerprint",
    )

    def __init__(self, base_layer: nn.Module, name: str) -> None:
        self.module_name = name
        self.symexplin_raw = nn.ParameterDict()
        self.symexplin_raw_frozen = BufferDict(persistent=False)
        self._table_dtypes: dict[str, torch.dtype] = {}  # of a base weight whose frozen raw is a table of its values
        self.symexplin_beta = BufferDict(persistent=True)
        self.symexplin_transposed = BufferDict(persistent=True)  # tells a merge of files how the weight lies
        for scale in SCALE_NAMES:
            setattr(self, PREFIX + scale, nn.ModuleDict())
        self.symexplin_residual_a = nn.ParameterDict()
        self.symexplin_residual_b = nn.ParameterDict()
        self.sel_config = {}
        self.inversion_report: dict[str, InversionReport] = {}
        self.base_fingerprint = {}
        self.frozen_peft_weight_names = {}
        self.merged_adapters = []
        self._disable_adapters = False
        self.kept_weights = KeptWeights()
        self.keeps_weight_for_backward = False
        self.shared_weights: SharedWeights | None = None  # inside accumulate_gradients
        self.omitted: tuple[str, ...] = ()  # names of what the next load need not bring
        self._unmerged = {}
        self._parameter_order = tuple(base_layer._parameters)
        self._adopt(base_layer)
        module: Any = self
        module.register_load_state_dict_post_hook(_refresh_after_load)
        module.register_state_dict_post_hook(omit_buffers)

    def _adopt(self, base_layer: Any) -> None:
        """Hold the base layer and describe how its weight lies."""
        self.base_layer = base_layer
        self.in_features, self.out_features = _get_in_out_features(base_layer)
        self.transposed = isinstance(base_layer, Conv1D)

    def scales(self, adapter: str) -> dict[str, StructuredScale]:
        """Return the structured scales of an adapter by name."""
        modules: Any = vars(self)["_modules"]  # past torch's own look-ups, which cost more than they find on every pass
        found = {name: modules[PREFIX + name]._modules.get(adapter) for name in SCALE_NAMES}
        return {name: scale for name, scale in found.items() if scale is not None}

    def _choose_beta(self, config: SELConfig, weight: Tensor, hidden_size: int | None) -> Tensor:
        """Return the curvature of a weight, 0-d."""
        return torch.tensor(resolve_beta(config, self.module_name, weight, hidden_size), dtype=torch.float32)

    def update_layer(
        self, adapter: str, config: SELConfig, *, hidden_size: int | None = None, convert: bool = True
    ) -> None:
        """Add an adapter: choose beta, invert the base weight or a draw, create scales and residual.

        Args:
            adapter: Name of the adapter.
            config: Its configuration.
            hidden_size: Width of the model, for beta="width".
            convert: False leaves all tensors without values, which are to be loaded.

        Raises:
            DroppedBaseError: If another adapter freed the base weight.
            UnsupportedModuleError: If the base weight cannot be read.
            SELError: If the weight cannot be inverted.
        """
        self.drop_if_pending()
        weight = self.fetch_base_weight().detach()
        if self.base_dropped is not None:
            raise DroppedBaseError(f"adding adapter {adapter!r} to {self.module_name}", self.base_dropped)
        check_readable(self.module_name, self.get_base_layer(), weight, convert)
        if convert and not isinstance(self.get_base_layer(), nn.Embedding):  # a table that is looked up has no fans
            weight = draw_target(config, weight, bool(self.stack))
        beta = self._choose_beta(config, weight, hidden_size) if convert else torch.ones(self.stack)
        shape = matrix_shape(config, self.weight_name, tuple(weight.shape[len(self.stack) :]), self.transposed)
        on_meta = not convert and makes_meta_parameters()
        device = torch.device("meta") if on_meta else choose_device(weight)
        if convert:
            raw, self.inversion_report[adapter] = self._invert(adapter, config, beta, weight)
        else:  # a frozen raw is in no file, but computed when the rest is there
            raw = torch.empty(
                weight.shape, dtype=RAW_DTYPES[config.raw_dtype], device=device if config.train_raw else "meta"
            )
        dtype = wide_dtype(config)
        self.sel_config[adapter] = config
        self.record_base(adapter, config, weight)
        self.symexplin_beta[adapter] = beta.to(device)
        if self.transposed:
            self.symexplin_transposed[adapter] = torch.ones((), dtype=torch.uint8, device=device)
        if config.train_raw:
            self.symexplin_raw[adapter] = nn.Parameter(raw)
        else:
            self.symexplin_raw_frozen[adapter] = raw
        for name, scale_config in config.scale_configs().items():
            getattr(self, PREFIX + name)[adapter] = StructuredScale(name, scale_config, beta, shape, dtype, device)
        fixed = tuple(PREFIX + name for name, scale in config.scale_configs().items() if not scale.trainable)
        self.frozen_peft_weight_names[adapter] = fixed
        if config.r > 0:
            a, b = init_residual(config.r, shape, self.stack, dtype, device)
            self.symexplin_residual_a[adapter], self.symexplin_residual_b[adapter] = nn.Parameter(a), nn.Parameter(b)
        if not config.init_weights:
            self._perturb(adapter)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _invert(self, adapter: str, config: SELConfig, beta: Tensor, weight: Tensor) -> tuple[Tensor, InversionReport]:
        """Return the raw weight of a weight, or if it stays frozen a table of it, and how that went."""
        tabulates = self.holds_base_weight and not config.train_raw
        found = tabulate_at_start(config, beta, weight, self.weight_name) if tabulates else None
        result = invert_at_start(config, beta, weight, self.weight_name) if found is None else found
        dtypes = {name: dtype for name, dtype in self._table_dtypes.items() if name != adapter}
        # A new dictionary: replicas of DataParallel share the old one.
        self._table_dtypes = dtypes if found is None else {**dtypes, adapter: weight.dtype}
        return result

    def discard_adapter(self, adapter: str) -> None:
        """Forget an adapter without choosing a new active one."""
        for attribute in (*self.adapter_layer_names, *self.other_param_names):
            container = getattr(self, attribute)
            if adapter in container:
                del container[adapter]
        self.frozen_peft_weight_names.pop(adapter, None)
        self.forget_deleted()

    def forget_deleted(self) -> None:
        """Free what was kept for adapters that are gone; put the base weight back if none asks for the CPU any more."""
        self.kept_weights.clear()
        if not self.merged and all(config.base_weight != "cpu" for config in self.sel_config.values()):
            self.put_base_back()

    def tensors(self, adapter: str) -> list[Tensor]:
        """Return the parameters of an adapter: raw if it is trained, scales, residual."""
        modules: Any = vars(self)["_modules"]  # as in scales
        found: list[Tensor] = []
        for name in self.adapter_layer_names:
            held = modules[name]
            if (scale := held._modules.get(adapter)) is not None:
                found += scale._parameters.values()
            elif (parameter := held._parameters.get(adapter)) is not None:
                found.append(parameter)
        return found

    @torch.no_grad()
    def _perturb(self, adapter: str) -> None:
        raw = [self.symexplin_raw[adapter]] if adapter in self.symexplin_raw else []  # a frozen raw is not saved
        for tensor in [*raw, *(part for scale in self.scales(adapter).values() for part in scale.parameters())]:
            tensor.mul_(1 + PERTURBATION * torch.randn_like(tensor))

    @torch.inference_mode(False)  # a first pass of inference may get here, and training use the table after it
    @torch.no_grad()
    def refresh_frozen_raw(self, adapter: str) -> None:
        """Recompute the raw weight of a train_raw=False adapter, or its table, from the base weight and its beta."""
        config, beta = self.sel_config[adapter], self.symexplin_beta[adapter]
        check_whole(self.module_name, [self.base_weight])
        self.symexplin_raw_frozen[adapter], _ = self._invert(adapter, config, beta, self.base_weight.detach())

    def _get_raw(self, adapter: str) -> tuple[Tensor, Tensor | None]:
        """Return raw and None, or the base weight and the table that leads from it to raw."""
        if not torch.compiler.is_compiling():
            self.drop_if_pending()
        if self.sel_config[adapter].train_raw:
            return self.symexplin_raw[adapter], None
        table_dtype = self._table_dtypes.get(adapter)
        if adapter not in self.symexplin_raw_frozen or table_dtype not in (None, self.base_dtype):
            self.refresh_frozen_raw(adapter)  # a load, or the base layer was cast
        frozen = self.symexplin_raw_frozen[adapter]
        return (self.base_weight, frozen) if adapter in self._table_dtypes else (frozen, None)

    def _fold_inputs(
        self, adapter: str, dtype: torch.dtype | None = None
    ) -> tuple[WeightSpec, Tensor, Tensor, Scales, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Return what kernels.fold takes, with raw in the base layer's layout; dtype None is the base layer's."""
        config, scales = self.sel_config[adapter], self.scales(adapter)
        raw, table = self._get_raw(adapter)
        beta: Tensor = self.symexplin_beta[adapter]
        patterns = tuple((name, scale.pattern) for name, scale in scales.items())
        spec = make_spec(config, patterns, self.base_dtype if dtype is None else dtype)
        parts: Scales = {name: scale.parts(beta) for name, scale in scales.items()}
        residual = (self.symexplin_residual_a[adapter], self.symexplin_residual_b[adapter]) if config.r > 0 else None
        check_usable(self.module_name, adapter, config, raw, residual, parts)
        return spec, raw, beta, parts, residual, table

    def get_effective_weight(self, adapter: str, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the effective weight of an adapter (Eq. 3-7 plus the residual), differentiably.

        Args:
            adapter: Name of an adapter of this layer.
            dtype: Dtype of the result; None for the base layer's.

        Returns:
            w_eff in the base layer's layout.
        """
        return fold_weight(*self._fold_inputs(adapter, dtype), self.transposed)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Whether the adapter can be written as a LoRA: PEFT does that for linear layers only."""
        return adapter_name in self.sel_config and isinstance(self.get_base_layer(), (nn.Linear, Conv1D))

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return w_eff - w_base of an adapter in the base layer's layout, in float32 (float64 for float64 raw)."""
        if self.base_dropped is not None:
            raise DroppedBaseError(f"the weight difference of {self.module_name}", self.base_dropped)
        if self.base_weight.is_meta:
            raise OffloadedError(self.module_name, "base weight")
        dtype = wide_dtype(self.sel_config[adapter])
        return self.get_effective_weight(adapter, dtype) - self.fetch_base_weight().to(dtype)

    def get_combined_weight(self, adapters: list[str]) -> Tensor:
        """Return the weight with adapters applied: w_eff itself for one, w_base + sum(w_eff_i - w_base) for several."""
        if len(adapters) == 1:
            return self.get_effective_weight(adapters[0])
        return add_differences(self.fetch_base_weight(), map(self.get_delta_weight, adapters), self.base_dtype)

    def get_running_weight(self, adapters: list[str]) -> Tensor:
        """Return get_combined_weight(adapters) for a forward pass, computed once for all passes of an evaluation.

        Inside accumulate_gradients it is computed once for all passes of training.

        In eval mode without gradients the weight is kept until train(), a load, a merge, a move, or a write to one of
        its tensors. A write into .data goes unseen: call train() and eval() after it.

        Args:
            adapters: Adapters to run with.

        Returns:
            The weight in the base layer's layout.
        """
        module: Any = self
        training = module.training or torch.is_grad_enabled()
        shared = find_shared_weights(self)
        if (training and shared is None) or torch.compiler.is_compiling():
            return self.get_combined_weight(adapters)
        sources = [self.base_weight] if len(adapters) > 1 else []  # one alone does not depend on it
        for adapter in adapters:
            raw_and_table = (tensor for tensor in self._get_raw(adapter) if tensor is not None)
            sources += [*raw_and_table, self.symexplin_beta[adapter], *self.tensors(adapter)]
        if training and shared is not None:
            return shared.get(adapters, sources, lambda: self._get_wide_weight(adapters), self.base_dtype)
        return self.kept_weights.get(
            adapters, sources, lambda: self.get_combined_weight(adapters), lambda: not is_layer_sharded(self)
        )

    def _get_wide_weight(self, adapters: list[str]) -> Tensor:
        """Return what get_combined_weight(adapters) does, for one adapter in float32 or float64."""
        if len(adapters) > 1:
            return self.get_combined_weight(adapters)
        return self.get_effective_weight(adapters[0], wide_dtype(self.sel_config[adapters[0]]))

    def train(self, mode: bool = True) -> Any:
        """Set training or eval mode, and forget kept weights.

        Args:
            mode: Whether to train.

        Returns:
            The layer.
        """
        self.kept_weights.clear()
        self.drop_if_pending()
        module: Any = self
        return nn.Module.train(module, mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the effective weight in the place of the base weight, which is kept aside for unmerge.

        Args:
            safe_merge: Check the merged weight for NaN and infinity first.
            adapter_names: Adapters to merge; None for all active ones.

        Raises:
            BrokenMergeError: If safe_merge finds NaN or infinity.
            MultiplierSignError: If normalize_by_inner_mult divides by a multiplier that is not above 0.
        """
        new = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.sel_config]
        if not new:
            return
        for scale in (scale for adapter in new for scale in self.scales(adapter).values()):
            scale.check_sign(self.weight_name)
        base: Any = self.get_base_layer()
        with torch.no_grad():
            merged = self.get_combined_weight([*self.merged_adapters, *new])
        if safe_merge and not bool(torch.isfinite(merged).all()):
            raise BrokenMergeError(self.weight_name, new)
        self.kept_weights.clear()
        self._unmerged.setdefault("weight", getattr(base, self.parameter_name))
        # A new Parameter, never .data: a tied embedding keeps its own weight.
        self._put_in_place(nn.Parameter(merged, requires_grad=False))
        self.merged_adapters.extend(new)

    def _active_unmerged(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.sel_config and name not in self.merged_adapters]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply device moves to everything, but dtype casts to the base layer only."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        def keep_values(tensor: Tensor) -> Tensor:  # accelerate shards on the meta device, and brings no buffers back
            result = keep_dtype(tensor)
            return tensor if result.is_meta and torch.distributed.is_initialized() else result

        module: Any = self
        self.kept_weights.clear()
        if recurse:
            for name, child in module.named_children():
                own = keep_values if name in BUFFERS else keep_dtype
                child._apply(fn if name in ("base_layer", HOLDER_NAME) else own)
        self._apply_aside(fn)
        return nn.Module._apply(module, fn, recurse=False)
