"""SELModel: chooses the target modules of a model, converts them, and undoes what it did when something fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers
from torch import Tensor, nn
from tqdm import tqdm

from peft_sel.accumulation import Accumulation, share_weights
from peft_sel.base import place_base_weights, show_placeholders
from peft_sel.card import find_base
from peft_sel.checks import (
    check_can_merge,
    check_can_split,
    check_found,
    check_tokens,
    warn_of_unreadable_base,
    warn_of_untouched_experts,
    warn_of_weakening,
)
from peft_sel.coexistence import check_beside, check_can_add, list_saved_modules
from peft_sel.conversion import BIAS, PREFIX, makes_meta_parameters, matches_end
from peft_sel.errors import (
    AdapterStateError,
    ConfigError,
    DroppedBaseError,
    ShardedError,
    UnsupportedModuleError,
    list_names,
)
from peft_sel.experts import find_parameters, is_internal, place_holder
from peft_sel.layer import SELLayer
from peft_sel.loading import current_load
from peft_sel.mixed import route_rows
from peft_sel.modules import SELModule, choose_layer_class
from peft_sel.partitioned import gathered, split_like
from peft_sel.quantized import SELQuantizedLinear, check_dequantizable, settle_quantization
from peft_sel.removal import iter_sel_layers, remove_adapter
from peft_sel.sharded import WAY_OUT, agreeing, awaits_values, is_layer_sharded, share_conversion
from peft_sel.state import SavedTuner
from peft_sel.targets import TARGET_MODULES, reads_weight_itself, restrict_to_layers
from peft_sel.trl import TRAINED, copy_adapter, is_reference
from peft_sel.tying import keep_parted_weights_apart

PATIENCE_S = 2.0  # no progress bar for anything quicker


class SELModel(SavedTuner):
    """Wraps a model so that its target modules train in SEL space; made by get_peft_model(model, SELConfig(...))."""

    prefix: str = PREFIX
    tuner_layer_cls = SELLayer
    target_module_mapping = TARGET_MODULES

    def sel_layers(self) -> Iterator[SELLayer]:
        """Yield the SEL layers of the model."""
        return iter_sel_layers(self.model)

    def keep_effective_weights(self, evaluation: bool = True, training: bool = False) -> None:
        """Choose where effective weights are kept rather than computed again, for the layers there are now.

        What is kept takes the memory of the converted weights once more for each adapter, or combination, that was run.

        Args:
            evaluation: In eval mode without gradients, between forward passes until train() is called; the default,
                since generating text would otherwise compute every weight for every token. A model that FSDP2 shards
                keeps none unless asked here, since each process would keep all; a write into a shard goes unseen then.
            training: From forward to backward, by linear layers; saves the time to compute them once more.
        """
        for layer in self.sel_layers():
            layer.kept_weights.enabled = layer.kept_weights.asked_for = evaluation
            layer.kept_weights.clear()
            layer.keeps_weight_for_backward = training

    def accumulate_gradients(self) -> AbstractContextManager[Accumulation]:
        """Share effective weights among the forward passes of one optimizer step, and pull their gradients back once.

        Put it around the micro-batches of a step, and take the step (clip, unscale) after it:

            with model.base_model.accumulate_gradients():
                for batch in micro_batches:
                    (model(**batch).loss / len(micro_batches)).backward()
            optimizer.step()

        The gradients are those of the plain way to rounding. Until the scope ends they are float32 sums (float64 for
        float64 raw) aside, 4 bytes per weight, then in .grad, layer by layer; so hooks of parameters see them once,
        backward(inputs=...) sees none, and scope.zero_grad() is what forgets those of the scope so far. The effective
        weights take 2 bytes more (of bf16) until then. Where raw is not trained, both are memory that the plain way
        does not need. An exception discards the gradients. In one process only; inside torch.compile, and in replicas
        of DataParallel, it changes nothing.

        Returns:
            A context manager.

        Raises:
            AccumulationError: If it is entered a second time, or in one of several processes; in a later backward pass
                through a forward pass inside.
            ChangedWeightError: If an adapter changes after a backward pass.
        """
        return share_weights(list(self.sel_layers()))

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Convert the target modules; on any error every module is put back as it was.

        An adapter "ref" with the configuration object of "default", as TRL adds it, starts as a copy of that. Under
        FSDP with cpu_ram_efficient_loading all processes have to do this, and take beta from the first.

        Args:
            model: The base model.
            adapter_name: Name of the adapter.
            autocast_adapter_dtype: Ignored: raw_dtype decides.
            low_cpu_mem_usage: Leave raw and scales empty on the meta device, to be loaded.
            state_dict: Takes the target modules from these keys.
        """
        config: Any = self.peft_config[adapter_name]
        names = (config.base_model_name_or_path, self.get_model_config(model).get("_name_or_path"))
        config.base_folders = find_base(names[0]) | find_base(names[1])
        check_can_add(model, adapter_name, config)
        check_can_split(model, config)
        warn_of_weakening(config)
        chosen_broadly = config.target_modules in (None, "all-linear") and not config.target_parameters
        load = current_load()
        loads = low_cpu_mem_usage or load is not None or makes_meta_parameters()
        self._convert = not (loads or awaits_values(model))
        # By name: a list of the parameters would keep those alive that base_weight="drop" is to free.
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        disabled = any(layer.disable_adapters for layer in iter_sel_layers(model))
        with show_placeholders(iter_sel_layers(model)):
            targets = self._find_targets(model, config) if state_dict is None else list_saved_modules(state_dict)
            check_beside(model, adapter_name, config, targets)
        shown = {"desc": "Converting" if self._convert else "Adding", "unit": "module", "total": len(targets)}
        self._progress = tqdm(**shown, disable=None, delay=PATIENCE_S, leave=False)
        try:
            with agreeing():
                with show_placeholders(iter_sel_layers(model)):
                    super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, state_dict)
                if is_reference(self.peft_config, adapter_name):
                    copy_adapter(model, TRAINED, adapter_name)
                if not awaits_values(model):  # the first process has read the base
                    warn_of_unreadable_base(iter_sel_layers(model), adapter_name, config)
                if chosen_broadly and state_dict is None:
                    warn_of_untouched_experts(model)
        except BaseException:
            self._take_out(model, adapter_name, flags)
            raise
        finally:
            self._progress.close()
        if load is not None:
            load.awaited.append(adapter_name)
            load.undo.callback(self._take_out, model, adapter_name, flags)
            load.finish += [layer.drop_if_pending for layer in iter_sel_layers(model)]
        if disabled:  # so are the layers that are new
            for layer in iter_sel_layers(model):
                layer.enable_adapters(False)
        if not loads:
            share_conversion(iter_sel_layers(model), adapter_name)
        place_base_weights(model, list(iter_sel_layers(model)), config.awaits_load or load is not None)

    def _find_targets(self, model: nn.Module, config: Any) -> list[str]:
        """Return the names of the modules that a configuration targets; refuse a beta_pattern that matches none."""
        config = _maybe_include_all_linear_layers(
            self._prepare_adapter_config(config, self.get_model_config(model)), model
        )
        names = [name for name, _ in model.named_modules() if name and self._check_target_module_exists(config, name)]
        for target, found in find_parameters(model, config.target_parameters or []).items():
            check_found(target, found, lambda path: self._check_target_module_exists(config, path))
            names += found
        biases = [f"{name}.{BIAS}" for name in names] if config.bias == "sel_only" else []
        for pattern in config.beta_pattern:
            if names and not any(matches_end(pattern, name) for name in (*names, *biases)):
                raise ConfigError("beta_pattern", pattern, "matches no target module; write a regex of its name's end")
        check_tokens(model, config, names)
        return names

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        """Fill in the default targets; PEFT does not apply layers_to_transform to a default that is a regex."""
        if peft_config.target_parameters and model_config.get("model_type") not in self.target_module_mapping:
            return peft_config  # parameters alone will do
        chosen = peft_config.target_modules is not None
        config: Any = super()._prepare_adapter_config(peft_config, model_config)
        if not chosen and isinstance(config.target_modules, str) and config.layers_to_transform is not None:
            config.target_modules = restrict_to_layers(
                config.target_modules, config.layers_to_transform, config.layers_pattern
            )
            config.layers_to_transform = config.layers_pattern = None
        return config

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        """Say whether a module is a target: no part of an adapter is, though it bears a parameter's name."""
        return False if is_internal(key) else BaseTuner._check_target_module_exists(peft_config, key)

    def _take_out(self, model: nn.Module, adapter_name: str, flags: dict[str, bool]) -> None:
        """Take an adapter out again, and leave the model as it was before that came, flags of parameters included."""
        self.peft_config.pop(adapter_name, None)
        remove_adapter(model, adapter_name)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad))
        if not any(iter_sel_layers(model)):
            model.__dict__.pop("peft_config", None)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: Any,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        base = target.get_base_layer() if isinstance(target, SELLayer) else target
        with gathered(base.parameters(recurse=False)):
            options: dict[str, Any] = {"hidden_size": self._hidden_size(), "convert": self._convert}
            if parameter_name is not None:
                holder = place_holder(parent, target_name, target)
                holder.add_adapter(parameter_name, adapter_name, peft_config, name=current_key, **options)
            elif isinstance(target, SELLayer):
                target.update_layer(adapter_name, peft_config, **options)
            else:
                owner: Any = type(parent)
                if reads_weight_itself(owner, target_name):
                    reason = f"{owner.__name__} reads its weight without calling the module"
                    raise UnsupportedModuleError(current_key, type(target).__name__, reason)
                if check_dequantizable(current_key, target, peft_config.base_weight):
                    options["dtype"] = getattr(self.model, "dtype", None)
                    layer_class: type[SELModule] = SELQuantizedLinear
                else:
                    layer_class = choose_layer_class(current_key, target)
                module = layer_class(target, adapter_name, peft_config, name=current_key, **options)
                if adapter_name not in self.active_adapters:
                    module.requires_grad_(False)
                self._replace_module(parent, target_name, module, target)
        if current_load() is None:  # PEFT could not copy into what is split
            split_like(base.parameters(recurse=False), getattr(parent, target_name).parameters())
        self._progress.update()

    def _check_new_adapter_config(self, config: PeftConfig) -> None:
        """Refuse a second adapter with biases only where one trains the base's own: converted ones are apart."""
        if any(getattr(other, BIAS, "none") == "all" for other in self.peft_config.values()):
            super()._check_new_adapter_config(config)

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None:
        """Freeze the base, its biases too where "sel_only" converts them: PEFT takes "..._only" as training these."""
        super()._mark_only_adapters_as_trainable(model)
        if not self._trains_base_biases():
            for layer in iter_sel_layers(model):
                if isinstance(bias := getattr(layer.get_base_layer(), BIAS, None), nn.Parameter):
                    bias.requires_grad_(False)

    def _trains_base_biases(self) -> bool:
        return any(getattr(self.peft_config[name], BIAS, "none") == "all" for name in self.active_adapters)

    @classmethod
    def _get_learnable_bias_state_dict(
        cls, model: nn.Module, state_dict: dict[str, Tensor], config: Any
    ) -> dict[str, Tensor]:
        """Select the base biases to save: none where "sel_only" converts them."""
        if config.bias == "sel_only":
            return {}
        return dict(super()._get_learnable_bias_state_dict(model, state_dict, config))

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Put a module in the place of another; PEFT's version fails on a saved module without a weight of its own."""
        setattr(parent, child_name, new_module)

    def _hidden_size(self) -> int | None:
        config: Any = getattr(self.model, "config", None)
        return getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "hidden_size", None)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Bring the adapter_names= of a call, one per row, to the layers."""
        if (names := kwargs.get("adapter_names")) is None:
            yield
            return
        with route_rows(self.model, names, args, kwargs):
            yield

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Do nothing: raw_dtype decides, and PEFT's cast would replace parameters that others hold."""

    def _dropped(self) -> str | None:
        return next((layer.base_dropped for layer in self.sel_layers() if layer.base_dropped is not None), None)

    def _require_base(self, action: str) -> None:
        if (adapter := self._dropped()) is not None:
            raise DroppedBaseError(action, adapter)

    def _require_whole(self, action: str) -> None:
        if (layer := next(self.sel_layers(), None)) is not None and is_layer_sharded(layer):
            raise ShardedError(layer.module_name, f"{action} would leave its shards behind", WAY_OUT)

    def disable_adapter_layers(self) -> None:
        """Run the base model until adapters are enabled again; an error where the base weights were dropped."""
        self._require_base("disable_adapter")
        if self._trains_base_biases():  # PEFT warns, of any biases
            super().disable_adapter_layers()
        else:
            self._enable_adapter_layers(enabled=False)

    def _check_known(self, names: str | list[str] | None) -> None:
        known = list(self.peft_config)
        if unknown := {names} - {*known} if isinstance(names, str) else {*(names or [])} - {*known}:
            raise AdapterStateError(list_names(sorted(unknown)), "is not in this model", f"it has {list_names(known)}")

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Choose the active adapters; with several, the deltas add: w_base + sum(w_eff_i - w_base).

        Args:
            adapter_name: Name or names.
            inference_mode: Freeze them.

        Raises:
            AdapterStateError: If the model lacks one.
        """
        self._check_known(adapter_name)
        super().set_adapter(adapter_name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; if no other is active, the first by name becomes so, in every layer the same.

        Args:
            adapter_name: Name of the adapter.

        Raises:
            DroppedBaseError: If it is the one that dropped the base weights.
        """
        self._require_whole("delete_adapter")
        if self._dropped() == adapter_name:
            raise DroppedBaseError("delete_adapter", adapter_name)
        others = sorted({*self.peft_config} - {adapter_name})
        merged = any(adapter_name in layer.merged_adapters for layer in self.sel_layers())
        if others and not merged and self.active_adapters == [adapter_name]:
            warnings.warn(f"{adapter_name!r} was the active adapter; {others[0]!r} is now", stacklevel=2)
            for layer in self.sel_layers():  # left to itself, each would choose among its own
                layer.set_adapter(others[0])
        super().delete_adapter(adapter_name)
        for layer in self.sel_layers():
            layer.forget_deleted()

    def unload(self) -> nn.Module:
        """Return the base model; the converted weights are those from before conversion, bit for bit."""
        self._require_whole("unload")
        self._require_base("unload")
        self.unmerge_adapter()
        return super().unload()

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Put effective weights in the place of base weights, which unmerge_adapter restores.

        Args:
            adapter_names: Adapters to merge; None for all active ones.
            safe_merge: Check every merged weight for NaN and infinity before the first one is replaced.

        Raises:
            AdapterStateError: If the model lacks one.
        """
        self._check_known(adapter_names)
        self._require_whole("merge_adapter")
        names = self.active_adapters if adapter_names is None else adapter_names
        check_can_merge(self.sel_layers(), names, safe_merge)
        super().merge_adapter(adapter_names=adapter_names)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        self._check_known(adapter_names)
        self._require_whole("unloading")
        names = self.active_adapters if adapter_names is None else adapter_names
        if not merge or not any(layer.merged or {*names} & {*layer.sel_config} for layer in self.sel_layers()):
            self._require_base("unloading without a merged adapter")
        if merge:
            check_can_merge(self.sel_layers(), names, safe_merge)
        while True:  # what lies inside a holder comes to light when the holder is gone
            super()._unload_and_optionally_merge(merge=merge, progressbar=progressbar, adapter_names=adapter_names)
            if not any(self.sel_layers()):
                break
        if merge:
            keep_parted_weights_apart(self.model)
            settle_quantization(self.model)
        return self.model
