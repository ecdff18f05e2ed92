"""Mixed batches: the adapter_names= of a call, one adapter per row, brought to every layer that runs rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from peft_sel.errors import MixedBatchError, list_names
from peft_sel.experts import SELHolder
from peft_sel.modules import BASE_ROWS, SELModule
from peft_sel.removal import iter_sel_layers

INPUTS = ("input_ids", "inputs", "inputs_embeds")  # that generate knows, one row per name


@contextmanager
def route_rows(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], call: Mapping[str, Any]
) -> Iterator[None]:
    """Hand the adapter of each row to every adapted module, for the duration of one forward or generate.

    Args:
        model: The model whose modules are adapted.
        names: Adapter of each row; "__base__" for the untouched base.
        args: Arguments of the call.
        call: Its keyword arguments; generate repeats each row for its beams or returned sequences.

    Raises:
        MixedBatchError: If the model trains, is merged or lacks an adapter, or if names and rows differ in number.
    """
    names = _check_names(model, names)
    inputs = next((value for value in (*args[:1], *map(call.get, INPUTS)) if value is not None), None)
    hook = partial(_add_names, names=names, copies=_count_copies(model, names, inputs, call))
    modules = [module for module in model.modules() if isinstance(module, (SELModule, AuxiliaryTrainingWrapper))]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise MixedBatchError([str(names)], "is no list of names", "give one adapter name per row")
    if model.training:  # gradient checkpointing runs a layer again when the names are long forgotten
        raise MixedBatchError(names, "works in inference only", "call model.eval(), or train one adapter per batch")
    layers = list(iter_sel_layers(model))
    known = {name for layer in layers for name in layer.sel_config}
    if unknown := sorted(set(names) - known - {BASE_ROWS}):
        raise MixedBatchError(
            unknown, "is not in this model", f"it has {list_names(sorted(known))}, and {BASE_ROWS} for none"
        )
    if merged := sorted({name for layer in layers for name in layer.merged_adapters}):
        raise MixedBatchError(names, f"meets the merged {list_names(merged)}", "call unmerge_adapter first")
    if holders := [module for module in model.modules() if isinstance(module, SELHolder)]:
        parameter: Any = next(layer for holder in holders for layer in holder.sel_parameters.values())
        problem = f"meets the target parameter {parameter.module_name}, which does not run row by row"
        raise MixedBatchError(names, problem, "use one batch per adapter")
    return list(names)


def _count_copies(model: nn.Module, names: list[str], inputs: Any, call: Mapping[str, Any]) -> int:
    """Return how often generate repeats each row; 1 for forward, to which the model's own settings do not apply."""
    sources: list[Mapping[str, Any]] = [call, getattr(call.get("generation_config"), "__dict__", {})]
    if isinstance(inputs, Tensor):  # of generate: forward's do not come here, or not from models that generate
        if len(inputs) != len(names):
            raise MixedBatchError(names, f"names {len(names)} rows of {len(inputs)}", "give one name per row")
        sources.append(getattr(getattr(model, "generation_config", None), "__dict__", {}))
    counts = [[source.get(key) for source in sources] for key in ("num_beams", "num_return_sequences")]
    return max(next((value for value in values if value is not None), 1) for values in counts)


def _add_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, names: list[str], copies: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # An encoder sees each row once, the decoder after it sees the repeated ones.
    repeated = bool(args) and len(args[0]) == copies * len(names)
    if isinstance(module, AuxiliaryTrainingWrapper):  # PEFT fails on an adapter that it has not
        names = [name if name in module._adapters else BASE_ROWS for name in names]
    return args, {**kwargs, "adapter_names": [n for n in names for _ in range(copies)] if repeated else names}
