"""Models that FSDP2 shards: their tensors gathered, and conversion where one process alone holds the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations import is_fsdp_enabled

from peft_sel.errors import OtherProcessError, ShardedError

WAY_OUT = "save the adapter and use merge_checkpoint, or load it in one process"
BUFFERS = ("symexplin_beta", "symexplin_transposed")  # what is saved of a layer beside its parameters


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor, as of FSDP2's parameters outside their module's passes."""
    return isinstance(tensor, DTensor)


def is_sharded_model(model: nn.Module) -> bool:
    """Whether FSDP2 shards a model, also while a pass left parameters gathered."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, on the CPU if it was sharded; all processes have to call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    there: Any = tensor.detach().to(tensor.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole.cpu()


class GatheredAdapters(dict[str, dict[str, Tensor]]):
    """The whole tensors of adapters, by adapter and key: a state_dict with which save_pretrained gathers nothing."""


def gather_adapters(
    model: PeftModel,
    adapters: Iterable[str] | None = None,
    save_embedding_layers: bool | Literal["auto"] = "auto",
) -> GatheredAdapters:
    """Gather the tensors of adapters one by one, for the first process; all processes have to call this together.

    Args:
        model: A model that FSDP2 shards.
        adapters: Names of adapters; None for all.
        save_embedding_layers: PEFT's.

    Returns:
        The whole tensors on the CPU; in other processes than the first nothing.
    """
    first = torch.distributed.get_rank() == 0
    found = GatheredAdapters()
    for adapter in adapters or list(model.peft_config):
        state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=save_embedding_layers)
        whole = ((key, gather(tensor)) for key, tensor in state.items())
        found[adapter] = {key: tensor for key, tensor in whole if first}
    return found


def write_from_first(tensors: Mapping[str, Tensor], write: Callable[[Callable[[str], Tensor]], object]) -> None:
    """Let the first process write whole tensors, which all gather one at a time; they have to call this together.

    Args:
        tensors: The same names in every process.
        write: Called in the first process, with a function that returns the tensor of a name.

    Raises:
        OtherProcessError: If the first process fails, which raises its own error, and this is another.
    """

    def announce(name: str | None, message: str | None = None) -> tuple[str | None, str | None]:
        told = [name, message]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0], told[1]

    def read(name: str) -> Tensor:
        announce(name)
        return gather(tensors[name])

    if torch.distributed.get_rank() == 0:
        try:
            write(read)
        except Exception as error:
            announce(None, str(error))
            raise
        announce(None)
        return
    while (told := announce(None))[0] is not None:
        gather(tensors[told[0]])
    if told[1] is not None:
        raise OtherProcessError(0, told[1])


def is_layer_sharded(layer: Any) -> bool:
    """Whether FSDP2 shards a layer, also while a pass has its parameters gathered.

    Nothing in a gathered parameter tells it from a plain one. But FSDP2 wants to hear of loads, and leaves a hook for
    each parameter in the module that holds it.
    """
    return any(
        getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
        for module in layer.children()
        for part in (module, *module.children())
        for hook in part._load_state_dict_post_hooks.values()
    )


def check_whole(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise if this process holds parts of tensors only, as outside a pass through a model that FSDP2 shards.

    Args:
        name: Module name.
        tensors: What an effective weight is to be computed from.

    Raises:
        ShardedError: If so.
    """
    if DTensor in map(type, tensors):  # asked in each pass of each layer
        raise ShardedError(name, "the whole weight is there in its forward pass only", WAY_OUT)


def awaits_values(model: nn.Module) -> bool:
    """Whether accelerate's cpu_ram_efficient_loading left this process an empty model, to be filled when it shards."""
    return is_fsdp_enabled() and any(parameter.is_meta for parameter in model.parameters())


def shard_as(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this process holds of whole tensors, which every process has, where a model's own are sharded.

    Args:
        state: The model's.
        tensors: Whole tensors by the same keys, in the shapes of the model's own.

    Returns:
        The shards; a tensor that the model does not shard as it is.
    """
    shards = dict(tensors)
    for key, tensor in tensors.items():
        own = state.get(key)
        if isinstance(own, DTensor) and not is_sharded(tensor):
            mesh = own.device_mesh
            shards[key] = distribute_tensor(tensor.to(mesh.device_type), mesh, own.placements, src_data_rank=None)
    return shards


def drop_awaited(
    model: nn.Module, layers: Iterable[Any], own: dict[str, Tensor], mapped: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return what this process has to load of an adapter: where accelerate brings the parameters, only the buffers.

    Args:
        model: The model.
        layers: Its layers.
        own: The adapter's tensors in the model.
        mapped: What is to be loaded, by the same keys.

    Returns:
        mapped, or a part of it.
    """
    if not awaits_values(model):
        return mapped
    for layer in layers:
        layer.omitted = ("symexplin_",)
    return {
        key: value
        for key, value in mapped.items()
        if (key in own and own[key].is_meta) or any(f".{name}." in key for name in BUFFERS)
    }


def choose_device(weight: Tensor) -> torch.device:
    """Return the device of a weight, for what belongs to it; where accelerate is to bring the values, the CPU.

    What waits there takes empty pages, and on the meta device accelerate could not tell an optimizer's parameters from
    one another, nor would it bring buffers back.
    """
    return torch.device("cpu") if weight.is_meta and is_fsdp_enabled() else weight.device


def make_placeholder(weight: Tensor) -> Tensor:
    """Return 0 elements of a weight's dtype, where choose_device says."""
    return torch.empty(0, dtype=weight.dtype, device=choose_device(weight))


@contextmanager
def agreeing() -> Iterator[None]:
    """Let a block succeed in all processes or in none, under cpu_ram_efficient_loading; all have to enter it together.

    Raises:
        OtherProcessError: If it failed in another process only.
    """
    try:
        yield
    except Exception as error:
        _collect_errors(error)
        raise
    if failed := _collect_errors(None):
        raise OtherProcessError(*failed[0])


def _collect_errors(error: Exception | None) -> list[tuple[int, str]]:
    """Return which processes failed, and with what message."""
    if not is_fsdp_enabled():
        return []
    messages: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(messages, None if error is None else str(error))
    return [(rank, message) for rank, message in enumerate(messages) if message is not None]


def share_conversion(layers: Iterable[Any], adapter: str) -> None:
    """Give all processes what the first one's conversion took from the weights, under cpu_ram_efficient_loading.

    The parameters come when the model is sharded; beta, on which the optimizer groups depend, the tables of a frozen
    raw weight and the fingerprints have to be there before.

    Args:
        layers: The layers of the model.
        adapter: Name of the new adapter.
    """
    if not is_fsdp_enabled():
        return
    first = torch.distributed.get_rank() == 0
    for layer in (layer for layer in layers if adapter in layer.sel_config):
        found: list[Any] = [_pack(layer, adapter) if first else None]
        torch.distributed.broadcast_object_list(found, src=0)
        if not first:
            _unpack(layer, adapter, *found[0])


def _pack(layer: Any, adapter: str) -> tuple[Any, ...]:
    """Return what follows from the base weight of a layer."""
    beta, frozen = layer.symexplin_beta[adapter], layer.symexplin_raw_frozen
    others = (layer._table_dtypes, layer.base_fingerprint, layer.inversion_report)
    return beta.cpu(), frozen[adapter].cpu() if adapter in frozen else None, *(other.get(adapter) for other in others)


def _unpack(
    layer: Any, adapter: str, beta: Tensor, frozen: Tensor | None, table_dtype: Any, fingerprint: Any, report: Any
) -> None:
    layer.symexplin_beta[adapter] = beta
    if adapter in layer.symexplin_transposed:
        layer.symexplin_transposed[adapter] = torch.ones((), dtype=torch.uint8)
    if frozen is not None:
        layer.symexplin_raw_frozen[adapter] = frozen
    for scale in layer.scales(adapter).values():
        scale.reset_start(beta)
    others = (layer._table_dtypes, layer.base_fingerprint, layer.inversion_report)
    for values, value in zip(others, (table_dtype, fingerprint, report), strict=True):
        if value is not None:
            values[adapter] = value


def omit_buffers(layer: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Leave the buffers out of the state of a sharded layer without values: accelerate wants a shard for each entry."""
    if any(is_sharded(parameter) and parameter.is_meta for parameter in layer.parameters()):
        layer.omitted = BUFFERS
        starts = tuple(f"{prefix}{name}." for name in BUFFERS)
        for key in [key for key in state if key.startswith(starts)]:
            del state[key]


def excuse_omitted(layer: Any, keys: Any) -> None:
    """Do not count as missing, after the load of a layer, what was left out on purpose."""
    omitted, layer.omitted = layer.omitted, ()
    if omitted:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not any(f".{name}" in key for name in omitted)]
