"""Figures of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peft_sel.plots import plot_loss_curves, plot_scale_trajectories, save_figure
from peft_sel.plots.figures import line_look, new_figure, styled

from .analysis import Results, Summary, read_curve
from .plan import Plan, losses_by_rate
from .trial import BINS, average_known

MOST_CURVES = 6
MOST_LOSS = 0.5  # above the best, of a figure with runs at rates far too high
MARKERS = "osD^vPX"
Runs = Mapping[str, dict[str, Any]]


def draw_plan(plan: Plan, runs: Runs, results: Results, summaries: list[Summary], folder: Path) -> dict[str, str]:
    """Draw what a plan has results for.

    Args:
        plan: The plan.
        runs: By arm, its run at the best rate with the first seed.
        results: All results.
        summaries: Of the plan's arms.
        folder: Where the files go.

    Returns:
        Caption by name of the file.
    """
    drawn: dict[str, tuple[Figure, str]] = {}
    wanted = [summary.arm for summary in summaries if summary.arm in plan.finalists] or list(runs)
    same_length = [arm for arm in wanted if runs[arm]["steps"] == plan.setting.steps][:MOST_CURVES]
    if len(same_length) > 1:
        baseline = plan.baseline if plan.baseline in same_length else None
        curves = {arm: read_curve(runs[arm]) for arm in same_length}
        drawn["curves"] = plot_loss_curves(curves, baseline=baseline), "held-out loss along the runs, first seed"
    sweeps = {arm: losses_by_rate(results, plan.name, arm, plan.seeds[0]) for arm in plan.arms}
    sweeps = {arm: losses for arm, losses in sweeps.items() if len(losses) > 2}
    if sweeps:
        drawn["rates"] = plot_rates(sweeps), "final loss by learning rate, first seed"
    if plan.setting.known is not None and sweeps:
        drawn["forgetting"] = (
            plot_forgetting(results, plan, list(sweeps)),
            "what was learned and forgotten, by rate; dashed: before",
        )
    changes = {arm: runs[arm]["change"] for arm in wanted if runs[arm]["final"] is not None}
    if len(changes) > 1:
        drawn["changes"] = plot_changes(changes), "size of the change by size of the weight, first seed"
    for arm in ("sel", "sel-small", "paper"):
        if arm in runs:
            drawn[f"scales-{arm}"] = (
                plot_scale_trajectories(read_scales(runs[arm])),
                f"scales of {arm}, relative to their start",
            )
    if any("weights" in point for run in runs.values() for point in run["curve"]):
        drawn["ones"] = plot_common_part(runs), "mean of the effective weights over their spread, along the runs"
    for name, (figure, _) in drawn.items():
        save_figure(figure, folder / f"{plan.name}-{name}.svg", overwrite=True)
    return {f"{plan.name}-{name}.svg": caption for name, (_, caption) in drawn.items()}


def read_scales(run: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the trajectories of a SEL run's scales by "<scale>/<role>"."""
    points = run["curve"]
    return {key: [(point["step"], point["scales"][key]) for point in points] for key in points[0]["scales"]}


@styled
def plot_rates(sweeps: Mapping[str, dict[float, float]]) -> Figure:
    """Draw the final loss of arms by learning rate; runs that diverged are left out."""
    figure, axes = _make_axes("learning rate", "final held-out loss, nats per token")
    for index, arm in enumerate(sweeps):
        points = sorted((rate, loss) for rate, loss in sweeps[arm].items() if math.isfinite(loss))
        axes.plot(*zip(*points, strict=True), **_look(index), label=arm)
    axes.set_xscale("log")
    _add_legend(figure, axes)
    return figure


@styled
def plot_forgetting(results: Results, plan: Plan, arms: list[str]) -> Figure:
    """Draw the final loss on the known text over that on the training text, a line through the rates of each arm."""
    figure, axes = _make_axes("final loss on held-out text of the domain", "final loss on the known text")
    seed = plan.seeds[0]
    for index, arm in enumerate(arms):
        runs = [
            r for r in results.values() if (r["plan"], r["arm"], r["seed"]) == (plan.name, arm, seed) and r["final"]
        ]
        points = [
            (run["final"]["text"], run["final"]["known"]) for run in sorted(runs, key=lambda run: float(run["rate"]))
        ]
        axes.plot(*zip(*points, strict=True), **_look(index), label=arm)
    finals = [run["final"] for run in results.values() if run["plan"] == plan.name and run["final"]]
    for axis, key in (("x", "text"), ("y", "known")):
        best = min(final[key] for final in finals)
        axes.set(**{f"{axis}lim": (best - 0.02, best + MOST_LOSS)})
    known = [r["start"]["known"] for r in results.values() if r["plan"] == plan.name and r["start"]]
    if known:
        axes.axhline(known[0], color="0.5", linestyle="--", linewidth=1)
    _add_legend(figure, axes)
    return figure


@styled
def plot_changes(changes: Mapping[str, dict[str, list[float | None]]]) -> Figure:
    """Draw the rms change of weights by their size, averaged over the roles of modules."""
    figure, axes = _make_axes("size of the weight over the rms of its tensor", "rms change over that rms")
    labels = [f"{low:g}-{high:g}" if math.isfinite(high) else f"over {low:g}" for low, high in pairwise(BINS)]
    for index, arm in enumerate(changes):
        columns = zip(*changes[arm].values(), strict=True)
        known = [
            (label, value) for label, c in zip(labels, columns, strict=True) if (value := average_known(c)) is not None
        ]
        axes.plot(*zip(*known, strict=True), **_look(index), label=arm)
    axes.set_ylim(bottom=0)
    _add_legend(figure, axes)
    return figure


@styled
def plot_common_part(runs: Runs) -> Figure:
    """Draw mean over standard deviation of effective weights along runs, averaged over the targets."""
    figure, axes = _make_axes("step", "mean over standard deviation")
    described = {arm: run["curve"] for arm, run in runs.items() if "weights" in run["curve"][0]}
    for index, arm in enumerate(described):
        points = [(point["step"], point["weights"]["mean_over_std"]) for point in described[arm]]
        axes.plot(*zip(*points, strict=True), **_look(index), label=arm)
    _add_legend(figure, axes)
    return figure


def _make_axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = new_figure(8, 4.2)
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _look(index: int) -> dict[str, Any]:
    return {**line_look(index), "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def _add_legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
