"""dtype= and max_shard_bytes= of a merge: sizes that are true, and a way back to the bytes of the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, logits, make_tiny
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig, merge_checkpoint

INDEX = "model.safetensors.index.json"
KEY = "model.layers.0.self_attn.q_proj.weight"
LARGEST = 96 * 32 * 2  # bytes of the embedding in bf16


def save_pair(folder: Path, dtype: torch.dtype = torch.bfloat16, shards: str = "1GB", **options: Any) -> list[Path]:
    """Save a base, and an untrained adapter of its query projections."""
    base, adapter = folder / "base", folder / "adapter"
    make_tiny(dtype=dtype).save_pretrained(base, max_shard_size=shards)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    get_peft_model(model, SELConfig(**{"target_modules": ["q_proj"], **options})).save_pretrained(adapter)
    return [base, adapter]


def read_index(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return content


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return dict(sorted(tensors.items()))


def assert_same_files(folder: Path, expected: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def mix_dtypes(base: Path, metadata: dict[str, str]) -> None:
    """Give a checkpoint of one file norms in float32, an integer buffer and metadata of its own."""
    tensors = load_file(base / "model.safetensors")
    tensors = {name: t.float() if "norm" in name else t for name, t in tensors.items()}
    tensors["model.layers.0.self_attn.steps"] = torch.arange(5)
    save_file(tensors, base / "model.safetensors", metadata)


@pytest.mark.parametrize("limit", [1, LARGEST - 1, LARGEST, 3 * LARGEST])
def test_from_one_file_to_shards_and_back(tmp_path: Path, limit: int) -> None:
    base, adapter = save_pair(tmp_path)
    metadata = {"format": "pt", "made_by": "a test"}
    mix_dtypes(base, metadata)
    merge_checkpoint(base, adapter, tmp_path / "shards", max_shard_bytes=limit)
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    index, files = read_index(tmp_path / "shards"), sorted((tmp_path / "shards").glob("*.safetensors"))
    found = read_all(tmp_path / "shards")
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
    assert [path.name for path in files] == sorted(set(index["weight_map"].values()))
    for number, path in enumerate(files, start=1):
        tensors = load_file(path)
        assert path.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        assert all(index["weight_map"][name] == path.name for name in tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == metadata
    assert_same_bits(found, read_all(base))
    merge_checkpoint(tmp_path / "shards", adapter, tmp_path / "back", max_shard_bytes=10**9)
    assert_same_files(tmp_path / "back", base)


def test_shards_keep_what_their_index_says(tmp_path: Path) -> None:
    base, adapter = save_pair(tmp_path, shards="12KB")
    index = read_index(base)
    index["metadata"].update(made_by="a test", total_size=1)  # a size that is not true
    (base / INDEX).write_text(json.dumps(index))
    total = sum(tensor.nbytes for tensor in read_all(base).values())
    for name, options, factor in (
        ("kept", {}, 1),
        ("wide", {"dtype": torch.float32}, 2),
        ("split", {"max_shard_bytes": 5000}, 1),
        ("both", {"max_shard_bytes": 5000, "dtype": torch.float64}, 4),
    ):
        merge_checkpoint(base, adapter, tmp_path / name, **options)
        found = read_index(tmp_path / name)
        assert found["metadata"] == {**index["metadata"], "total_size": factor * total}
        assert (found["weight_map"] == index["weight_map"]) is (
            "split" not in options and "max_shard_bytes" not in options
        )
        tensors = read_all(tmp_path / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) == factor * total
        assert_same_bits({key: t.to(torch.bfloat16) for key, t in tensors.items()}, read_all(base))
    for path in (tmp_path / "both").glob("*.safetensors"):  # the limit is for what is written, not for the base
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 5000


def test_another_dtype_is_for_floating_point_tensors_alone(tmp_path: Path) -> None:
    base, adapter = save_pair(tmp_path)
    mix_dtypes(base, {"format": "pt"})
    merge_checkpoint(base, adapter, tmp_path / "out", dtype=torch.float16)
    out, before = read_all(tmp_path / "out"), read_all(base)
    for name, tensor in before.items():
        assert torch.equal(out[name], tensor.to(torch.float16) if tensor.is_floating_point() else tensor), name
        assert (out[name].dtype == torch.float16) is tensor.is_floating_point()
    merge_checkpoint(base, adapter, tmp_path / "same", dtype=torch.bfloat16)
    assert {t.dtype for t in read_all(tmp_path / "same").values()} == {torch.bfloat16, torch.int64}


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 5000}, {"dtype": torch.float32}], ids=str)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
def test_an_untied_head_is_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    base, adapter = save_pair(tmp_path, shards="12KB", target_modules=["q_proj", "lm_head"])
    before = read_index(base)["metadata"]
    merge_checkpoint(base, adapter, tmp_path / "out", **options)
    tensors, index = read_all(tmp_path / "out"), read_index(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert before["total_parameters"] == index["metadata"]["total_parameters"] - 96 * 32
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)))
