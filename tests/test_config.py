"""SELConfig and ScaleConfig: defaults, JSON, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re

import pytest
from peft import PeftConfig

from peft_sel import ScaleConfig, SELConfig, SELError
from peft_sel.config import BASE_WEIGHTS, BIASES, INIT_TARGETS, RAW_DTYPES
from peft_sel.numerics import FAMILIES, INITS, MODES, PATTERNS
from peft_sel.scale_config import NORMALIZERS


def test_json_round_trip(tmp_path):
    config = SELConfig(
        target_modules=["q_proj"],
        mode="oppose",
        beta=7.5,
        beta_pattern={"layers.0.*": 3.0},
        exp_scale=ScaleConfig("row", init=0.1, lr_mult=50.0, lr_mult_end=8.0, weight_decay=False, transform="exp"),
        inner_multiplier=None,
        offset="column",
        anneal_steps=100,
    )
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, SELConfig)
    assert loaded.inference_mode is False
    assert loaded.to_dict() == config.to_dict()
    assert isinstance(loaded.exp_scale, ScaleConfig) and loaded.exp_scale.lr_mult_end == 8.0


def test_defaults_of_the_contract():
    config = SELConfig()
    assert (config.mode, config.family, config.beta, config.beta_rms, config.init) == (
        "mismatch",
        "symexp",
        "auto",
        0.3,
        "exact",
    )
    assert (config.train_raw, config.r, config.bias, config.base_weight, config.anneal_steps) == (
        True,
        8,
        "none",
        "keep",
        0.2,
    )
    for name in ("exp_scale", "linear_scale", "inner_multiplier"):
        scale = getattr(config, name)
        assert (scale.pattern, scale.lr_mult, scale.lr_mult_end) == ("row_col_mult", None, None)
    assert config.shift is None and config.offset is None
    assert SELConfig().exp_scale is not SELConfig().exp_scale


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "missmatch"}, "mode='missmatch'.*mismatch, congruent"),
        ({"family": "tanh"}, "family='tanh'"),
        ({"init": "zero"}, "init='zero'"),
        ({"bias": "some"}, "bias='some'"),
        ({"base_weight": "disk"}, "base_weight='disk'"),
        ({"raw_dtype": "int8"}, "raw_dtype='int8'"),
        ({"exp_scale": "diagonal"}, "pattern='diagonal'.*row_col_mult"),
        ({"exp_scale": {"patern": "row"}}, "exp_scale=.*patern"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"beta": -1}, "beta=-1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"beta": "big"}, "beta='big'"),
        ({"beta_pattern": {"q_proj": 0.0}}, "beta=0.0"),
        ({"beta_pattern": {"(": 1.0}}, "beta_pattern='\\('"),
        ({"beta_rms": 0.0}, "beta_rms=0.0"),
        ({"r": -1}, "r=-1"),
        ({"r": 2.5}, "r=2.5"),
        ({"residual_alpha": float("nan")}, "residual_alpha=nan"),
        ({"residual_alpha": 0.0}, "residual_alpha=0.0"),
        ({"train_raw": "yes"}, "train_raw='yes'"),
        ({"exp_scale": ScaleConfig("row", init=0.0)}, "exp_scale=0.0: must start above 0"),
        ({"inner_multiplier": ScaleConfig("row", init=-1.0)}, "inner_multiplier=-1.0"),
        ({"linear_scale": ScaleConfig("row", init=-1.0)}, "linear_scale=-1.0: must start at 0"),
        ({"linear_scale": ScaleConfig(init=0.0)}, "linear_scale=0.0: a product"),
        ({"anneal_steps": True}, "anneal_steps=True"),
        ({"anneal_steps": 0}, "anneal_steps=0"),
        ({"anneal_steps": 1.5}, "anneal_steps=1.5"),
        ({"shift": ScaleConfig("global", init=0.1)}, "shift=0.1"),
        ({"shift": "row_col_mult"}, "shift='row_col_mult'.*no gradient"),
        ({"offset": ScaleConfig()}, "offset='row_col_mult'.*column"),
        ({"offset": ScaleConfig("row", transform="exp")}, "offset='exp'"),
        ({"base_weight": "drop", "train_raw": False}, "base_weight='drop'"),
    ],
)
def test_refuses(options, match):
    with pytest.raises(SELError, match=match):
        SELConfig(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr_mult": 0.0}, "lr_mult=0.0"),
        ({"lr_mult_end": -1.0}, "lr_mult_end=-1.0"),
        ({"init": float("inf")}, "init=inf"),
        ({"rank": 0}, "rank=0"),
        ({"transform": "log"}, "transform='log'"),
        ({"pattern": "row", "transform": "exp", "init": 0.0}, "init=0.0: .*logarithm"),
        ({"pattern": "lora", "transform": "exp"}, "transform='exp'.*row_col_mult"),
    ],
)
def test_scale_config_refuses(options, match):
    with pytest.raises(SELError, match=match):
        ScaleConfig(**options)


def read_attributes(cls: type) -> dict[str, str]:
    """Return the entries of a docstring's Attributes by name, each on one line."""
    lines = inspect.getdoc(cls).split("Attributes:\n")[1].split("\nRaises:")[0].splitlines()
    entries: dict[str, str] = {}
    for line in lines:
        if match := re.fullmatch(r"    (\w+): (.*)", line):
            name, entries[match[1]] = match[1], match[2]
        elif line.strip():
            entries[name] += f" {line.strip()}"
    return entries


def default_of(field: dataclasses.Field) -> str:
    """Return a field's default as help writes it."""
    if field.default_factory is not dataclasses.MISSING:
        return "ScaleConfig()" if field.default_factory is ScaleConfig else repr(field.default_factory())
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


@pytest.mark.parametrize("cls", [SELConfig, ScaleConfig])
def test_help_has_every_field_and_its_default(cls):
    entries, fields = read_attributes(cls), dataclasses.fields(cls)
    assert list(entries) == [field.name for field in fields]
    for field in fields:
        stated = re.findall(r"(?:^|\. |; )Default (.+?)(?=[:.,](?: |$))", entries[field.name])
        assert stated == [default_of(field)], field.name
    shown = " ".join(pydoc.render_doc(cls).replace("|", " ").split())
    assert all(f"Default {default_of(field)}" in shown for field in fields)


CHOICES = {
    "mode": MODES,
    "family": FAMILIES,
    "beta": ("auto", "width"),
    "init": INITS,
    "init_target": INIT_TARGETS,
    "normalizer": NORMALIZERS,
    "bias": BIASES,
    "base_weight": BASE_WEIGHTS,
    "raw_dtype": tuple(RAW_DTYPES),
}


def test_help_has_every_choice_and_what_is_open():
    entries, patterns = read_attributes(SELConfig), read_attributes(ScaleConfig)["pattern"]
    for name, choices in CHOICES.items():
        assert all(f'"{choice}"' in entries[name] for choice in choices), name
    assert all(f'"{pattern}"' in patterns for pattern in PATTERNS)
    assert "(open)" in entries["anneal_steps"] and "Those marked (open)" in SELConfig.__doc__
    for name in ("beta_rms", "residual_alpha", "residual_lr_mult", "anneal_steps"):
        assert "positive" in entries[name], name


def test_an_unknown_pattern_is_told_with_its_scale() -> None:
    with pytest.raises(SELError, match=r"inner_multiplier\.pattern='rows': unknown; choose one of global, row"):
        SELConfig(inner_multiplier="rows")
