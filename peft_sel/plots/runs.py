"""Curves of training runs: what is in their logs, losses with steps to baseline, and the paths of the scales."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from peft_sel.errors import PlotError, SELError, list_names
from peft_sel.logs import START, USUAL_STARTS
from peft_sel.numerics import SCALE_NAMES
from peft_sel.plots.figures import (
    REFERENCE,
    label_steps,
    line_look,
    list_roles,
    mark_level,
    new_figure,
    sort_roles,
    styled,
)
from peft_sel.untrusted import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]
STATE_FILE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
TRAINING, HELD_OUT = "loss", "eval_loss"  # what Trainer logs
LABELS = {TRAINING: "Training loss (nats per token)", HELD_OUT: "Held-out loss (nats per token)"}
DIGITS = 3  # of losses in a legend
SCALE_PREFIX = "sel/scale/"
SCALE_TITLES = {
    "exp_scale": "Exponential scale $e_w$",
    "linear_scale": "Linear scale $l_w$",
    "inner_multiplier": "Inner multiplier $m$",
    "offset": "Offset $n$",
    "shift": "Shift $s$",
}


def read_logs(path: str | Path) -> list[dict[str, Any]]:
    """Read the logs of a run from the states that Trainer saves, of which the one with the most steps counts.

    Args:
        path: A trainer_state.json; a folder that holds one, such as a checkpoint; or the output folder of a run: its
            own state, from `peft-sel train` or trainer.save_state(), or that of its last checkpoint, whichever has
            more steps. A state in it that is cut off or otherwise unreadable gives way to the next one.

    Returns:
        Its log_history.

    Raises:
        PlotError: If there is none.
        CheckpointError: If no file is readable JSON.
    """
    path = Path(path)
    files = _list_states(path) if path.is_dir() else [path]
    states: list[dict[str, Any]] = []
    failures: list[SELError] = []
    for file in filter(Path.is_file, files):
        try:
            states.append(_read_state(file))
        except SELError as error:
            failures.append(error)
        if states and file.parent != path:
            break  # the other checkpoints are older
    if not states and failures:
        raise failures[0]
    if not states:
        problem = f"holds no {STATE_FILE}, nor a checkpoint with one" if path.is_dir() else "there is no such file"
        way_out = "name the output folder of peft-sel train, of a Trainer that saved checkpoints, or call save_state()"
        raise PlotError(path, problem, way_out)
    history: list[dict[str, Any]] = max(states, key=_count_steps)["log_history"]
    return history


def _list_states(folder: Path) -> list[Path]:
    """Return where states may be: in a folder itself, then in its checkpoints, the last one first."""
    found = (CHECKPOINT.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    numbers = sorted((int(match[1]) for match in found if match), reverse=True)
    return [folder / STATE_FILE, *(folder / f"checkpoint-{number}" / STATE_FILE for number in numbers)]


def _read_state(file: Path) -> dict[str, Any]:
    state = read_json(file)
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise PlotError(file, "has no log_history", "name the state that a Trainer saved")
    return state


def _count_steps(state: Mapping[str, Any]) -> int:
    steps = state.get("global_step")
    return steps if isinstance(steps, int) else 0


def collect_curve(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return (step, value) of a key in a log_history."""
    return [
        (entry["step"], float(entry[key]))
        for entry in history
        if isinstance(entry.get("step"), int) and isinstance(entry.get(key), int | float)
    ]


def find_loss_key(paths: Sequence[str | Path]) -> str:
    """Return which loss all runs have a curve of: "eval_loss" on held-out text, else "loss" in training.

    Args:
        paths: As for read_logs.

    Returns:
        The key; "eval_loss" needs two evaluations in each run.

    Raises:
        PlotError: If a run has no logs.
        CheckpointError: If a file is not readable JSON.
    """
    return HELD_OUT if all(len(collect_curve(read_logs(path), HELD_OUT)) > 1 for path in paths) else TRAINING


def read_losses(paths: Sequence[str | Path], key: str = HELD_OUT) -> dict[str, list[tuple[int, float]]]:
    """Read the loss curves of runs.

    Args:
        paths: As for read_logs.
        key: What is logged: "eval_loss" on held-out text, "loss" in training; find_loss_key says which all have.

    Returns:
        Curves by path.

    Raises:
        PlotError: If a run has no logs, or not this key in them.
        CheckpointError: If a file is not readable JSON.
    """
    curves = {}
    for path in paths:
        if str(path) in curves:
            raise PlotError(path, "is named twice", "name each run once")
        history = read_logs(path)
        curves[str(path)] = collect_curve(history, key)
        if not curves[str(path)]:
            losses = {name for entry in history for name in entry if name.endswith("loss")}
            raise PlotError(path, f"has no {key} in its logs", f"choose one of: {list_names(sorted(losses)) or 'none'}")
    return curves


def find_reaching_step(curve: Curve, loss: float) -> float | None:
    """Return the step at which a curve first reaches a loss.

    Args:
        curve: (step, loss) in the order of the steps; points that are not finite are left out.
        loss: The loss.

    Returns:
        The step, on the straight line between two points; None if it never does.
    """
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    if points and points[0][1] <= loss:
        return float(points[0][0])
    for (step, value), (next_step, next_value) in pairwise(points):
        if value > loss >= next_value:
            return step + (value - loss) / (value - next_value) * (next_step - step)
    return None


def find_lasting_step(curve: Curve, loss: float) -> float | None:
    """Return the step from which on a curve stays at or below a loss.

    A lucky dip of a noisy curve does not count, as it does for find_reaching_step.

    Args:
        curve: (step, loss) in the order of the steps; a loss that is not finite is above every other.
        loss: The loss.

    Returns:
        The step, on the straight line between two points; None if the curve does not end at or below the loss.
    """
    below = list(takewhile(lambda point: point[1] <= loss, reversed(curve)))
    if not below:
        return None
    step, value = below[-1]
    if len(below) == len(curve):
        return float(step)
    last, above = curve[-len(below) - 1]
    return last + (above - loss) / (above - value) * (step - last) if math.isfinite(above) else float(step)


@styled
def plot_loss_curves(curves: Mapping[str, Curve], baseline: str | None = None, key: str = HELD_OUT) -> Figure:
    """Draw loss curves, and mark where each has reached the final loss of a baseline (the paper's Fig. 4).

    The legend holds the figures: each arm's final loss, the step from which on its curve stays at or below the
    baseline's final loss (see find_lasting_step), and how many times fewer steps that is than the baseline itself takes
    to the same loss, by the same rule. Losses count as they are printed, to three digits. Only curves on held-out text
    are compared so: losses of single training batches are so noisy that the lowest of many says little.

    The axis of the losses ends at the largest after a quarter of the steps, so that the fall at the start does not
    press the rest together; a line in the panel says so where anything is cut off.

    Args:
        curves: By name of the arm, (step, loss in nats per token) in the order of the steps.
        baseline: The arm to compare with; None for curves alone.
        key: What the losses are: "eval_loss" or another "eval_..._loss" is on held-out text, "loss" in training.

    Returns:
        The figure.

    Raises:
        PlotError: If there is no curve, one has no finite loss, or the baseline is not among them or diverged.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_loss_curves({"AdamW": [(0, 4.0), (80, 2.7)], "SEL": [(0, 4.0), (80, 2.6)]}, "AdamW")  # doctest: +SKIP
    """
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    draw_losses(axes, curves, baseline, key, columns=1 + (len(curves) > 5))
    return figure


def draw_losses(axes: Axes, curves: Mapping[str, Curve], baseline: str | None, key: str, columns: int) -> None:
    """Draw what plot_loss_curves shows into a panel, its legend above it.

    Args:
        axes: The panel.
        curves: As for plot_loss_curves.
        baseline: As for plot_loss_curves.
        key: As for plot_loss_curves.
        columns: Of the legend.

    Raises:
        PlotError: As for plot_loss_curves.
    """
    _check_curves(curves, baseline)
    is_held_out = key.startswith("eval_") and key.endswith("loss")
    level = None if baseline is None or not is_held_out else curves[baseline][-1][1]
    target = None if level is None else round(level, DIGITS) + 0.5 * 10.0**-DIGITS  # what is printed alike is reached
    own = None if target is None else find_lasting_step(curves[baseline or ""], target)
    others = [name for name in curves if name != baseline]
    for name, curve in curves.items():
        steps, losses = zip(*curve, strict=True)
        look = {"color": "#000000", "linestyle": "-"} if name == baseline else line_look(others.index(name) % 6)
        label = f"{name}: {losses[-1]:.{DIGITS}f}" if math.isfinite(losses[-1]) else f"{name}: diverged"
        if level is not None and target is not None and name != baseline:
            reached = find_lasting_step(curve, target)
            label += "; not reached" if reached is None else f"; step {reached:.0f}"
            if reached and own:
                label += f" ({own / reached:.2f}x)"
            if reached is not None:
                axes.plot([reached], [level], marker="o", markersize=5, color=look["color"], zorder=3)
        look["marker"] = "." if len(curve) == 1 else ""
        axes.plot(steps, losses, label=label, zorder=2.5 if name == baseline else 2, **look)
    if level is not None:
        mark_level(axes, level)
    _limit_losses(axes, curves)
    label_steps(axes)
    axes.set_ylabel(LABELS.get(key, key))
    heading = "final loss"
    if level is not None:
        heading += f"; step from which on it stays at or below that of {baseline}\n(how many times fewer steps)"
    elif baseline is not None:
        heading += "; steps are compared on held-out loss only"
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), title=heading, alignment="left", ncols=columns)


def _check_curves(curves: Mapping[str, Curve], baseline: str | None) -> None:
    """Raise unless there is something to draw and to compare with."""
    if not curves:
        raise PlotError("curves", "there is none", "give at least one")
    for name, curve in curves.items():
        if not any(math.isfinite(value) for _, value in curve):
            raise PlotError(name, "its curve has no finite loss", "leave it out")
    if baseline is not None and baseline not in curves:
        problem = "is the baseline, and no curve of that name is given"
        raise PlotError(baseline, problem, f"choose one of {list_names(curves)}")
    if baseline is not None and not math.isfinite(curves[baseline][-1][1]):
        raise PlotError(baseline, "is the baseline, and diverged", "compare with another")


def _limit_losses(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """End the axis at the largest loss after a quarter of the steps; arms that end above their start do not count.

    A line says how far up anything goes that is cut off.
    """
    finite = [[(step, value) for step, value in curve if math.isfinite(value)] for curve in curves.values()]
    steps = [step for curve in finite for step, _ in curve]
    whole = [
        points
        for curve, points in zip(curves.values(), finite, strict=True)
        if math.isfinite(curve[-1][1]) and curve[-1][1] <= points[0][1]
    ]
    start = min(steps) + (max(steps) - min(steps)) / 4
    late = [value for curve in whole or finite for step, value in curve if step >= start]
    late += [float(np.interp(start, *np.array(curve).T)) for curve in whole or finite if curve]
    low, high = min(value for curve in whole or finite for _, value in curve), max(late)
    margin = 0.04 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)
    highest = max(value for curve in finite for _, value in curve)
    if highest > high + margin:
        note = f"cut off above: up to {highest:.3g}"
        axes.annotate(
            note,
            (1, 1),
            (-2, -2),
            xycoords="axes fraction",
            textcoords="offset points",
            color=REFERENCE,
            fontsize=8,
            ha="right",
            va="top",
        )


@styled
def plot_scale_trajectories(logs: Sequence[Mapping[str, Any]] | Mapping[str, Curve]) -> Figure:
    """Draw how the scales moved in a run, one panel for each scale and one line for each module role (Fig. 6).

    Args:
        logs: trainer.state.log_history of a run of SELTrainer or with SELCallback, what read_logs returns; or curves
            by "<scale>/<role>", as collect_scale_means names them, with or without "sel/scale/" before, and its
            "<scale>/start" where that is there.

    Returns:
        The figure. Values are means over the weights of a role, relative to their start, or the means themselves where
        they start at 0.

    Raises:
        PlotError: If there is no scale in the logs.
        MissingPackageError: If matplotlib is not installed.

    Example:
        >>> plot_scale_trajectories(trainer.state.log_history)  # doctest: +SKIP
    """
    if not isinstance(logs, Mapping):
        keys = dict.fromkeys(key for entry in logs for key in entry if key.startswith(SCALE_PREFIX))
        logs = {key: collect_curve(logs, key) for key in keys}
    panels: dict[str, dict[str, Curve]] = {name: {} for name in SCALE_NAMES}
    starts = dict(USUAL_STARTS)
    for key, curve in logs.items():
        scale, _, role = key.removeprefix(SCALE_PREFIX).partition("/")
        if scale not in panels or not role or not curve:
            raise PlotError(key, "is no curve of a scale", f"name it <scale>/<role>, scale one of {', '.join(panels)}")
        if role == START:
            starts[scale] = curve[-1][1]
        else:
            panels[scale][role] = curve
    panels = {name: lines for name, lines in panels.items() if lines}
    if not panels:
        raise PlotError("the logs", "hold no sel/scale/...", "train with SELTrainer, or with SELCallback in callbacks")
    roles = sort_roles(role for lines in panels.values() for role in lines)
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(2.7 * columns + 1.2, 2.5 * rows + 0.2)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, (scale, lines) in zip(grid.flat, panels.items(), strict=False):
        _draw_trajectories(axes, lines, roles, 1.0 if starts[scale] else 0.0)
        axes.set_title(SCALE_TITLES[scale])
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for column in range(columns):  # the lowest panel of each
        lowest = grid[rows - 1 if (rows - 1) * columns + column < len(panels) else rows - 2][column]
        label_steps(lowest)
        lowest.tick_params(labelbottom=True)
    list_roles(figure, roles)
    return figure


def _draw_trajectories(axes: Axes, lines: Mapping[str, Curve], roles: Sequence[str], reference: float) -> None:
    """Draw one scale's panel: 1 as reference for means relative to their start, 0 for those that start there."""
    values = [reference]
    for role, curve in lines.items():
        steps, means = zip(*curve, strict=True)
        axes.plot(steps, means, label=role, **line_look(roles.index(role)))
        values += [mean for mean in means if math.isfinite(mean)]
    mark_level(axes, reference)
    margin = max(0.05 * (max(values) - min(values)), 0.002)  # room around a scale that stands still
    axes.set_ylim(min(values) - margin, max(values) + margin)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_ylabel("Mean / start" if reference else "Mean")
