"""A warning to those who train SEL parameters of several roles in one optimizer group (4.4)."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from peft_sel.base import LIVE_LAYERS
from peft_sel.optim.groups import GroupSettings, find_sel_settings

_seen: WeakSet[Optimizer] = WeakSet()


def warn_of_shared_groups(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Warn, at the first step of an optimizer, if a group of it ignores what sets its SEL parameters apart.

    A group is taken as meant if it has the key "role", holds one parameter, or SEL parameters of one role. Otherwise
    it has one learning rate and one weight decay for roles that have their own: that is said, unless they agree.

    Args:
        optimizer: The optimizer that is about to step.
        args: Of the step, as torch passes them to such a hook.
        kwargs: Of the step.
    """
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    groups = [group for group in optimizer.param_groups if "role" not in group and len(group["params"]) > 1]
    members = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    settings = find_sel_settings(LIVE_LAYERS, members) if members else {}
    for group in groups:
        found = dict.fromkeys(settings[id(p)] for p in group["params"] if p.requires_grad and id(p) in settings)
        for one, other in combinations(found, 2):
            lost = _describe_loss(one, other, float(group.get("weight_decay", 0.0)))
            if one.role != other.role and lost:
                warnings.warn(
                    f"{type(optimizer).__name__} trains {one.role} and {other.role} of a SEL model in one parameter "
                    f"group, so that {lost}; create it with peft_sel.create_sel_optimizer(model, lr=...), or use "
                    "SELTrainer (for other trainers: class MyTrainer(SELTrainerMixin, TheirTrainer))",
                    stacklevel=3,
                )
                return


def _describe_loss(one: GroupSettings, other: GroupSettings, weight_decay: float) -> str:
    """Say what two roles lose in one group."""
    lost = []
    if (one.lr_mult, one.lr_mult_end) != (other.lr_mult, other.lr_mult_end):
        lost.append("their learning-rate multipliers are ignored")
    if weight_decay and one.decays != other.decays:
        spared = one if other.decays else other
        lost.append(f"weight decay shrinks {spared.role}")
    return " and ".join(lost)


register_optimizer_step_pre_hook(warn_of_shared_groups)
