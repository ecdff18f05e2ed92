"""The report on checkpoints and adapters: what it says must be what a conversion does."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NUM_TARGETS, make_tiny
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peft_sel import ScaleConfig, SELConfig, SELLayer, merge_checkpoint
from peft_sel.checkpoint import TensorReport, inspect_checkpoint, render, summarize
from peft_sel.checkpoint.inspect import _compare_bits
from peft_sel.errors import BrokenMergeError, CheckpointError, NonFiniteWeightError, SELError

ADAPTER = "adapter_model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def make_base(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    make_tiny("qwen2", dtype, tie_word_embeddings=False).save_pretrained(folder, max_shard_size="12KB")
    return folder


def convert(base: Path, **options: Any) -> PeftModel:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), SELConfig(**options))


def layers_of(model: PeftModel) -> dict[str, SELLayer]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SELLayer)}
    return {name.removeprefix("base_model.model."): layer for name, layer in layers.items()}


def change(folder: Path, name: str, edit: Any) -> None:
    """Replace one tensor of a folder by edit(tensor); None removes it."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = edit(tensors[name])
            save_file({key: value for key, value in tensors.items() if value is not None}, path)


def with_first_element(value: float) -> Any:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "congruent", "beta": 7.5}, {"beta": "width", "exp_scale": "row", "offset": "column"}],
    ids=str,
)
def test_model_report_is_what_conversion_does(tmp_path: Path, options: dict[str, Any]) -> None:
    base = make_base(tmp_path / "base")
    reports = inspect_checkpoint(base, config=SELConfig(**options))
    layers = layers_of(convert(base, **options))
    assert {report.name for report in reports} == {f"{name}.weight" for name in layers}
    for report in reports:
        layer = layers[report.name.removesuffix(".weight")]
        weight = layer.get_base_layer().weight.detach()
        assert report.shape == tuple(weight.shape)
        assert report.dtype == "bfloat16"
        # float32 against float64 sums: a relative error of sqrt(numel) roundings at most
        tolerance = math.sqrt(weight.numel()) * torch.finfo(torch.float32).eps
        std = float(weight.double().std(correction=0))
        assert report.std == pytest.approx(std, rel=tolerance)
        assert report.max_over_std == pytest.approx(float(weight.abs().max()) / std, rel=tolerance)
        assert report.beta == float(layer.symexplin_beta["default"])
        assert report.newton_steps == layer.inversion_report["default"].num_steps
        assert (report.num_differing, report.max_ulp, report.round_trip) == (0, 0, "identical")
        assert report.error is report.note is None


def test_float32_distance_is_that_of_a_real_merge(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", torch.float32)
    convert(base).save_pretrained(tmp_path / "adapter")
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out")
    merged = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    original = {name: tensor for path in base.glob("*.safetensors") for name, tensor in load_file(path).items()}
    reports = inspect_checkpoint(base)
    assert any(report.num_differing for report in reports)  # else this test shows nothing
    for report in reports:
        before, after = original[report.name].double(), merged[report.name].double()
        assert report.num_differing == int((before != after).sum())
        before, after = before[before != 0], after[before != 0]  # zeros come back as they are
        spacing = torch.finfo(torch.float32).eps * torch.exp2(torch.floor(torch.log2(before.abs())))
        distance = float(((before - after).abs() / spacing).max())
        assert abs(report.max_ulp - distance) <= 1  # where a power of two lies between, the spacing changes
        assert report.round_trip.endswith(f"max {report.max_ulp} ulp") or report.num_differing == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_distance_in_units_in_the_last_place(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    above_one = 1 + info.eps
    before = torch.tensor([1.0, -1.0, 0.0, 2.0, 0.0, 1.0, -2.0], dtype=dtype)
    after = torch.tensor([above_one, -above_one, -0.0, above_one, 0.0, 1.0, -2.0], dtype=dtype)
    assert _compare_bits(before[:2], after[:2]) == (2, 1)
    assert _compare_bits(before[2:3], after[2:3]) == (1, 0)  # the sign of zero is a bit, too
    assert _compare_bits(before[3:4], after[3:4]) == (1, round(1 / info.eps) - 1)  # down to 1 there are 1/eps numbers
    assert _compare_bits(before[4:], after[4:]) == (0, 0)
    smallest = torch.tensor([info.smallest_normal * info.eps], dtype=dtype)
    assert _compare_bits(smallest, -smallest) == (1, 2)  # one step to zero, one beyond


def test_refused_tensor_is_a_row_not_an_exception(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    change(base, f"{Q_PROJ}.weight", with_first_element(math.nan))
    change(base, "model.layers.1.mlp.up_proj.weight", torch.zeros_like)
    reports = {report.name: report for report in inspect_checkpoint(base)}
    assert len(reports) == NUM_TARGETS
    broken, zero = reports.pop(f"{Q_PROJ}.weight"), reports.pop("model.layers.1.mlp.up_proj.weight")
    assert "1 NaN" in broken.error
    assert (broken.round_trip, broken.newton_steps, broken.beta) == ("refused", None, None)
    assert zero.error is None
    assert "all zeros" in zero.note
    assert zero.round_trip == "identical"
    assert {report.round_trip for report in reports.values()} == {"identical"}
    text = render([broken, zero, *reports.values()])
    assert f"{Q_PROJ}.weight: {broken.error}" in text
    assert text.endswith("1 with errors")


def test_configuration_that_no_tensor_survives(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    reports = inspect_checkpoint(base, config=SELConfig(linear_scale=ScaleConfig(init=1.0), r=0))
    assert len(reports) == NUM_TARGETS
    assert all("1.25*linear_scale" in report.error for report in reports)


@pytest.mark.parametrize("model_type", ["of-tomorrow", None])
def test_unknown_model_type_means_every_matrix_but_embedding_and_head(tmp_path: Path, model_type: str | None) -> None:
    base = make_base(tmp_path / "base")
    known = {report.name for report in inspect_checkpoint(base)}
    change(base, "model.norm.weight", lambda tensor: tensor)
    if model_type is None:
        (base / "config.json").unlink()
    else:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    assert {report.name for report in inspect_checkpoint(base)} == known


def test_targets_of_the_configuration(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    options: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"], "exclude_modules": r".*layers\.0\..*"}
    reports = inspect_checkpoint(base, config=SELConfig(**options))
    assert {report.name for report in reports} == {"lm_head.weight", "model.layers.1.self_attn.q_proj.weight"}


@pytest.mark.parametrize("train_raw", [True, False])
@torch.no_grad()
def test_adapter_report(tmp_path: Path, train_raw: bool) -> None:
    base = make_base(tmp_path / "base")
    options: dict[str, Any] = {
        "train_raw": train_raw,
        "r": 3,
        "residual_alpha": 6.0,
        "exp_scale": ScaleConfig("row_col_mult", transform="exp"),
        "linear_scale": ScaleConfig("global", trainable=False),
        "inner_multiplier": "lora",
        "offset": "column",
        "modules_to_save": ["lm_head"],
    }
    model = convert(base, **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    reports = {report.name: report for report in inspect_checkpoint(tmp_path / "adapter")}
    layers = layers_of(model)
    assert reports.keys() == {*layers, "lm_head.weight"}
    assert reports["lm_head.weight"].shape == (96, 32)
    eps = torch.finfo(torch.float32).eps
    for name, layer in layers.items():
        report = reports[name]
        assert report.error is None
        assert report.shape == (layer.out_features, layer.in_features)
        assert report.beta == float(layer.symexplin_beta["default"])
        a, b = layer.symexplin_residual_a["default"], layer.symexplin_residual_b["default"]
        assert report.residual_norm == pytest.approx(float((2.0 * b @ a).norm()), rel=64 * eps)
        scales = layer.scales("default")
        row, column = (scales["exp_scale"].get_parameter(part).exp() for part in ("row", "column"))
        expected = {
            "exp_scale": float((row[:, None] * column).mean()) * report.beta,
            "inner_multiplier": float((scales["inner_multiplier"].base + _product(scales["inner_multiplier"])).mean()),
            "offset": float(scales["offset"].column.mean()),
        }
        # a mean over up to 1536 numbers of either sign and of size 1
        assert report.scale_means == pytest.approx(expected, rel=64 * eps, abs=64 * eps)
        if train_raw:
            assert report.std == pytest.approx(float(layer.symexplin_raw["default"].std(correction=0)), rel=64 * eps)
        else:
            assert report.std is None


def _product(scale: Any) -> torch.Tensor:
    return scale.b @ scale.a


def test_broken_adapter_is_reported(tmp_path: Path) -> None:
    convert(make_base(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    prefix = "base_model.model.model.layers.0"
    change(tmp_path / "adapter", f"{prefix}.self_attn.q_proj.symexplin_raw", with_first_element(math.inf))
    change(tmp_path / "adapter", f"{prefix}.self_attn.k_proj.symexplin_beta", lambda _: None)
    change(tmp_path / "adapter", f"{prefix}.self_attn.v_proj.symexplin_exp_scale.row", lambda t: t[:-1].clone())
    reports = {report.name.split(".", 2)[2]: report for report in inspect_checkpoint(tmp_path / "adapter")}
    assert "infinite values in raw" in reports["0.self_attn.q_proj"].error
    assert "lacks beta" in reports["0.self_attn.k_proj"].error
    assert "exp_scale.row" in reports["0.self_attn.v_proj"].error
    assert sum(report.error is not None for report in reports.values()) == 3


def test_render_lines_up_and_leaves_empty_columns_out() -> None:
    reports = [
        TensorReport("a.weight", (4, 30), "float32", 0.25, 4.0, 7.5, 3, 0, 0),
        TensorReport("a.longer.weight", (400, 3), "float32", 0.125, 11.0, 12.25, 2, 5, 2),
    ]
    header, rule, *rows, summary = render(reports).splitlines()
    assert header.split() == ["tensor", "shape", "dtype", "std", "max/std", "beta", "steps", "round", "trip"]
    assert rule == "-" * len(header)
    assert [len(row) for row in rows] == [len(header)] * 2
    assert " ".join(rows[1].split()) == "a.longer.weight 400x3 float32 0.125 11 12.25 2 5 differ, max 2 ulp"
    assert summary == summarize(reports)
    assert summary.startswith("2 tensors; 1,320 weights; beta 7.5 to 12.25; 3 Newton steps at most; 1 identical")
    assert summary.endswith("worst 2 ulp")
    assert render([]).splitlines() == ["tensor", "------", "0 tensors; 0 weights"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="LORA"):
        inspect_checkpoint(tmp_path)


def test_quiet_when_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = make_base(tmp_path / "base")
    capfd.readouterr()
    inspect_checkpoint(base, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a dense adapter and one that trains scales only; make a copy before changing anything."""
    folder = tmp_path_factory.mktemp("made")
    make_base(folder / "base")
    convert(folder / "base").save_pretrained(folder / "adapter")
    convert(folder / "base", train_raw=False).save_pretrained(folder / "scales")
    return folder


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copies")
    return tmp_path / "copies"


def assert_merge_refused(folder: Path, adapter: str, error: type[SELError], message: str) -> None:
    before = set(folder.iterdir())
    with pytest.raises(error, match=message):
        merge_checkpoint(folder / "base", folder / adapter, folder / "out")
    assert set(folder.iterdir()) == before


def adapter_faults() -> dict[str, tuple[Any, str]]:
    prefix = f"base_model.model.{Q_PROJ}.symexplin_"

    def drop(key: str) -> Any:
        return lambda tensors: tensors.pop(key)

    def put(key: str, tensor: torch.Tensor) -> Any:
        return lambda tensors: tensors.update({key: tensor})

    return {
        "raw missing": (drop(prefix + "raw"), r"lacks raw of model\.layers\.0\.self_attn\.q_proj"),
        "scale part missing": (drop(prefix + "exp_scale.row"), r"lacks exp_scale\.row"),
        "beta missing": (drop(prefix + "beta"), "lacks beta"),
        "raw of another shape": (
            put(prefix + "raw", torch.zeros(32, 31)),
            r"q_proj.symexplin_raw.*\(32, 31\).*\(32, 32\)",
        ),
        "raw transposed": (
            put(prefix.replace("q_proj", "k_proj") + "raw", torch.zeros(32, 16)),
            r"\(32, 16\).*\(16, 32\)",
        ),
        "residual of another rank": (put(prefix + "residual_a", torch.zeros(3, 32)), r"residual_a.*\(3, 32\)"),
        "scale of another shape": (put(prefix + "linear_scale.column", torch.zeros(33)), r"linear_scale\.column.*33"),
        "scale not configured": (put(prefix + "shift.value", torch.zeros(())), r"shift\.value.*not mention"),
        "unknown part": (put(prefix + "magic", torch.zeros(())), r"symexplin_magic.*not mention"),
        "key of another library": (put("model.x.lora_A.weight", torch.zeros(1)), r"lora_A\.weight that no SEL adapter"),
        "module without a home": (
            put("base_model.model.score.weight", torch.zeros(1)),
            r"1 of its \d+ tensors have no counterpart .*score\.weight",
        ),
        "saved module of another shape": (
            put("base_model.model.model.norm.weight", torch.zeros(33)),
            r"norm\.weight.*\(33,\).*\(32,\)",
        ),
        "converted and replaced": (
            put(prefix.replace("symexplin_", "weight"), torch.zeros(32, 32)),
            r"q_proj\.weight twice over",
        ),
        "another base": (
            put(prefix.replace("symexplin_", "base_layer.weight"), torch.zeros(32, 32)),
            "copy of the base weight .*q_proj.weight differs",
        ),
        "nothing of SEL in it": (lambda tensors: [tensors.pop(key) for key in list(tensors)], "holds no tensor"),
    }


@pytest.mark.parametrize("fault", adapter_faults())
def test_adapter_that_does_not_fit_is_not_merged(copies: Path, fault: str) -> None:
    edit, message = adapter_faults()[fault]
    tensors = load_file(copies / "adapter" / ADAPTER)
    edit(tensors)
    save_file(tensors, copies / "adapter" / ADAPTER)
    assert_merge_refused(copies, "adapter", CheckpointError, message)


def test_base_of_another_size_is_not_merged(copies: Path) -> None:
    shutil.rmtree(copies / "base")
    make_tiny("qwen2", intermediate_size=40).save_pretrained(copies / "base")
    message = r"down_proj\.symexplin_raw has shape \(32, 48\).*\(32, 40\)"
    assert_merge_refused(copies, "adapter", CheckpointError, message)


def test_what_is_no_sel_adapter_is_not_merged(copies: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copies / "base")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(copies / "lora")
    (copies / "pickled").mkdir()
    shutil.copy(copies / "adapter" / "adapter_config.json", copies / "pickled")
    (copies / "pickled" / "adapter_model.bin").write_bytes(b"pickle")
    config = json.loads((copies / "adapter" / "adapter_config.json").read_text())
    for name, text in (("unreadable", "{"), ("of tomorrow", json.dumps({**config, "mode": "quantum"}))):
        (copies / name).mkdir()
        (copies / name / "adapter_config.json").write_text(text)
    for name, message in (
        ("lora", "adapter of type 'LORA', not SYMEXPLIN"),
        ("unreadable", "adapter_config.json: is not readable JSON"),
        ("of tomorrow", "adapter_config.json: cannot be used: mode='quantum'"),
        ("base", "holds no adapter_config.json"),
        ("nowhere", "there is no such folder"),
        ("pickled", r"adapter_model\.bin.*never opened"),
    ):
        assert_merge_refused(copies, name, CheckpointError, message)
    with pytest.raises(CheckpointError, match="is an adapter, not a model checkpoint"):
        merge_checkpoint(copies / "adapter", copies / "adapter", copies / "out")


@pytest.mark.parametrize("which", ["base", "adapter"])
def test_truncated_file_is_not_merged(copies: Path, which: str) -> None:
    path = sorted((copies / which).glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    assert_merge_refused(copies, "adapter", CheckpointError, f"{path.name}: is .*corrupt")


@pytest.mark.parametrize("part", ["raw", "exp_scale.row", "residual_b"])
def test_broken_adapter_is_not_merged(copies: Path, part: str) -> None:
    change(copies / "adapter", f"base_model.model.{Q_PROJ}.symexplin_{part}", with_first_element(math.nan))
    assert_merge_refused(copies, "adapter", BrokenMergeError, rf"{Q_PROJ}\.weight")


def test_scale_only_adapter_is_not_merged_into_nan(copies: Path) -> None:
    change(copies / "base", f"{Q_PROJ}.weight", with_first_element(math.nan))
    assert_merge_refused(copies, "scales", NonFiniteWeightError, rf"{Q_PROJ}\.weight")
