"""Merge an adapter into a safetensors checkpoint, file to file, without building the model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from peft_sel.checkpoint.adapter import Adapter, is_parameter, shape_error, weight_key
from peft_sel.checkpoint.experts import check_layout, find_split_stacks, rename_as_loaded
from peft_sel.checkpoint.inspect import EMBEDDING
from peft_sel.checkpoint.model_config import find_model_class, ties_embeddings
from peft_sel.checkpoint.shards import (
    CONFIG_FILE,
    MODEL_FILE,
    CheckpointReader,
    TensorEntry,
    plan_shards,
    write_index,
    write_shard,
    write_text,
)
from peft_sel.conversion import rebuild_weight
from peft_sel.errors import BrokenMergeError, CheckpointError, ConfigError, OutputExistsError, list_names
from peft_sel.untrusted import read_json

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Weights in any format, and what would make transformers load an adapter on top of the merged model.
NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|npz|ot|index\.json|tflite|mlmodel)|adapter_config\.json|config\.json"
)
MAX_SIDE_BYTES = 1 << 30  # of one file beside the weights, so that one with a hole does not fill the disk
COPIED_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        tensors_total: Tensors in the output.
        tensors_merged: Of these, tensors whose values come from the adapter.
        bytes_read: Bytes of tensor data read from the base and the adapter.
        bytes_written: Bytes of weights files written.
        seconds: Wall time.
        out_dir: The output folder.
    """

    tensors_total: int
    tensors_merged: int
    bytes_read: int
    bytes_written: int
    seconds: float
    out_dir: Path


def _resolve_names(names: list[str], known: set[str], prefix: str, adapter_dir: Path, base_dir: Path) -> dict[str, str]:
    """Return adapter name -> base key: the names as they are, or all with the base model prefix added or removed."""
    candidates = [{name: name for name in names}]
    if prefix:
        candidates.append({name: f"{prefix}.{name}" for name in names})
        candidates.append({name: name.removeprefix(f"{prefix}.") for name in names})
    homeless = [[name for name, key in mapping.items() if key not in known] for mapping in candidates]
    best = min(range(len(candidates)), key=lambda index: len(homeless[index]))
    if homeless[best]:
        raise CheckpointError(
            adapter_dir,
            f"{len(homeless[best])} of its {len(names)} tensors have no counterpart in {base_dir}: "
            f"{list_names(homeless[best])}",
            "merge into the checkpoint that the adapter was made from (with a newly added head: save that model first)",
        )
    return candidates[best]


class _Plan:
    """What each tensor of the output is made of; making a plan validates the adapter against the base."""

    def __init__(self, base: CheckpointReader, adapter: Adapter, dtype: torch.dtype | None) -> None:
        self.base, self.adapter, self.dtype = base, adapter, dtype
        path = base.folder / CONFIG_FILE
        self.config = read_json(path) if os.path.lexists(path) else {}
        if self.config.get("quantization_config"):
            raise CheckpointError(path, "the weights are quantized", "merge into an unquantized copy of the model")
        model_class, self.ties = find_model_class(self.config), ties_embeddings(self.config, path)
        tied_keys = getattr(
            model_class, "_tied_weights_keys", None
        )  # such as lm_head.weight: model.embed_tokens.weight
        pairs = list(tied_keys.items()) if self.ties and isinstance(tied_keys, dict) else []
        absent = {tied: source for pair in pairs for tied, source in (pair, pair[::-1]) if tied not in base.entries}
        self.untied = {tied: source for tied, source in absent.items() if source in base.entries}
        weights = {module: weight_key(module) for module in adapter.modules}
        check_layout(self.config, [name for module, name in weights.items() if is_parameter(module)], base.folder)
        self.stacks = find_split_stacks(base.entries)
        loaded = {rename_as_loaded(key): key for key in base.entries}
        keys = _resolve_names(
            [*weights.values(), *adapter.replacements, *adapter.base_copies],
            base.entries.keys() | self.untied.keys() | self.stacks.keys() | loaded.keys(),
            getattr(model_class, "base_model_prefix", ""),
            adapter.folder,
            base.folder,
        )
        keys = {name: loaded.get(key, key) for name, key in keys.items()}
        self.modules = {keys[name]: module for module, name in weights.items()}
        self.members = {  # tensor on disk -> the stack and the expert that its rows are from
            key: (stack, expert)
            for stack in self.modules.keys() & self.stacks.keys()
            for expert, group in enumerate(self.stacks[stack].keys)
            for key in group
        }
        self._last: tuple[tuple[str, int, torch.dtype], Tensor] | None = None
        self.replaced = {keys[name]: key for name, key in adapter.replacements.items()}
        self.copies = {keys[name]: key for name, key in adapter.base_copies.items()}
        self._check_tying(pairs, without_head=any(len(key) < len(name) for name, key in keys.items()))
        self._check_tensors()
        self._update_config()

    def _check_tying(self, pairs: list[tuple[str, str]], without_head: bool) -> None:
        """Decide whether tied tensors part: they must where the adapter changes one, and the other keeps its value."""
        touched = self.modules.keys() | self.replaced.keys()
        self.tied_changed = any(touched.intersection(pair) for pair in pairs)
        if not self.tied_changed:
            self.untied = {}
        changes_embedding = any(EMBEDDING.fullmatch(key.removesuffix(".weight")) for key in touched)
        if (without_head and changes_embedding and self.ties) or (self.tied_changed and len(pairs) > 1):
            raise CheckpointError(
                self.base.folder,
                "the adapter changes a tensor that the model ties to others, and these cannot be untied from files",
                "save the full model with tie_word_embeddings=False first, or merge with merge_and_unload",
            )

    def _base_entry(self, key: str) -> TensorEntry:
        """Return the base's entry for a key; for a tied tensor that is not on disk, that of its counterpart."""
        return self.stacks[key].entry if key in self.stacks else self.base.entries[self.untied.get(key, key)]

    @property
    def tensors_merged(self) -> int:
        """Number of tensors of the output whose values come from the adapter."""
        return len(self.modules.keys() - self.stacks.keys()) + len(self.members) + len(self.replaced)

    def _check_tensors(self) -> None:
        """Raise unless every adapter tensor fits its base tensor, and no other one of the adapter does."""
        adapter = self.adapter
        sources = [*self.modules.values(), *self.replaced.values(), *self.copies.values()]
        hidden = {*adapter.modules, *adapter.replacements.values(), *adapter.base_copies.values()} - {*sources}
        if twice := sorted(hidden | (self.modules.keys() & self.replaced.keys())):
            raise CheckpointError(
                self.adapter.folder, f"holds {list_names(twice)} twice over", "save the adapter again"
            )
        for key, module in self.modules.items():
            entry = self._base_entry(key)
            if entry.dtype not in WEIGHT_DTYPES:
                raise CheckpointError(
                    self.base.folder, f"{key} is stored as {entry.dtype}", "merge into an unquantized copy of the model"
                )
            self.adapter.check_parts(module, entry.shape)
        for key, saved in (*self.replaced.items(), *self.copies.items()):
            entry, found = self._base_entry(key), self.adapter.reader.entries[saved]
            if found.shape != entry.shape:
                raise shape_error(self.adapter.folder, saved, found.shape, key, entry.shape)
            if found.dtype != entry.dtype and not {found.dtype, entry.dtype} <= {*WEIGHT_DTYPES}:
                raise CheckpointError(
                    self.adapter.folder, f"{saved} is {found.dtype} and in the base {entry.dtype}", "save it again"
                )
        for key, saved in self.copies.items():
            copy = self.adapter.reader.read(saved)
            if not torch.equal(self.base.read(self._base_entry(key).name).to(copy.dtype), copy):
                raise CheckpointError(
                    self.adapter.folder,
                    f"its copy of the base weight {key} differs from the one in {self.base.folder}",
                    "merge into the checkpoint that the adapter was made from",
                )

    def _update_config(self) -> None:
        """Set the tying and dtype fields of the configuration to what the output holds."""
        nested = [part for name, part in self.config.items() if name.endswith("_config") and isinstance(part, dict)]
        for part in (self.config, *nested):
            if self.tied_changed and (part is self.config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
            for field in {"dtype", "torch_dtype"} & part.keys() if self.dtype else ():
                part[field] = str(self.dtype).removeprefix("torch.")

    def outputs(self) -> list[TensorEntry]:
        """Return the tensors of the output, in the files of the base."""
        entries = []
        followers = {source: tied for tied, source in self.untied.items()}
        for entry in self.base.entries.values():
            dtype = self.dtype if self.dtype and entry.dtype in WEIGHT_DTYPES else entry.dtype
            entries.append(dataclasses.replace(entry, dtype=dtype))
            if entry.name in followers:
                entries.append(dataclasses.replace(entries[-1], name=followers[entry.name]))
        return entries

    def compute(self, entry: TensorEntry) -> Tensor:
        """Return the value of an output tensor."""
        key = entry.name
        if not any(key in changed for changed in (self.modules, self.members, self.replaced)):
            stored = self.base.read(self._base_entry(key).name)
            result = stored.to(entry.dtype)
            if result is not stored and torch.isfinite(stored).all() and not torch.isfinite(result).all():
                raise self._overflow(entry)
            return result
        result = self._adapted(key, entry.dtype)
        if not torch.isfinite(result).all():
            base_dtype = self._base_entry(key).dtype
            if entry.dtype != base_dtype and torch.isfinite(self._adapted(key, base_dtype)).all():
                raise self._overflow(entry)
            raise BrokenMergeError(key, [str(self.adapter.folder)])
        return result

    def _adapted(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor that the adapter changes."""
        if key in self.replaced:
            return self.adapter.reader.read(self.replaced[key]).to(dtype)
        if key in self.members:
            return self._adapted_rows(key, dtype)
        config = self.adapter.config
        base_weight = None if config.train_raw else self.base.read(self._base_entry(key).name)
        parts = self.adapter.read_parts(self.modules[key])
        return rebuild_weight(config, parts, dtype=dtype, base_weight=base_weight, name=key)

    def _adapted_rows(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor that holds some rows of an expert's matrix; the matrix is kept for its other rows."""
        name, expert = self.members[key]
        stack, config = self.stacks[name], self.adapter.config
        group = stack.keys[expert]
        if self._last is None or self._last[0] != (name, expert, dtype):
            base_weight = None if config.train_raw else torch.cat([self.base.read(member) for member in group])
            parts = self.adapter.read_expert(self.modules[name], expert)
            title = f"{name}[{expert}]"
            matrix = rebuild_weight(config, parts, dtype=dtype, base_weight=base_weight, name=title)
            self._last = (name, expert, dtype), matrix
        return self._last[1].split(stack.rows)[group.index(key)]

    def _overflow(self, entry: TensorEntry) -> CheckpointError:
        return CheckpointError(
            self.base.folder, f"{entry.name} has values beyond the range of {entry.dtype}", "choose a wider dtype"
        )


def _copy_side_files(base_dir: Path, out_dir: Path) -> None:
    """Copy what lies beside the weights: tokenizer, generation config, chat templates, licence."""
    sources = [path for path in base_dir.iterdir() if not NOT_COPIED.fullmatch(path.name.lower())]
    for folder in COPIED_FOLDERS:
        if (base_dir / folder).is_dir():
            (out_dir / folder).mkdir()
            sources.extend((base_dir / folder).iterdir())
    for path in sources:
        if not path.exists() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(path, "is a link to nothing, a pipe or a device", "remove it, or fetch it again")
        if path.is_file():
            if path.stat().st_size > MAX_SIDE_BYTES:
                problem = f"is larger than {MAX_SIDE_BYTES} bytes, and no file of weights"
                raise CheckpointError(path, problem, "move it out of the folder")
            with open(path, "rb") as source, open(out_dir / path.relative_to(base_dir), "xb") as target:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _staged_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder beside out_dir that becomes out_dir at the end, or disappears on any error."""
    parent = out_dir.absolute().parent
    staging = parent / f".{out_dir.name}.unfinished-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        _sync_folder(staging)
        if os.path.lexists(out_dir):
            raise OutputExistsError(out_dir)
        os.rename(staging, out_dir)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                out_dir, f"could not be written ({error})", "nothing was left behind; free space or name another folder"
            ) from error
        raise
    _sync_folder(parent)


def _write(plan: _Plan, out_dir: Path, max_shard_bytes: int | None, progress: bool) -> int:
    """Write config and weights of the output; return the bytes of the weights files."""
    config_path = plan.base.folder / CONFIG_FILE
    if config_path.exists():
        unchanged = plan.config == read_json(config_path)
        text = json.dumps(plan.config, indent=2, sort_keys=True) + "\n"
        write_text(out_dir / CONFIG_FILE, config_path.read_text(encoding="utf-8") if unchanged else text)
    entries, index_metadata = plan.outputs(), plan.base.index_metadata
    if max_shard_bytes is not None:
        entries = plan_shards(entries, max_shard_bytes)
        index_metadata = None if entries[-1].file == MODEL_FILE else index_metadata or {}
    first_metadata = plan.base.metadata[plan.base.files[0]]
    num_bytes = 0
    with tqdm(total=len(entries), desc="merge", unit=" tensors", disable=None if progress else True) as bar:

        def compute(entry: TensorEntry) -> Tensor:
            bar.update()
            return plan.compute(entry)

        for file in dict.fromkeys(entry.file for entry in entries):
            members = [entry for entry in entries if entry.file == file]
            num_bytes += write_shard(out_dir / file, members, compute, plan.base.metadata.get(file, first_metadata))
    if index_metadata is not None:
        write_index(out_dir / f"{MODEL_FILE}.index.json", entries, index_metadata)
    return num_bytes


@torch.no_grad()
def merge_checkpoint(
    base_dir: str | Path,
    adapter_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    progress: bool = True,
) -> MergeReport:
    """Write a base checkpoint with an adapter folded in (Eq. 3-7), as an ordinary checkpoint that needs no peft_sel.

    Works tensor by tensor, so memory holds one tensor and its raw weight, whatever the model's size. The values are
    those of merge_and_unload, bit for bit, and at zero training steps those of a bf16 or fp16 base. out_dir appears
    only when it is complete: everything is written to a hidden folder beside it, brought to the disk and renamed.

    Args:
        base_dir: Folder of the base model: safetensors, one file or shards with an index.
        adapter_dir: Folder that PeftModel.save_pretrained wrote.
        out_dir: Folder to create.
        dtype: Dtype of all floating-point tensors of the output (float16, bfloat16, float32 or float64), also entered
            in config.json; None keeps each tensor's own.
        max_shard_bytes: Most bytes of tensor data per file; None keeps the base's files.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        Counts, bytes and seconds.

    Raises:
        OutputExistsError: If out_dir exists.
        ConfigError: If dtype or max_shard_bytes cannot be used.
        CheckpointError: If a folder or file is missing, corrupt or pickled, the adapter is no SEL adapter, a tensor of
            it has no counterpart in the base or does not fit it, or the output cannot be written.
        BrokenMergeError: If a merged tensor holds NaN or infinity.
        NonFiniteWeightError: If the adapter trains only scales and a base weight holds NaN or infinity.
    """
    started = time.perf_counter()
    out_dir = Path(out_dir)
    if os.path.lexists(out_dir):
        raise OutputExistsError(out_dir)
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError("dtype", dtype, f"choose one of {', '.join(map(str, WEIGHT_DTYPES))}")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "a file needs room for at least one byte")
    with CheckpointReader(base_dir) as base, Adapter(adapter_dir) as adapter:
        plan = _Plan(base, adapter, dtype)
        with _staged_folder(out_dir) as staging:
            _copy_side_files(base.folder, staging)
            bytes_written = _write(plan, staging, max_shard_bytes, progress)
        return MergeReport(
            tensors_total=len(base.entries) + len(plan.untied),
            tensors_merged=plan.tensors_merged,
            bytes_read=base.bytes_read + adapter.reader.bytes_read,
            bytes_written=bytes_written,
            seconds=time.perf_counter() - started,
            out_dir=out_dir,
        )
