"""Files that someone else wrote: what lies, explodes or never ends is refused in one line, and nothing is left."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refusals import (
    CONFIG,
    MODEL,
    RAW,
    TENSORS,
    assert_refused,
    edit_header,
    edit_json,
    edit_tensors,
    make_folders,
)
from safetensors.torch import load_file

from peft_sel import SELConfig, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint
from peft_sel.checkpoint.experts import find_split_stacks
from peft_sel.checkpoint.shards import TensorEntry
from peft_sel.errors import NewerFormatError
from peft_sel.untrusted import MAX_JSON_BYTES, MAX_JSON_DEPTH, parse_json, read_json

BETA = RAW.replace("raw", "beta")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return make_folders(tmp_path)


@pytest.fixture
def no_memory_to_waste() -> Iterator[None]:
    """Two GB of address space on top of what there is."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_format_version_is_saved_and_a_newer_one_refused(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    assert json.loads((adapter / CONFIG).read_text())["format_version"] == SELConfig().format_version == 1
    edit_json(adapter / CONFIG, format_version=2, mode="of format 2")
    assert_refused(base, adapter, "format_version 2.*up to 1; run pip install -U", inspected=adapter, load=True)
    with pytest.raises(NewerFormatError):
        SELConfig.from_pretrained(adapter)
    edit_json(adapter / CONFIG, format_version=0, mode="mismatch")
    assert_refused(base, adapter, "format_version=0", inspected=adapter, load=True)


def test_an_adapter_without_a_format_version_has_the_first(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    config = json.loads((adapter / CONFIG).read_text())
    del config["format_version"]
    (adapter / CONFIG).write_text(json.dumps(config))
    assert SELConfig.from_pretrained(adapter).format_version == 1
    merge_checkpoint(base, adapter, base.parent / "out", progress=False)


def test_an_unknown_field_is_left_out_with_a_warning(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    edit_json(adapter / CONFIG, of_tomorrow=3)
    with pytest.warns(UserWarning, match="of_tomorrow"):
        merge_checkpoint(base, adapter, base.parent / "out", progress=False)


@pytest.mark.parametrize("file", ["base/config.json", f"adapter/{CONFIG}"])
@pytest.mark.parametrize("kind", ["twice", "deep", "list", "pipe", "dangling", "hole", "surrogate", "latin"])
def test_json_that_lies_or_never_ends(folders: tuple[Path, Path], file: str, kind: str) -> None:
    base, adapter = folders
    path = base.parent / file
    text = path.read_text().rstrip()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "hole":
        with open(path, "wb") as hole:
            hole.truncate(MAX_JSON_BYTES + 1)
    else:
        deep = text[:-1] + ', "a": ' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}"
        twice = text[:-1] + ', "model_type": "llama", "r": 1, "model_type": "llama", "r": 2}'
        texts = {
            "twice": twice,
            "deep": deep,
            "list": "[1]",
            "surrogate": '{"\\ud800": 1, "\\ud800": 2}',
            "latin": "{'\xe9'}",
        }
        path.write_bytes(texts[kind].encode("latin-1"))
    is_base = file.startswith("base")
    messages = {"twice": "comes twice", "surrogate": "comes twice", "deep": "too deeply", "hole": "larger than"}
    missing = f"no {CONFIG}" if kind in ("pipe", "dangling") and not is_base else "is not readable JSON"
    assert_refused(base, adapter, messages.get(kind, missing))


def test_peft_reads_no_configuration_that_says_two_things(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    text = (adapter / CONFIG).read_text().rstrip()
    (adapter / CONFIG).write_text(text[:-1] + ', "beta_rms": 0.1}')
    assert_refused(base, adapter, "'beta_rms' comes twice", inspected=adapter, load=True)


def test_depth_that_is_allowed() -> None:
    fits = '{"a":' * MAX_JSON_DEPTH + "1" + "}" * MAX_JSON_DEPTH
    assert json.loads(fits) == parse_json(fits)
    with pytest.raises(ValueError, match="too deeply"):
        parse_json('{"a":' + fits + "}")
    with pytest.raises(ValueError, match="too deeply"):
        parse_json("[" * 200_000)


def test_special_numbers_pass_as_transformers_writes_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json(tmp_path / "config.json") == {"time_step_limit": [0.0, float("inf")]}


def test_header_that_names_a_tensor_twice(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    entry = b'"model.norm.weight":{"dtype":"I32","shape":[16],"data_offsets":[0,64]}'
    edit_header(base / MODEL, lambda header: b"{" + entry + b"," + header[1:])
    assert_refused(
        base,
        adapter,
        r"model\.safetensors: has a broken header \(the key 'model.norm.weight' comes twice",
        inspected=base,
    )


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("a\nb", [0], "cannot be printed"),
        ("\x1b]0;x\x07", [0], "cannot be printed"),
        ("x" * 1001, [0], "too long"),
        ("empty", [2**62, 0], "no tensor can have"),
        ("empty", [0, 2**40, 2**40], "no tensor can have"),
        ("empty", [1] * 70 + [0], "no tensor can have"),
    ],
)
def test_names_and_shapes_that_no_model_has(
    folders: tuple[Path, Path], name: str, shape: list[int], match: str
) -> None:
    base, adapter = folders
    for file, inspected in ((adapter / TENSORS, adapter), (base / MODEL, base)):
        size = file.stat().st_size
        entry = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})[:-1].encode()
        edit_header(file, lambda header, entry=entry: entry + b"," + header[1:])
        assert file.stat().st_size > size
        assert_refused(base, adapter, match, inspected=inspected)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_curvature_that_is_none(folders: tuple[Path, Path], value: float) -> None:
    base, adapter = folders
    edit_tensors(adapter / TENSORS, lambda tensors: tensors[BETA].fill_(value))
    assert_refused(base, adapter, "a beta that is not positive and finite", load=False)
    report = next(report for report in inspect_checkpoint(adapter, progress=False) if "q_proj" in report.name)
    assert report.error is not None and "not positive and finite" in report.error


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, torch.float64, torch.bfloat16])
def test_tensors_of_another_kind(folders: tuple[Path, Path], dtype: torch.dtype) -> None:
    base, adapter = folders
    for key in (RAW, BETA, RAW.replace("raw", "residual_a"), RAW.replace("raw", "exp_scale.row")):
        original = (adapter / TENSORS).read_bytes()
        edit_tensors(
            adapter / TENSORS,
            lambda tensors, key=key: tensors.update({key: torch.ones_like(tensors[key], dtype=dtype)}),
        )
        assert_refused(base, adapter, f"as {dtype}, unlike any SEL adapter")
        (adapter / TENSORS).write_bytes(original)


def test_a_saved_module_of_another_kind(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    key = "base_model.model.model.norm.weight"
    edit_tensors(adapter / TENSORS, lambda tensors: tensors.update({key: torch.ones(16, dtype=torch.int64)}))
    assert_refused(base, adapter, r"norm\.weight is torch\.int64")


def test_a_flag_that_does_not_fit_the_weight(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    edit_tensors(base / MODEL, lambda tensors: tensors.update({"conv.weight": torch.ones(2, 3, 1, 1)}))
    name = "base_model.model.conv.symexplin_"
    added = {f"{name}beta": torch.ones(()), f"{name}transposed": torch.ones((), dtype=torch.uint8)}
    edit_tensors(adapter / TENSORS, lambda tensors: tensors.update(added))
    assert_refused(base, adapter, r"symexplin_transposed for a weight of shape \(2, 3, 1, 1\)")


def test_two_tensors_for_one_place(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    norm = "base_model.model.model.norm."
    both = {f"{norm}base_layer.weight": torch.ones(16), f"{norm}original_module.weight": torch.zeros(16)}
    original = (adapter / TENSORS).read_bytes()
    edit_tensors(adapter / TENSORS, lambda tensors: tensors.update(both))
    assert_refused(base, adapter, r"holds model\.norm\.weight twice", inspected=adapter)
    (adapter / TENSORS).write_bytes(original)

    def double(tensors: dict[str, torch.Tensor]) -> None:
        copies = {
            key.replace("q_proj.", "q_proj.base_layer."): value for key, value in tensors.items() if "q_proj." in key
        }
        tensors.update({key: value.clone() for key, value in copies.items()})

    edit_tensors(adapter / TENSORS, double)
    assert_refused(base, adapter, "q_proj.* twice over")


def test_a_saved_module_wins_over_its_original_wherever_they_lie(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    norm = "base_model.model.model.norm."
    for wide in (True, False):  # wider dtypes come first in a file
        added = {f"{norm}weight": torch.zeros(16), f"{norm}modules_to_save.weight": torch.full((16,), 2.0)}
        narrow = f"{norm}{'' if wide else 'modules_to_save.'}weight"
        added[narrow] = added[narrow].half()
        edit_tensors(adapter / TENSORS, lambda tensors, added=added: tensors.update(added))
        out = base.parent / f"out {wide}"
        merge_checkpoint(base, adapter, out, progress=False)
        assert load_file(out / MODEL)["model.norm.weight"].unique().tolist() == [2.0]


@pytest.mark.usefixtures("no_memory_to_waste")
@pytest.mark.parametrize("field", ["r", "exp_scale"])
def test_a_rank_that_would_fill_the_memory(folders: tuple[Path, Path], field: str) -> None:
    base, adapter = folders
    edit_json(adapter / CONFIG, **{field: 10**9 if field == "r" else {"pattern": "lora", "rank": 10**9}})
    match = rf"{field}(\.rank)?=1000000000: .* rank above 1024 adds nothing"
    assert_refused(base, adapter, match, load=True)


def test_an_empty_configuration_is_copied(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (base / "config.json").write_text("{}")
    merge_checkpoint(base, adapter, base.parent / "out", progress=False)
    assert (base.parent / "out" / "config.json").read_text() == "{}"


@pytest.mark.usefixtures("no_memory_to_waste")
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_labels"])
def test_a_configuration_of_a_giant(folders: tuple[Path, Path], field: str) -> None:
    base, adapter = folders
    expected = merge_checkpoint(base, adapter, base.parent / "expected", progress=False)
    edit_json(base / "config.json", **{field: 10**9})
    report = merge_checkpoint(base, adapter, base.parent / "out", progress=False)
    assert (report.tensors_merged, report.tensors_total) == (expected.tensors_merged, expected.tensors_total)


@pytest.mark.parametrize("value", [["Ü"], "LlamaForCausalLM", ["models"], [["a"]], {}, 3, ["\ud800"]])
def test_a_configuration_of_strange_classes(folders: tuple[Path, Path], value: object) -> None:
    base, adapter = folders
    edit_json(base / "config.json", architectures=value, model_type="strange", text_config=[1])
    merge_checkpoint(base, adapter, base.parent / "out", progress=False)
    assert inspect_checkpoint(base, progress=False)


@pytest.mark.parametrize(
    "width", ["16", -1, 0, 10**400, [16], True], ids=["text", "negative", "zero", "huge", "list", "bool"]
)
def test_a_width_that_is_none(folders: tuple[Path, Path], width: object) -> None:
    base, _ = folders
    edit_json(base / "config.json", hidden_size=None)
    before = inspect_checkpoint(base, config=SELConfig(beta="width"), progress=False)
    edit_json(base / "config.json", hidden_size=width)
    after = inspect_checkpoint(base, config=SELConfig(beta="width"), progress=False)
    assert [report.beta for report in after] == [report.beta for report in before]


@pytest.mark.parametrize("number", ["00", "\u0660", "9" * 900])
def test_experts_with_other_digits_are_no_stack(number: str) -> None:
    names = [f"layers.0.mlp.experts.{number}.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    assert find_split_stacks({name: TensorEntry(name, (2, 2), torch.float32, "x") for name in names}) == {}


def test_a_scale_without_its_parts_is_reported(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    scale = RAW.replace("raw", "exp_scale")

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[RAW] = tensors[RAW][None]
        del tensors[f"{scale}.row"], tensors[f"{scale}.column"]

    edit_tensors(adapter / TENSORS, reshape)
    report = next(report for report in inspect_checkpoint(adapter, progress=False) if "q_proj" in report.name)
    assert report.error is not None and "incomplete" in report.error
    assert_refused(base, adapter, "q_proj")


def test_what_a_library_quotes_stays_one_line(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    edit_json(adapter / CONFIG, task_type="\x1b[2J\ud800")
    assert_refused(base, adapter, r"Invalid task type: '\\x1b\[2J\\ud800'", inspected=adapter)
    edit_json(adapter / CONFIG, task_type=None, exp_scale={"\x7f": 1})
    assert_refused(base, adapter, r"unexpected keyword argument '\\x7f'", inspected=adapter, load=True)
    edit_header(base / MODEL, lambda header: b'{"a":"' + b"x" * 100_000 + b'"}')
    assert_refused(base, adapter, r"invalid type.*xxx\.\.\.xxx", inspected=base)


def test_no_regex_of_an_adapter_is_run_by_merging_or_inspecting(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    endless = "(([a-z._0-9]*)*)*!"
    edit_json(adapter / CONFIG, target_modules=endless, exclude_modules=endless, beta_pattern={endless: 1.0})
    merge_checkpoint(base, adapter, base.parent / "out", progress=False)
    assert inspect_checkpoint(adapter, progress=False)
