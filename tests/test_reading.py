"""How PEFT reads a SEL adapter through read_adapter: of which base, from where, to which device, never a pickle."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import peft.peft_model
import pytest
import torch
from models import (
    assert_same_bits,
    clone_state,
    convert,
    fingerprint,
    logits,
    make_config,
    make_tiny,
    sel_layers,
    train_steps,
)
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from test_fingerprint import CONFIG_FILE, FIRST, make_other, read_record
from test_groups import make_base
from test_resume import HALF, make_trainer
from test_untrusted_files import Bomb

from peft_sel import SELConfig, save_adapter
from peft_sel.errors import CheckpointError, NewerFormatError, OtherBaseError
from peft_sel.numerics import fingerprint_weight, fingerprints_agree, matches_fingerprint
from peft_sel.registry import extend_loading

FILE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
SMALL_SHARDS = 8_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_folder(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PeftModel:
    """Save a trained adapter; return its model."""
    model = convert(make_tiny(dtype=dtype), **options)
    train_steps(model)
    model.eval().save_pretrained(folder)
    return model


def make_pickled(folder: Path) -> Path:
    """Put a bomb in the place of an adapter's tensors; return where it leaves a trace."""
    (folder / FILE).unlink()
    trace = folder.parent / "exploded"
    (folder / PICKLED).write_bytes(pickle.dumps(Bomb(trace)))
    return trace


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("train_raw", [True, False])
def test_a_taken_name_on_another_base_is_refused(tmp_path: Path, train_raw: bool, low_cpu_mem_usage: bool) -> None:
    make_folder(tmp_path, train_raw=train_raw)
    model = convert(make_other(), train_raw=train_raw)
    train_steps(model)
    state, before = clone_state(model), fingerprint(model)
    record = {layer.fingerprint_name: dict(layer.base_fingerprint) for layer in sel_layers(model)}
    with pytest.raises(OtherBaseError, match=rf"from another base, as the values of {FIRST} show.*check_base=False"):
        model.load_adapter(tmp_path, "default", low_cpu_mem_usage=low_cpu_mem_usage)
    assert fingerprint(model) == before and list(model.peft_config) == ["default"]
    assert_same_bits(clone_state(model), state)
    assert {layer.fingerprint_name: dict(layer.base_fingerprint) for layer in sel_layers(model)} == record


def test_an_adapter_that_was_never_trained_is_taken_out_with_the_refusal(tmp_path: Path) -> None:
    make_folder(tmp_path)
    base = make_other()
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(OtherBaseError):
        PeftModel.from_pretrained(base, tmp_path, config=make_config())
    assert fingerprint(base) == before
    assert_same_bits(clone_state(base), state)


def test_check_base_of_the_adapter_in_the_model_decides(tmp_path: Path) -> None:
    make_folder(tmp_path / "first")
    model = convert(make_other(), check_base=False)
    model.load_adapter(tmp_path / "first", "default")
    model.save_pretrained(tmp_path / "second")  # which now belongs to this base
    first, second = read_record(tmp_path / "first"), read_record(tmp_path / "second")
    assert [name for name in first if first[name] != second[name]] == [FIRST]


def test_a_taken_name_keeps_the_record_of_the_file(tmp_path: Path) -> None:
    make_folder(tmp_path / "first", torch.float32)
    model = convert(make_tiny(dtype=torch.bfloat16))
    model.load_adapter(tmp_path / "first", "default")  # another precision of the same base
    model.save_pretrained(tmp_path / "second")
    assert read_record(tmp_path / "second") == read_record(tmp_path / "first")


def test_a_dropped_base_is_known_by_its_record(tmp_path: Path) -> None:
    make_folder(tmp_path, base_weight="drop")
    convert(make_tiny(dtype=torch.bfloat16), base_weight="drop").load_adapter(tmp_path, "default")
    with pytest.raises(OtherBaseError):
        convert(make_other(), base_weight="drop").load_adapter(tmp_path, "default")


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [torch.float32, torch.bfloat16, torch.float16])
def test_records_agree_where_a_weight_would_match(made: torch.dtype, loaded: torch.dtype) -> None:
    checkpoint = (torch.randn(40, 30) ** 3).bfloat16()
    other = checkpoint.clone()
    other[3, 4] *= 1.5
    for weight in (checkpoint, other):
        recorded, found = fingerprint_weight(checkpoint.to(made)), fingerprint_weight(weight.to(loaded))
        expected = matches_fingerprint(recorded, weight.to(loaded))
        assert fingerprints_agree(recorded, found) == fingerprints_agree(found, recorded) == expected
        assert expected == (weight is checkpoint)


@pytest.mark.parametrize("train_raw", [True, False])
def test_training_does_not_resume_on_another_base(tmp_path: Path, train_raw: bool) -> None:
    def make(seed: int, **options: Any) -> PeftModel:
        return get_peft_model(make_base(seed), SELConfig(task_type="CAUSAL_LM", train_raw=train_raw, **options))

    make_trainer(make(0), tmp_path / "first").train()
    checkpoint = str(tmp_path / "first" / f"checkpoint-{HALF}")
    with pytest.raises(OtherBaseError, match="made from another base"):
        make_trainer(make(1), tmp_path / "second").train(resume_from_checkpoint=checkpoint)
    assert not list(tmp_path.glob("second/checkpoint-*"))
    trainer = make_trainer(make(0), tmp_path / "third")
    trainer.train(resume_from_checkpoint=checkpoint)
    assert read_record(next(tmp_path.glob("third/checkpoint-*"))) == read_record(Path(checkpoint))
    make_trainer(make(1, check_base=False), tmp_path / "fourth").train(resume_from_checkpoint=checkpoint)


def test_a_taken_name_takes_no_newer_format(tmp_path: Path) -> None:
    make_folder(tmp_path)
    content = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(NewerFormatError):
        convert(make_tiny(dtype=torch.bfloat16)).load_adapter(tmp_path, "default")


LOADERS: dict[str, Callable[[Path], object]] = {
    "name taken": lambda folder: convert(make_tiny(dtype=torch.bfloat16)).load_adapter(folder, "default"),
    "configuration given": lambda folder: PeftModel.from_pretrained(
        make_tiny(dtype=torch.bfloat16), folder, config=PeftConfig.from_pretrained(folder)
    ),
    "subfolder": lambda folder: convert(make_tiny(dtype=torch.bfloat16)).load_adapter(
        folder.parent, "default", subfolder=folder.name
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickled_adapter_is_refused_on_every_way(tmp_path: Path, loader: str) -> None:
    make_folder(tmp_path / "adapter")
    LOADERS[loader](tmp_path / "adapter")
    trace = make_pickled(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin.*never opened"):
        LOADERS[loader](tmp_path / "adapter")
    (tmp_path / "adapter" / PICKLED).unlink()
    with pytest.raises(CheckpointError, match=rf"holds neither {FILE} nor"):
        LOADERS[loader](tmp_path / "adapter")
    assert not trace.exists()


def put_into_cache(folder: Path, cache: Path) -> dict[str, Any]:
    """Lay a folder out as the hub's cache holds it; return the options that find it there."""
    root = cache / "models--someone--adapter"
    shutil.copytree(folder, root / "snapshots" / COMMIT / "deep")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    return {"cache_dir": str(cache), "local_files_only": True, "subfolder": "deep"}


@pytest.mark.parametrize("name", ["default", "second"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, SMALL_SHARDS])
def test_a_repository_of_the_hub_is_read_like_a_folder(tmp_path: Path, max_shard_bytes: int, name: str) -> None:
    trained = make_folder(tmp_path / "unused")
    save_adapter(trained, tmp_path / "adapter", max_shard_bytes=max_shard_bytes)
    options = put_into_cache(tmp_path / "adapter", tmp_path / "cache")
    model = convert(make_tiny(dtype=torch.bfloat16))
    model.load_adapter("someone/adapter", name, **options)
    model.set_adapter(name)
    assert torch.equal(logits(model.eval()), logits(trained))
    other = convert(make_other())
    train_steps(other)
    with pytest.raises(OtherBaseError):
        other.load_adapter("someone/adapter", name, **options)


def test_a_repository_of_pickles_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "adapter")
    trace = make_pickled(tmp_path / "adapter")
    options = put_into_cache(tmp_path / "adapter", tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin.*never opened"):
        convert(make_tiny(dtype=torch.bfloat16)).load_adapter("someone/adapter", "default", **options)
    assert not trace.exists()


OTHER_TENSORS: dict[str, dict[str, Any]] = {
    "modules_to_save": {"modules_to_save": ["norm"], "target_modules": ["q_proj"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 5]}},
    "biases": {"bias": "all"},
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
def test_other_tensors_go_to_the_device(tmp_path: Path, kind: str) -> None:
    make_folder(tmp_path, **OTHER_TENSORS[kind])
    found = peft.peft_model.load_peft_weights(tmp_path, "meta")
    assert {".symexplin_" in name for name in found} == {True, False}
    assert all(tensor.device.type == ("cpu" if ".symexplin_" in name else "meta") for name, tensor in found.items())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what is mapped")
@pytest.mark.parametrize("name", ["new", "default"])
@pytest.mark.parametrize("kind", [*OTHER_TENSORS, "frozen raw and biases"])
def test_nothing_stays_mapped_from_the_file(tmp_path: Path, kind: str, name: str) -> None:
    options = OTHER_TENSORS.get(kind, {"bias": "sel_only", "beta": 5.0, "train_raw": False})
    trained = make_folder(tmp_path, **options)
    if name == "new":
        model = PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path, low_cpu_mem_usage=True)
    else:
        model = convert(make_tiny(dtype=torch.bfloat16), **options)
        model.load_adapter(tmp_path, "default", low_cpu_mem_usage=True)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(logits(model.eval()), logits(trained))
    held = peft.peft_model.load_peft_weights(tmp_path, "cpu")
    assert str(tmp_path / FILE) in Path("/proc/self/maps").read_text() and held  # the test could fail


def test_configurations_of_other_methods_are_left_to_peft(tmp_path: Path) -> None:
    lora = get_peft_model(make_tiny(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    lora.save_pretrained(tmp_path)
    text = (tmp_path / CONFIG_FILE).read_text()
    (tmp_path / CONFIG_FILE).write_text(text.replace("{", '{"r": 3,', 1))  # a key that comes twice
    assert torch.equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), logits(lora))
    for broken in ("", "[]", "{}", "\x00", '{"peft_type": ["SYMEXPLIN"]}'):
        (tmp_path / CONFIG_FILE).write_text(broken)
        assert peft.peft_model.load_peft_weights(str(tmp_path), "cpu").keys()
    (tmp_path / CONFIG_FILE).unlink()
    assert peft.peft_model.load_peft_weights(str(tmp_path), "cpu").keys()


def test_the_reader_is_installed_over_the_wrapper_of_another_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = peft.peft_model.load_peft_weights.__wrapped__
    tensors = {"found": torch.zeros(1)}

    @wraps(stock)
    def of_another(*args: Any, **options: Any) -> Any:
        return stock(*args, **options)

    monkeypatch.setattr(peft.peft_model, "load_peft_weights", of_another)
    extend_loading(lambda *arguments: tensors)
    installed = peft.peft_model.load_peft_weights
    assert installed is not of_another and installed("anything") is tensors
    extend_loading(lambda *arguments: None)
    assert peft.peft_model.load_peft_weights is installed
