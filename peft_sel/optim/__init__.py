"""Optimizers and schedulers for SEL parameters."""

from peft_sel.optim.anneal import (
    AnnealedSchedule,
    anneal_multiplier,
    anneal_scheduler,
    create_sel_scheduler,
    relative_multiplier,
    resolve_anneal_steps,
)
from peft_sel.optim.groups import ROLES, check_param_groups, create_sel_optimizer, sel_param_groups
from peft_sel.optim.shared_groups import warn_of_shared_groups

__all__ = [
    "ROLES",
    "AnnealedSchedule",
    "anneal_multiplier",
    "anneal_scheduler",
    "check_param_groups",
    "create_sel_optimizer",
    "create_sel_scheduler",
    "relative_multiplier",
    "resolve_anneal_steps",
    "sel_param_groups",
    "warn_of_shared_groups",
]
