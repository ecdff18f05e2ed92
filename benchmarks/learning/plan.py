"""What is run: plans in YAML, their arms, and which runs an arm still needs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
PLANS = FOLDER / "plans"
RESULTS = FOLDER / "results"
# The order of the plans; one that takes another's best rate comes after it.
ORDER = ("german", "scratch256", "lengths", "study", "linux", "scratch128", "small")
SWEEP_FACTOR = 2.0
MAX_SWEEP = 7  # rates of one arm at most


@dataclass(frozen=True)
class Setting:
    """What every arm of a plan shares.

    Attributes:
        model: "smollm2", the demo's checkpoint, or sizes of a Qwen3 model with random weights.
        text: Text to train on, a name of texts.SOURCES.
        known: Text that the model knew before, to measure what it forgets; None from scratch.
        steps: Optimizer steps.
        sequences: Blocks in a step.
        length: Tokens in a block.
        eval_every: Steps between two points of the curve.
        eval_blocks: Validation blocks of a point of the curve.
        validation_blocks: Held-out blocks that choose the learning rate.
        test_blocks: Others, whose loss is reported.
        known_blocks: Held-out blocks of the known text.
        warmup_share: Share of the steps in which the rate rises; afterwards it falls linearly to 0.
    """

    model: Any
    text: str
    steps: int
    known: str | None = None
    sequences: int = 1
    length: int = 512
    eval_every: int = 8
    eval_blocks: int = 8
    validation_blocks: int = 16
    test_blocks: int = 32
    known_blocks: int = 16
    warmup_share: float = 0.1


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        method: A name in arms.METHODS.
        options: Its options.
        sweep: Middle learning rate of a sweep, which goes on in steps of a factor 2 until the best rate has a worse
            one on both sides.
        rate: Or one learning rate.
        rate_of: Or the best rate of another arm, "plan/arm".
        times: Factors on that rate, a run for each.
        steps: Other than the plan's.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    sweep: float | None = None
    rate: float | None = None
    rate_of: str | None = None
    times: tuple[float, ...] = (1.0,)
    steps: int | None = None

    def __post_init__(self) -> None:
        if sum(choice is not None for choice in (self.sweep, self.rate, self.rate_of)) != 1:
            raise SystemExit(f"arm of method {self.method}: give one of sweep, rate and rate_of")


@dataclass(frozen=True)
class Plan:
    """Arms that are compared.

    Attributes:
        name: Its file's.
        setting: What they share.
        baseline: The arm that the others are compared with.
        arms: By name.
        finalists: Arms that are run with every seed at their best rate.
        seeds: Seeds; sweeps use the first.
    """

    name: str
    setting: Setting
    baseline: str
    arms: dict[str, Arm]
    finalists: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        plan: Name of its plan.
        arm: Name of its arm.
        rate: Learning rate.
        seed: Of the order of the text and of everything drawn.
    """

    plan: str
    arm: str
    rate: float
    seed: int

    @property
    def file(self) -> str:
        """Its result, below the folder of results."""
        return f"{self.plan}/{self.arm}-lr{self.rate:.3g}-seed{self.seed}.json"


def load_plan(name: str, folder: Path = PLANS) -> Plan:
    """Read a plan; an unknown key is an error that names it."""
    file = folder / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    arms = {arm: _build(Arm, options, f"{file}: {arm}") for arm, options in content.pop("arms").items()}
    setting = _build(Setting, content.pop("setting"), f"{file}: setting")
    plan: Plan = _build(Plan, {"name": name, "arms": arms, "setting": setting, **content}, str(file))
    for arm in (plan.baseline, *plan.finalists):
        if arm not in arms and "/" not in arm:
            raise SystemExit(f"{file}: {arm} is no arm")
    return plan


def load_plans() -> dict[str, Plan]:
    """Read all plans."""
    return {name: load_plan(name) for name in ORDER}


def _build(kind: Any, values: dict[str, Any], where: str) -> Any:
    known = {f.name: f.type for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SystemExit(f"{where}: unknown key {unknown[0]}; known are {', '.join(known)}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Read every result below a folder, by Run.file."""
    files = sorted(folder.glob("*/*.json"))
    return {file.relative_to(folder).as_posix(): json.loads(file.read_text(encoding="utf-8")) for file in files}


def losses_by_rate(results: dict[str, dict[str, Any]], plan: str, arm: str, seed: int) -> dict[float, float]:
    """Return final losses on the validation blocks by learning rate; a run that diverged counts as infinite."""
    runs = [r for r in results.values() if (r["plan"], r["arm"], r["seed"]) == (plan, arm, seed)]
    return {
        run["rate"]: math.inf if run["final"] is None else run["final"]["validation"] for run in sorted(runs, key=_rate)
    }


def _rate(result: dict[str, Any]) -> float:
    return float(result["rate"])


def find_best_rate(losses: dict[float, float]) -> float | None:
    """Return the rate of the smallest loss; None unless a worse one lies on either side or the sweep is at its end."""
    if len(losses) < 3:
        return None
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    inside = rates[0] < best < rates[-1]
    return best if inside or len(rates) >= MAX_SWEEP else None


def list_sweep(start: float, losses: dict[float, float]) -> list[float]:
    """Return the rates that a sweep still needs: three around its start, then one more beyond an edge that is best."""
    first = [start / SWEEP_FACTOR, start, start * SWEEP_FACTOR]
    missing = [rate for rate in map(_round_rate, first) if rate not in losses]
    if missing or find_best_rate(losses) is not None:
        return missing
    best = min(losses, key=lambda rate: losses[rate])
    return [_round_rate(best * SWEEP_FACTOR if best == max(losses) else best / SWEEP_FACTOR)]


def _round_rate(rate: float) -> float:
    return float(f"{rate:.3g}")


def resolve_rate(plans: dict[str, Plan], results: dict[str, dict[str, Any]], plan: str, arm: str) -> float | None:
    """Return the learning rate at which an arm is compared; None while it is not known."""
    chosen = plans[plan].arms[arm]
    losses = losses_by_rate(results, plan, arm, plans[plan].seeds[0])
    if chosen.sweep is not None:
        return find_best_rate(losses)
    rates = _list_given(plans, results, chosen)
    if len(rates) > 1:
        return min(losses, key=lambda rate: losses[rate]) if len(losses) == len(rates) else None
    return rates[0] if rates else None


def _list_given(plans: dict[str, Plan], results: dict[str, dict[str, Any]], arm: Arm) -> list[float]:
    """Return the rates of an arm without a sweep; none while the arm that it takes its rate from has no best one."""
    if arm.rate is not None:
        return [arm.rate]
    origin, _, other = str(arm.rate_of).partition("/")
    best = resolve_rate(plans, results, origin, other)
    return [] if best is None else [_round_rate(best * factor) for factor in arm.times]


def list_missing(plans: dict[str, Plan], results: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the runs that can be started and have no result yet.

    Those of the finalists come first, in the order of the plans, their sweeps before their seeds; then other arms.
    """
    sweeps = [
        (arm in plan.finalists, Run(plan.name, arm, rate, plan.seeds[0]))
        for plan in plans.values()
        for arm in plan.arms
        for rate in _rates(plans, results, plan, arm)
    ]
    for plan in plans.values():
        yield from (run for final, run in sweeps if final and run.plan == plan.name and run.file not in results)
        for arm in plan.finalists:
            best = resolve_rate(plans, results, plan.name, arm)
            seeds = [Run(plan.name, arm, best, seed) for seed in plan.seeds[1:] if best is not None]
            yield from (run for run in seeds if run.file not in results)
    yield from (run for final, run in sweeps if not final and run.file not in results)


def _rates(plans: dict[str, Plan], results: dict[str, dict[str, Any]], plan: Plan, name: str) -> Iterable[float]:
    """Return the rates of an arm that are to be run with the first seed."""
    arm = plan.arms[name]
    if arm.sweep is not None:
        return list_sweep(arm.sweep, losses_by_rate(results, plan.name, name, plan.seeds[0]))
    return _list_given(plans, results, arm)
