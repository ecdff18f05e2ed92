"""The report: README.md and its figures, made from the JSON files alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import figures
from .analysis import Difference, Results, Summary, find_runs, read_losses, summarize
from .plan import FOLDER, Plan, find_best_rate, list_missing, losses_by_rate, read_results, resolve_rate
from .trial import BINS, average_known

FINDINGS = FOLDER / "findings.md"
PILOT = FOLDER / "pilot"


def write_report(plans: dict[str, Plan], results: Results, folder: Path = FOLDER) -> None:
    """Write README.md and its figures.

    Args:
        plans: All plans.
        results: All results.
        folder: Where to write.
    """
    (folder / "figures").mkdir(exist_ok=True)
    for file in (folder / "figures").glob("*.svg"):
        file.unlink()
    sections = [FINDINGS.read_text(encoding="utf-8").strip()]
    for plan in plans.values():
        if any(result["plan"] == plan.name for result in results.values()):
            sections += _render_plan(plans, results, plan, folder / "figures")
    sections += [_render_pilot(), _render_machine(results), _render_missing(plans, results)]
    text = "\n\n".join(section for section in sections if section)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def _render_plan(plans: dict[str, Plan], results: Results, plan: Plan, figures_folder: Path) -> Iterator[str]:
    """Yield the sections of one plan."""
    setting = plan.setting
    model = (
        "SmolLM2-135M" if setting.model == "smollm2" else f"Qwen3, width {setting.model['hidden_size']}, from scratch"
    )
    tokens = setting.sequences * setting.length
    yield f"## {plan.name}: {model}, {setting.text}, {setting.steps} steps of {tokens:,} tokens"
    summaries = summarize(plans, results, plan)
    if summaries and len(lengths := summaries[0].lengths) > 1:
        listed = ", ".join(f"{steps} steps {loss:.3f}" for steps, loss in sorted(lengths.items()))
        yield f"Baseline `{plan.baseline}` at other lengths, each with its whole schedule (first seed): {listed}."
    if summaries:
        yield render_summaries(summaries, plan)
    sweeps = [(arm, losses_by_rate(results, plan.name, arm, plan.seeds[0])) for arm in plan.arms]
    sweeps = [(arm, losses) for arm, losses in sweeps if len(losses) > 1]
    if sweeps:
        yield (
            "Validation loss by learning rate (first seed; best in bold, or in italics if at an edge):\n\n"
            + render_sweeps(sweeps)
        )
    runs = {arm: run for arm in plan.arms if (run := find_run(plans, results, plan, arm)) is not None}
    captions = figures.draw_plan(plan, runs, results, summaries, figures_folder)
    yield "\n".join(f"![{caption}](figures/{file})" for file, caption in captions.items())
    weights = render_weights(runs)
    if weights:
        yield "What became of the weights (first seed, best rate):\n\n" + weights


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def render_summaries(summaries: list[Summary], plan: Plan) -> str:
    """Return the table of arms, the best first."""
    header = ["arm", "trained", "rate", "final loss by seed", "difference", "error over blocks", "verdict"]
    header += ["step ratio", "reaches the baseline's loss"]
    if plan.setting.known is not None:
        header += ["known text, start to end", "difference there"]
    return render_table(header, [_render_summary(found, plan.setting.known is not None) for found in summaries])


def _render_summary(found: Summary, has_known: bool) -> list[str]:
    difference, error = found.compare(), found.measure_block_error()
    verdict = "baseline" if found.is_baseline else "" if difference is None else difference.verdict
    row = [
        f"`{found.arm}`",
        f"{next(iter(found.runs.values()))['trained_parameters'] / 1e6:.1f}M",
        f"{found.rate:.3g}" + ("" if found.swept else " (not swept)"),
        ", ".join(f"{loss:.3f}" for loss in read_losses(found.runs).values()),
        render_interval(difference),
        "" if error is None else f"{error:.3f}",
        verdict,
        render_ratios([ratio for _, ratio in sorted(found.find_step_ratios().items())]),
        ", ".join("never" if c is None else f"{c:.2f}x" for _, c in sorted(found.find_crossings().items())),
    ]
    if has_known:
        starts = [run["start"]["known"] for run in found.base.values() if run["start"]]
        ends = statistics.fmean(read_losses(found.runs, "known").values())
        row += [" → ".join(f"{loss:.3f}" for loss in [*starts[:1], ends]), render_interval(found.compare("known"))]
    return row


def render_interval(difference: Difference | None) -> str:
    """Return a mean difference and half of its interval, nothing for None."""
    if difference is None:
        return ""
    spread = "" if difference.half_width is None else f" ± {difference.half_width:.3f}"
    return f"{difference.mean:+.3f}{spread}"


def render_ratios(ratios: list[float]) -> str:
    """Return step ratios, those outside the baseline's lengths in words."""
    texts = {0.0: "below", float("inf"): "beyond"}
    return ", ".join(texts.get(ratio, f"{ratio:.2f}") for ratio in ratios)


def render_sweeps(sweeps: list[tuple[str, dict[float, float]]]) -> str:
    """Return the table of sweeps."""
    rates = sorted({rate for _, losses in sweeps for rate in losses})
    rows = []
    for arm, losses in sweeps:
        best = min(losses, key=lambda rate: losses[rate])
        mark = "**" if find_best_rate(losses) == best else "*"
        cells = [f"{losses[rate]:.3f}" if rate in losses else "" for rate in rates]
        rows.append([f"`{arm}`", *(f"{mark}{c}{mark}" if r == best else c for r, c in zip(rates, cells, strict=True))])
    return render_table(["arm", *(f"{rate:.3g}" for rate in rates)], rows)


def render_weights(runs: dict[str, dict[str, Any]]) -> str:
    """Return a table of how weights changed, by size of the weight, and of their mean, spectral norm and tail.

    Args:
        runs: By arm.
    """
    bins = [f"{low:g} to {high:g}" for low, high in pairwise(BINS)]
    header = ["arm", *(f"change, size {name}" for name in bins), "mean/std", "spectral", "largest/rms"]
    rows = []
    for arm, run in runs.items():
        if run["final"] is not None:
            changes = [average_known(column) for column in zip(*run["change"].values(), strict=True)]
            described = [
                " → ".join(
                    f"{statistics.fmean([role[key] for role in run['weights'][when].values()]):.3g}"
                    for when in ("start", "end")
                )
                for key in ("mean_over_std", "spectral", "max_over_rms")
            ]
            rows.append([f"`{arm}`", *("" if c is None else f"{c:.4f}" for c in changes), *described])
    return render_table(header, rows) if rows else ""


def find_run(plans: dict[str, Plan], results: Results, plan: Plan, arm: str) -> dict[str, Any] | None:
    """Return the run of an arm at its best rate with the first seed, if there is one."""
    return find_runs(results, plan.name, arm, resolve_rate(plans, results, plan.name, arm)).get(plan.seeds[0])


def _render_pilot() -> str:
    """Show the runs that came before the held-out text was mended."""
    found: dict[str, dict[float, float]] = {}
    for result in read_results(PILOT).values():
        if result["seed"] == 0:
            found.setdefault(result["arm"], {})[result["rate"]] = result["final"]["text"]
    return (
        "## Pilot\n\nFinal loss by learning rate on the held-out text of the first version (German manual pages, first "
        "seed); PREREGISTRATION.md says what was wrong with it. Nothing above uses these runs.\n\n"
        + render_sweeps([(arm, dict(sorted(losses.items()))) for arm, losses in found.items()])
    )


def _render_machine(results: Results) -> str:
    """Say what the results were measured on."""
    kinds: Counter[str] = Counter()
    for result in results.values():
        environment = result["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        machine = environment["machine"]
        processor = f"{machine['processor']} with {machine['vectors']}, {machine['cores']} cores"
        kinds[f"{processor}, {machine['threads']} thread(s) a run; {versions}"] += 1
    hours = sum(result["seconds"] for result in results.values()) / 3600
    machines = "; and ".join(f"{count} on {kind}" for kind, count in kinds.items())
    return (
        f"## Measured on\n\n{len(results)} runs, {hours:.1f} hours of one thread: {machines}. With AVX2 alone products "
        "of bf16 are computed in float32 (products.py)."
    )


def _render_missing(plans: dict[str, Plan], results: Results) -> str:
    """List arms with runs that could start now, by plan."""
    missing: dict[str, dict[str, int]] = {}
    for run in list_missing(plans, results):
        arms = missing.setdefault(run.plan, {})
        arms[run.arm] = arms.get(run.arm, 0) + 1
    lines = [
        f"- {plan}: " + ", ".join(f"`{arm}` ({count})" for arm, count in arms.items()) for plan, arms in missing.items()
    ]
    return (
        ""
        if not lines
        else "## Not run yet\n\nArms with the number of runs that could start now:\n\n" + "\n".join(lines)
    )
