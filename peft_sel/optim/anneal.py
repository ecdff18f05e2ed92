"""Learning-rate multipliers as pure functions of the step, and the scheduler that applies them (section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from peft_sel.errors import ConfigError


def anneal_multiplier(step: float, lr_mult: float, lr_mult_end: float, anneal_steps: float) -> float:
    """Compute the multiplier k(t) on the base learning rate: a cosine in log space, then constant (4.4).

    Args:
        step: Optimizer steps taken so far, t >= 0.
        lr_mult: Multiplier at step 0, k0 > 0.
        lr_mult_end: Multiplier from anneal_steps on, k1 > 0.
        anneal_steps: Length T > 0 of the annealing in optimizer steps; a fraction of a step is fine.

    Returns:
        exp(ln k0 + ln(k1/k0)/2 * (1 - cos(pi * min(t/T, 1)))).

    Raises:
        ConfigError: If a multiplier or T is not positive and finite.

    Example:
        >>> anneal_multiplier(0, 50.0, 8.0, 200), anneal_multiplier(100, 50.0, 8.0, 200)  # halfway: sqrt(50 * 8)
        (50.0, 20.0)
    """
    return lr_mult * relative_multiplier(step, lr_mult, lr_mult_end, anneal_steps)


def relative_multiplier(step: float, lr_mult: float, lr_mult_end: float, anneal_steps: float) -> float:
    """Compute k(t)/k0: exactly 1 at step 0, and at every step when nothing is annealed.

    Args:
        step: As for anneal_multiplier.
        lr_mult: As for anneal_multiplier.
        lr_mult_end: As for anneal_multiplier.
        anneal_steps: As for anneal_multiplier.

    Returns:
        The factor on a learning rate that already holds k0.

    Raises:
        ConfigError: If a multiplier or T is not positive and finite.
    """
    for field, value in (("lr_mult", lr_mult), ("lr_mult_end", lr_mult_end), ("anneal_steps", anneal_steps)):
        if not 0 < value < math.inf:
            raise ConfigError(field, value, "must be a positive finite number")
    if step >= anneal_steps:
        return lr_mult_end / lr_mult
    return math.exp(math.log(lr_mult_end / lr_mult) / 2 * (1 - math.cos(math.pi * step / anneal_steps)))


def resolve_anneal_steps(anneal_steps: int | float, num_training_steps: int | None) -> float:
    """Return the length of the annealing in steps.

    Args:
        anneal_steps: An int counts steps; a float in (0, 1] is a fraction of the run (1 is one step, 1.0 all of them).
        num_training_steps: Steps of the run; only a fraction needs it.

    Returns:
        T > 0, not rounded.

    Raises:
        ConfigError: If the number of steps or the fraction is out of range, or the fraction has no run to refer to.
    """
    if isinstance(anneal_steps, float):
        if not 0 < anneal_steps <= 1:
            raise ConfigError("anneal_steps", anneal_steps, "a float is a fraction of the steps, in (0, 1]")
        if not num_training_steps or num_training_steps < 0:
            raise ConfigError(
                "num_training_steps",
                num_training_steps,
                f"anneal_steps={anneal_steps!r} is a fraction of it; give it, or make anneal_steps a number of steps",
            )
        return anneal_steps * num_training_steps
    if anneal_steps < 1:
        raise ConfigError("anneal_steps", anneal_steps, "an int counts steps and must be at least 1")
    return float(anneal_steps)


class AnnealedSchedule:
    """Factor on one group's initial learning rate at a step: the schedule's s(t) times k(t)/k0.

    LambdaLR saves the __dict__ of a callable, and torch.load(weights_only=True) reads plain numbers only. So the three
    numbers live there and come back from a checkpoint, and the schedule sits in a slot, is not saved, and follows the
    arguments of the resumed run, as in transformers.
    """

    __slots__ = ("__dict__", "schedule")

    def __init__(
        self, schedule: Callable[[int], float], lr_mult: float, lr_mult_end: float, anneal_steps: float
    ) -> None:
        self.schedule = schedule
        self.lr_mult = lr_mult
        self.lr_mult_end = lr_mult_end
        self.anneal_steps = anneal_steps

    def __call__(self, step: int) -> float:
        """Return s(step) * k(step)/k0."""
        return self.schedule(step) * relative_multiplier(step, self.lr_mult, self.lr_mult_end, self.anneal_steps)


def anneal_scheduler(scheduler: LRScheduler, num_training_steps: int | None) -> LRScheduler:
    """Multiply a fresh scheduler's learning rates by k(t)/k0 of each group, in place.

    Groups without the keys of sel_param_groups keep the schedule as it is.

    Args:
        scheduler: A LambdaLR at step 0 (what transformers makes for every closed-form schedule); any other kind is
            returned unchanged when no group of its optimizer anneals.
        num_training_steps: Steps of the run, for anneal_steps given as a fraction.

    Returns:
        The same scheduler.

    Raises:
        ConfigError: If a group anneals and the schedule is not a function of the step, or anneal_steps is invalid.
    """
    multipliers = [
        (group.get("lr_mult", 1.0), group.get("lr_mult_end", 1.0), group.get("anneal_steps", 1))
        for group in scheduler.optimizer.param_groups
    ]
    if not isinstance(scheduler, LambdaLR):
        if any(start != end for start, end, _ in multipliers):
            raise ConfigError(
                "lr_scheduler_type",
                type(scheduler).__name__,
                "annealed multipliers need a schedule that is a function of the step; use linear, cosine, constant or "
                "another such schedule, or leave lr_mult_end unset",
            )
        return scheduler
    scheduler.lr_lambdas = [
        AnnealedSchedule(schedule, start, end, 1.0 if start == end else resolve_anneal_steps(steps, num_training_steps))
        for schedule, (start, end, steps) in zip(scheduler.lr_lambdas, multipliers, strict=True)
    ]
    return scheduler


def create_sel_scheduler(
    optimizer: Optimizer,
    name: str = "linear",
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    **specific_kwargs: Any,
) -> LRScheduler:
    """Create a transformers schedule whose learning rates also follow each group's annealed multiplier (4.4).

    At step t a group's learning rate is base_lr * s(t) * k(t). state_dict and load_state_dict resume exactly: k0, k1
    and the length of the annealing come from the checkpoint, s(t) from the arguments given here.

    Accelerate steps a prepared scheduler once per process and step, unless split_batches is set: multiply
    num_training_steps, num_warmup_steps and an integer anneal_steps by the number of processes, as for any scheduler.
    Or give Accelerator step_scheduler_with_optimizer=False and step once per optimizer step, as
    configs/accelerate/plain_loop.py does.

    Args:
        optimizer: From create_sel_optimizer, or any optimizer over sel_param_groups; prepared by Accelerate or not.
        name: Schedule name of transformers.get_scheduler.
        num_warmup_steps: Steps of linear warm-up; every schedule but constant needs it.
        num_training_steps: Steps of the run; needed by most schedules and by anneal_steps given as a fraction.
        **specific_kwargs: Passed to the schedule, such as num_cycles or min_lr.

    Returns:
        The scheduler at step 0: step it after each optimizer step.

    Raises:
        ConfigError: If a group anneals and the schedule is not a function of the step (reduce_lr_on_plateau), or
            anneal_steps is invalid.
    """
    scheduler = get_scheduler(name, optimizer, num_warmup_steps, num_training_steps, specific_kwargs)
    return anneal_scheduler(scheduler, num_training_steps)
