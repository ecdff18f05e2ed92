"""Merge adapters into a safetensors checkpoint, file to file, without building the model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from peft_sel.checkpoint.adapter import Adapter
from peft_sel.checkpoint.plan import Plan
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
from peft_sel.checkpoint.side_files import copy_side_files
from peft_sel.checkpoint.staging import check_output, staged_folder
from peft_sel.conversion import FLOAT_DTYPES
from peft_sel.errors import ConfigError
from peft_sel.untrusted import read_json


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        tensors_total: Tensors in the output.
        tensors_merged: Of these, tensors whose values come from an adapter.
        bytes_read: Bytes of tensor data read from the base and the adapters.
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


def _write(plan: Plan, out_dir: Path, max_shard_bytes: int | None, progress: bool) -> int:
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
            weight = plan.compute(entry)
            bar.update()
            return weight

        for file in dict.fromkeys(entry.file for entry in entries):
            members = [entry for entry in entries if entry.file == file]
            num_bytes += write_shard(out_dir / file, members, compute, plan.base.metadata.get(file, first_metadata))
    if index_metadata is not None:
        count = index_metadata.get("total_parameters")
        if isinstance(count, int):
            count += sum(math.prod(entry.shape) for entry in entries if entry.name in plan.untied)
            index_metadata = {**index_metadata, "total_parameters": count}
        write_index(out_dir / f"{MODEL_FILE}.index.json", entries, index_metadata)
    return num_bytes


def check_mergeable(base_dir: str | Path) -> None:
    """Raise what merge_checkpoint would whatever the adapter, before hours of training one.

    Args:
        base_dir: Folder of the base model.

    Raises:
        CheckpointError: If the base is missing, corrupt, pickled or quantized.
    """
    with CheckpointReader(base_dir) as base:
        Plan(base, [], None, True)


@torch.no_grad()
def merge_checkpoint(
    base_dir: str | Path,
    adapter_dir: str | Path | Sequence[str | Path],
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    check_base: bool = True,
) -> MergeReport:
    """Write a base checkpoint with adapters folded in (Eq. 3-7), as an ordinary checkpoint that needs no peft_sel.

    Works tensor by tensor, so memory holds one tensor and its raw weight, whatever the model's size. The values are
    those of merge_and_unload, bit for bit, and at zero training steps those of a bf16 or fp16 base. Several adapters
    are those of merge_and_unload(adapter_names=[...]): all were trained on this base, and what each adds to a weight,
    w_eff - w_base, is summed. An adapter that was trained on top of a merged other one needs a second merge, into the
    output of the first. out_dir appears only when it is complete: everything is written to a hidden folder beside it,
    brought to the disk and renamed. What a killed merge left there, the next one into the same out_dir removes, with a
    warning, before it starts anew.

    Args:
        base_dir: Folder of the base model: safetensors, one file or shards with an index.
        adapter_dir: Folder that PeftModel.save_pretrained wrote, or several of them.
        out_dir: Folder to create.
        dtype: Dtype of all floating-point tensors of the output (float16, bfloat16, float32 or float64), also entered
            in config.json; None keeps each tensor's own.
        max_shard_bytes: Most bytes of tensor data per file; None keeps the base's files.
        overwrite: Replace the checkpoint in out_dir, at the moment when the new one is complete. Nothing else is ever
            replaced: no other files or folders, nor the working folder, base_dir, adapter_dir, or a parent of these.
        progress: Show a progress bar when standard error is a terminal.
        check_base: Refuse a base that the adapter was not made from, by the fingerprints that it records.

    Returns:
        Counts, bytes and seconds.

    Raises:
        OutputExistsError: If out_dir exists and overwrite is False.
        ConfigError: If dtype or max_shard_bytes cannot be used, or no adapter is named.
        CheckpointError: If a folder or file is missing, corrupt or pickled, an adapter is no SEL adapter, a tensor of
            it has no counterpart in the base or does not fit it, two adapters replace one tensor (modules_to_save,
            bias="all"), or the output cannot be written, may not be replaced, or is being written by another process.
        BrokenMergeError: If a merged tensor holds NaN or infinity.
        OtherBaseError: If an adapter was made from another base.
        NonFiniteWeightError: If an adapter trains only scales and a base weight holds NaN or infinity.
    """
    started = time.perf_counter()
    adapter_dirs = [adapter_dir] if isinstance(adapter_dir, (str, Path)) else adapter_dir
    if not adapter_dirs:
        raise ConfigError("adapter_dir", adapter_dirs, "name at least one adapter to merge")
    out_dir, inputs = Path(out_dir), [Path(folder) for folder in (base_dir, *adapter_dirs)]
    check_output(out_dir, overwrite, inputs, "overwrite=True (--overwrite)")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise ConfigError("dtype", dtype, f"choose one of {', '.join(map(str, FLOAT_DTYPES))}")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "a file needs room for at least one byte")
    with CheckpointReader(base_dir) as base, ExitStack() as stack:
        adapters = [stack.enter_context(Adapter(folder)) for folder in adapter_dirs]
        plan = Plan(base, adapters, dtype, check_base)
        with staged_folder(out_dir, overwrite=overwrite, inputs=inputs) as staging:
            copy_side_files(base.folder, staging)
            bytes_written = _write(plan, staging, max_shard_bytes, progress)
        return MergeReport(
            tensors_total=len(base.entries) + len(plan.untied),
            tensors_merged=plan.tensors_merged,
            bytes_read=base.bytes_read + sum(adapter.reader.bytes_read for adapter in adapters),
            bytes_written=bytes_written,
            seconds=time.perf_counter() - started,
            out_dir=out_dir,
        )
