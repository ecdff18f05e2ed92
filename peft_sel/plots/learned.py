"""What an adapter has made of the transform, by module role, from its files alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from peft_sel.checkpoint.adapter import Adapter
from peft_sel.config import SELConfig
from peft_sel.errors import CheckpointError, PlotError
from peft_sel.logs import name_role
from peft_sel.numerics import effective_weight, init_parts, mean_value, start_value
from peft_sel.plots.figures import line_look, mark_level, new_figure, sort_roles, styled
from peft_sel.plots.transform import MAX_EXPONENT, both_halves
from peft_sel.structured import transform_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4


@styled
def plot_learned_transform(adapter_dir: str | Path) -> Figure:
    """Draw what an adapter has made of the transform for each module role (after the paper's Fig. 8).

    A panel for each role has the learned map over its start, the median over the layers and their quartiles. Each layer
    (of a stack, each expert) enters with the mean of each of its scales; raw weights are in units of 1 / beta, which
    differs from tensor to tensor. Residuals are not in it.

    Args:
        adapter_dir: Folder of the adapter.

    Returns:
        The figure.

    Raises:
        CheckpointError: If the folder or a file cannot be used, or holds no SEL adapter.
        PlotError: If a scale is NaN or infinite.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_learned_transform("runs/demo/adapter")  # doctest: +SKIP
    """
    by_role: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    with Adapter(adapter_dir) as adapter:
        for module in adapter.modules:
            by_role.setdefault(name_role(module), []).extend(read_maps(adapter, module))
    exponents = both_halves(MAX_EXPONENT).numpy()
    roles = sort_roles(by_role)
    columns = min(COLUMNS, len(roles))
    rows = math.ceil(len(roles) / columns)
    figure = new_figure(2.3 * columns + 0.4, 2.35 * rows + 0.2)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    panels = grid[: len(roles)]
    for index, (role, axes) in enumerate(zip(roles, panels, strict=True)):
        with np.errstate(invalid="ignore"):  # both are 0 at 0
            change = np.array([after / start for start, after in by_role[role]])
        _draw_change(axes, exponents, change, index)
        axes.set_title(f"{role}, {len(change)} weights")
        axes.set_xlabel(r"Raw weight $\beta w$")
        if index % columns == 0:
            axes.set_ylabel("Effective weight,\nlearned / start")
    _share_limits(panels)
    for axes in grid[len(roles) :]:
        axes.remove()
    return figure


def _draw_change(axes: Axes, exponents: np.ndarray, change: np.ndarray, index: int) -> None:
    """Draw median and quartiles of what a role's map has become of its start."""
    low, middle, high = np.quantile(change, [0.25, 0.5, 0.75], axis=0)
    look = line_look(index)
    axes.fill_between(exponents, low, high, color=look["color"], alpha=0.25, linewidth=0)
    axes.plot(exponents, middle, **look)
    mark_level(axes, 1.0)
    axes.ticklabel_format(axis="y", useOffset=False)


def _share_limits(panels: list[Axes]) -> None:
    """Give all panels one vertical range, with room around a map that has not moved."""
    low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(min(low, 0.995), max(high, 1.005))


def read_maps(adapter: Adapter, module: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Compute the map of a module at its start and as learned, one pair for each expert of a stack.

    Args:
        adapter: The adapter.
        module: A key of its modules.

    Yields:
        beta * w_eff for beta * w from -3 to 3, NaN between -0 and 0.

    Raises:
        CheckpointError: If its tensors are incomplete or do not fit one another.
        PlotError: If a scale is NaN or infinite.
    """
    adapter.check_beta(module)
    config, keys = adapter.find_config(module), adapter.modules[module]
    shape = adapter.reader.entries[keys["beta"]].shape
    scales = config.scale_configs()
    for expert in range(shape[0]) if shape else (None,):
        beta, start, learned = adapter.reader.read(keys["beta"], expert), {}, {}
        for name, scale in scales.items():
            try:
                names = init_parts(scale.pattern, 1.0, (1, 1), rank=scale.rank, device="meta")
                parts = {part: adapter.reader.read(keys[f"{name}.{part}"], expert) for part in names}
                learned[name] = mean_value(scale.pattern, transform_parts(scale, parts, beta))
            except (LookupError, RuntimeError) as error:
                problem = f"the tensors of {name} of {module} are incomplete or inconsistent ({error})"
                raise CheckpointError(adapter.folder, problem, "save the adapter again") from error
            if not math.isfinite(learned[name]):
                raise PlotError(adapter.folder, f"{name} of {module} is NaN or infinite", "go back to an earlier one")
            start[name] = start_value(name, float(beta), config.family) if scale.init is None else scale.init
        yield _compute_map(config, float(beta), start), _compute_map(config, float(beta), learned)


def _compute_map(config: SELConfig, beta: float, scales: dict[str, float]) -> np.ndarray:
    """Return beta * w_eff of both_halves(MAX_EXPONENT) / beta."""
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in scales.items()}
    weight = effective_weight(
        both_halves(MAX_EXPONENT) / beta,
        **values,
        beta=beta,
        mode=config.mode,
        family=config.family,
        normalize_by_inner_mult=config.normalize_by_inner_mult,
    )
    result: np.ndarray = (beta * weight).numpy()
    return result
