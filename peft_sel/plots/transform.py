"""The transform at its start, as curves: the map and its slope, and what the linear path contributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peft_sel.errors import PlotError
from peft_sel.numerics import MODES, check_beta, effective_weight, effective_weight_gradients, start_value
from peft_sel.plots.figures import DASHES, PALETTE, REFERENCE, line_look, new_figure, styled
from peft_sel.plots.runs import HELD_OUT, Curve, draw_losses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 201  # of each half of a curve
MAX_EXPONENT = 3.0  # beta * |w| up to which curves go: exp(3) = 20
MAX_DRAWN = 1e100
NEAR_EXPONENT = 1.5  # where modes still differ visibly


def half_line(limit: float) -> Tensor:
    """Return raw weights from 0 to a limit."""
    return torch.linspace(0, limit, POINTS, dtype=torch.float64)


def both_halves(limit: float) -> Tensor:
    """Return raw weights from -limit to -0, NaN, which parts a line, and those from 0 to limit."""
    half = half_line(limit)
    return torch.cat([-half.flip(0), torch.tensor([float("nan")], dtype=torch.float64), half])


def _start_scales(beta: float, offset: float) -> list[Tensor]:
    """Return e_w, l_w and m as training starts, and an offset."""
    values = [start_value(name, beta, "symexp") for name in ("exp_scale", "linear_scale", "inner_multiplier")]
    return [torch.tensor(value, dtype=torch.float64) for value in (*values, offset)]


@styled
def plot_transform(
    modes: Sequence[str] = MODES, betas: Sequence[float] = (7.5,), offsets: Sequence[float] = (0.0,)
) -> Figure:
    """Draw the map from raw to effective weights (Eq. 3-7) and its slope, as training starts (the paper's Fig. 2, 3).

    One line for each combination; with several beta or offsets, colours tell these apart and dashes the modes. Lines
    are parted at 0, where the slope of mismatch jumps. Dotted: an ordinary weight.

    Args:
        modes: Names of modes.
        betas: Curvatures, positive; raw weights go up to 1.5 over the largest.
        offsets: Values of n.

    Returns:
        The figure.

    Raises:
        ConfigError: If a mode is unknown or a curvature not positive.
        PlotError: If one of the three is empty, or a line would leave the range of numbers.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_transform(["mismatch"], betas=[7.5, 13.5, 19.1])  # doctest: +SKIP
    """
    for name, values in (("modes", modes), ("betas", betas), ("offsets", offsets)):
        if not values:
            raise PlotError(name, "there is none", "give at least one")
    for beta in betas:
        check_beta(beta)
    raw = both_halves(NEAR_EXPONENT / max(betas))
    figure = new_figure(7.6, 3.6)
    maps, slopes = figure.subplots(1, 2)
    shapes = list(product(betas, offsets))
    for (shape_index, (beta, offset)), (mode_index, mode) in product(enumerate(shapes), enumerate(modes)):
        scales = _start_scales(beta, offset)
        effective = effective_weight(raw, *scales, beta=beta, mode=mode)
        ones = torch.ones_like(raw)
        slope = effective_weight_gradients(ones, raw, *scales, beta=beta, mode=mode, names=["raw"])["raw"]
        for drawn in (raw, effective, slope):
            _check_drawable(f"beta={beta:g}, offset={offset:g}", drawn)
        look = line_look(mode_index)
        if len(shapes) > 1:
            color, dashes = PALETTE[shape_index % len(PALETTE)], DASHES[mode_index % len(DASHES)]
            look = line_look(shape_index) if len(modes) == 1 else {"color": color, "linestyle": dashes}
        maps.plot(raw, effective, label=_name_line(mode, beta, offset, modes, betas, offsets), **look)
        slopes.plot(raw, slope, **look)
    limit = float(raw[-1])
    plain = {"color": REFERENCE, "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 1.5}
    maps.plot([-limit, limit], [-limit, limit], label="ordinary weight", **plain)
    slopes.plot([-limit, limit], [1, 1], **plain)
    for axes, label in ((maps, "Effective weight $w_{eff}$"), (slopes, r"Slope $\mathrm{d}w_{eff}/\mathrm{d}w$")):
        axes.set_xlabel("Raw weight $w$")
        axes.set_ylabel(label)
    fixed = [f"mode {modes[0]}"] * (len(modes) == 1) + [rf"$\beta$ = {betas[0]:g}"] * (len(betas) == 1)
    fixed += [f"$n$ = {offsets[0]:g}"] * (len(offsets) == 1)
    figure.legend(loc="outside right upper", title=", ".join(fixed) or None, alignment="left")
    return figure


def _check_drawable(name: str, values: Tensor) -> None:
    """Raise unless matplotlib can draw the values of a line, NaN at its gap aside."""
    largest = float(values[values != 0].abs().nan_to_num(0.0, posinf=math.inf).max())
    if values.isnan().sum() > 1 or not 1 / MAX_DRAWN < largest < MAX_DRAWN:
        raise PlotError(name, "has a line that no figure can hold", "choose values nearer to a training's")


def _name_line(
    mode: str, beta: float, offset: float, modes: Sequence[str], betas: Sequence[float], offsets: Sequence[float]
) -> str:
    """Return what tells a line from the others."""
    parts = [mode] * (len(modes) > 1) + [rf"$\beta$ = {beta:g}"] * (len(betas) > 1)
    return ", ".join(parts + [f"$n$ = {offset:g}"] * (len(offsets) > 1)) or "SEL"


@styled
def plot_linear_path(
    betas: Sequence[float] = (7.5, 13.5, 19.1),
    curves: Mapping[str, Curve] | None = None,
    baseline: str | None = None,
    key: str = HELD_OUT,
) -> Figure:
    """Draw the share of the linear path, L / (E + L), in effective weights, and what runs without it lose (Fig. 5).

    Args:
        betas: Curvatures, positive, with the scales as training starts; 7.5, 13.5 and 19.1 are those of widths 1024,
            2048 and 3072. Raw weights go up to 3 over the smallest.
        curves: Loss curves of the arms of an ablation for a second panel, as for plot_loss_curves; None for none.
        baseline: The arm that the others are compared with.
        key: What the losses are, as for plot_loss_curves.

    Returns:
        The figure.

    Raises:
        ConfigError: If a curvature is not positive.
        PlotError: If there is no curvature, or none that can be drawn, or as for plot_loss_curves.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_linear_path([7.5, 15.0])  # doctest: +SKIP
    """
    if not betas:
        raise PlotError("betas", "there is none", "give at least one")
    for beta in betas:
        check_beta(beta)
    raw = half_line(MAX_EXPONENT / min(betas))[1:]
    has_losses = bool(curves) or baseline is not None
    figure = new_figure(8.8, 4.4) if has_losses else new_figure(4.4, 3.6)
    panels = figure.subplots(1, 1 + has_losses, squeeze=False)[0]
    for index, beta in enumerate(betas):
        scales = _start_scales(beta, 0.0)
        whole = effective_weight(raw, *scales, beta=beta, mode="congruent")
        share = 100 * scales[1] * raw / whole  # 0 where the exponential path overflows
        _check_drawable(f"beta={beta:g}", raw)
        panels[0].plot(raw, share, label=rf"$\beta$ = {beta:g}", **line_look(index))
    panels[0].set_xlabel("Size of the raw weight |$w$|")
    panels[0].set_ylabel("Linear path's share of the weight (%)")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    panels[0].legend(loc="upper right")
    if has_losses:
        draw_losses(panels[1], curves or {}, baseline, key, columns=1)
    return figure
