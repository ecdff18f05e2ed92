"""Distributions of raw and effective weights, before and after a training, in one pass over tensors or files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from peft_sel.checkpoint.adapter import Adapter
from peft_sel.checkpoint.plan import Plan
from peft_sel.checkpoint.shards import CheckpointReader, TensorEntry
from peft_sel.config import SELConfig
from peft_sel.conversion import FLOAT_DTYPES, invert_at_start, matches_end, resolve_beta
from peft_sel.errors import PlotError, list_names
from peft_sel.plots.figures import REFERENCE, line_look, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INNER_BINS = 20  # on either side of 0, up to the threshold: many more, and bfloat16's few values look like a comb
OUTER_BINS = 40  # from there to the largest weight
CELL_BITS = 20  # of float32, rounded: sign, exponent and 11 bits of the fraction; every bfloat16 has a cell of its own
BLOCK = 1 << 22
EFFECTIVE = "Effective weight $w_{eff}$"
QUANTILES = {0.999: ("^", "▲"), 0.9999: ("s", "■")}
BASE, BEFORE, AFTER = "base", "before", "after"
MOST_BOUNDS = 3  # of matrices of different shapes, in the legend one by one


class Distribution:
    """Counts of weights by value, to which tensors are added one by one; 8 MiB, however many there are.

    Values are rounded to 12 significant bits, which bfloat16 weights pass unchanged.

    Attributes:
        count: Number of weights.
        xavier_bounds: Distinct bounds of Xavier's uniform draw, sqrt(6 / (d_in + d_out)), of the matrices among them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.xavier_bounds: set[float] = set()
        self._cells = torch.zeros(1 << CELL_BITS, dtype=torch.int64)
        self._sum = self._sum_of_squares = 0.0

    @torch.no_grad()
    def add(self, tensor: Tensor, name: str = "tensor") -> None:
        """Count the values of a tensor.

        Args:
            tensor: Weights, any float dtype and shape.
            name: How errors call it.

        Raises:
            PlotError: If it holds NaN or infinity, or is no tensor of floating-point numbers.
        """
        if tensor.dtype not in FLOAT_DTYPES:
            raise PlotError(name, f"is {tensor.dtype}", "draw floating-point weights")
        drop = 32 - CELL_BITS
        for block in tensor.detach().reshape(-1).split(BLOCK):
            values = block.cpu().float()
            if not bool(torch.isfinite(values).all()):
                raise PlotError(name, "holds NaN or infinite values", "leave it out, or repair it")
            bits = values.view(torch.int32).long() + (1 << (drop - 1)) & 0xFFFFFFFF
            self._cells += torch.bincount(bits >> drop, minlength=1 << CELL_BITS)
            self._sum += float(values.double().sum())
            self._sum_of_squares += float(values.double().square().sum())
        self.count += tensor.numel()
        if tensor.dim() == 2 and tensor.numel():
            self.xavier_bounds.add((6 / sum(tensor.shape)) ** 0.5)

    @property
    def std(self) -> float:
        """Standard deviation."""
        mean = self._sum / self.count
        return float(max(self._sum_of_squares / self.count - mean * mean, 0.0) ** 0.5)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct values, and how many weights have each."""
        occupied = self._cells.nonzero().squeeze(1)
        bits = occupied << (32 - CELL_BITS)
        signed = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32)
        return signed.view(torch.float32).double().numpy(), self._cells[occupied].numpy()

    def quantile(self, share: float) -> float:
        """Return the smallest size |w| that at least a share of the weights do not exceed; of 1 the largest."""
        values, counts = self.values()
        order = np.argsort(np.abs(values), kind="stable")
        reached = np.cumsum(counts[order]) >= share * self.count
        return float(np.abs(values)[order][np.argmax(reached)])

    @property
    def extreme(self) -> float:
        """The weight farthest from 0, the positive one of two."""
        values, _ = self.values()
        return float(max(values, key=lambda value: (abs(value), value)))

    def histogram(self, edges: np.ndarray) -> np.ndarray:
        """Return the density of the weights between edges."""
        values, counts = self.values()
        found, _ = np.histogram(values, edges, weights=counts)
        return found / (self.count * np.diff(edges))


Weights = Tensor | Distribution | Mapping[str, Tensor | Distribution]


@styled
def plot_weight_distribution(weights: Weights, raw: Weights | None = None) -> Figure:
    """Draw distributions of weights, the density on a logarithmic axis (the paper's Fig. 1, 7).

    Marks, of effective weights, the bound of Xavier's uniform draw, which a fresh matrix does not exceed (of more than
    three shapes the smallest and the largest), and the sizes that 99.9 % and 99.99 % of the weights do not, on each
    side of 0 that has weights of this size; the legend has these numbers, and the weight farthest from 0. The axis of
    the weights is linear up to that bound (up to the standard deviation where there is no matrix), and logarithmic
    beyond, on either side of 0.

    Args:
        weights: Effective weights: one tensor, or several by label.
        raw: Raw weights for a second panel, labels as in weights; None for none.

    Returns:
        The figure.

    Raises:
        PlotError: If there is no weight, or one is NaN or infinite.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_weight_distribution({"before": old_weight, "after": new_weight})  # doctest: +SKIP
        >>> plot_weight_distribution(*read_weight_distributions("base", "adapter", tensor="q_proj"))  # doctest: +SKIP
    """
    panels = {EFFECTIVE: _distribute(weights)}
    if raw is not None:
        panels["Raw weight $w$"] = _distribute(raw)
    labels = list(dict.fromkeys(label for members in panels.values() for label in members))
    figure = new_figure(4.6 * len(panels), 4.2)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)[0]
    every = [member for members in panels.values() for member in members.values()]
    largest = max(member.quantile(1.0) for member in every)
    threshold = (
        min((bound for member in every for bound in member.xavier_bounds), default=every[0].std) or largest or 1.0
    )
    limit = largest or threshold
    edges = _make_edges(threshold, limit)
    for axes, (title, members) in zip(grid, panels.items(), strict=True):
        for label, member in members.items():
            _draw_distribution(axes, label, member, edges, labels.index(label))
        if title == EFFECTIVE:
            _mark_bounds(axes, sorted(set().union(*(member.xavier_bounds for member in members.values()))))
        axes.set_yscale("log")
        if limit > threshold:
            axes.set_xscale("symlog", linthresh=threshold)
            ticks = _choose_ticks(threshold, limit)
            axes.set_xticks(ticks, [f"{tick:g}".replace("-", "\N{MINUS SIGN}") for tick in ticks])
            axes.set_xticks([], minor=True)
        axes.set_xlabel(title)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.4)
    grid[0].set_ylabel("Density")
    low, high = grid[0].get_ylim()
    grid[0].set_ylim(min(low, high / 1000), high * 1.5)  # so that an even distribution looks even
    return figure


def _mark_bounds(axes: Axes, bounds: list[float]) -> None:
    """Mark Xavier's bounds on either side of 0."""
    text = " and ".join(f"{bound:.3g}" for bound in bounds)
    if len(bounds) > MOST_BOUNDS:
        bounds = [bounds[0], bounds[-1]]
        text = f"{bounds[0]:.3g} to {bounds[1]:.3g}"
    for index, bound in enumerate(bounds):
        for position, name in ((-bound, None), (bound, f"Xavier bound {text}" if index == 0 else None)):
            axes.axvline(position, color=REFERENCE, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1.5, label=name)


def _make_edges(threshold: float, limit: float) -> np.ndarray:
    """Return edges of bins: even up to a threshold, then even in the logarithm up to the largest weight."""
    limit *= 1 + 1e-9
    half = np.linspace(0, min(threshold, limit), INNER_BINS + 1)
    if limit > threshold:
        half = np.concatenate([half, np.geomspace(threshold, limit, OUTER_BINS + 1)[1:]])
    return np.concatenate([-half[:0:-1], half])


def _choose_ticks(threshold: float, limit: float) -> list[float]:
    """Return 0 and, on either side, the powers of ten beyond a threshold, or if these are few, 1, 2 and 5 of them."""
    decades = range(math.floor(math.log10(threshold)), math.ceil(math.log10(limit)) + 1)
    for digits in ((1,), (1, 2, 5)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [tick for tick in found if 1.2 * threshold < tick <= limit]
        if len(found) > 1:
            break
    return [*(-tick for tick in reversed(found)), 0.0, *found]


def _distribute(weights: Weights) -> dict[str, Distribution]:
    """Return distributions by label."""
    members = weights if isinstance(weights, Mapping) else {"weights": weights}
    result = {}
    for label, member in members.items():
        if isinstance(member, Tensor):
            distribution = Distribution()
            distribution.add(member, label)
        else:
            distribution = member
        if distribution.count == 0:
            raise PlotError(label, "there is no weight", "give at least one")
        result[label] = distribution
    if not result:
        raise PlotError("weights", "there is none", "give at least one tensor")
    return result


def _draw_distribution(axes: Axes, label: str, member: Distribution, edges: np.ndarray, index: int) -> None:
    """Draw one density, with marks at its tail quantiles."""
    density = member.histogram(edges)
    look = line_look(index)
    tails = []
    for share, (marker, sign) in QUANTILES.items():
        size = member.quantile(share)
        sides = np.array([-size, size])
        heights = density[np.minimum(np.searchsorted(edges, sides, "right") - 1, len(density) - 1)]
        sides, heights = sides[heights > 0], heights[heights > 0]
        axes.plot(sides, heights, marker=marker, markersize=5.5, linestyle="", color=look["color"])
        tails.append(f"{100 * share:g} % {sign} within {size:.3g}")
    name = f"{label}, farthest from 0: {member.extreme:.3g}\n{', '.join(tails)}"
    axes.stairs(density, edges, color=look["color"], linestyle=look["linestyle"], linewidth=1.3, label=name)


@torch.no_grad()
def read_weight_distributions(
    base_dir: str | Path,
    adapter_dir: str | Path | None = None,
    *,
    tensor: str,
    check_base: bool = True,
    progress: bool = True,
) -> tuple[dict[str, Distribution], dict[str, Distribution] | None]:
    """Read weights of a checkpoint before and after an adapter, and the raw weights of both, tensor by tensor.

    Nothing builds a model, and memory holds one tensor. Effective weights are those of merge_checkpoint in float32. Raw
    weights before are those that the adapter's conversion started from; without an adapter, those that a default
    conversion would start from. An adapter whose weights were drawn from scratch has no "before".

    Args:
        base_dir: Folder of the base checkpoint.
        adapter_dir: Folder of the adapter; None for the base alone.
        tensor: A tensor's name, a module's, or a regular expression for names or their ends, such as "q_proj" or
            "layers.0.mlp.*"; what matches is one distribution.
        check_base: Refuse a base that the adapter was not made from.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Effective and raw weights by "before" and "after", those of a base alone by "base"; None for raw weights that
        the files do not have.

    Raises:
        PlotError: If no tensor matches, none of those is the adapter's, or one holds NaN or infinity.
        CheckpointError: If a folder or file cannot be used, or the adapter does not fit the base.
        OtherBaseError: If the adapter was made from another base.
        SELError: If a weight cannot be inverted.
    """
    disable = None if progress else True
    with CheckpointReader(base_dir) as base:
        if adapter_dir is None:
            names = [entry.name for entry in _find_tensors(base.entries, tensor, base.folder)]
            return _read_base(base, tqdm(names, "read", unit=" tensors", disable=disable))
        with Adapter(adapter_dir) as adapter:
            plan = Plan(base, [adapter], torch.float32, check_base)
            outputs = {entry.name: entry for entry in plan.outputs()}
            found = _find_tensors(outputs, tensor, base.folder)
            changed = plan.folded.keys() | plan.members.keys() | plan.replaced.keys()
            entries = [entry for entry in found if entry.name in changed]
            if not entries:
                names = sorted(plan.folded.keys() | plan.members.keys())
                problem = f"changes none of the {len(found)} tensors that {tensor} matches"
                raise PlotError(adapter.folder, problem, f"choose among {list_names(names)}")
            return _read_both(plan, adapter, tqdm(entries, "read", unit=" tensors", disable=disable))


def _find_tensors(entries: Mapping[str, TensorEntry], pattern: str, folder: Path) -> list[TensorEntry]:
    """Return the floating-point tensors of a name, a module's name or a regular expression."""
    try:
        re.compile(pattern)
        found = [
            entry
            for name, entry in entries.items()
            if entry.dtype in FLOAT_DTYPES
            and (name == pattern or matches_end(pattern, name) or matches_end(pattern, name.removesuffix(".weight")))
        ]
    except (re.error, RecursionError, OverflowError) as error:
        raise PlotError(f"tensor={pattern}", f"is no regular expression ({error})", "write dots as \\.") from error
    if not found:
        raise PlotError(folder, f"holds no floating-point tensor that {pattern} matches", "peft-sel inspect lists them")
    return found


def _read_base(
    base: CheckpointReader, names: tqdm[str]
) -> tuple[dict[str, Distribution], dict[str, Distribution] | None]:
    """Read a base alone, and what a default conversion makes of it where all are matrices."""
    effective, raw, config = Distribution(), Distribution(), SELConfig()
    for name in names:
        weight = base.read(name)
        effective.add(weight, name)
        if weight.dim() == 2:
            beta = resolve_beta(config, name.removesuffix(".weight"), weight, None, name)
            raw.add(invert_at_start(config, beta, weight, name)[0], name)
    return {BASE: effective}, {BASE: raw} if raw.count == effective.count else None


def _read_both(
    plan: Plan, adapter: Adapter, entries: tqdm[TensorEntry]
) -> tuple[dict[str, Distribution], dict[str, Distribution] | None]:
    """Read tensors that an adapter changes, before and after."""
    effective = {BEFORE: Distribution(), AFTER: Distribution()}
    raw = {BEFORE: Distribution(), AFTER: Distribution()}
    for entry in entries:
        weight = plan.base.read(plan.untied.get(entry.name, entry.name))
        effective[BEFORE].add(weight, entry.name)
        effective[AFTER].add(plan.compute(entry), entry.name)
        for time, tensor in _read_raw(plan, adapter, entry.name, weight).items():
            raw[time].add(tensor, entry.name)
    if adapter.config.draws_targets:
        del effective[BEFORE]
    raw = {time: member for time, member in raw.items() if member.count}
    return effective, raw or None


def _read_raw(plan: Plan, adapter: Adapter, key: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the raw weights of a tensor, where it is converted; before only if the base holds what was inverted."""
    stack, expert = plan.members.get(key, (key, None))
    if stack not in plan.folded:
        return {}
    module = plan.folded[stack][0][1]
    parts = adapter.read_parts(module) if expert is None else adapter.read_expert(module, expert)
    found = {}
    if not adapter.config.draws_targets:
        beta = parts["beta"]
        found[BEFORE] = invert_at_start(adapter.find_config(module), beta if beta.dim() else float(beta), weight, key)[
            0
        ]
    if "raw" in parts and expert is None:
        found[AFTER] = parts["raw"]
    elif "raw" in parts:
        rows = plan.stacks[stack].keys[expert or 0].index(key)
        found[AFTER] = parts["raw"].split(plan.stacks[stack].rows)[rows]
    return found
