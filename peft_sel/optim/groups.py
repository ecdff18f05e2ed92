"""Optimizer groups: every trainable parameter in exactly one, with its role's learning rate and weight decay (4.4)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from peft_sel.config import ScaleConfig, SELConfig
from peft_sel.errors import ConfigError, ParameterGroupError, list_names
from peft_sel.layer import SELLayer
from peft_sel.numerics import SCALE_NAMES

ROLES = ("raw", *SCALE_NAMES, "residual", "other")  # the order of the groups: a stock Trainer logs group 0's rate
# (k0, k1) of 4.4, for weights drawn from scratch: on pretrained ones they did harm.
SCRATCH_MULTIPLIERS = {"exp_scale": (50.0, 8.0), "linear_scale": (50.0, 8.0), "inner_multiplier": (0.01, 0.5)}
SCRATCH_RESIDUAL_MULTIPLIER = 0.5
_DECAYED_SCALES = ("exp_scale", "linear_scale")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")  # names that transformers.Trainer doesn't decay


@dataclass(frozen=True)
class GroupSettings:
    """What parameters must have in common to share a group."""

    role: str
    lr_mult: float
    lr_mult_end: float
    anneal_steps: int | float
    decays: bool


def sel_param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.01,
    *,
    lr_scale: Callable[[str, nn.Parameter], float] | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters into optimizer groups by role (4.4).

    Each trainable parameter is in exactly one group; shared ones count once. The order depends on the model only: by
    role (ROLES), then as the parameters come in the model.

    | role | learning rate | weight decay |
    | --- | --- | --- |
    | raw | lr | yes |
    | exp_scale, linear_scale | lr * ScaleConfig.lr_mult | unless ScaleConfig.weight_decay is False |
    | inner_multiplier, offset, shift | lr * ScaleConfig.lr_mult | only if ScaleConfig.weight_decay is True |
    | residual | lr * SELConfig.residual_lr_mult / beta, one group per distinct beta | yes |
    | other (modules_to_save, plain biases, tokens) | lr | as transformers.Trainer: not biases and norms |

    The experts of a stacked parameter have a beta each but one tensor for the residual: its rate is divided by the
    geometric mean of theirs.

    Args:
        model: A model with at least one trainable SEL parameter; each uses the config of its own adapter.
        lr: Base learning rate, positive.
        weight_decay: For the groups that decay, not negative.
        lr_scale: A further factor on each parameter's rate, on top of those of its role, as in muP: called with the
            name in the model and the parameter, returns a positive number. Decoupled weight decay scales along.

    Returns:
        Groups with params, lr (the base rate times lr_mult), weight_decay, and the plain keys role, lr_mult (k0),
        lr_mult_end (k1) and anneal_steps (int steps or float fraction) that create_sel_scheduler reads. lr_scale is in
        k0 and k1: there is one group for each role and distinct product.

    Raises:
        ConfigError: If lr is not positive, weight_decay is negative, or lr_scale returns no positive, finite number.
        ParameterGroupError: If no SEL parameter is trainable, one has no known role, a trainable parameter is on the
            meta device, or FSDP1 wraps the model.
    """
    if not 0 < lr < math.inf:
        raise ConfigError("lr", lr, "the base learning rate must be a positive finite number")
    if not 0 <= weight_decay < math.inf:
        raise ConfigError("weight_decay", weight_decay, "must be 0 or a positive finite number")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ParameterGroupError(
            "FSDP1 wraps the model, and its flat parameters mix roles",
            "set fsdp_version: 2 in Accelerate's config (version: 2 in Trainer's fsdp_config)",
        )
    known = find_sel_settings(model.modules())
    owners = dict(model.named_modules(remove_duplicate=False))
    grouped: dict[tuple[GroupSettings, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_has_place(name, parameter)
            settings = known.get(id(parameter)) or _settings_outside_sel(name, owners[name.rpartition(".")[0]])
            settings = _apply_lr_scale(settings, lr_scale, name, parameter)
            # 1 step and the fraction 1.0 are equal numbers and different settings
            key = (settings, isinstance(settings.anneal_steps, float))
            grouped.setdefault(key, []).append(parameter)
    groups = [
        _make_group(settings, parameters, lr, weight_decay)
        for (settings, _), parameters in sorted(grouped.items(), key=lambda item: ROLES.index(item[0][0].role))
    ]
    check_param_groups(model, groups)
    if all(group["role"] == "other" for group in groups):
        raise ParameterGroupError(
            "the model has no trainable SEL parameter",
            "convert it with get_peft_model(model, SELConfig(...)), or load the adapter with is_trainable=True",
        )
    return groups


def check_param_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Check that every trainable parameter of a model is in exactly one group.

    Args:
        model: The model to be trained.
        groups: Optimizer groups.

    Raises:
        ParameterGroupError: If parameters are missing or appear more than once; names them.
    """
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    wrong = [name for name, parameter in model.named_parameters() if counts[id(parameter)] != parameter.requires_grad]
    if wrong:
        raise ParameterGroupError(
            f"these parameters are not in exactly one group if trainable, and in none if not: {list_names(wrong)}",
            "build the groups with sel_param_groups after the last change of requires_grad",
        )


def create_sel_optimizer(
    model: nn.Module,
    optimizer_cls: Callable[..., Optimizer] = torch.optim.AdamW,
    *,
    lr: float,
    weight_decay: float = 0.01,
    lr_scale: Callable[[str, nn.Parameter], float] | None = None,
    **kwargs: Any,
) -> Optimizer:
    """Create an optimizer over sel_param_groups.

    With a stock scheduler the multipliers stay as they start; create_sel_scheduler anneals them.

    To free each gradient as soon as it is used, make one optimizer per parameter and let torch call it in the backward
    pass. It gives the bits of the plain loop, without gradient clipping, accumulation or a GradScaler:

        def update(parameter, optimizer):
            optimizer.step()
            parameter.grad = None

        for group in sel_param_groups(model, lr):
            for parameter in group["params"]:
                optimizer = torch.optim.AdamW([{**group, "params": [parameter]}])
                parameter.register_post_accumulate_grad_hook(functools.partial(update, optimizer=optimizer))

    Each takes a create_sel_scheduler of its own.

    Args:
        model: A model with at least one trainable SEL parameter.
        optimizer_cls: An optimizer class that takes parameter groups, also one of few bits of bitsandbytes or torchao.
        lr: Base learning rate, positive.
        weight_decay: For the groups that decay, not negative.
        lr_scale: A further factor on each parameter's rate, see sel_param_groups.
        **kwargs: Further arguments of optimizer_cls, such as betas or fused.

    Returns:
        The optimizer. With it and create_sel_scheduler a stock Trainer takes the steps of SELTrainer, bit for bit if
        both have one kind of AdamW (Trainer's own is fused=True) and SELTrainer shares no weights of an accumulation.

    Raises:
        ConfigError: If lr is not positive, weight_decay is negative, or lr_scale returns no positive, finite number.
        ParameterGroupError: If no SEL parameter is trainable, or a SEL parameter has no known role.

    Example:
        >>> optimizer = create_sel_optimizer(model, lr=2e-5)  # doctest: +SKIP
        >>> scheduler = create_sel_scheduler(optimizer, "linear", 10, 1000)  # doctest: +SKIP
        >>> trainer = Trainer(model, args, optimizers=(optimizer, scheduler))  # doctest: +SKIP
    """
    return optimizer_cls(sel_param_groups(model, lr, weight_decay, lr_scale=lr_scale), lr=lr, **kwargs)


def _check_has_place(name: str, parameter: nn.Parameter) -> None:
    """Raise if a trainable parameter has no memory; accelerate's FSDP2 would take it for another in the optimizer."""
    if parameter.is_meta:
        raise ParameterGroupError(
            f"{name} is trainable and on the meta device",
            "under FSDP2 set cpu_ram_efficient_loading to false, or train SEL parameters only, without modules_to_save "
            "and bias='all'; else load the model into memory",
        )


def _apply_lr_scale(
    settings: GroupSettings,
    lr_scale: Callable[[str, nn.Parameter], float] | None,
    name: str,
    parameter: nn.Parameter,
) -> GroupSettings:
    """Return settings with both multipliers times the caller's factor for a parameter."""
    if lr_scale is None:
        return settings
    value: Any = lr_scale(name, parameter)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ConfigError("lr_scale", value, f"for {name} it must return a positive, finite number")
    return replace(settings, lr_mult=settings.lr_mult * factor, lr_mult_end=settings.lr_mult_end * factor)


def _make_group(
    settings: GroupSettings, parameters: list[nn.Parameter], lr: float, weight_decay: float
) -> dict[str, Any]:
    keys = asdict(settings)
    decays = keys.pop("decays")
    return {
        "params": parameters,
        "lr": lr * settings.lr_mult,
        "weight_decay": weight_decay if decays else 0.0,
        **keys,
    }


def find_sel_settings(modules: Iterable[object], wanted: Container[int] | None = None) -> dict[int, GroupSettings]:
    """Map the ids of SEL parameters to their settings.

    Args:
        modules: Modules; those that are no SEL layers have none.
        wanted: Only adapters of a layer that hold one of these ids; None for all.

    Returns:
        The settings of all parameters of these adapters.
    """
    found: dict[int, GroupSettings] = {}
    for module in modules:
        if isinstance(module, SELLayer):
            for adapter, config in module.sel_config.items():
                if wanted is None or any(id(tensor) in wanted for tensor in module.tensors(adapter)):
                    for parameter, settings in _iter_layer_settings(module, adapter, config):
                        found.setdefault(id(parameter), settings)
    return found


def _iter_layer_settings(
    layer: SELLayer, adapter: str, config: SELConfig
) -> Iterator[tuple[nn.Parameter, GroupSettings]]:
    """Yield the parameters of one adapter on one layer with their settings."""
    if adapter in layer.symexplin_raw:
        yield layer.symexplin_raw[adapter], GroupSettings("raw", 1.0, 1.0, config.anneal_steps, decays=True)
    options = config.scale_configs()
    for name, scale in layer.scales(adapter).items():
        for parameter in scale.parameters():
            yield parameter, _settings_of_scale(name, options[name], config)
    if adapter in layer.symexplin_residual_a:
        beta = layer.symexplin_beta[adapter]
        chosen = config.residual_lr_mult or (SCRATCH_RESIDUAL_MULTIPLIER if config.draws_targets else 1.0)
        multiplier = chosen / (beta.log().mean().exp() if beta.dim() else beta).item()
        settings = GroupSettings("residual", multiplier, multiplier, config.anneal_steps, decays=True)
        yield layer.symexplin_residual_a[adapter], settings
        yield layer.symexplin_residual_b[adapter], settings


def _settings_of_scale(name: str, options: ScaleConfig, config: SELConfig) -> GroupSettings:
    decays = name in _DECAYED_SCALES if options.weight_decay is None else options.weight_decay
    start, end = SCRATCH_MULTIPLIERS.get(name, (1.0, 1.0)) if config.draws_targets else (1.0, 1.0)
    if options.lr_mult is not None:
        start = end = options.lr_mult
    end = end if options.lr_mult_end is None else options.lr_mult_end
    return GroupSettings(name, start, end, config.anneal_steps, decays)


def _settings_outside_sel(name: str, owner: nn.Module) -> GroupSettings:
    """Return the settings of a trainable parameter that is no SEL tensor: base rate, Trainer's rule for the decay."""
    if ".symexplin_" in name:
        raise ParameterGroupError(
            f"{name} is trainable and has no known role", "freeze it, or give its scale a ScaleConfig in SELConfig"
        )
    decays = not isinstance(owner, nn.LayerNorm) and _NO_DECAY.search(name.lower()) is None
    return GroupSettings("other", 1.0, 1.0, 1, decays)
