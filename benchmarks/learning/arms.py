"""The ways to train that are compared: each takes a model and returns it ready, with optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from peft_sel import SELConfig, create_sel_optimizer, create_sel_scheduler
from peft_sel.layer import SELLayer
from peft_sel.targets import DENSE_TARGETS

WEIGHT_DECAY = 0.01
SCHEDULE = "linear"
SCRATCH_PLAIN = ["embed_tokens", "lm_head", "norm"]  # what SEL trains plainly from scratch


class Task(NamedTuple):
    """What an arm is made for.

    Attributes:
        rate: Learning rate.
        steps: Optimizer steps.
        warmup: Those in which the rate rises.
        scratch: Whether the model's weights are random.
    """

    rate: float
    steps: int
    warmup: int
    scratch: bool


class Trained(NamedTuple):
    """A model ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler


def list_targets(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by name: what every arm trains, whatever wraps them."""
    named = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in DENSE_TARGETS}
    return {name.removeprefix("base_model.model."): module for name, module in named.items()}


def read_weight(layer: nn.Module) -> Tensor:
    """Return the effective weight of a SEL layer, else the weight."""
    return layer.get_effective_weight("default") if isinstance(layer, SELLayer) else layer.weight


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> Trained:
    return Trained(model, optimizer, get_scheduler(SCHEDULE, optimizer, task.warmup, task.steps))


def _make_adamw(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=task.rate, weight_decay=WEIGHT_DECAY, fused=True)


def _freeze_others(model: nn.Module, task: Task) -> None:
    """Leave only the target weights trainable; from scratch everything is."""
    if not task.scratch:
        model.requires_grad_(False)
        for layer in list_targets(model).values():
            layer.weight.requires_grad_(True)


def make_full(model: nn.Module, task: Task, everything: bool = False) -> Trained:
    """AdamW on the target weights, or on every parameter of the model."""
    if not everything:
        _freeze_others(model, task)
    return _finish(model, _make_adamw(model.parameters(), task), task)


def make_peft(model: nn.Module, task: Task, config: str, **options: Any) -> Trained:
    """One of PEFT's tuners, by the name of its configuration, under AdamW."""
    wrapped = peft.get_peft_model(model, getattr(peft, config)(target_modules=list(DENSE_TARGETS), **options))
    return _finish(wrapped, _make_adamw(wrapped.parameters(), task), task)


def draw_targets(model: nn.Module) -> nn.Module:
    """Return a plain model whose target weights are what make_sel draws from scratch under the same seed."""
    config = SELConfig(target_modules=list(DENSE_TARGETS), init_target="xavier_uniform", mode="congruent")
    drawn: nn.Module = peft.get_peft_model(model, config).merge_and_unload()
    return drawn.requires_grad_(True)


def make_sel(model: nn.Module, task: Task, **options: Any) -> Trained:
    """SEL with fields of SELConfig other than their defaults, and its own parameter groups."""
    if task.scratch:
        options = {"init_target": "xavier_uniform", "modules_to_save": SCRATCH_PLAIN, **options}
    if options.get("train_raw", True):
        options["base_weight"] = "drop"
    wrapped = peft.get_peft_model(model, SELConfig(target_modules=list(DENSE_TARGETS), **options))
    optimizer = create_sel_optimizer(wrapped, lr=task.rate, weight_decay=WEIGHT_DECAY, fused=True)
    return Trained(wrapped, optimizer, create_sel_scheduler(optimizer, SCHEDULE, task.warmup, task.steps))


class RelativeAdam(torch.optim.AdamW):
    """AdamW whose step on a weight is multiplied by 1 + slope * |w| / rms of the tensor at the start.

    A step of SEL's raw weight moves the effective one by f'(raw), which is 1 + beta * |w| but for the linear path: with
    slope = beta * rms this is what SEL amounts to without its scales.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], others: Iterable[nn.Parameter], slope: float, lr: float
    ) -> None:
        self.relative = {weight: slope / weight.detach().square().mean().sqrt().item() for weight in weights}
        super().__init__([*self.relative, *others], lr=lr, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make AdamW's step, then add slope * |w| times it."""
        before = {weight: weight.clone() for weight in self.relative}
        result = super().step(closure)
        for weight, slope in self.relative.items():
            old = before.pop(weight)
            weight.add_((weight - old).mul_(old.abs()), alpha=slope)
        return result


def make_relative(model: nn.Module, task: Task, slope: float = 0.3) -> Trained:
    """AdamW with steps in proportion to an affine function of the weight, and no reparameterisation."""
    _freeze_others(model, task)
    weights = [layer.weight for layer in list_targets(model).values()]
    chosen = set(map(id, weights))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    return _finish(model, RelativeAdam(weights, others, slope, task.rate), task)


class SignedPower(nn.Module):
    """Powerpropagation: weight = theta * |theta|^(exponent - 1)."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, theta: Tensor) -> Tensor:
        """Return the weight."""
        return theta * theta.abs().pow(self.exponent - 1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return theta."""
        return weight.sign() * weight.abs().pow(1 / self.exponent)


def make_power(model: nn.Module, task: Task, exponent: float = 2.0) -> Trained:
    """AdamW on Powerpropagation's parameters."""
    _freeze_others(model, task)
    for layer in list_targets(model).values():
        parametrize.register_parametrization(layer, "weight", SignedPower(exponent), unsafe=True)
    return _finish(model, _make_adamw(model.parameters(), task), task)


METHODS: dict[str, Callable[..., Trained]] = {
    "full": make_full,
    "peft": make_peft,
    "sel": make_sel,
    "relative": make_relative,
    "power": make_power,
}
