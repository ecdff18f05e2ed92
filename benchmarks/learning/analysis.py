"""What the results say: paired differences with intervals, step ratios, crossings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from peft_sel.plots import find_reaching_step

from .plan import Plan, resolve_rate

Results = dict[str, dict[str, Any]]
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Difference(NamedTuple):
    """A mean of paired differences.

    Attributes:
        mean: The mean.
        half_width: Half of its 95 % interval; None for a single pair.
        pairs: How many.
    """

    mean: float
    half_width: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """What may be said of an arm with this difference in loss to the baseline."""
        if self.half_width is None:
            return "one seed"
        if abs(self.mean) <= self.half_width:
            return "no difference shown"
        return "better" if self.mean < 0 else "worse"


def compare_pairs(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compare two arms over the seeds that both have.

    Args:
        values: Loss by seed.
        base: The same of the baseline.

    Returns:
        The difference, negative where values are lower; None without a common seed.
    """
    differences = [values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())]
    if not differences:
        return None
    count = len(differences)
    mean = sum(differences) / count
    if count == 1:
        return Difference(mean, None, 1)
    variance = sum((difference - mean) ** 2 for difference in differences) / (count - 1)
    return Difference(mean, T_QUANTILES[count - 1] * math.sqrt(variance / count), count)


def find_equal_steps(loss: float, by_steps: Mapping[int, float]) -> float:
    """Return how many steps of its full schedule a baseline needs for a loss.

    Args:
        loss: The loss.
        by_steps: Final loss of the baseline by steps, falling.

    Returns:
        Steps, interpolated in log(steps); beyond the longest run inf, below the shortest 0.
    """
    known = sorted(by_steps.items())
    for (steps, high), (more, low) in pairwise(known):
        if low <= loss <= high:
            share = (high - loss) / (high - low)
            return math.exp(math.log(steps) + share * (math.log(more) - math.log(steps)))
    return 0.0 if loss > known[0][1] else math.inf


def final_losses(results: Results, plan: str, arm: str, rate: float, text: str = "text") -> dict[int, float]:
    """Return the final loss of an arm at a rate, by seed; a run that diverged counts as infinite."""
    runs = [r for r in results.values() if (r["plan"], r["arm"]) == (plan, arm) and math.isclose(r["rate"], rate)]
    return {run["seed"]: math.inf if run["final"] is None else run["final"].get(text, math.nan) for run in runs}


def read_curve(result: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (step, held-out loss) along a run."""
    return [(point["step"], point["loss"]) for point in result["curve"]]


def read_lengths(plans: dict[str, Plan], results: Results, plan: Plan) -> dict[int, float]:
    """Return the final loss of a plan's baseline by steps, with the first seed, its runs of other lengths included."""
    baseline, seed = f"{plan.name}/{plan.baseline}", plan.seeds[0]
    found = {}
    for other in plans.values():
        for name, arm in other.arms.items():
            same = (other.name, name) == (plan.name, plan.baseline)
            if same or (arm.rate_of == baseline and arm.steps and arm.method == plan.arms[plan.baseline].method):
                rate = resolve_rate(plans, results, other.name, name)
                losses = {} if rate is None else final_losses(results, other.name, name, rate)
                if seed in losses:
                    found[arm.steps or plan.setting.steps] = losses[seed]
    return found


class Summary(NamedTuple):
    """What the report says of an arm at its best rate.

    Attributes:
        arm: Its name.
        rate: The rate.
        parameters: Trained parameters.
        losses: Final loss by seed.
        known: Final loss on the known text by seed; empty from scratch.
        difference: In final loss to the baseline.
        known_difference: The same on the known text.
        ratios: Step ratio by seed.
        crossings: Steps of the arm over the step where it first reaches the baseline's final loss, by seed; None where
            it does not.
    """

    arm: str
    rate: float
    parameters: int
    losses: dict[int, float]
    known: dict[int, float]
    difference: Difference | None
    known_difference: Difference | None
    ratios: dict[int, float]
    crossings: dict[int, float | None]


def summarize(
    plans: dict[str, Plan], results: Results, plan: Plan, arm: str, lengths: Mapping[int, float]
) -> Summary | None:
    """Summarize an arm at its best rate.

    Args:
        plans: All plans.
        results: All results.
        plan: The arm's plan.
        arm: Its name.
        lengths: Final loss of the baseline by steps, with the first seed.

    Returns:
        The summary; None while the best rate is not known.
    """
    baseline_plan, _, baseline = plan.baseline.rpartition("/")
    baseline_plan = baseline_plan or plan.name
    rate, base_rate = (
        resolve_rate(plans, results, plan.name, arm),
        resolve_rate(plans, results, baseline_plan, baseline),
    )
    if rate is None or base_rate is None:
        return None
    runs = _runs_by_seed(results, plan.name, arm, rate)
    base_runs = _runs_by_seed(results, baseline_plan, baseline, base_rate)
    if not runs or not base_runs:
        return None
    losses, base = (
        final_losses(results, *key) for key in ((plan.name, arm, rate), (baseline_plan, baseline, base_rate))
    )
    has_known = plan.setting.known is not None
    known = final_losses(results, plan.name, arm, rate, "known") if has_known else {}
    known_base = final_losses(results, baseline_plan, baseline, base_rate, "known") if has_known else {}
    ratios, crossings = {}, {}
    for seed in sorted(losses.keys() & base.keys()):
        if len(lengths) > 1:
            # lengths has one seed: what another gains on the baseline of its own seed is laid on that curve
            first = lengths[plan.setting.steps]
            steps = plan.arms[arm].steps or plan.setting.steps
            ratios[seed] = find_equal_steps(first + losses[seed] - base[seed], lengths) / steps
        level = read_curve(base_runs[seed])[-1][1]
        crossing = find_reaching_step(read_curve(runs[seed]), level)
        crossings[seed] = None if crossing is None else base_runs[seed]["steps"] / crossing
    parameters = next(iter(runs.values()))["trained_parameters"]
    return Summary(
        arm,
        rate,
        parameters,
        losses,
        known,
        compare_pairs(losses, base),
        compare_pairs(known, known_base),
        ratios,
        crossings,
    )


def _runs_by_seed(results: Results, plan: str, arm: str, rate: float) -> dict[int, dict[str, Any]]:
    runs = [r for r in results.values() if (r["plan"], r["arm"]) == (plan, arm) and math.isclose(r["rate"], rate)]
    return {run["seed"]: run for run in sorted(runs, key=lambda run: int(run["seed"]))}
