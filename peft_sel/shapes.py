"""Which matrix a weight is, and the shapes of what an adapter holds for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from peft_sel.config import SELConfig
from peft_sel.errors import ConfigError
from peft_sel.numerics import SCALE_NAMES, init_parts

VECTOR_PATTERNS = {"column": "global", "row_col_mult": "global", "row_col_add": "row", "lora": "row"}
MIN_RANK_LIMIT = 1024  # ranks up to here are allowed whatever the size of the weight


def vector_config(config: SELConfig) -> SELConfig:
    """Return the configuration of a bias beside a weight that has config: a matrix of one column, without a residual.

    Args:
        config: The adapter's configuration.

    Returns:
        A copy whose scales are global or row: on one column, a sum of rows and columns is no more than a row.
    """
    scales: dict[str, Any] = {}
    for name in SCALE_NAMES:
        scale = getattr(config, name)
        pattern = None if scale is None else VECTOR_PATTERNS.get(scale.pattern, scale.pattern)
        scales[name] = None if scale is None else dataclasses.replace(scale, pattern=pattern)
    return dataclasses.replace(config, r=0, base_weight="keep", **scales)


def to_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """View a weight as a (d_out, d_in) matrix, whose rows and columns the scales and the residual have.

    Args:
        weight: Weight in its module's layout: (d_out, d_in) of Linear and Embedding (whose rows are the vocabulary),
            (d_out, d_in / groups, *kernel) of convolutions, (d_in, d_out) of transformers' Conv1D, (d_out,) of a bias.
        transposed: Whether the layout is (d_in, d_out).

    Returns:
        A view; from_matrix undoes it.
    """
    if weight.dim() == 1:
        return weight[:, None]
    return weight.T if transposed else weight.flatten(1)


def matrix_shape(config: SELConfig, name: str, shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
    """Return (d_out, d_in) of a weight, after checking that no rank makes an adapter much larger than the weight.

    Args:
        config: The adapter's configuration, which may come from a file.
        name: How errors call the weight.
        shape: Its shape in its module's layout.
        transposed: Whether that is (d_in, d_out).

    Returns:
        Rows and columns.

    Raises:
        ConfigError: If a rank is above the smaller of the two (and MIN_RANK_LIMIT), where it adds nothing.
    """
    rows, columns = to_matrix(torch.empty(shape, device="meta"), transposed).shape
    limit = max(MIN_RANK_LIMIT, min(rows, columns))
    ranks = {
        f"{scale}.rank": chosen.rank for scale, chosen in config.scale_configs().items() if chosen.pattern == "lora"
    }
    for field, rank in {"r": config.r, **ranks}.items():
        if rank > limit:
            raise ConfigError(field, rank, f"{name} is {rows} x {columns}, where a rank above {limit} adds nothing")
    return rows, columns


def from_matrix(matrix: Tensor, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """View a (d_out, d_in) matrix as a weight of a given shape: the inverse of to_matrix."""
    if transposed:
        return matrix.T
    return matrix if len(shape) == 2 else matrix.reshape(shape)  # a sparse gradient cannot pass a reshape


def expected_shapes(
    config: SELConfig, shape: tuple[int, ...], transposed: bool = False, stacked: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a saved adapter holds for a target weight, by its name after the prefix.

    Args:
        config: The adapter's configuration.
        shape: Shape of the weight in its module's layout.
        transposed: Whether that is (d_in, d_out).
        stacked: Whether it is a stack of experts along its first dimension.

    Returns:
        Shapes by name.

    Raises:
        ConfigError: If a rank is far above what the weight can use.
    """
    if stacked:
        flags = {"transposed": ()} if transposed else {}
        members = expected_shapes(config, shape[1:], transposed)
        return {name: (shape[0], *member) for name, member in members.items()} | flags
    config = vector_config(config) if len(shape) == 1 else config
    shapes: dict[str, tuple[int, ...]] = {"beta": ()}
    if config.train_raw:
        shapes["raw"] = shape
    if transposed:
        shapes["transposed"] = ()
    rows, columns = matrix_shape(config, "a weight", shape, transposed)
    for scale, scale_config in config.scale_configs().items():
        parts = init_parts(scale_config.pattern, 1.0, (rows, columns), rank=scale_config.rank, device="meta")
        shapes.update({f"{scale}.{part}": tuple(tensor.shape) for part, tensor in parts.items()})
    if config.r > 0:
        shapes["residual_a"], shapes["residual_b"] = (config.r, columns), (rows, config.r)
    return shapes
