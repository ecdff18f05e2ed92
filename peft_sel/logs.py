"""Logs of a training: the learning rate of every role, and how far the scales have moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peft_sel.conversion import BIAS, HOLDER_NAME
from peft_sel.layer import SELLayer
from peft_sel.numerics import mean_value
from peft_sel.partitioned import gathered
from peft_sel.sharded import gather
from peft_sel.structured import StructuredScale, transform_parts

START = "start"  # in the place of a role
USUAL_STARTS = {"exp_scale": 1.0, "linear_scale": 1.0, "inner_multiplier": 1.0, "offset": 0.0, "shift": 0.0}


def collect_learning_rates(groups: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rates of optimizer groups by role.

    Args:
        groups: Groups of sel_param_groups, as an optimizer holds them; groups without a role count as "other".

    Returns:
        One entry per role, or smallest and largest under <role>_min and <role>_max: always for the residual (one rate
        per distinct beta), else where the groups of a role differ.
    """
    by_role: dict[str, list[float]] = {}
    for group in groups:
        by_role.setdefault(group.get("role", "other"), []).append(float(group["lr"]))
    rates: dict[str, float] = {}
    for role, values in by_role.items():
        smallest, largest = min(values), max(values)
        if role == "residual" or smallest < largest:
            rates |= {f"{role}_min": smallest, f"{role}_max": largest}
        else:
            rates[role] = smallest
    return rates


@torch.no_grad()
def collect_scale_means(model: nn.Module) -> dict[str, float]:
    """Measure how far the trainable scales of the active adapters have moved; under FSDP2 all processes have to.

    Args:
        model: A model with SEL layers.

    Returns:
        By "<scale>/<role>", such as "exp_scale/q_proj" and, of its bias, "exp_scale/q_proj.bias" (the role is the last
        part of the module's name): the scale's mean over the weight, relative to its start (the mean itself where it
        starts at 0), averaged over the layers. Where the name of a scale does not say which of the two (an offset that
        does not start at 0, another one that does), its start is there as "<scale>/start".

    Raises:
        MultiplierSignError: If normalize_by_inner_mult divides by a multiplier that is not above 0.
    """
    found: dict[str, list[float]] = {}
    with gathered(p for m in model.modules() if isinstance(m, StructuredScale) for p in m.parameters()):
        for path, layer in model.named_modules():
            if isinstance(layer, SELLayer):
                for adapter in layer.active_adapters:
                    for name, scale in layer.scales(adapter).items():
                        if any(part.requires_grad for part in scale.parameters()):
                            key = f"{name}/{name_role(path)}"
                            scale.check_sign(layer.weight_name)
                            mean = _mean_scale(scale, layer.symexplin_beta[adapter])
                            found.setdefault(key, []).append(mean / (scale.start or 1.0))
                            if bool(scale.start) != bool(USUAL_STARTS[name]):
                                found.setdefault(f"{name}/{START}", []).append(scale.start)
    return {key: sum(values) / len(values) for key, values in found.items()}


def name_role(path: str) -> str:
    """Return the last part of a module's or parameter's name; of a bias the last two, as in "q_proj.bias"."""
    owner, _, name = path.rpartition(f".{HOLDER_NAME}.")
    last = path.rpartition(".")[2]
    return f"{owner.rpartition('.')[2]}.{BIAS}" if name == BIAS else last


def _mean_scale(scale: StructuredScale, beta: Tensor) -> float:
    """Return the mean of a scale over the weight, from its parts alone."""
    own = {name: gather(getattr(scale, name)).to(beta.device) for name in scale.part_names}
    return mean_value(scale.pattern, transform_parts(scale.config, own, beta))


class SELCallback(TrainerCallback):
    """Adds scale trajectories and the learning rate of every role to Trainer's logs.

    Each training log gains sel/lr/<role> (the rate of the step just taken, like Trainer's own learning_rate) and
    sel/scale/<scale>/<module role> (see collect_scale_means), in state.log_history and in every callback that comes
    after this one: all share one dict of logs. SELTrainer adds it by itself, ahead of the reporters and behind the
    callbacks that print.

    A stock Trainer takes callbacks=[SELCallback()]; the figures are in state.log_history then, but not in the reporters
    that report_to names, which come before all callbacks. To have them in TensorBoard too, list its callback behind
    this one: report_to="none" and callbacks=[SELCallback(), TensorBoardCallback()], from transformers.integrations.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the learning rates of this step: when Trainer logs, the scheduler has already moved on."""
        self._rates = collect_learning_rates(kwargs["optimizer"].param_groups)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add to the logs of a training step; evaluation results and the final summary get no figures of SEL's."""
        logs: dict[str, float] = kwargs["logs"]
        for key in state.log_history[-1].keys() - {"step"}:  # PrinterCallback takes out what it does not print
            logs.setdefault(key, state.log_history[-1][key])
        if "loss" not in logs:
            return
        added = {f"sel/lr/{role}": rate for role, rate in self._rates.items()}
        added |= {f"sel/scale/{key}": mean for key, mean in collect_scale_means(kwargs["model"]).items()}
        logs.update(added)
        state.log_history[-1].update(added)
