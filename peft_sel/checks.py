"""What must hold before an adapter is added, loaded or merged: nothing happens by halves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft.tuners.tuners_utils import _ExcludedModule
from torch import Tensor, nn

from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS, HOLDER_NAME, PREFIX
from peft_sel.errors import (
    AdapterMismatchError,
    BrokenMergeError,
    ConfigError,
    OtherBaseError,
    PartitionedError,
    list_names,
)
from peft_sel.experts import find_untouched_experts
from peft_sel.layer import SELLayer
from peft_sel.numerics import fingerprints_agree
from peft_sel.partitioned import is_split, whole_shape
from peft_sel.shapes import vector_config
from peft_sel.sharded import gather
from peft_sel.structured import check_sign


def check_saved(
    own: dict[str, Tensor],
    mapped: dict[str, Tensor],
    state: dict[str, Tensor],
    adapter_name: str,
    strip_adapter: Callable[[str], str],
) -> None:
    """Raise unless the tensors to be loaded are those of the adapter, in shape, dtype and range.

    Args:
        own: What would be saved of the adapter now, by the model's keys.
        mapped: What is to be loaded, by the model's keys.
        state: The model's state_dict.
        adapter_name: Name of the adapter.
        strip_adapter: Takes the adapter's name out of a key.

    Raises:
        AdapterMismatchError: If a tensor is missing, unexpected or of another shape or dtype; also one that was saved
            beside the adapter's own, such as modules_to_save, whose dtype may differ.
        ConfigError: If a beta is not positive and finite.
    """
    expected = {
        strip_adapter(key): value
        for key, value in own.items()
        if f".{PREFIX}" not in key or key.endswith(f".{adapter_name}") or f".{adapter_name}." in key
    }
    saved = {strip_adapter(key): value for key, value in mapped.items()}
    wrong = [
        f"{key} is {_describe(saved[key])} in the file and {_describe(value)} in the model"
        for key, value in expected.items()
        if key in saved and f".{PREFIX}" in key and _describe(saved[key]) != _describe(value)
    ]
    for key, value in mapped.items():
        if f".{PREFIX}" not in key:
            own_value = state.get(key, state.get(key.removeprefix("base_model.model.")))
            if own_value is not None:
                expected[strip_adapter(key)] = own_value
                if own_value.shape != value.shape:
                    wrong.append(f"{key} is {_describe(value)} in the file and {_describe(own_value)} in the model")
    missing, unexpected = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    if missing or unexpected or wrong:
        raise AdapterMismatchError(adapter_name, missing, unexpected, wrong)
    for key, value in saved.items():
        if key.endswith(f".{PREFIX}beta") and not bool(((value > 0) & value.isfinite()).all()):
            raise ConfigError("beta", value.tolist(), f"{key} must be positive and finite; the adapter file is broken")


def check_base(layers: Iterable[SELLayer], adapter_name: str, config: SELConfig, saved: SELConfig) -> None:
    """Raise if a saved adapter meets another base than it was made from.

    Args:
        layers: The layers of the model.
        adapter_name: Name of the adapter.
        config: Its configuration in the model, which says whether to check.
        saved: That beside its tensors, which holds the fingerprints of its base; without them nothing is checked.

    Raises:
        OtherBaseError: If so, naming the first weight that differs.
    """
    for layer in layers if config.check_base else ():
        recorded = saved.base_fingerprint.get(layer.fingerprint_name)
        if recorded and not fingerprints_agree(layer.base_fingerprint.get(adapter_name, recorded), recorded):
            way_out = (
                "pass check_base=False to PeftModel.from_pretrained, or to the SELConfig of an adapter that is loaded "
                "over, to load it all the same"
            )
            made_from = saved.base_model_name_or_path
            raise OtherBaseError(repr(adapter_name), layer.fingerprint_name, made_from, config.train_raw, way_out)


def warn_of_unreadable_base(layers: Iterable[SELLayer], adapter_name: str, config: SELConfig) -> None:
    """Warn, of the first layer only, where a base weight cannot be read, so that nothing tells which base it is.

    A quantised weight has none of the values of its checkpoint, which is worth a warning only where there is a record.

    Args:
        layers: The layers of the model.
        adapter_name: Name of the adapter.
        config: Its configuration.
    """
    for layer in layers if config.check_base and not config.draws_targets else ():
        recorded = layer.fingerprint_name in config.base_fingerprint
        if adapter_name in layer.sel_config and not layer.base_is_readable and (recorded or layer.holds_base_weight):
            where = "on the meta device" if layer.holds_base_weight else "quantised"
            what = "is not checked to be" if recorded else "is not recorded as"
            warnings.warn(
                f"the base weight {layer.fingerprint_name} is {where}; this base {what} the one that adapter "
                f"{adapter_name!r} was made from",
                stacklevel=3,
            )
            return


def warn_of_untouched_experts(model: nn.Module) -> None:
    """Warn of expert parameters that no adapter converts: they are no modules, and nothing else would tell.

    Args:
        model: The model.
    """
    if experts := find_untouched_experts(model):
        ends = list(dict.fromkeys(".".join(name.split(".")[-3:]) for name in experts))
        warnings.warn(
            f"the expert parameters {list_names(experts)} stay as they are, since target_modules reaches modules "
            f"only; target_parameters={ends} converts them too",
            stacklevel=3,
        )


def warn_of_weakening(config: SELConfig) -> None:
    """Warn of an adapter whose conversion does not give the weights back that it is made from.

    Args:
        config: Its configuration.
    """
    weakens = config.init == "congruent" and config.mode in ("mismatch", "oppose") and not config.draws_targets
    if weakens and not config.inference_mode:
        warnings.warn(
            f"init='congruent' with mode={config.mode!r} weakens the converted weights: it is meant for training "
            "from scratch. Use init='exact' to keep a pretrained model as it is",
            stacklevel=3,
        )


def check_multipliers(config: Any, state: dict[str, Tensor], adapter_name: str) -> None:
    """Raise if an adapter to be saved is divided by an inner multiplier that has reached 0.

    Args:
        config: The adapter's SELConfig.
        state: Its tensors, by the model's keys.
        adapter_name: Name of the adapter.

    Raises:
        MultiplierSignError: If it is.
    """
    if not config.normalize_by_inner_mult:
        return
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        module, found, part = key.partition(f".{PREFIX}inner_multiplier.{adapter_name}.")
        if found:
            modules.setdefault(module, {})[part] = gather(tensor)
    for module, parts in modules.items():
        is_bias = module.endswith(f".{HOLDER_NAME}.{BIAS}")
        scale = (vector_config(config) if is_bias else config).scale_configs()["inner_multiplier"]
        check_sign(scale, parts, module.removeprefix("base_model.model.").replace(f".{HOLDER_NAME}.", "."))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_can_split(model: nn.Module, config: SELConfig) -> None:
    """Raise if an adapter cannot run where DeepSpeed ZeRO-3 has split the base weights.

    Args:
        model: The base model.
        config: The adapter's configuration.

    Raises:
        ConfigError: If so, naming the field.
    """
    if not any(map(is_split, model.parameters())):
        return
    elsewhere = "use FSDP2 or ZeRO-2 (configs/accelerate)"
    if config.base_weight == "cpu":
        raise ConfigError("base_weight", "cpu", "ZeRO-3 has split the base weights; use 'drop' or its offload_param")
    if config.target_parameters:
        reason = f"ZeRO-3 gathers parameters for the module that owns them, which runs without its own; {elsewhere}"
        raise ConfigError("target_parameters", config.target_parameters, reason)
    if not config.train_raw:
        reason = f"ZeRO-3 loads the base in float32, of which each process would hold all raw weights; {elsewhere}"
        raise ConfigError("train_raw", False, reason)


def check_gathered(model: nn.Module, adapter_name: str, state: dict[str, Tensor]) -> None:
    """Raise unless what is saved of an adapter has all of its tensors that ZeRO-3 has split, whole.

    Args:
        model: The model.
        adapter_name: Name of the adapter.
        state: What is saved, by the model's keys.

    Raises:
        PartitionedError: If one is missing or not whole.
    """
    for name, parameter in model.named_parameters():
        own = f".{PREFIX}" in name and (name.endswith(f".{adapter_name}") or f".{adapter_name}." in name)
        if own and is_split(parameter) and (name not in state or state[name].shape != whole_shape(parameter)):
            way_out = (
                "pass state_dict=accelerator.get_state_dict(prepared_model), called in every process, to "
                "save_pretrained, and set zero3_save_16bit_model: true for that, which changes no dtype"
            )
            raise PartitionedError(name, "saving", way_out)


def check_loadable(model: nn.Module, mapped: dict[str, Tensor]) -> None:
    """Raise if ZeRO-3 has split what is to be loaded into, so that copying would fail.

    Args:
        model: The model.
        mapped: What is to be loaded, by the model's keys.

    Raises:
        PartitionedError: If so.
    """
    for name, parameter in model.named_parameters():
        if name in mapped and is_split(parameter):
            way_out = (
                "load with PeftModel.from_pretrained before accelerator.prepare, an adapter with modules_to_save in "
                "a process without ZeRO-3; a run goes on from the checkpoint that DeepSpeed wrote"
            )
            raise PartitionedError(name, "loading an adapter", way_out)


def check_found(target: str, found: list[str], is_target: Callable[[str], Any]) -> None:
    """Raise unless a name in target_parameters stands for parameters that all may be converted.

    Args:
        target: The name.
        found: The parameters it stands for.
        is_target: PEFT's rule for a module's name.

    Raises:
        ConfigError: If there are none, or one that exclude_modules or modules_to_save seems to take out.
    """
    if not found:
        raise ConfigError("target_parameters", target, "is the end of no parameter's name in this model")
    paths = {path: name for name in found for path in (name, name.rpartition(".")[0])}
    excluded = [name for path, name in paths.items() if isinstance(is_target(path), _ExcludedModule)]
    if excluded:
        reason = (
            f"{excluded[0]} is under exclude_modules or modules_to_save, which do not reach parameters; name only "
            "those to convert, as in '0.mlp.experts.down_proj'"
        )
        raise ConfigError("target_parameters", target, reason)


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


@torch.no_grad()
def check_can_merge(layers: Iterable[SELLayer], adapter_names: list[str], safe_merge: bool) -> None:
    """Raise what merging adapters would, before the first weight is replaced.

    Args:
        layers: The layers of a model.
        adapter_names: Adapters to merge.
        safe_merge: Whether to compute every merged weight and check it for NaN and infinity.

    Raises:
        MultiplierSignError: If a multiplier that the transform is divided by has reached 0.
        SELError: If values cannot be used, or with safe_merge are not in memory.
        BrokenMergeError: If a merged weight is not finite, naming the first such weight.
    """
    for layer in layers:
        new = [name for name in adapter_names if name in layer.sel_config and name not in layer.merged_adapters]
        for adapter in new:
            if not safe_merge and any(tensor.is_meta for tensor in layer.tensors(adapter)):
                continue  # accelerate brings what it has offloaded when the layer is merged
            for scale in layer.scales(adapter).values():
                scale.check_sign(layer.weight_name)
            layer._fold_inputs(adapter)
        if new and safe_merge:
            merged = layer.get_combined_weight([*layer.merged_adapters, *new])
            if not bool(torch.isfinite(merged).all()):
                raise BrokenMergeError(layer.weight_name, new)
