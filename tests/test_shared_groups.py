"""A warning to those who train a SEL model with an optimizer that knows nothing of SEL's groups."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from test_groups import PAPER, make_base, make_model
from test_training import make_arguments, make_data
from torch.optim import SGD, AdamW, Optimizer
from transformers import Trainer

from peft_sel import ScaleConfig, SELConfig, SELTrainer, create_sel_optimizer, sel_param_groups

SCALES, PAPERS = "raw, exp_scale, linear_scale", "exp_scale, linear_scale and inner_multiplier"
FIX = r"; create it with peft_sel\.create_sel_optimizer\(model, lr=\.\.\.\), or use SELTrainer"
DECAY = "weight decay shrinks inner_multiplier"


def rates_of(roles: str) -> str:
    return f"the learning-rate multipliers of {roles} are ignored"


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def messages(*optimizers: Optimizer, steps: int = 1) -> list[str]:
    """Return what is warned of when optimizers step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()
    return [str(warning.message) for warning in caught]


def test_the_trainers_own_optimizer_is_warned_of_once(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, max_steps=2)
    trainer = Trainer(make_model(r=0, beta=7.5), arguments, train_dataset=make_data())
    with pytest.warns(UserWarning, match=rf"^AdamW trains several roles .* so that {DECAY}{FIX}") as caught:
        trainer.train()
    assert len(caught) == 1
    SELTrainer(make_model(r=0), arguments, train_dataset=make_data()).train()  # and warnings are errors here


@pytest.mark.parametrize(
    ("options", "weight_decay", "expected"),
    [
        ({"r": 0}, 0.01, rf"group \({SCALES} and inner_multiplier\), so that {DECAY};"),
        ({"r": 0, **PAPER}, 0.0, rf"{SCALES} and inner_multiplier\), so that {rates_of(PAPERS)};"),
        ({"r": 2}, 0.01, rf"inner_multiplier and residual\), so that {rates_of('residual')} and {DECAY};"),
        ({"r": 2}, 0.0, rf"{SCALES}, inner_multiplier and residual\), so that {rates_of('residual')};"),
        ({"r": 2, "train_raw": False}, 0.0, rf"\(exp_scale, .* residual\), so that {rates_of('residual')};"),
        (
            {"r": 0, "inner_multiplier": ScaleConfig(lr_mult=2.0)},
            0.1,
            f"so that {rates_of('inner_multiplier')} and {DECAY};",
        ),
        ({"r": 2}, None, f"so that {rates_of('residual')};"),  # of an optimizer that knows no decay
        ({"r": 0}, 0.0, None),  # where nothing sets the roles apart
        ({"r": 0, "inner_multiplier": None}, 0.01, None),
    ],
)
def test_says_what_is_lost(options: dict[str, Any], weight_decay: float | None, expected: str | None) -> None:
    model = make_model(**options)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=weight_decay or 0.0)
    optimizer.param_groups[0]["weight_decay"] = weight_decay
    found = messages(optimizer, steps=3)
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


def make_copied(duplicate: Any) -> PeftModel:
    return duplicate(make_model(r=0, target_modules=["v_proj"]))


def make_injected() -> torch.nn.Module:
    return inject_adapter_in_model(SELConfig(r=0, target_modules=["v_proj"]), make_base())


def make_of_biases() -> PeftModel:
    model = make_model(r=0, bias="sel_only", target_modules=["v_proj"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".sel_parameters." in name and parameter.requires_grad)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_copied(copy.deepcopy),
        lambda: make_copied(lambda model: pickle.loads(pickle.dumps(model))),
        make_injected,
        make_of_biases,
    ],
    ids=["copy", "pickle", "injected", "biases"],
)
def test_every_way_to_get_a_model(make: Any) -> None:
    model = make()
    assert len(messages(AdamW(trainable(model)))) == 1


def test_groups_of_the_users_own_are_taken_as_meant() -> None:
    model = make_model(r=2, **PAPER)
    roles: dict[str, list[Any]] = {}
    for group in sel_param_groups(model, 1e-3):
        roles.setdefault(group["role"], []).extend(group["params"])
    by_role = AdamW([{"params": members} for members in roles.values()], lr=1e-3)
    by_parameter = AdamW([{"params": [parameter]} for parameter in trainable(model)], lr=1e-3)
    marked = AdamW([{"params": trainable(model), "role": "all"}], lr=1e-3)
    own = [AdamW([parameter]) for parameter in trainable(model)]
    ours = [AdamW([{**group, "params": [p]}]) for group in sel_param_groups(model, 1e-3) for p in group["params"]]
    assert messages(by_role, by_parameter, marked, *own, *ours) == []
    assert messages(create_sel_optimizer(model, lr=1e-3), create_sel_optimizer(model, SGD, lr=1e-3)) == []


def test_groups_that_are_added_later_are_looked_at() -> None:
    model = make_model(r=0, target_modules=["v_proj"])
    by_module: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        by_module.setdefault(name.split(".symexplin_")[0], []).extend([parameter] if parameter.requires_grad else [])
    first, *others = (members for members in by_module.values() if members)
    optimizer = AdamW([first[0]], lr=1e-3, weight_decay=0.01)
    assert messages(optimizer, steps=2) == []
    optimizer.add_param_group({"params": first[1:]})
    assert len(messages(optimizer, steps=2)) == 1
    optimizer.add_param_group({"params": others[0][:1]})
    assert messages(optimizer) == []
    optimizer.add_param_group({"params": others[0][1:]})
    assert len(messages(optimizer, steps=2)) == 1


def test_all_groups_are_told_in_one_sentence() -> None:
    model = make_model(r=2, inner_multiplier=ScaleConfig(lr_mult=0.5), target_modules=["v_proj"])
    members: dict[str, list[Any]] = {}
    for group in sel_param_groups(model, 1e-3):
        members.setdefault(group["role"], []).extend(group["params"])
    pairs = [members["raw"] + members["inner_multiplier"], members["exp_scale"] + members["residual"]]
    (found,) = messages(AdamW([{"params": pair} for pair in pairs], lr=1e-3, weight_decay=0.01))
    lost = f"{rates_of('inner_multiplier and residual')} and {DECAY};"
    assert f"(raw and inner_multiplier; exp_scale and residual), so that {lost}" in found


def test_other_models_and_frozen_parameters_do_not_count() -> None:
    model = make_model(r=0)
    base, lora = make_base(), get_peft_model(make_base(), LoraConfig(target_modules=["v_proj"]))
    assert messages(AdamW(trainable(base)), AdamW(trainable(lora))) == []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("symexplin_raw" in name)
    assert messages(AdamW(model.parameters())) == []


def test_an_optimizer_prepared_by_accelerate_is_what_it_holds() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model(r=0)
    good, bad = (
        accelerator.prepare(optimizer) for optimizer in (create_sel_optimizer(model, lr=1e-3), AdamW(trainable(model)))
    )
    assert messages(good) == []
    assert len(messages(bad, steps=2)) == 1
