"""Weights that DeepSpeed ZeRO-3 has split among processes: empty in each of them but while they are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is one that ZeRO-3 splits among processes, gathered at the moment or not."""
    return hasattr(tensor, "ds_id")


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is split among processes and not gathered, so that it has no values here."""
    status: Any = getattr(tensor, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that a tensor has, or if it is split, has while it is gathered."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


@contextmanager
def gathered(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gather split tensors for the length of a block, which may read them; others are left alone.

    All processes have to enter it together.

    Args:
        tensors: Parameters, split or not.
    """
    away = [tensor for tensor in tensors if is_away(tensor)]
    if not away:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(away):
        yield


def split_like(models: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> None:
    """Split parameters as others are, with the values that they have in the first process.

    Args:
        models: Parameters; if none of them is split, nothing happens.
        parameters: Parameters to split; those that are split already stay as they are.
    """
    model: Any = next(filter(is_split, models), None)
    if model is not None:
        model.convert_to_zero_parameters(param_list=list(parameters))


def copy_frozen(model: nn.Module, part: str) -> dict[str, Tensor]:
    """Copy the frozen split parameters with a text in their names: Trainer leaves these out of what it gathers.

    All processes have to call it together.

    Args:
        model: The model.
        part: The text.

    Returns:
        Copies in CPU memory, by name.
    """
    copies = {}
    for name, parameter in model.named_parameters():
        if part in name and is_split(parameter) and not parameter.requires_grad:
            with gathered([parameter]):
                copies[name] = parameter.detach().to("cpu", copy=True)
    return copies
