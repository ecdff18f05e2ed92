"""What SELConfig and ScaleConfig are given, from Python or from a file, against the types of their fields."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import sel_layers
from peft import get_peft_model
from torch import nn

from peft_sel import ScaleConfig, SELConfig
from peft_sel.errors import ConfigError


def test_numbers_and_collections_of_other_libraries_become_pythons_own(tmp_path: Path) -> None:
    config = SELConfig(
        r=np.int64(2),
        beta=np.float32(2.5),
        layers_to_transform=np.array([0, 1]),
        target_modules={"q_proj": None}.keys(),
        exp_scale=ScaleConfig(lr_mult=np.float32(3.0)),
    )
    config.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["layers_to_transform"] == [0, 1]
    assert (config.r, config.beta, config.layers_to_transform, config.exp_scale.lr_mult) == (2, 2.5, [0, 1], 3.0)
    assert config.target_modules == {"q_proj"} and type(config.r) is int


def test_annotations_of_later_peft_versions_are_left_alone() -> None:
    @dataclass
    class Later(SELConfig):
        anything: Any = None
        pair: tuple[int, int] = (1, 2)
        names: set[str] | None = None

    assert Later(anything=[1], pair=(3, 4), names={"a"}).pair == (3, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 2.0),
        ("r", True),
        ("r", 2**63),
        ("beta", [1.0]),
        ("beta", 10**400),
        ("beta", True),
        ("beta_rms", "1"),
        ("beta_pattern", ["q"]),
        ("beta_pattern", {"q": "1"}),
        ("mode", ["mismatch"]),
        ("family", {}),
        ("init", 3),
        ("train_raw", 1),
        ("exp_scale", 3),
        ("exp_scale", {"pattern": ["row"]}),
        ("exp_scale", {"lr_mult": "2"}),
        ("exp_scale", {"rank": 2.5}),
        ("exp_scale", {"rank": None}),
        ("exp_scale", {"init": 10**400}),
        ("exp_scale", {"trainable": "no"}),
        ("anneal_steps", float("nan")),
        ("anneal_steps", "1"),
        ("residual_alpha", [1]),
        ("target_modules", 3),
        ("target_modules", [3]),
        ("target_modules", "x" * 20_000),
        ("target_parameters", "x"),
        ("modules_to_save", {"a": 1}),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", 0),
        ("inference_mode", "yes"),
        ("base_model_name_or_path", 3),
        ("revision", []),
        ("auto_mapping", "os"),
        ("peft_sel_version", "9" * 5000),
        ("beta_pattern", {"a{99999999999}": 1.0}),
        ("beta_pattern", {"(" * 5000 + ")" * 5000: 1.0}),
    ],
)
def test_fields_of_a_wrong_type_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b.*=") as caught:
        SELConfig(**{field: value})
    assert len(str(caught.value)) < 500


def test_collections_and_whole_numbers_pass_where_they_did() -> None:
    config = SELConfig(target_modules=("q", "v"), beta=2, residual_alpha=4, layers_to_transform=range(2))
    assert (config.beta, config.target_modules, config.layers_to_transform) == (2, ("q", "v"), [0, 1])
    assert ScaleConfig("row", init=1).init == 1


def _convert_linear(**options: Any) -> nn.Module:
    model = nn.ModuleDict({"layer": nn.Linear(3, 4)})
    return get_peft_model(model, SELConfig(target_modules=["layer"], **options))


def test_a_small_rank_may_exceed_a_smaller_weight() -> None:
    assert len(sel_layers(_convert_linear(r=64))) == 1


def test_a_rank_that_the_weight_cannot_use() -> None:
    with pytest.raises(ConfigError, match=r"layer\.weight is 4 x 3, where a rank above 1024"):
        _convert_linear(r=1025)
    with pytest.raises(ConfigError, match=r"exp_scale\.rank=1025: layer\.weight"):
        _convert_linear(exp_scale=ScaleConfig("lora", rank=1025))
