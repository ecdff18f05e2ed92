"""Families, log_curvature, normalize_by_inner_mult and normalizer in models, layers and files."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from models import assert_same_bits, clone_state, make_tiny
from moe import convert_moe, make_moe
from peft import PeftModel, get_peft_model
from test_layer import make_layer
from test_merge import load_all, logits_of, make_adapter, save_base
from torch import nn
from transformers import AutoModelForCausalLM

from peft_sel import ScaleConfig, SELConfig, SELError, SELLayer, merge_checkpoint, sel_param_groups
from peft_sel.checkpoint.inspect import inspect_checkpoint
from peft_sel.logs import collect_scale_means
from peft_sel.modules import SELLinear
from peft_sel.numerics import expand_parts

TABLE_6 = {
    f"log={log} normalised={normalised}": {"log_curvature": log, "normalize_by_inner_mult": normalised}
    for log, normalised in product((False, True), (False, True))
}
OPTIONS: dict[str, dict[str, Any]] = {
    **TABLE_6,
    "fixed": {"normalizer": "fixed"},
    "fixed, of every kind": {
        "normalizer": "fixed",
        "exp_scale": ScaleConfig("lora", rank=2),
        "linear_scale": "row_col_add",
        "log_curvature": True,
        "inner_multiplier": "column",
    },
    "fixed, small": {"normalizer": "fixed", "train_raw": False, "r": 3, "log_curvature": True},
    "positive": {"exp_scale": ScaleConfig(transform="exp"), "linear_scale": None, "normalizer": "fixed"},
    "sinh": {"family": "sinh", "mode": "congruent"},
    "sinh, all": {"family": "sinh", "mode": "congruent", "normalizer": "fixed", **TABLE_6["log=True normalised=True"]},
    "damped": {"family": "damped", "mode": "congruent"},
    "damped, all": {
        "family": "damped",
        "mode": "congruent",
        "offset": "column",
        "normalizer": "fixed",
        "beta": 7.5,
        **TABLE_6["log=True normalised=True"],
    },
    "damped exp_only": {"family": "damped", "mode": "exp_only", "offset": "row_col_mult", "beta": 12.5},
}
every_option = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("variants") / "base", torch.bfloat16)


@every_option
def test_conversion_changes_no_bit(name: str) -> None:
    """bf16 and fp16, both zeros among the weights."""
    for dtype in (torch.bfloat16, torch.float16):
        model = make_tiny("qwen3", dtype)
        before = clone_state(model)
        merged = get_peft_model(model, SELConfig(**OPTIONS[name])).merge_and_unload()
        assert_same_bits(merged.state_dict(), before)


@every_option
def test_files_merge_and_load_as_the_trained_model(tmp_path: Path, base: Path, name: str) -> None:
    adapted = make_adapter(base, tmp_path / "adapter", **OPTIONS[name])
    merge_checkpoint(base, adapted.folder, tmp_path / "out")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapted.folder, low_cpu_mem_usage=True
    )
    assert torch.equal(logits_of(loaded), adapted.logits)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(plain), adapted.logits)
    adapted.model.merge_and_unload().save_pretrained(tmp_path / "reference")
    out, original = load_all(tmp_path / "out"), load_all(base)
    assert_same_bits(out, load_all(tmp_path / "reference"))
    assert any(not torch.equal(out[key], original[key]) for key in out)


@every_option
def test_inspect_rehearses_and_reports(tmp_path: Path, base: Path, name: str) -> None:
    reports = inspect_checkpoint(base, config=SELConfig(**OPTIONS[name]), progress=False)
    assert [report.round_trip for report in reports] == ["identical"] * len(reports)
    adapter = make_adapter(base, tmp_path / "adapter", steps=0, **OPTIONS[name]).folder
    for report in inspect_checkpoint(adapter, progress=False):
        assert report.error is None
        # A mean of products of float32 square roots, or of exponentials of logarithms: a few roundings.
        assert all(abs(mean - 1) <= 1e-5 for mean in report.scale_means.values()), report.scale_means


@pytest.mark.parametrize("name", ["fixed, of every kind", "sinh, all", "damped, all", "log=False normalised=True"])
def test_experts_keep_their_bits(tmp_path: Path, name: str) -> None:
    """Every expert has its own beta, so its own constant factors."""
    model = make_moe("qwen3_moe", torch.bfloat16)
    before = clone_state(model)
    model.save_pretrained(tmp_path / "base")
    options = {key: value for key, value in OPTIONS[name].items() if key != "beta"}
    adapted = convert_moe(model, **options)
    stack = next(m for m in adapted.modules() if isinstance(m, SELLayer))
    assert stack.symexplin_beta["default"].unique().numel() > 1
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "symexplin_exp_scale" in key or "symexplin_inner" in key:
                parameter.add_(0.01 * torch.rand_like(parameter))
    assert all(math.isfinite(mean) for mean in collect_scale_means(adapted).values())
    adapted.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    merged = adapted.merge_and_unload().state_dict()
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), merged)
    assert any(not torch.equal(merged[key], before[key]) for key in merged)
    untrained = convert_moe(make_moe("qwen3_moe", torch.bfloat16), **options).merge_and_unload()
    assert_same_bits(untrained.state_dict(), before)


def parameters_of(layer: SELLinear) -> dict[str, nn.Parameter]:
    scales = layer.scales("default").items()
    return {f"{scale}.{part}": value for scale, module in scales for part, value in module.named_parameters()}


def oracle_weight(layer: SELLinear, changes: dict[str, Any], kind: str) -> np.ndarray:
    """The layer's weight from its parameters by SPEC.md: kappa / beta with log_curvature, factors with fixed."""
    beta = reference.wide(layer.symexplin_beta["default"])
    parameters = {name: reference.wide(changes.get(name, value)) for name, value in parameters_of(layer).items()}
    values: dict[str, Any] = {"linear_scale": 0, "inner_multiplier": 1, "offset": 0, "shift": 0}
    for scale in layer.scales("default"):
        parts = {key.partition(".")[2]: value for key, value in parameters.items() if key.startswith(f"{scale}.")}
        options = layer.sel_config["default"]
        logarithmic = (scale == "inner_multiplier" and options.log_curvature) or (
            scale == "offset" and kind == "damped"
        )
        if logarithmic:
            parts = {part: np.exp(value) for part, value in parts.items()}
        values[scale] = reference.expand(getattr(options, scale).pattern, parts)
        if scale == "inner_multiplier" and options.log_curvature:
            values[scale] = values[scale] / beta
        if options.normalizer == "fixed" and scale == "exp_scale":
            values[scale] = values[scale] / beta
        if options.normalizer == "fixed" and scale == "linear_scale" and kind == "symexp":
            values[scale] = values[scale] / max(beta, 7.5)
    raw = layer.symexplin_raw["default"]
    scales = [values[scale] for scale in reference.SCALES]
    return reference.effective_weight(raw, *scales, beta, options.mode, kind, options.normalize_by_inner_mult)


@pytest.mark.parametrize("normalizer", ["folded", "fixed"])
@pytest.mark.parametrize(("log", "normalised"), list(product((False, True), (False, True))))
@pytest.mark.parametrize("kind", reference.FAMILIES)
def test_values_and_gradients_of_the_trained_parameters(
    kind: str, log: bool, normalised: bool, normalizer: str
) -> None:
    """float64 against differences of the oracle, in every mode, with another pattern for each scale."""
    for mode, patterns in product(
        reference.FAMILIES[kind][0], (("row_col_mult", "column", "row_col_mult"), ("lora", "row_col_add", "row"))
    ):
        scales = dict(zip(reference.SCALES[:3], patterns, strict=True))
        if kind != "symexp":
            scales |= {"linear_scale": "row"} if kind == "damped" else {}
            scales = {scale: pattern for scale, pattern in scales.items() if scale in reference.FAMILIES[kind][1]}
        if kind != "sinh":
            scales["offset"] = "column"
        variants = {"log_curvature": log, "normalize_by_inner_mult": normalised, "normalizer": normalizer}
        layer = make_layer(family=kind, mode=mode, beta=9.0, r=0, **scales, **variants)
        with torch.no_grad():
            for parameter in parameters_of(layer).values():
                parameter.add_(0.1 * torch.rand_like(parameter))
        weight = layer.get_effective_weight("default")
        assert reference.relative_error(weight, oracle_weight(layer, {}, kind)) <= 2e-14  # float64, z below 10
        grad = torch.randn_like(weight)
        weight.backward(grad)
        for name, parameter in parameters_of(layer).items():
            if mode == "exp_only" and name.startswith("linear_scale"):
                continue

            def loss(value, name=name, layer=layer, grad=grad):
                return (reference.wide(grad) * oracle_weight(layer, {name: value}, kind)).sum()

            want = reference.differentiate(loss, parameter)
            error = abs(reference.wide(parameter.grad) - want).max()
            assert error <= 1e-8 * max(abs(want).max(), 1e-3), (mode, name)
        raw = layer.symexplin_raw["default"]
        assert (raw.grad[raw == 0] != 0).all() and (raw == 0).sum() == 2


@pytest.mark.parametrize("beta", [1.5, 7.5, 20.0])
@pytest.mark.parametrize("pattern", reference.PATTERNS)
def test_folded_and_fixed_are_one_function_with_other_steps(pattern: str, beta: float) -> None:
    """At the start and after equal changes; the gradients of the parameters differ by the factor."""
    layers = []
    for normalizer in ("folded", "fixed"):
        torch.manual_seed(0)
        options = {"exp_scale": pattern, "linear_scale": pattern, "normalizer": normalizer, "beta": beta, "r": 0}
        layers.append(make_layer(**options))
    folded, fixed = layers
    # Two float64 roundings of the scales, 1 + z times steeper in raw.
    torch.testing.assert_close(fixed.symexplin_raw["default"], folded.symexplin_raw["default"], rtol=1e-14, atol=0)
    ratios = {}
    for name, value in parameters_of(fixed).items():
        scale, part = name.split(".")
        if scale == "inner_multiplier":
            continue
        factor = 1 / (beta if scale == "exp_scale" else max(beta, 7.5))
        if part in ("value", "row", "base") or (part == "column" and pattern in ("column", "row_col_mult")):
            assert (value == 1).all(), name
        # What is multiplied: both factors of a product by the root, all terms of a sum, and one factor of B @ A.
        ratios[name] = {"row_col_mult": factor**0.5}.get(pattern, 1.0 if part == "a" else factor)
    steps = {name: 0.1 * torch.randn_like(value) for name, value in parameters_of(fixed).items()}
    with torch.no_grad():
        for name, value in parameters_of(fixed).items():
            value += steps[name]
            parameters_of(folded)[name].add_(ratios.get(name, 1.0) * steps[name])
    weights = [layer.get_effective_weight("default") for layer in layers]
    torch.testing.assert_close(*weights, rtol=1e-13, atol=0)
    for weight in weights:
        weight.sum().backward()
    for name, value in parameters_of(fixed).items():
        want = ratios.get(name, 1.0) * parameters_of(folded)[name].grad
        torch.testing.assert_close(value.grad, want, rtol=1e-12, atol=1e-14)


def test_fixed_keeps_a_start_that_was_chosen() -> None:
    scale = ScaleConfig("row", init=0.25)
    for normalizer in ("folded", "fixed"):
        layer = make_layer(exp_scale=scale, normalizer=normalizer, beta=8.0)
        exp_scale = layer.scales("default")["exp_scale"]
        assert (expand_parts("row", exp_scale.parts(layer.symexplin_beta["default"])) == 0.25).all()
        assert exp_scale.start == 0.25
        assert exp_scale.row.tolist() == [0.25 if normalizer == "folded" else 2.0] * 3


@pytest.mark.parametrize("pattern", ["global", "row", "column", "row_col_mult"])
def test_logarithms_start_where_the_spec_says(pattern: str) -> None:
    layer = make_layer(inner_multiplier=pattern, exp_scale=ScaleConfig(pattern, transform="exp"), log_curvature=True)
    share = 2 if pattern == "row_col_mult" else 1
    for value in layer.scales("default")["inner_multiplier"].parameters():
        assert value.tolist() == pytest.approx([math.log(3.0) / share] * len(value), rel=1e-15)
    for value in layer.scales("default")["exp_scale"].parameters():  # the inverse transform of v**(1/2)
        assert value.tolist() == pytest.approx([-math.log(3.0) / share] * len(value), rel=1e-15)
    damped = make_layer(family="damped", mode="congruent", offset=pattern)
    for value in damped.scales("default")["offset"].parameters():
        assert value.tolist() == pytest.approx([math.log(0.5) / share] * len(value), rel=1e-15)


@every_option
def test_logged_means_start_at_one(name: str) -> None:
    """Relative to where each scale starts: the values after logarithms and constant factors, not the parameters."""
    means = collect_scale_means(get_peft_model(make_tiny(), SELConfig(**OPTIONS[name])))
    starts = {key: means.pop(key) for key in [*means] if key.endswith("/start")}  # where the scale's name does not say
    assert starts == ({"offset/start": 0.5} if "offset/q_proj" in means and "damped" in name else {})
    assert means and all(abs(mean - 1) <= 1e-5 for mean in means.values()), means


@pytest.mark.parametrize("log", [False, True])
def test_log_curvature_keeps_the_groups_of_the_inner_multiplier(log: bool) -> None:
    model = get_peft_model(
        make_tiny(), SELConfig(inner_multiplier=ScaleConfig(lr_mult=0.01, lr_mult_end=0.5), log_curvature=log)
    )
    (group,) = [group for group in sel_param_groups(model, lr=1.0) if group["role"] == "inner_multiplier"]
    assert (group["lr"], group["lr_mult_end"], group["weight_decay"]) == (0.01, 0.5, 0.0)
    assert len(group["params"]) == 2 * 14


@every_option
def test_configurations_survive_json(tmp_path: Path, name: str) -> None:
    config = SELConfig(**OPTIONS[name])
    config.save_pretrained(tmp_path)
    loaded = SELConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.scale_configs() == config.scale_configs()


def test_scales_that_a_family_lacks_resolve_to_none() -> None:
    sinh, damped = SELConfig(family="sinh", mode="congruent"), SELConfig(family="damped", mode="congruent")
    assert sinh.linear_scale is None and list(sinh.scale_configs()) == ["exp_scale", "inner_multiplier"]
    assert damped.linear_scale == ScaleConfig() and list(damped.scale_configs()) == [*reference.FAMILIES["damped"][1]]
    assert damped.scale_configs()["offset"].trainable is False  # None fixes a scale at its start, here 0.5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"family": "sinh"}, "mode='mismatch': family='sinh' has only congruent"),
        ({"family": "damped", "mode": "oppose"}, "mode='oppose': family='damped' has only congruent and exp_only"),
        ({"family": "sinh", "mode": "congruent", "linear_scale": "row"}, "linear_scale='row'.*sinh.*leave it out"),
        ({"family": "sinh", "mode": "congruent", "offset": "row"}, "offset='row'.*sinh"),
        ({"family": "sinh", "mode": "congruent", "shift": "row"}, "shift='row'.*sinh"),
        ({"family": "damped", "mode": "congruent", "shift": "row"}, "shift='row'.*damped"),
        ({"family": "damped", "mode": "congruent", "offset": ScaleConfig("row", init=0.0)}, "offset=0.0.*n above 0"),
        ({"family": "damped", "mode": "congruent", "offset": ScaleConfig("row", init=-1.0)}, "offset=-1.0.*n above 0"),
        ({"family": "damped", "mode": "congruent", "offset": "lora"}, "offset='lora'.*logarithm.*row_col_mult"),
        ({"log_curvature": True, "inner_multiplier": None}, "log_curvature=True: needs an inner_multiplier"),
        ({"log_curvature": True, "inner_multiplier": "lora"}, "log_curvature=True: a sum .lora. has no logarithm"),
        ({"log_curvature": True, "inner_multiplier": "row_col_add"}, "log_curvature=True: a sum"),
        ({"normalize_by_inner_mult": True, "inner_multiplier": None}, "normalize_by_inner_mult=True: needs an inner"),
        (
            {"normalize_by_inner_mult": True, "inner_multiplier": ScaleConfig("row", init=0.0)},
            "inner_multiplier=0.0: must start above 0",
        ),
        ({"normalize_by_inner_mult": "yes"}, "normalize_by_inner_mult='yes': must be True or False"),
        ({"normalizer": "loose"}, "normalizer='loose'.*folded, fixed"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_the_reason(options: dict, match: str) -> None:
    with pytest.raises(SELError, match=match):
        SELConfig(**options)


def test_damped_without_linear_path_names_the_tensor_that_it_cannot_reach() -> None:
    model = make_tiny()
    before = clone_state(model)
    with pytest.raises(SELError, match=r"beta=1.*q_proj.weight: .*reaches no large weight"):
        get_peft_model(model, SELConfig(family="damped", mode="exp_only", beta=1.0))
    assert_same_bits(model.state_dict(), before)
