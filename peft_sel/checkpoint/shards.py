"""Safetensors folders: list what they hold, read one tensor at a time, write one tensor at a time.

A checkpoint is a folder with one weights file, or with several (shards) and an index that says which tensor is where.
Weights are read through the safetensors library only; pickled weights are never opened.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peft_sel.errors import CheckpointError, list_names, show_name, show_value
from peft_sel.untrusted import find_pickles, parse_json, pickled_error, read_json

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CONFIG_FILE = "config.json"
# No model comes near these; larger ones would be slow to match or print, or overflow in torch.
MAX_NAME = 1000
MAX_DIMENSIONS = 16

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint, known without loading it.

    Attributes:
        name: Key of the tensor.
        shape: Its shape.
        dtype: Its dtype on disk.
        file: Name of the weights file inside the folder.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader:
    """Read the tensors of a safetensors folder one at a time, with at most one file open.

    Opening reads the headers only. The data of a tensor is mapped from the file, not copied, so memory stays at what
    the caller makes of it. Use it as a context manager, or call close.

    Args:
        folder: The checkpoint folder.
        weights_name: Name of the weights file when there is one; with ".index.json" appended it is the index's name.

    Attributes:
        entries: name -> TensorEntry, file by file, in the order of the data in each file.
        files: Names of the weights files.
        metadata: file -> the file's own metadata (text to text).
        index_metadata: The "metadata" of the index, None without an index.
        bytes_read: Bytes of tensor data read so far.

    Raises:
        CheckpointError: If the folder is missing, holds no safetensors weights, a file is corrupt or truncated, or the
            index is malformed, names a missing file or one outside the folder, or contradicts the files; also if a
            name comes twice or cannot be printed, or a shape is beyond what torch can hold.
    """

    def __init__(self, folder: str | Path, weights_name: str = MODEL_FILE) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._open_file: str | None = None
        self._handle: Any = None
        single, index = self.folder / weights_name, self.folder / f"{weights_name}.index.json"
        weight_map: dict[str, str] = {}
        self.index_metadata: dict[str, Any] | None = None
        if os.path.isfile(single):
            self.files: list[str] = [weights_name]
        elif os.path.isfile(index):
            weight_map, self.index_metadata = _read_index(index)
            self.files = sorted(set(weight_map.values()))
        else:
            raise _nothing_to_read(self.folder, weights_name)
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        try:
            for file in self.files:
                self._list_file(file)
            for name, file in weight_map.items():
                if name not in self.entries or self.entries[name].file != file:
                    raise CheckpointError(
                        index,
                        f"says that {show_name(name)} is in {file}, which does not hold it",
                        "fetch the checkpoint again",
                    )
        except BaseException:
            self.close()
            raise

    def _list_file(self, file: str) -> None:
        """Add the tensors of one file to entries."""
        self._use(file)  # the library checks the header against the file's size
        header = _read_header(self.folder / file)
        self.metadata[file] = header.pop("__metadata__", {})
        for name, place in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            entry = _make_entry(self.folder, name, place, file)
            if name in self.entries:
                raise CheckpointError(
                    self.folder,
                    f"tensor {name} is in both {self.entries[name].file} and {file}",
                    "remove the file that does not belong, or fetch the checkpoint again",
                )
            self.entries[name] = entry

    def _use(self, file: str) -> Any:
        """Return the open handle of a file, closing the one before."""
        if self._open_file != file:
            self.close()
            path = self.folder / file
            try:
                self._handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError, MemoryError) as error:  # the last where address space is limited
                raise CheckpointError(
                    path, f"is missing, corrupt or truncated ({error})", "fetch or save the checkpoint again"
                ) from error
            self._open_file = file
        return self._handle

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return one tensor, on the CPU and in its dtype on disk.

        Args:
            name: A key of entries.
            index: Read only this index of the first dimension, which the result lacks; None for the whole.

        Returns:
            The tensor, mapped from the file: do not write into it.

        Raises:
            CheckpointError: If the file broke, or was exchanged, since the checkpoint was opened.
        """
        entry = self.entries[name]
        handle = self._use(entry.file)
        try:
            tensor: Tensor = handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            path = self.folder / entry.file
            raise CheckpointError(path, f"tensor {name} cannot be read ({error})", "fetch it again") from error
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape[0 if index is None else 1 :], entry.dtype):
            raise CheckpointError(
                self.folder / entry.file, f"tensor {name} is not what it was a moment ago", "start again"
            )
        self.bytes_read += tensor.numel() * entry.dtype.itemsize
        return tensor

    def close(self) -> None:
        """Close the open file, if any."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle = self._open_file = None

    def __enter__(self) -> CheckpointReader:
        """Return the reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the open file."""
        self.close()


def _read_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a file that the library accepts (which itself forgets the order of metadata)."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return parse_json(file.read(min(length, os.path.getsize(path))))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"has a broken header ({error})", "fetch or save the checkpoint again") from error


def _make_entry(folder: Path, name: str, place: dict[str, Any], file: str) -> TensorEntry:
    """Return what a file's header says about a tensor, after checking that torch can hold it and a line its name."""
    path, shape = folder / file, tuple(place["shape"])
    if len(name) > MAX_NAME or not name.isprintable():
        problem = f"holds a tensor called {show_value(name)}, which is too long or cannot be printed"
        raise CheckpointError(path, problem, "fetch the checkpoint from a source you trust")
    if place["dtype"] not in DTYPES:
        raise CheckpointError(
            path,
            f"tensor {name} has the dtype {place['dtype']}, which is not supported",
            f"convert it to one of {', '.join(DTYPES)}",
        )
    dtype = DTYPES[place["dtype"]]
    # An empty tensor may claim any length along its other dimensions: the library takes it, torch overflows.
    if len(shape) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        problem = f"tensor {name} has the shape {show_value(shape)}, which no tensor can have"
        raise CheckpointError(path, problem, "fetch the checkpoint from a source you trust")
    return TensorEntry(name, shape, dtype, file)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (tensor -> file, metadata) of an index after checking that every file is a plain name in the folder."""
    content = read_json(path)
    weight_map, metadata = content.get("weight_map"), content.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CheckpointError(path, "has no weight_map that says which tensor is in which file", "fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:]+\.safetensors", file) or not file.isprintable():
            raise CheckpointError(
                path,
                f"puts tensor {show_name(name)} into {show_value(file)}, which is not the name of a .safetensors file "
                "in this folder",
                "an index may name only files beside it: correct it, or fetch the checkpoint from a source you trust",
            )
    missing = sorted(file for file in set(weight_map.values()) if not os.path.isfile(path.parent / file))
    if missing:
        raise CheckpointError(path, f"names files that are not there: {list_names(missing)}", "fetch the missing files")
    return weight_map, metadata


def _nothing_to_read(folder: Path, weights_name: str) -> CheckpointError:
    """Return the error for a folder without the weights that were asked for."""
    if not os.path.lexists(folder):
        return CheckpointError(folder, "there is no such folder", "name a local folder that holds " + weights_name)
    try:
        names = os.listdir(folder)
    except OSError as error:
        problem = "is a file, not a folder" if isinstance(error, NotADirectoryError) else f"cannot be read ({error})"
        return CheckpointError(folder, problem, "name the folder that holds " + weights_name)
    if weights_name == MODEL_FILE and ADAPTER_CONFIG_FILE in names:
        return CheckpointError(folder, "is an adapter, not a model checkpoint", "name the folder of the base model")
    if pickled := find_pickles(names):
        return pickled_error(folder, pickled)
    return CheckpointError(
        folder,
        f"holds neither {weights_name} nor {weights_name}.index.json",
        "name a folder that save_pretrained wrote",
    )


def write_shard(
    path: str | Path,
    entries: Sequence[TensorEntry],
    read: Callable[[TensorEntry], Tensor],
    metadata: dict[str, str] | None = None,
) -> int:
    """Write a safetensors file tensor by tensor, with one tensor in memory.

    The format allows it: 8 bytes of header length, a JSON header with every tensor's dtype, shape and place, then the
    data; all sizes are known in advance. Wider dtypes come first, as with the library's own writer, so that data stays
    aligned.

    Args:
        path: The file to create; it must not exist.
        entries: What to write; their shapes and dtypes are those of the result.
        read: Returns the tensor of an entry; called once for each, in the order of the file.
        metadata: The file's own metadata, text to text.

    Returns:
        Bytes written. The data is on the disk (fsync) when this returns.

    Raises:
        CheckpointError: If read returns another shape or dtype than the entry's, or a name comes twice.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for entry in ordered:
        if entry.name in header:
            raise CheckpointError(path, f"tensor {entry.name} would be written twice", "give every tensor its own name")
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.num_bytes],
        }
        position += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            tensor = read(entry)
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise CheckpointError(
                    path,
                    f"tensor {entry.name} was announced as {entry.dtype} {entry.shape} but is {tensor.dtype} "
                    f"{tuple(tensor.shape)}",
                    "this is a defect: please report it",
                )
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
                del flat
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + position


def write_text(path: str | Path, text: str) -> None:
    """Write a small text file and bring it to the disk.

    Args:
        path: The file to create; it must not exist.
        text: Its content.
    """
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_index(path: str | Path, entries: Sequence[TensorEntry], metadata: dict[str, Any]) -> None:
    """Write the index of a sharded checkpoint.

    Args:
        path: The file to create.
        entries: Every tensor with the file it is in.
        metadata: Kept, with total_size (bytes) set to the sum over entries.
    """
    content = {
        "metadata": {**metadata, "total_size": sum(entry.num_bytes for entry in entries)},
        "weight_map": {entry.name: entry.file for entry in entries},
    }
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def plan_shards(
    entries: Sequence[TensorEntry], max_shard_bytes: int, weights_name: str = MODEL_FILE
) -> list[TensorEntry]:
    """Assign tensors, in their order, to files of a largest size.

    Args:
        entries: The tensors; the files they name are ignored.
        max_shard_bytes: Most bytes of tensor data in one file, positive; a larger tensor gets a file of its own.
        weights_name: Name of the file if one is enough; else "-00001-of-00002" goes before its suffix.

    Returns:
        The entries with their new files.
    """
    shards: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        if not shards or (entry.num_bytes > room and shards[-1]):
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.num_bytes
    stem, suffix = os.path.splitext(weights_name)
    names = (
        [weights_name]
        if len(shards) == 1
        else [f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}" for number in range(1, len(shards) + 1)]
    )
    return [
        TensorEntry(entry.name, entry.shape, entry.dtype, file)
        for file, shard in zip(names, shards, strict=True)
        for entry in shard
    ]
