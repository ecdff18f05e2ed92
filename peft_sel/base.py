"""Where the base weight of a converted module is: in its place, set aside, in CPU memory, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from peft_sel.config import SELConfig
from peft_sel.errors import NonFiniteWeightError, OffloadedError
from peft_sel.loading import current_load
from peft_sel.numerics import fingerprint_weight, fingerprints_agree, matches_fingerprint
from peft_sel.partitioned import is_split
from peft_sel.sharded import gather, make_placeholder

_Layer = TypeVar("_Layer", bound="BaseWeightLayer")

LIVE_LAYERS: WeakSet[BaseWeightLayer] = WeakSet()  # of all models: tells whether an optimizer's parameters are SEL's


class _Plain:
    """Makes a class look to Python like nn.Module, so that FSDP2 can make one of its own of a layer's (lm_head's)."""


class BaseWeightLayer(_Plain, BaseTunerLayer):
    """Gives the base weight of one target, wherever it is.

    A weight set aside (base_weight="cpu", or while an adapter is merged) is no parameter of any module meanwhile, so
    that .to(device) need not move it and DDP, which wants all parameters on one device, does not see it.
    """

    parameter_name = "weight"  # of the base layer
    stack: tuple[int, ...] = ()  # (num_experts,) where the weight is a stack of matrices
    holds_base_weight = True  # and does not compute it anew at each access
    on_cpu = False  # whether the base weight stays in CPU memory wherever the layer runs
    drop_pending = False  # whether the base weight is to be dropped as soon as it is certain that the adapter loads
    sel_config: dict[str, SELConfig]
    base_fingerprint: dict[str, str]  # of the base weight, by adapter
    module_name: str
    in_features: int | None
    out_features: int | None
    _unmerged: dict[str, Tensor]  # the base weight set aside; a dict, so not registered
    _parameter_order: tuple[str, ...]  # of the base layer

    def __new__(cls: type[_Layer], *_: Any, **__: Any) -> _Layer:
        """Make a layer, as an instance or as a copy, for which __init__ is not called."""
        layer = super().__new__(cls)
        LIVE_LAYERS.add(layer)
        return layer

    @property
    def base_weight(self) -> Tensor:
        """The base layer's own weight, also while an adapter is merged into the layer or it is in CPU memory."""
        base: Any = self.get_base_layer()
        weight: Tensor = self._unmerged.get("weight", getattr(base, self.parameter_name))
        return weight

    def _peek_base_weight(self) -> Tensor:
        """Return the base weight without letting ZeRO-3, which watches attributes, gather its values for that."""
        held: Tensor | None = vars(self.get_base_layer())["_parameters"].get(self.parameter_name)
        return self.base_weight if held is None or self._unmerged else held

    @property
    def base_dtype(self) -> torch.dtype:
        """Dtype of the base weight."""
        return self._peek_base_weight().dtype

    @property
    def base_dropped(self) -> str | None:
        """Name of the adapter that freed the base weight, or None."""
        weight = self._peek_base_weight()
        if weight.numel() == 0 and not is_split(weight) and self.in_features and self.out_features:
            return next((name for name, config in self.sel_config.items() if config.base_weight == "drop"), "default")
        return None

    @property
    def weight_name(self) -> str:
        """How errors call the base weight."""
        return f"{self.module_name}.weight"

    @property
    def fingerprint_name(self) -> str:
        """How a configuration calls the base weight: by its name in the base."""
        return self.weight_name.replace(".base_layer.", ".")

    @property
    def base_is_readable(self) -> bool:
        """Whether the base weight is in memory, with the values that its checkpoint has."""
        return self.holds_base_weight and not self.base_weight.is_meta

    def record_base(self, adapter: str, config: SELConfig, weight: Tensor) -> None:
        """Keep the fingerprint of the base weight that an adapter is made from: the recorded one, if it has that.

        Args:
            adapter: Name of the adapter.
            config: Its configuration; what starts from a draw has nothing from the base.
            weight: The base weight; of one that cannot be read, what is recorded stays.
        """
        if config.draws_targets:
            return
        value = config.base_fingerprint.get(self.fingerprint_name)
        stacked = bool(self.stack)
        if self.base_is_readable and not (value and matches_fingerprint(value, weight, stacked)):
            value = fingerprint_weight(weight, stacked)
        if value:
            self.base_fingerprint[adapter] = value

    def keep_record(self, adapter: str, recorded: str | None) -> None:
        """Keep the fingerprint that came with the tensors of an adapter, unless the base weight has another.

        Args:
            adapter: Name of the adapter.
            recorded: What its file says of the base weight; None for nothing.
        """
        if not recorded or adapter not in self.sel_config:
            return
        if fingerprints_agree(self.base_fingerprint.get(adapter, recorded), recorded):
            self.base_fingerprint[adapter] = recorded

    def check_base_is_finite(self, adapter: str) -> None:
        """Raise unless the base weight that a train_raw=False adapter inverts holds finite numbers only."""
        frozen = adapter in self.sel_config and not self.sel_config[adapter].train_raw
        if frozen and not self.base_weight.is_meta:
            broken = ~torch.isfinite(gather(self.base_weight))
            if bool(broken.any()):
                raise NonFiniteWeightError(self.weight_name, int(broken.sum()))

    @property
    def base_is_away(self) -> bool:
        """Whether the base layer cannot run by itself: its weight is in CPU memory, and no other in its place."""
        return self.on_cpu and not self.merged

    def fetch_base_weight(self) -> Tensor:
        """Return the base weight on the device that the layer runs on: a copy there, if the weight stays on the CPU."""
        weight = self.base_weight
        if not self.on_cpu:
            return weight
        return weight.to(getattr(self.get_base_layer(), self.parameter_name).device, non_blocking=True)

    def drop_base_weight(self) -> None:
        """Free the base weight: a 0-element buffer that remembers dtype and device, and is not saved, replaces it."""
        self._put_placeholder()

    def drop_if_pending(self) -> None:
        """Free a base weight that was left for a load that might fail, unless that goes on."""
        if self.drop_pending and current_load() is None:
            self.drop_pending = False
            self.drop_base_weight()

    def set_base_aside(self) -> None:
        """Take the base weight out of the base layer for as long as it stays on the CPU."""
        if not self.merged:
            base: Any = self.get_base_layer()
            self._unmerged["weight"] = getattr(base, self.parameter_name)
            self._put_placeholder()
        self.on_cpu = True

    def put_base_back(self) -> None:
        """Put a base weight from CPU memory back into the base layer, on the layer's device."""
        if self.on_cpu:
            base: Any = self.get_base_layer()
            weight = self._unmerged.pop("weight")
            _replace_values(weight, weight.data.to(getattr(base, self.parameter_name).device))
            self._put_in_place(weight)
            self.on_cpu = False

    def unmerge(self) -> None:
        """Put the base weight back, bit for bit."""
        if not self.merged:
            return
        base: Any = self.get_base_layer()
        if getattr(base, self.parameter_name).is_meta:  # the hook would bring the merged weight back
            raise OffloadedError(self.module_name, "merged weight")
        if self.base_dropped is not None:
            self.drop_base_weight()
            self._unmerged.clear()
        elif self.on_cpu:
            self._put_placeholder()
        else:
            setattr(base, self.parameter_name, self._unmerged.pop("weight"))
        self.merged_adapters.clear()

    def _put_placeholder(self) -> None:
        base: Any = self.get_base_layer()
        placeholder = make_placeholder(getattr(base, self.parameter_name))
        delattr(base, self.parameter_name)
        base.register_buffer(self.parameter_name, placeholder, persistent=False)

    def _put_in_place(self, weight: Tensor) -> None:
        """Make a parameter the base layer's weight, at its own place among the others."""
        base: Any = self.get_base_layer()
        setattr(base, self.parameter_name, weight)
        for name in [name for name in self._parameter_order if name in base._parameters]:
            base._parameters[name] = base._parameters.pop(name)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, None]:
        """Answer the device only: PEFT would round float32 tensors to the dtype of the base layer."""
        device, _ = super()._get_base_layer_device_and_dtype(base_layer)
        return device, None

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move what low_cpu_mem_usage put in place to the base layer's device, and out of the file that held it."""
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        layer: Any = self
        for tensor in layer.tensors(adapter_name):
            if tensor.device.type == "cpu":  # perhaps mapped: cutting the file later would end the process
                tensor.data = tensor.data.clone()
        for buffers in (layer.symexplin_beta, layer.symexplin_transposed):
            if adapter_name in buffers:
                buffers[adapter_name] = buffers[adapter_name].clone()

    def _apply_aside(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move or cast to the weight that is set aside; one that stays on the CPU is cast only."""
        for weight in self._unmerged.values():
            result = fn(weight.data.new_empty(0)) if self.on_cpu else weight
            away = result.device != weight.device
            values = weight.data.to(result.dtype) if away else fn(weight.data)
            _replace_values(weight, pin(values) if self.on_cpu else values)


@contextmanager
def show_placeholders(layers: Iterable[BaseWeightLayer]) -> Iterator[None]:
    """Let placeholders be parameters meanwhile: PEFT looks for what target_parameters names among these only.

    Args:
        layers: Layers, of which some may have their base weight in CPU memory.
    """
    away: list[tuple[Any, str]] = [
        (layer.get_base_layer(), layer.parameter_name) for layer in layers if layer.base_is_away
    ]
    for module, name in away:
        module._parameters[name] = nn.Parameter(module._buffers.pop(name), requires_grad=False)
    try:
        yield
    finally:
        for module, name in away:
            module._buffers[name] = module._parameters.pop(name).detach()


def _replace_values(weight: Tensor, values: Tensor) -> None:
    """Give a parameter other values, in memory of their own, for all who hold it; the old memory is freed."""
    weight.data = values


def pin(tensor: Tensor) -> Tensor:
    """Return a CPU tensor in page-locked memory, from which a GPU copies faster; as it is where there is no CUDA."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def place_base_weights(model: nn.Module, layers: list[BaseWeightLayer], awaits_load: bool) -> None:
    """Free base weights, or move them to CPU memory, as the configurations of each layer ask for.

    They move in place: whatever holds such a parameter gives its device memory free. A weight that another module
    shares (a tied embedding that is not converted) has to stay for that one, and so does one on the meta device, which
    has no values. Shared by converted modules only, it is moved once for all of them.

    Args:
        model: The model, in which other modules may hold the same parameters.
        layers: Its layers.
        awaits_load: Whether to leave what is to be freed until drop_if_pending.
    """
    places = [{config.base_weight for config in layer.sel_config.values()} for layer in layers]
    for layer in (layer for layer, place in zip(layers, places, strict=True) if "drop" in place):
        layer.drop_pending = True
        if not awaits_load:
            layer.drop_if_pending()
    moving = [layer for layer, place in zip(layers, places, strict=True) if "cpu" in place and not layer.on_cpu]
    own = {(id(layer.get_base_layer()), layer.parameter_name) for layer in moving}
    shared = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if (id(module), name) not in own
    }
    moving = [layer for layer in moving if id(layer.base_weight) not in shared and not layer.base_weight.is_meta]
    for layer in moving:
        layer.set_base_aside()
    for weight in {id(layer.base_weight): layer.base_weight for layer in moving}.values():
        _replace_values(weight, pin(weight.data.cpu()))
