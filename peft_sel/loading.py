"""What an adapter file must hold: exactly the adapter's tensors, so that nothing loads by halves, in their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from peft_sel.conversion import PREFIX
from peft_sel.errors import AdapterMismatchError, ConfigError
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


def check_multipliers(config: Any, state: dict[str, Tensor], adapter_name: str) -> None:
    """Raise if an adapter to be saved is divided by an inner multiplier that has reached 0.

    Args:
        config: The adapter's SELConfig.
        state: Its tensors, by the model's keys.
        adapter_name: Name of the adapter.

    Raises:
        MultiplierSignError: If it is.
    """
    scale = config.scale_configs().get("inner_multiplier")
    if scale is None or not scale.divides:
        return
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        module, found, part = key.partition(f".{PREFIX}inner_multiplier.{adapter_name}.")
        if found:
            modules.setdefault(module, {})[part] = tensor
    for module, parts in modules.items():
        check_sign(scale, parts, module.removeprefix("base_model.model."))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
