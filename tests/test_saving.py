"""save_adapter: PEFT's files, whole or not at all, in shards where asked; and every way to read those."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.peft_model
import pytest
import torch
from models import assert_same_bits, clone_state, convert, fingerprint, logits, make_config, make_tiny, train_steps
from moe import TARGETS, convert_moe, make_moe
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peft_sel import SELError, merge_checkpoint, save_adapter
from peft_sel.checkpoint import inspect_checkpoint
from peft_sel.errors import AdapterStateError, CheckpointError, ConfigError, OutputExistsError

FILE, INDEX, CONFIG = "adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_config.json"
SMALL = 8_000  # bytes: less than most shards of the tiny model need


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every safetensors file of a folder, no name twice."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return dict(sorted(tensors.items()))


def make_trained(**options: Any) -> PeftModel:
    model = convert(make_tiny(dtype=torch.bfloat16), **options)
    train_steps(model, 2)
    return model.eval()


@pytest.fixture
def trained() -> PeftModel:
    return make_trained()


VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "scales only": {"train_raw": False},
    "biases": {"bias": "sel_only", "beta": 5.0},
    "other tensors": {"bias": "all", "modules_to_save": ["norm"], "base_weight": "drop", "task_type": None},
    "float64": {"raw_dtype": "float64"},
    "embedding and tied head": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
@pytest.mark.parametrize("max_shard_bytes", [10**9, SMALL])
@pytest.mark.parametrize("name", VARIANTS)
def test_holds_what_peft_writes(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = make_trained(**VARIANTS[name])
    model.save_pretrained(tmp_path / "peft")
    save_adapter(model, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    assert_same_bits(load_tensors(tmp_path / "ours"), load_tensors(tmp_path / "peft"))
    ours, peft_files = read_all(tmp_path / "ours"), read_all(tmp_path / "peft")
    assert json.loads(ours.pop(CONFIG)) == json.loads(peft_files.pop(CONFIG))
    assert ours.pop("README.md") == peft_files.pop("README.md")
    for path in (tmp_path / "ours").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    if max_shard_bytes == 10**9:
        assert ours.keys() == peft_files.keys() == {FILE}
    else:
        index = json.loads(ours.pop(INDEX))
        names = [f"adapter_model-{n:05d}-of-{len(ours):05d}.safetensors" for n in range(1, len(ours) + 1)]
        assert len(names) > 1 and sorted(ours) == names == sorted(set(index["weight_map"].values()))
        tensors = load_tensors(tmp_path / "peft")
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        for path in (tmp_path / "ours").glob("*.safetensors"):
            part = load_file(path)
            assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= SMALL
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["ours", "peft"]


LOADERS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "from_pretrained": lambda base, folder: PeftModel.from_pretrained(base, folder),
    "low_cpu_mem_usage": lambda base, folder: PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True),
    "subfolder": lambda base, folder: PeftModel.from_pretrained(base, folder.parent, subfolder=folder.name),
    "given a configuration": lambda base, folder: PeftModel.from_pretrained(base, folder, config=make_config()),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, SMALL])
def test_peft_loads_it(trained: PeftModel, loader: str, max_shard_bytes: int, tmp_path: Path) -> None:
    save_adapter(trained, tmp_path / "adapter", max_shard_bytes=max_shard_bytes)
    loaded = LOADERS[loader](make_tiny(dtype=torch.bfloat16), tmp_path / "adapter").eval()
    assert_same_bits(clone_state(loaded), clone_state(trained))
    assert torch.equal(logits(loaded), logits(trained))


@pytest.mark.parametrize("max_shard_bytes", [10**9, SMALL])
def test_other_ways_to_load_it(trained: PeftModel, max_shard_bytes: int, tmp_path: Path) -> None:
    make_tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    trained.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    save_adapter(trained, tmp_path / "adapter", max_shard_bytes=max_shard_bytes)
    assert_same_bits(clone_state(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), clone_state(trained))
    second = convert(make_tiny(dtype=torch.bfloat16))
    second.load_adapter(tmp_path / "adapter", "second")
    second.set_adapter("second")
    assert torch.equal(logits(second.eval()), logits(trained))
    second.load_adapter(tmp_path / "adapter", "default")  # over tensors that are there
    second.set_adapter("default")
    assert torch.equal(logits(second.eval()), logits(trained))


def test_key_mapping_is_applied_to_shards(trained: PeftModel, tmp_path: Path) -> None:
    save_adapter(trained, tmp_path / "whole")
    tensors = {
        key.replace("model.layers.", "old_layers.").replace("q_proj", "query"): tensor
        for key, tensor in load_file(tmp_path / "whole" / FILE).items()
    }
    mapping = {
        r"^old_layers\.(\d+)\.self_attn\.query": r"model.layers.\1.self_attn.q_proj",
        "^old_layers": "model.layers",
    }
    save_file(tensors, tmp_path / "whole" / FILE)
    expected = peft.peft_model.load_peft_weights.__wrapped__(str(tmp_path / "whole"), "cpu", mapping)
    assert_same_bits(peft.peft_model.load_peft_weights(tmp_path / "whole", "cpu", mapping), expected)
    loaded = PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path / "whole", key_mapping=mapping)
    assert torch.equal(logits(loaded), logits(trained))


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_shards_merge_and_inspect_like_one_file(kind: str, tmp_path: Path) -> None:
    if kind == "dense":
        base, model = make_tiny(dtype=torch.bfloat16), make_trained()
    else:
        base = make_moe(dtype=torch.bfloat16)
        model = convert_moe(make_moe(dtype=torch.bfloat16), target_parameters=TARGETS, init_weights=False)
    base.save_pretrained(tmp_path / "base")
    save_adapter(model, tmp_path / "one")
    save_adapter(model, tmp_path / "many", max_shard_bytes=SMALL)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for name in ("one", "many"):
        merge_checkpoint(tmp_path / "base", tmp_path / name, tmp_path / f"merged {name}", progress=False)
    assert read_all(tmp_path / "merged one") == read_all(tmp_path / "merged many")
    assert inspect_checkpoint(tmp_path / "one") == inspect_checkpoint(tmp_path / "many")


def test_a_named_adapter_goes_into_the_folder_itself(trained: PeftModel, tmp_path: Path) -> None:
    trained.add_adapter("other", make_config(beta=7.5))
    save_adapter(trained, tmp_path / "o", adapter_name="other")
    trained.save_pretrained(tmp_path / "peft", selected_adapters=["other"])
    assert_same_bits(load_tensors(tmp_path / "o"), load_tensors(tmp_path / "peft" / "other"))
    assert json.loads((tmp_path / "o" / CONFIG).read_text())["beta"] == 7.5


@pytest.mark.parametrize(("first", "second"), [(10**9, SMALL), (SMALL, 10**9), (SMALL, 2 * SMALL)])
def test_overwrite_replaces_the_adapter_and_nothing_else(
    trained: PeftModel, first: int, second: int, tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    save_adapter(trained, out, max_shard_bytes=first)
    (out / "notes.txt").write_text("mine")
    (out / "link").symlink_to("notes.txt")
    (out / "README.md").write_text("# My adapter\n\nAbout it.\n")
    with pytest.raises(OutputExistsError, match=r"adapter already exists; .* first; overwrite=True replaces it$"):
        save_adapter(trained, out)
    train_steps(trained.train())
    out.chmod(0o700)
    save_adapter(trained.eval(), out, max_shard_bytes=second, overwrite=True)
    assert out.stat().st_mode & 0o777 == 0o700
    save_adapter(trained, tmp_path / "fresh", max_shard_bytes=second)
    found, fresh = read_all(out), read_all(tmp_path / "fresh")
    assert found.pop("notes.txt") == found.pop("link") == b"mine" and (out / "link").is_symlink()
    assert b"About it." in found.pop("README.md") and fresh.pop("README.md")
    assert found == fresh
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "fresh"]


def test_overwrite_refuses_what_is_not_an_adapter_alone(
    trained: PeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-5").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"precious")
    (tmp_path / "file").write_text("precious")
    save_adapter(trained, tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    before = read_all(tmp_path)
    for name, message in (
        ("run", r"holds folders \(checkpoint-5\)"),
        ("model", "holds no adapter_config.json"),
        ("file", "is a link or a file"),
        ("link", "is a link or a file"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            save_adapter(trained, tmp_path / name, overwrite=True)
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(CheckpointError, match="in use as the working directory"):
        save_adapter(trained, ".", overwrite=True)
    assert read_all(tmp_path) == before
    (tmp_path / "empty").mkdir()
    save_adapter(trained, tmp_path / "empty", overwrite=True)
    assert (tmp_path / "empty" / FILE).is_file()


def test_bad_requests_write_nothing(trained: PeftModel, tmp_path: Path) -> None:
    lora = get_peft_model(make_tiny(), LoraConfig(target_modules=["q_proj"]))
    for model, options, error, message in (
        (trained, {"adapter_name": "nobody"}, AdapterStateError, "'nobody' is no SEL adapter of this model"),
        (lora, {}, AdapterStateError, "'default' is no SEL adapter of this model"),
        (trained.get_base_model(), {}, AdapterStateError, "is no SEL adapter of this model"),
        (trained, {"max_shard_bytes": 0}, ConfigError, "max_shard_bytes=0"),
    ):
        with pytest.raises(error, match=message):
            save_adapter(model, tmp_path / "deep" / "out", **options)
        assert not any(tmp_path.iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard missing": (
        lambda f: next(f.glob("*-00002-of-*")).unlink(),
        "do not belong together: adapter_model-00002-of",
    ),
    "shard cut": (lambda f: cut(next(f.glob("*-00003-of-*"))), "adapter_model-00003-of-.* is truncated or corrupt"),
    "index missing": (lambda f: (f / INDEX).unlink(), "index.json: is not readable JSON"),
    "index cut": (lambda f: cut(f / INDEX), "index.json: is not readable JSON"),
    "index leads out": (
        lambda f: (f / INDEX).write_text(
            (f / INDEX).read_text().replace("adapter_model-00002", "../adapter_model-00002")
        ),
        "do not belong together",
    ),
    "no shard": (lambda f: [p.unlink() for p in f.glob("*.safetensors")] and None, "do not belong together"),
    "index of a list": (lambda f: (f / INDEX).write_text('{"weight_map": [1]}') and None, "has no weight_map"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_shards_leave_the_model(trained: PeftModel, what: str, tmp_path: Path) -> None:
    save_adapter(trained, tmp_path / "adapter", max_shard_bytes=SMALL)
    spoil, message = BROKEN[what]
    spoil(tmp_path / "adapter")
    base = make_tiny(dtype=torch.bfloat16)
    before, state = fingerprint(base), clone_state(base)
    with pytest.raises(CheckpointError, match=message):
        PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert fingerprint(base) == before
    assert_same_bits(base.state_dict(), state)
    with pytest.raises(SELError):
        merge_checkpoint(tmp_path, tmp_path / "adapter", tmp_path / "out")


def test_a_file_that_peft_wrote_over_shards_counts(trained: PeftModel, tmp_path: Path) -> None:
    save_adapter(trained, tmp_path, max_shard_bytes=SMALL, overwrite=True)
    train_steps(trained.train())
    trained.eval().save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    assert torch.equal(logits(PeftModel.from_pretrained(make_tiny(dtype=torch.bfloat16), tmp_path)), logits(trained))


def test_other_methods_load_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = get_peft_model(make_tiny(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    lora.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_tiny(), tmp_path)), logits(lora))


def test_a_configuration_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_config(beta=7.5).save_pretrained(str(tmp_path))
    before = read_all(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            make_config(beta=9.5).save_pretrained(str(tmp_path))
    assert read_all(tmp_path) == before
    shutil.copytree(tmp_path, tmp_path / ".unfinished")  # of a process that died
    make_config(beta=9.5).save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / CONFIG).read_text())["beta"] == 9.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", CONFIG]
