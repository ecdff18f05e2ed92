"""The effective weights of an adapter alone, in two bytes each: what a run computed, not what it could go on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from peft_sel.checkpoint.adapter import Adapter, is_parameter, weight_key
from peft_sel.checkpoint.base_check import BaseCheck
from peft_sel.checkpoint.experts import check_layout, find_split_stacks, rename_as_loaded
from peft_sel.checkpoint.model_config import find_model_class
from peft_sel.checkpoint.plan import match_names
from peft_sel.checkpoint.shards import (
    CONFIG_FILE,
    MODEL_FILE,
    CheckpointReader,
    TensorEntry,
    plan_shards,
    write_index,
    write_shard,
)
from peft_sel.checkpoint.staging import check_output, staged_folder
from peft_sel.conversion import FLOAT_DTYPES, rebuild_weight
from peft_sel.errors import BrokenMergeError, CheckpointError, ConfigError
from peft_sel.untrusted import read_json

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        tensors: Number of tensors.
        bytes_written: Bytes of weights files written.
        out_dir: The output folder.
    """

    tensors: int
    bytes_written: int
    out_dir: Path


class _Weights:
    """What an adapter makes of its base: names, shapes, and one tensor at a time."""

    def __init__(self, adapter: Adapter, base: CheckpointReader | None, dtype: torch.dtype, check_base: bool) -> None:
        self.adapter, self.base, self.dtype = adapter, base, dtype
        self.check = BaseCheck(adapter, check_base)
        self.modules = {weight_key(module): module for module in adapter.modules}
        self.stacks = find_split_stacks(base.entries) if base else {}
        self.in_base = self._find_in(base) if base else {}  # key -> what the base calls it
        self.entries = [TensorEntry(key, self._check(key), dtype, "") for key in self.modules]
        for key, saved in adapter.replacements.items():
            if ".token_adapter." in key:
                problem = f"trains single rows of a weight ({key}), and the others are in the base"
                raise CheckpointError(adapter.folder, problem, "merge it instead")
            found = adapter.reader.entries[saved]
            self.entries.append(
                TensorEntry(key, found.shape, dtype if found.dtype in FLOAT_DTYPES else found.dtype, "")
            )

    def _find_in(self, base: CheckpointReader) -> dict[str, str]:
        """Find the weights that are to be read from a base, where it has them, by the names that a merge knows."""
        path = base.folder / CONFIG_FILE
        config = read_json(path) if os.path.lexists(path) else {}
        needed = [key for key, module in self.modules.items() if self.check.needs_base(module)]
        check_layout(config, [key for key in needed if is_parameter(self.modules[key])], base.folder)
        entries = {key: stack.entry for key, stack in self.stacks.items()} | base.entries
        loaded = {rename_as_loaded(key): key for key in base.entries}
        prefix = getattr(find_model_class(config), "base_model_prefix", "")
        names = match_names(needed, entries.keys() | loaded.keys(), prefix)
        homes = {key: loaded.get(name, name) for key, name in names.items()}
        return {key: home for key, home in homes.items() if home in entries and entries[home].dtype in FLOAT_DTYPES}

    def _read_base(self, base: CheckpointReader, key: str) -> Tensor:
        """Return the weight of a base, put together if it is split on disk."""
        home = self.in_base[key]
        if home in base.entries:
            return base.read(home)
        return torch.stack([torch.cat([base.read(member) for member in group]) for group in self.stacks[home].keys])

    def _check(self, key: str) -> tuple[int, ...]:
        """Return the shape of a weight after checking that the adapter has all of it."""
        module = self.modules[key]
        raw = self.adapter.modules[module].get("raw")
        if raw is not None:
            shape = self.adapter.reader.entries[raw].shape
        elif self.base is not None and key in self.in_base:
            home = self.in_base[key]
            shape = (self.base.entries[home] if home in self.base.entries else self.stacks[home].entry).shape
        else:
            folder, way_out = self.adapter.folder, "name the base checkpoint with base_dir (--base), or merge into it"
            if self.base is not None:
                folder, way_out = self.base.folder, "name the base checkpoint that the adapter was made from"
            problem = f"does not hold {key}, from whose values this adapter's weight is made"
            raise CheckpointError(folder, problem, way_out)
        self.adapter.check_parts(module, shape)
        return shape

    def compute(self, entry: TensorEntry) -> Tensor:
        """Return the value of an output tensor."""
        result = self._compute(entry.name, entry.dtype)
        if entry.dtype in FLOAT_DTYPES and not bool(torch.isfinite(result).all()):
            if bool(torch.isfinite(self._compute(entry.name, torch.float32)).all()):
                problem = f"{entry.name} has values beyond the range of {self.dtype}"
                raise CheckpointError(self.adapter.folder, problem, "choose a wider dtype")
            raise BrokenMergeError(entry.name, [str(self.adapter.folder)])
        return result

    def _compute(self, key: str, dtype: torch.dtype) -> Tensor:
        if key not in self.modules:
            return self.adapter.reader.read(self.adapter.replacements[key]).to(dtype)
        module = self.modules[key]
        base_weight = self._read_base(self.base, key) if self.base is not None and key in self.in_base else None
        self.check.check(module, base_weight)
        parts = self.adapter.read_parts(module)
        return rebuild_weight(self.adapter.config, parts, dtype=dtype, base_weight=base_weight, name=key)


@contextmanager
def _opened(base_dir: str | Path | None) -> Iterator[CheckpointReader | None]:
    if base_dir is None:
        yield None
    else:
        with CheckpointReader(base_dir) as base:
            yield base


@torch.no_grad()
def export_weights(
    adapter_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    base_dir: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
    check_base: bool = True,
) -> ExportReport:
    """Write the effective weights (Eq. 3-7) of what an adapter trained, and nothing else, as safetensors.

    Half of a dense adapter in bfloat16, and any program can read it: the names are those of the model's own parameters
    (load_state_dict(..., strict=False)), the values those of merge_checkpoint into a base of that dtype, bit for bit.
    It loses what training needs: the raw weights in float32, the scales and the residual, so that training cannot go on
    from it. Works tensor by tensor; out_dir appears only when it is complete.

    Args:
        adapter_dir: Folder of the adapter.
        out_dir: Folder to create.
        dtype: Dtype of the result: bfloat16, float16 or float32. Counters and masks of saved modules keep their own.
        base_dir: Folder of the base model, which only an adapter with train_raw=False needs; the weights of another are
            compared with those that it holds.
        max_shard_bytes: Most bytes of tensor data per file.
        progress: Show a progress bar when standard error is a terminal.
        check_base: Refuse a base that the adapter was not made from, by the fingerprints that it records.

    Returns:
        Counts and bytes.

    Raises:
        OutputExistsError: If out_dir exists.
        ConfigError: If dtype or max_shard_bytes cannot be used.
        CheckpointError: If a folder or file is missing, corrupt or pickled, the adapter is no SEL adapter or needs a
            base that does not hold its weights, values are beyond the dtype's range, or out_dir cannot be written.
        BrokenMergeError: If a weight holds NaN or infinity.
        OtherBaseError: If base_dir is another base than the adapter's.
    """
    out_dir = Path(out_dir)
    check_output(out_dir)
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"choose one of {', '.join(map(str, DTYPES))}")
    if max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "a file needs room for at least one byte")
    with Adapter(adapter_dir) as adapter, _opened(base_dir) as base:
        weights = _Weights(adapter, base, dtype, check_base)
        entries = plan_shards(weights.entries, max_shard_bytes)
        files = list(dict.fromkeys(entry.file for entry in entries))
        num_bytes = 0
        bar = tqdm(total=len(entries), desc="export", unit=" tensors", disable=None if progress else True)

        def compute(entry: TensorEntry) -> Tensor:
            weight = weights.compute(entry)
            bar.update()
            return weight

        with bar, staged_folder(out_dir) as unfinished:
            for file in files:
                members = [entry for entry in entries if entry.file == file]
                num_bytes += write_shard(unfinished / file, members, compute, {"format": "pt"})
            if len(files) > 1:
                write_index(unfinished / f"{MODEL_FILE}.index.json", entries, {})
    return ExportReport(len(entries), num_bytes, out_dir)
