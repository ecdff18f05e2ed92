"""What adapters of one model must not do to each other, by their names, base weights or modules_to_save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.integrations import is_fsdp_enabled

from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS, HOLDER_NAME, PREFIX
from peft_sel.errors import AdapterStateError, ConfigError, list_names
from peft_sel.layer import SELLayer
from peft_sel.numerics import init_parts
from peft_sel.removal import iter_sel_layers
from peft_sel.shapes import vector_config


def check_can_add(model: nn.Module, adapter_name: str, config: SELConfig) -> None:
    """Raise if the name cannot be, the model has it already, or another adapter needs a base to be dropped."""
    if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict(), adapter_name):
        raise AdapterStateError(
            adapter_name, "has a name that torch cannot store", "choose one without dots that ModuleDict has not"
        )
    if adapter_name == BIAS:  # saving another adapter, PEFT would leave out every tensor with it in its name
        raise AdapterStateError(adapter_name, "has a name that names biases in saved adapters", "choose another")
    if config.base_weight == "cpu" and is_fsdp_enabled():
        raise ConfigError(
            "base_weight", "cpu", "FSDP with cpu_ram_efficient_loading has it in one process only; use 'keep' or 'drop'"
        )
    others = _collect_configs(model)
    if adapter_name in others:
        raise AdapterStateError(
            adapter_name, "is already in this model", "delete it first, or give the new one another name"
        )
    if config.base_weight == "drop" and others:
        raise AdapterStateError(
            adapter_name,
            f"would free the base weights, which {list_names(sorted(others))} may need",
            "use base_weight='keep', or delete the other adapters first",
        )
    configs = {adapter_name: config, **others}
    moving = [name for name, other in configs.items() if other.base_weight == "cpu"]
    frozen = [name for name, other in configs.items() if not other.train_raw]
    if moving and frozen:
        raise AdapterStateError(
            frozen[0],
            "has train_raw=False and computes from the base weights in every step, and "
            f"{moving[0]!r} moves them to the CPU",
            "use base_weight='keep' for all adapters of this model",
        )


def check_beside(model: nn.Module, adapter_name: str, config: SELConfig, targets: list[str]) -> None:
    """Raise if an adapter and those that are there could not all be saved.

    Args:
        model: The base model.
        adapter_name: Name of the new adapter.
        config: Its configuration.
        targets: Names of the modules that it is to convert.

    Raises:
        AdapterStateError: If a name is a part of a key of another's tensors, by which PEFT would leave them out.
        ConfigError: If modules_to_save of one would copy converted modules of another.
    """
    configs = {adapter_name: config, **_collect_configs(model)}
    if len(configs) < 2:
        return
    for name, module in model.named_modules():
        if _trains_whole(config, name) and any(iter_sel_layers(module)):
            reason = f"{name} has modules that another adapter converted; add this one to a model of its own"
            raise ConfigError("modules_to_save", config.modules_to_save, reason)
        if isinstance(module, AuxiliaryTrainingWrapper):
            for inside in (target for target in targets if target.startswith(f"{name}.")):
                reason = f"{inside} lies in {name}, which another adapter trains whole; use a model of its own"
                raise ConfigError("target_modules", config.target_modules, reason)
    parts = _collect_parts(model, configs.values(), targets)
    for name in configs:
        if name in parts or name.startswith(PREFIX):
            way_out = "choose another" if name == adapter_name else "delete it first, or load it under another name"
            raise AdapterStateError(
                name,
                "has a name that is a part of the keys in saved adapters, so that another beside it would be saved "
                "without those tensors",
                f"{way_out}; alone in its model an adapter can have any name",
            )


def list_saved_modules(state: Iterable[str]) -> list[str]:
    """Return the names of the modules whose tensors have these keys in a saved adapter."""
    return sorted({name for name, found, _ in (key.rpartition(f".{PREFIX}") for key in state) if found})


def _collect_configs(model: nn.Module) -> dict[str, SELConfig]:
    configs: dict[str, SELConfig] = {}
    for layer in iter_sel_layers(model):
        configs |= layer.sel_config
    return configs


def _collect_parts(model: nn.Module, configs: Iterable[SELConfig], targets: list[str]) -> set[str]:
    """Return the parts of the keys under which tensors of these adapters are saved, but for names of adapters."""
    parts = {"base_model", "model", "weight", BIAS, HOLDER_NAME}
    # A regex may match what lies in a converted module too, under names of adapters; PEFT passes over it.
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SELLayer))
    for path in (*(name for name in targets if not name.startswith(inside)), *_iter_saved(model, list(configs))):
        parts.update(path.split("."))
    for config in configs:
        scales = [*config.scale_configs().values()]
        if config.bias == "sel_only":
            scales += vector_config(config).scale_configs().values()
        for scale in scales:
            parts |= init_parts(scale.pattern, 1.0, (0, 0)).keys()
    return parts


def _iter_saved(model: nn.Module, configs: list[SELConfig]) -> Iterator[str]:
    """Yield the names of modules and parameters of the model's own that are, or may be, saved with an adapter."""
    held: tuple[str, ...] = ()  # by wrappers, under names of adapters
    for name, module in model.named_modules():
        if name.startswith(held):
            continue
        own = module
        if isinstance(module, AuxiliaryTrainingWrapper):
            held, own = (*held, f"{name}."), module.original_module
        # Embeddings, since a vocabulary that was resized is saved too.
        if isinstance(own, (SELLayer, nn.Embedding)) or name == "lm_head":
            yield name
        if any(_trains_whole(config, name) for config in configs):
            yield from (f"{name}.{key}" for key in own.state_dict())
    for name, _ in model.named_parameters() if any(config.bias == "all" for config in configs) else ():
        if BIAS in name and f".{PREFIX}" not in name and not name.startswith(held):
            yield name


def _trains_whole(config: SELConfig, name: str) -> bool:
    """Tell whether modules_to_save names a module, by PEFT's rule."""
    return any(name.endswith(end) for end in config.modules_to_save or ())


def check_complete(names: Iterable[tuple[str, nn.Module]], adapter_name: str, state: dict[str, Tensor]) -> None:
    """Raise if a tensor that an adapter of these modules trains is not among what is saved of it."""
    for path, module in names:
        for name, _ in module.named_parameters() if isinstance(module, SELLayer) else ():
            key = f"{path}.{name}".replace("_fsdp_wrapped_module.", "").removeprefix(".")
            if name.startswith(PREFIX) and name.split(".")[1] == adapter_name and key not in state:
                way_out = "pass the state_dict of the whole model, and call no adapter like a part of that key"
                raise AdapterStateError(adapter_name, f"would be saved without {key}", way_out)
