"""A warning to those who train SEL parameters of several roles in one optimizer group (4.4)."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from peft_sel.base import LIVE_LAYERS
from peft_sel.optim.groups import ROLES, GroupSettings, find_sel_settings

_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many groups


def warn_of_shared_groups(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Warn, at the first step of an optimizer and of groups added later, if a group ignores what sets roles apart.

    A group is taken as meant if it has the key "role", holds one parameter, or SEL parameters of one role. Otherwise
    it has one learning rate and one weight decay for roles that have their own: that is said, unless they agree.

    Args:
        optimizer: The optimizer that is about to step.
        args: Of the step, as torch passes them to such a hook.
        kwargs: Of the step.
    """
    first = _seen.get(optimizer, 0)
    if first == len(optimizer.param_groups):
        return
    _seen[optimizer] = len(optimizer.param_groups)
    groups = [g for g in optimizer.param_groups[first:] if "role" not in g and len(g["params"]) > 1]
    members = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    settings = find_sel_settings(LIVE_LAYERS, members) if members else {}
    shared: dict[str, None] = {}
    rates: set[str] = set()
    shrunk: set[str] = set()
    for group in groups:
        found = dict.fromkeys(settings[id(p)] for p in group["params"] if p.requires_grad and id(p) in settings)
        roles = set()
        for one, other in combinations(found, 2):
            lost_rates, lost_sparing = _find_losses(one, other, decays=bool(group.get("weight_decay")))
            rates |= lost_rates
            shrunk |= lost_sparing
            roles |= {one.role, other.role} if lost_rates or lost_sparing else set()
        shared |= {_list_roles(roles): None} if roles else {}
    if shared:
        lost = [f"the learning-rate multipliers of {_list_roles(rates)} are ignored"] if rates else []
        lost += [f"weight decay shrinks {_list_roles(shrunk)}"] if shrunk else []
        warnings.warn(
            f"{type(optimizer).__name__} trains several roles of a SEL model in one parameter group "
            f"({'; '.join(shared)}), so that {' and '.join(lost)}; create it with peft_sel.create_sel_optimizer(model, "
            "lr=...), or use SELTrainer (for other trainers: class MyTrainer(SELTrainerMixin, TheirTrainer))",
            stacklevel=3,
        )


def _find_losses(one: GroupSettings, other: GroupSettings, *, decays: bool) -> tuple[set[str], set[str]]:
    """Return which of two roles lose their learning-rate multipliers in one group, and which are not spared a decay."""
    if one.role == other.role:
        return set(), set()
    multipliers = {s.role: (s.lr_mult, s.lr_mult_end) for s in (one, other)}
    differ = multipliers[one.role] != multipliers[other.role]
    rates = {role for role, own in multipliers.items() if differ and own != (1.0, 1.0)}
    shrunk = {s.role for s in (one, other) if decays and one.decays != other.decays and not s.decays}
    return rates, shrunk


def _list_roles(roles: set[str]) -> str:
    *names, last = sorted(roles, key=ROLES.index)
    return f"{', '.join(names)} and {last}" if names else last


register_optimizer_step_pre_hook(warn_of_shared_groups)
