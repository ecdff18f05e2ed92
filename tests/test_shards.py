"""Reading and writing safetensors folders: layout, bytes, and every kind of broken input."""

from __future__ import annotations

import json
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peft_sel.checkpoint.shards import (
    DTYPES,
    CheckpointReader,
    TensorEntry,
    plan_shards,
    write_index,
    write_shard,
)
from peft_sel.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "b.weight": torch.randn(5, 3).to(torch.bfloat16),
        "a.weight": torch.randn(4, 7),
        "half": torch.randn(3).to(torch.float16),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
        "großé": torch.tensor([[float("nan"), -0.0, float("inf")]]),
    }


def save_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], **index_changes: str) -> None:
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} | index_changes
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def test_lists_without_loading_and_reads_one_at_a_time(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with CheckpointReader(tmp_path) as reader:
        assert reader.bytes_read == 0
        assert reader.files == ["model.safetensors"]
        assert reader.metadata == {"model.safetensors": {"format": "pt"}}
        assert reader.index_metadata is None
        assert {name: (entry.shape, entry.dtype) for name, entry in reader.entries.items()} == {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            assert same_bytes(reader.read(name), tensor), name
        assert reader.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


def test_only_one_shard_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sharded(tmp_path, {f"model-{i}.safetensors": {f"t{i}": torch.full((2,), float(i))} for i in range(3)})
    open_files = set()
    largest = 0

    class CountingHandle:
        def __init__(self, path: Path, framework: str) -> None:
            nonlocal largest
            self.path, self.handle = path, safe_open(path, framework=framework)
            open_files.add(path)
            largest = max(largest, len(open_files))

        def __exit__(self, *exception: object) -> None:
            open_files.discard(self.path)
            self.handle.__exit__(*exception)

        def __getattr__(self, name: str) -> object:
            return getattr(self.handle, name)

    monkeypatch.setattr("peft_sel.checkpoint.shards.safe_open", CountingHandle)
    with CheckpointReader(tmp_path) as reader:
        kept = [reader.read(f"t{i}") for i in (0, 1, 2, 0)]
    assert [float(tensor[0]) for tensor in kept] == [0, 1, 2, 0]  # valid after their file was closed
    assert largest == 1
    assert not open_files


def test_written_file_equals_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "z": "ü", "a": '"'})
    with CheckpointReader(tmp_path) as reader:
        size = write_shard(
            tmp_path / "copy.safetensors",
            list(reader.entries.values()),
            lambda entry: reader.read(entry.name),
            reader.metadata["model.safetensors"],
        )
    assert (tmp_path / "copy.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert size == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_the_librarys_loader_reads_what_was_written(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    torch.manual_seed(1)
    tensors = {f"t{i}": torch.arange(5 + i).to(dtype) for i, dtype in enumerate(sorted(DTYPES.values(), key=str))}
    tensors["transposed"] = torch.randn(3, 5).T
    entries = [TensorEntry(name, tuple(t.shape), t.dtype, "x") for name, t in tensors.items()]
    path = tmp_path / "x.safetensors"
    write_shard(path, entries, lambda entry: tensors[entry.name], metadata)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == (metadata or {})
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    assert header_size % 8 == 0  # the data starts aligned


def test_write_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def read(entry: TensorEntry) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        tensor = torch.ones(8)
        made.append(weakref.ref(tensor))
        return tensor

    write_shard(tmp_path / "x.safetensors", [TensorEntry(f"t{i}", (8,), torch.float32, "x") for i in range(4)], read)
    assert alive == [0, 0, 0, 0]


def test_write_refuses_what_does_not_match_its_header(tmp_path: Path) -> None:
    entry = TensorEntry("t", (2, 3), torch.float32, "x")
    for number, wrong in enumerate((torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16))):
        with pytest.raises(CheckpointError, match="t was announced as"):
            write_shard(tmp_path / f"{number}.safetensors", [entry], lambda _, wrong=wrong: wrong)
    with pytest.raises(CheckpointError, match="written twice"):
        write_shard(tmp_path / "x.safetensors", [entry, entry], lambda _: torch.zeros(2, 3))
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "0.safetensors", [entry], lambda _: torch.zeros(2, 3))


def test_plan_shards_and_index(tmp_path: Path) -> None:
    entries = [TensorEntry(f"t{i}", (size,), torch.uint8, "old") for i, size in enumerate((4, 4, 5, 20, 1, 9))]
    plan = plan_shards(entries, 10)
    assert [entry.file[6:11] for entry in plan] == ["00001", "00001", "00002", "00003", "00004", "00004"]
    assert {entry.file[-20:] for entry in plan} == {f"0000{i}-of-00004.safetensors"[-20:] for i in range(1, 5)}
    assert [entry.name for entry in plan] == [entry.name for entry in entries]
    assert {entry.file for entry in plan_shards(entries, 43)} == {"model.safetensors"}
    write_index(tmp_path / INDEX, plan, {"total_size": 7, "total_parameters": 43})
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 43, "total_parameters": 43}
    assert index["weight_map"]["t3"] == "model-00003-of-00004.safetensors"


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    save_sharded(tmp_path, {"model-1.safetensors": {"old": torch.zeros(1)}})
    save_file({"new": torch.zeros(1)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert list(reader.entries) == ["new"]


def test_links_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_sharded(tmp_path / "snapshot", {f"model-{i}.safetensors": {f"t{i}": torch.full((2,), i)} for i in range(2)})
    for number, path in enumerate(sorted((tmp_path / "snapshot").iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    with CheckpointReader(tmp_path / "snapshot") as reader:
        assert [int(reader.read(name)[0]) for name in ("t0", "t1")] == [0, 1]


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        CheckpointReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        CheckpointReader(tmp_path / "file")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter, not a model"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickled_weights_are_never_opened(tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=rf"{name}.*never opened.*save_pretrained"):
        CheckpointReader(tmp_path)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert (tmp_path / "exploded").exists()  # the bomb works: the test could fail


def break_file(content: bytes, kind: str) -> bytes:
    header_size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + header_size]
    lying = header.replace(b"[4,7]", b"[4,9]")
    return {
        "empty": b"",
        "short": content[:5],
        "in the header": content[:40],
        "in the data": content[:-1],
        "longer than it says": content + b"\0",
        "noise": bytes(range(256)) * 4,
        "huge header": (1 << 62).to_bytes(8, "little") + content[8:],
        "lying shape": content[:8] + lying + content[8 + header_size :],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["empty", "short", "in the header", "in the data", "longer than it says", "noise", "huge header", "lying shape"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_corrupt_file_is_named(tmp_path: Path, kind: str, sharded: bool) -> None:
    file = "model-2.safetensors" if sharded else "model.safetensors"
    if sharded:
        save_sharded(tmp_path, {"model-1.safetensors": {"x": torch.zeros(1)}, file: make_tensors()})
    else:
        save_file(make_tensors(), tmp_path / file)
    path = tmp_path / file
    path.write_bytes(break_file(path.read_bytes(), kind))
    with pytest.raises(CheckpointError, match=rf"{file}: is missing, corrupt or truncated"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "C:model.safetensors",
        "..\\model.safetensors",
        "pytorch_model.bin",
    ],
)
def test_index_may_name_only_safetensors_files_beside_it(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "checkpoint"
    save_sharded(folder, {"model-1.safetensors": {"x": torch.zeros(1)}}, y=file)
    save_file({"y": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="puts tensor y into"):
        CheckpointReader(folder)


def test_index_that_contradicts_the_files(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": {"x": torch.zeros(1)}, "model-2.safetensors": {"y": torch.zeros(1)}}
    save_sharded(tmp_path / "a", shards, z="model-3.safetensors")
    with pytest.raises(CheckpointError, match=r"not there: model-3\.safetensors"):
        CheckpointReader(tmp_path / "a")
    save_sharded(tmp_path / "b", shards, z="model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"says that z is in model-2\.safetensors"):
        CheckpointReader(tmp_path / "b")
    save_sharded(tmp_path / "c", shards, y="model-1.safetensors", x="model-2.safetensors")
    with pytest.raises(CheckpointError, match="which does not hold it"):
        CheckpointReader(tmp_path / "c")
    shards["model-1.safetensors"]["w"] = torch.zeros(1)  # keeps the file in the index
    shards["model-2.safetensors"]["x"] = torch.ones(1)
    save_sharded(tmp_path / "d", shards)
    with pytest.raises(CheckpointError, match=r"x is in both model-1\.safetensors and model-2\.safetensors"):
        CheckpointReader(tmp_path / "d")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "\xff", "[" * 100000]
)
def test_malformed_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=INDEX):
        CheckpointReader(tmp_path)


def test_unsupported_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="t has the dtype F8_E8M0"):
        CheckpointReader(tmp_path)


def test_file_that_disappears_after_opening(tmp_path: Path) -> None:
    save_sharded(tmp_path, {f"model-{i}.safetensors": {f"t{i}": torch.zeros(2)} for i in range(2)})
    with CheckpointReader(tmp_path) as reader:
        (tmp_path / "model-0.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model-0\.safetensors: is missing"):
            reader.read("t0")
