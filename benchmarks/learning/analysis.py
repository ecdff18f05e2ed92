"""What the results say: paired differences with intervals, step ratios, crossings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
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
        if math.isinf(self.mean):
            return "diverged"
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
        The difference, negative where values are lower; None without a common seed of which the baseline is finite.
    """
    common = sorted(values.keys() & base.keys())
    differences = [values[seed] - base[seed] for seed in common if math.isfinite(base[seed])]
    if not differences:
        return None
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1 or math.isinf(mean):
        return Difference(mean, None, count)
    return Difference(mean, T_QUANTILES[count - 1] * statistics.stdev(differences) / math.sqrt(count), count)


def find_equal_steps(loss: float, by_steps: Mapping[int, float]) -> float:
    """Return how many steps of its full schedule a baseline needs for a loss.

    Args:
        loss: The loss.
        by_steps: Final loss of the baseline by steps, falling.

    Returns:
        Steps, interpolated in log(steps); beyond the longest run inf, below the shortest 0.
    """
    known = sorted(by_steps.items())
    if not loss <= known[0][1]:  # also where either diverged
        return 0.0
    for (steps, high), (more, low) in pairwise(known):
        if low <= loss < high:
            share = (high - loss) / (high - low)
            return math.exp(math.log(steps) + share * (math.log(more) - math.log(steps)))
    return float(known[0][0]) if loss == known[0][1] else math.inf


def find_runs(results: Results, plan: str, arm: str, rate: float | None) -> dict[int, dict[str, Any]]:
    """Return the runs of an arm at a rate by seed."""
    runs = [r for r in results.values() if (r["plan"], r["arm"], r["rate"]) == (plan, arm, rate)]
    return {run["seed"]: run for run in sorted(runs, key=lambda run: int(run["seed"]))}


def read_losses(runs: Mapping[int, dict[str, Any]], text: str = "text") -> dict[int, float]:
    """Return final losses by seed; of a run that diverged, infinity."""
    return {seed: math.inf if run["final"] is None else run["final"][text] for seed, run in runs.items()}


def read_curve(result: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (step, held-out loss) along a run."""
    return [(point["step"], point["loss"]) for point in result["curve"]]


def read_lengths(plans: dict[str, Plan], results: Results, plan: Plan) -> dict[int, float]:
    """Return the final loss of a plan's baseline by steps, with the first seed, its runs of other lengths included."""
    baseline = f"{plan.name}/{plan.baseline}"
    method = plan.arms[plan.baseline].method if plan.baseline in plan.arms else None
    found = {}
    for other in plans.values():
        for name, arm in other.arms.items():
            if f"{other.name}/{name}" == baseline or (arm.rate_of == baseline and arm.steps and arm.method == method):
                runs = find_runs(results, other.name, name, resolve_rate(plans, results, other.name, name))
                losses = read_losses(runs)
                if plan.seeds[0] in losses:
                    found[arm.steps or plan.setting.steps] = losses[plan.seeds[0]]
    return found


@dataclass(frozen=True)
class Summary:
    """What the report says of an arm at its best rate.

    Attributes:
        arm: Its name.
        rate: The rate.
        swept: Whether a sweep found it.
        runs: Its runs by seed.
        base: Those of the baseline.
        lengths: Final loss of the baseline by steps, with the first seed.
    """

    arm: str
    rate: float
    swept: bool
    runs: dict[int, dict[str, Any]]
    base: dict[int, dict[str, Any]]
    lengths: dict[int, float]

    @property
    def is_baseline(self) -> bool:
        """Whether the arm is the baseline itself."""
        return self.runs == self.base

    def compare(self, text: str = "text") -> Difference | None:
        """Compare final losses with the baseline's."""
        return compare_pairs(read_losses(self.runs, text), read_losses(self.base, text))

    def measure_block_error(self) -> float | None:
        """Return the standard error over test blocks of the difference to the baseline, with the first common seed."""
        seed = min(self.runs.keys() & self.base.keys(), default=None)
        if seed is None or self.runs[seed]["final"] is None or self.base[seed]["final"] is None:
            return None
        pairs = zip(self.runs[seed]["final_blocks"]["text"], self.base[seed]["final_blocks"]["text"], strict=True)
        differences = [mine - other for mine, other in pairs]
        return statistics.stdev(differences) / math.sqrt(len(differences))

    def find_step_ratios(self) -> dict[int, float]:
        """Return, by seed, the baseline's steps for the arm's final loss over the arm's steps.

        The baseline's other lengths have one seed, so what an arm gains on the baseline of its own seed is laid on that
        curve.
        """
        losses, base = read_losses(self.runs), read_losses(self.base)
        ratios = {}
        for seed in losses.keys() & base.keys() if len(self.lengths) > 1 else ():
            loss = self.lengths[self.base[seed]["steps"]] + losses[seed] - base[seed]
            ratios[seed] = find_equal_steps(loss, self.lengths) / self.runs[seed]["steps"]
        return ratios

    def find_crossings(self) -> dict[int, float | None]:
        """Return, by seed, the steps over the step at which the curve first reaches the baseline's end, if it does."""
        crossings: dict[int, float | None] = {}
        for seed in self.runs.keys() & self.base.keys():
            level = read_curve(self.base[seed])[-1][1]
            step = find_reaching_step(read_curve(self.runs[seed]), level)
            crossings[seed] = None if step is None else self.base[seed]["steps"] / step
        return crossings


def summarize(plans: dict[str, Plan], results: Results, plan: Plan) -> list[Summary]:
    """Summarize the arms whose best rate is known and whose runs are as long as the baseline's, the best first."""
    owner, _, baseline = plan.baseline.rpartition("/")
    owner = owner or plan.name
    base = find_runs(results, owner, baseline, resolve_rate(plans, results, owner, baseline))
    lengths, found = read_lengths(plans, results, plan), []
    for name, arm in plan.arms.items():
        rate = resolve_rate(plans, results, plan.name, name)
        runs = find_runs(results, plan.name, name, rate)
        if (
            rate is not None
            and runs
            and base
            and {r["steps"] for r in [*runs.values(), *base.values()]} == {next(iter(base.values()))["steps"]}
        ):
            found.append(Summary(name, rate, arm.sweep is not None, runs, base, lengths))
    return sorted(found, key=_mean_difference)


def _mean_difference(found: Summary) -> float:
    difference = found.compare()
    return math.inf if difference is None else difference.mean
