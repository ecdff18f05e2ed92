"""peft_sel.optim.anneal: the closed form of SPEC section 2, and schedulers that follow it."""

from __future__ import annotations

import copy
import io
import math
import pickle

import mpmath
import pytest
import torch
from accelerate import Accelerator
from transformers import SchedulerType, get_scheduler

from peft_sel.errors import ConfigError
from peft_sel.optim import anneal_multiplier, create_sel_scheduler, relative_multiplier, resolve_anneal_steps

# One exp, one log, one cos of numbers of order 1 to 10: a few rounding errors of float64, times ln(k1/k0) < 10.
REL = 64 * torch.finfo(torch.float64).eps
BASE_LR, NUM_STEPS, NUM_WARMUP = 1e-3, 20, 4
# (lr_mult, lr_mult_end, anneal_steps): fixed, the paper's scales and inner multiplier, annealed over the whole run
GROUPS = [(1.0, 1.0, 0.2), (50.0, 8.0, 0.5), (0.01, 0.5, 8), (2.0, 3.0, 1.0), (0.5, 0.25, 1)]


def oracle(step: float, k0: float, k1: float, length: float) -> float:
    """SPEC section 2, in 50 digits."""
    with mpmath.workdps(50):
        ratio = mpmath.mpf(step) / mpmath.mpf(length)
        k0, k1 = mpmath.mpf(k0), mpmath.mpf(k1)
        exponent = mpmath.log(k0) + mpmath.log(k1 / k0) / 2 * (1 - mpmath.cos(mpmath.pi * min(ratio, 1)))
        return float(mpmath.exp(exponent))


def make_optimizer(lr: float = BASE_LR) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    groups = [
        {
            "params": [torch.nn.Parameter(torch.randn(3))],
            "lr": lr * k0,
            "role": f"role{index}",
            "lr_mult": k0,
            "lr_mult_end": k1,
            "anneal_steps": steps,
        }
        for index, (k0, k1, steps) in enumerate(GROUPS)
    ]
    groups.append({"params": [torch.nn.Parameter(torch.randn(3))], "lr": lr})  # added by the user, without our keys
    return torch.optim.AdamW(groups)


def advance(optimizer: torch.optim.Optimizer, scheduler, num_steps: int) -> list[list[float]]:
    """Run steps and return the learning rates that each was taken with."""
    rates = []
    for _ in range(num_steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("length", [1, 7.3, 200])
@pytest.mark.parametrize(("k0", "k1"), [(50.0, 8.0), (0.01, 0.5), (1.0, 1.0), (1e-3, 1e3)])
def test_multiplier_is_the_closed_form(k0: float, k1: float, length: float) -> None:
    for step in [0, 0.5, 1, 2, 3.65, 7, 7.3, 100, 199, 200, 201, 10**6]:
        assert anneal_multiplier(step, k0, k1, length) == pytest.approx(oracle(step, k0, k1, length), rel=REL)
        assert relative_multiplier(step, k0, k1, length) == pytest.approx(oracle(step, k0, k1, length) / k0, rel=REL)


def test_multiplier_starts_ends_and_halves_where_it_should() -> None:
    assert anneal_multiplier(0, 50.0, 8.0, 200) == 50.0
    assert anneal_multiplier(100, 50.0, 8.0, 200) == pytest.approx(math.sqrt(50 * 8), rel=REL)
    assert anneal_multiplier(200, 50.0, 8.0, 200) == anneal_multiplier(5000, 50.0, 8.0, 200) == 8.0
    values = [anneal_multiplier(step, 50.0, 8.0, 200) for step in range(201)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 201
    assert {relative_multiplier(step, 0.3, 0.3, 7) for step in range(10)} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 0.0, 1.0, 5), "lr_mult"),
        ((0, 1.0, -1.0, 5), "lr_mult_end"),
        ((9, 1.0, 2.0, 0), "anneal_steps"),
        ((3, math.nan, 1.0, 5), "lr_mult"),
        ((3, 1.0, math.inf, 5), "lr_mult_end"),
    ],
)
def test_multiplier_refuses_what_has_no_logarithm(arguments: tuple[float, ...], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        anneal_multiplier(*arguments)


def test_anneal_steps_are_steps_or_a_fraction() -> None:
    assert resolve_anneal_steps(1, 1000) == 1.0
    assert resolve_anneal_steps(1.0, 1000) == 1000.0
    assert resolve_anneal_steps(0.2, 1000) == 200.0
    assert resolve_anneal_steps(300, None) == 300.0
    assert resolve_anneal_steps(0.25, 10) == 2.5
    for steps in (0, -3, 0.0, -0.5, 1.5, math.nan):
        with pytest.raises(ConfigError, match="anneal_steps="):
            resolve_anneal_steps(steps, 1000)
    for total in (None, 0):
        with pytest.raises(ConfigError, match=r"num_training_steps=.*fraction"):
            resolve_anneal_steps(0.2, total)


def test_scheduler_gives_each_group_its_rate_at_each_step() -> None:
    optimizer = make_optimizer()
    scheduler = create_sel_scheduler(optimizer, "linear", NUM_WARMUP, NUM_STEPS)
    rates = advance(optimizer, scheduler, NUM_STEPS)
    lengths = [4.0, 10.0, 8.0, 20.0, 1.0]
    for step, step_rates in enumerate(rates):
        schedule = step / NUM_WARMUP if step < NUM_WARMUP else (NUM_STEPS - step) / (NUM_STEPS - NUM_WARMUP)
        for rate, (k0, k1, _), length in zip(step_rates, GROUPS, lengths, strict=False):
            assert rate == pytest.approx(BASE_LR * schedule * oracle(step, k0, k1, length), rel=REL)
        assert step_rates[-1] == pytest.approx(BASE_LR * schedule, rel=REL)
    assert scheduler.get_last_lr() == [0.0] * len(optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "specific"),
    [
        ("cosine", {}),
        ("cosine", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
    ],
)
def test_every_closed_form_schedule_is_multiplied(name: str, specific: dict[str, float]) -> None:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    if name == "polynomial":  # transformers compares its end rate with the optimizer's default rate
        specific = {**specific, "lr_end": 0.0}
    expected = advance(plain, get_scheduler(name, plain, NUM_WARMUP, NUM_STEPS, specific), NUM_STEPS)
    optimizer = make_optimizer()
    rates = advance(optimizer, create_sel_scheduler(optimizer, name, NUM_WARMUP, NUM_STEPS, **specific), NUM_STEPS)
    for step, (step_rates, (rate,)) in enumerate(zip(rates, expected, strict=True)):
        assert step_rates[1] == pytest.approx(rate * oracle(step, 50.0, 8.0, 10.0), rel=REL)


def test_a_stock_scheduler_keeps_the_starting_multipliers() -> None:
    optimizer = make_optimizer()
    rates = advance(optimizer, get_scheduler("linear", optimizer, 0, NUM_STEPS), NUM_STEPS)
    for step, step_rates in enumerate(rates):
        for rate, (k0, _, _) in zip(step_rates, GROUPS, strict=False):
            assert rate == pytest.approx(BASE_LR * k0 * (1 - step / NUM_STEPS), rel=REL)


def test_state_dict_resumes_exactly_in_the_middle_of_the_annealing() -> None:
    straight = make_optimizer()
    expected = advance(straight, create_sel_scheduler(straight, "cosine", NUM_WARMUP, NUM_STEPS), NUM_STEPS)
    first = make_optimizer()
    first_scheduler = create_sel_scheduler(first, "cosine", NUM_WARMUP, NUM_STEPS)
    advance(first, first_scheduler, 6)
    file = io.BytesIO()
    torch.save((first.state_dict(), first_scheduler.state_dict()), file)
    file.seek(0)
    optimizer_state, scheduler_state = torch.load(file, weights_only=True)  # as Trainer loads it

    second = make_optimizer(lr=0.7)  # the saved rates win
    second_scheduler = create_sel_scheduler(second, "cosine", NUM_WARMUP, NUM_STEPS)
    second.load_state_dict(optimizer_state)
    second_scheduler.load_state_dict(scheduler_state)
    assert advance(second, second_scheduler, NUM_STEPS - 6) == expected[6:]
    for group, reference in zip(second.param_groups, make_optimizer().param_groups, strict=True):
        keys = ("role", "lr_mult", "lr_mult_end", "anneal_steps")
        assert [(group.get(key), type(group.get(key))) for key in keys] == [
            (reference.get(key), type(reference.get(key))) for key in keys
        ]


def test_the_length_of_the_annealing_comes_from_the_checkpoint() -> None:
    first = make_optimizer()
    first_scheduler = create_sel_scheduler(first, "constant", 0, NUM_STEPS)
    advance(first, first_scheduler, 6)
    longer = make_optimizer()
    longer_scheduler = create_sel_scheduler(longer, "constant", 0, 10 * NUM_STEPS)
    longer.load_state_dict(first.state_dict())
    longer_scheduler.load_state_dict(first_scheduler.state_dict())
    assert advance(longer, longer_scheduler, 3) == advance(first, first_scheduler, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_scheduler_survives_copies(duplicate) -> None:
    optimizer = make_optimizer()
    scheduler = create_sel_scheduler(optimizer, "linear", NUM_WARMUP, NUM_STEPS)
    advance(optimizer, scheduler, 5)
    twin = duplicate(scheduler.lr_lambdas)
    assert [[schedule(step) for step in range(25)] for schedule in twin] == [
        [schedule(step) for step in range(25)] for schedule in scheduler.lr_lambdas
    ]


def test_scheduler_works_through_accelerate() -> None:
    straight = make_optimizer()
    expected = advance(straight, create_sel_scheduler(straight, "linear", NUM_WARMUP, NUM_STEPS), NUM_STEPS)
    accelerator = Accelerator(cpu=True)
    optimizer = make_optimizer()
    scheduler = create_sel_scheduler(optimizer, "linear", NUM_WARMUP, NUM_STEPS)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    assert advance(optimizer, scheduler, NUM_STEPS) == expected
    late = accelerator.prepare(make_optimizer())  # Trainer prepares the optimizer first
    assert advance(late, create_sel_scheduler(late, "linear", NUM_WARMUP, NUM_STEPS), NUM_STEPS) == expected


# transformers 5.0 knows one such schedule, later ones two
@pytest.mark.parametrize("name", sorted({"reduce_lr_on_plateau", "greedy"} & {kind.value for kind in SchedulerType}))
def test_schedules_that_are_no_function_of_the_step(name: str) -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler_type=.*function of the step.*lr_mult_end unset"):
        create_sel_scheduler(make_optimizer(), name, 0, NUM_STEPS)
    fixed = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr_mult": 50.0, "lr_mult_end": 50.0}])
    create_sel_scheduler(fixed, name, 0, NUM_STEPS)


def test_a_fraction_needs_the_length_of_the_run() -> None:
    with pytest.raises(ConfigError, match="num_training_steps=None"):
        create_sel_scheduler(make_optimizer(), "constant")
