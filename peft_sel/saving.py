"""Adapters as folders: written whole or not at all, in shards where they are big, and read without a second copy."""

from __future__ import annotations

import copy
import inspect
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict, infer_device
from torch import Tensor

from peft_sel.adapter_files import INDEX_NAME, UNFINISHED
from peft_sel.card import CARD_FILE, read_card
from peft_sel.checkpoint.adapter import KEY_PREFIX
from peft_sel.checkpoint.shards import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CheckpointReader,
    TensorEntry,
    plan_shards,
    write_index,
    write_shard,
)
from peft_sel.checkpoint.staging import require_folder, staged_folder
from peft_sel.config import SELConfig
from peft_sel.conversion import PREFIX
from peft_sel.errors import AdapterStateError, CheckpointError, ConfigError, OutputExistsError, list_names
from peft_sel.sharded import is_sharded_model, write_from_first
from peft_sel.state import SavedTensors

MAX_SHARD_BYTES = 50_000_000_000  # what the hub takes as one file
ADAPTER_NAMES = re.compile(r"adapter_model.*\.(safetensors|bin|index\.json)|adapter_config\.json")


@torch.no_grad()
def save_adapter(
    model: PeftModel,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Save an adapter so that its folder is whole or not there, whenever the process dies.

    Writes what PeftModel.save_pretrained writes, the same tensors in the same file (on GPUs copied out one at a time),
    but into a hidden folder beside, brought to the disk and renamed. Bigger adapters become shards with an index, as
    checkpoints do; PeftModel.from_pretrained, merge_checkpoint and inspect read these as well. On several processes,
    call it on one; under FSDP2 on all, which gather tensor after tensor for the first, and that one writes.

    Args:
        model: The model.
        folder: Folder to create; the adapter's files go directly into it, whatever its name.
        adapter_name: The adapter.
        max_shard_bytes: Most bytes of tensor data per file; a larger tensor gets a file of its own.
        overwrite: Replace the adapter in folder, in one step; other files there stay, and folders must not be there.

    Raises:
        OutputExistsError: If folder exists and overwrite was not asked for.
        AdapterStateError: If the model has no SEL adapter of this name.
        ConfigError: If max_shard_bytes cannot be used.
        OffloadedError: If tensors of it are not in memory.
        MultiplierSignError: If training brought a multiplier that the transform is divided by to 0 or below.
        CheckpointError: If folder holds something else than an adapter, or cannot be written.
        OtherProcessError: If the first of several processes fails, and this is another.
    """
    folder = Path(folder)
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(model, PeftModel) or not isinstance(config, SELConfig):
        raise AdapterStateError(adapter_name, "is no SEL adapter of this model", "name one that get_peft_model added")
    if max_shard_bytes < 1:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "a file needs room for at least one byte")
    tensors = get_peft_model_state_dict(model, adapter_name=adapter_name)
    entries = [TensorEntry(name, tuple(tensor.shape), tensor.dtype, "") for name, tensor in sorted(tensors.items())]
    entries = plan_shards(entries, max_shard_bytes, ADAPTER_FILE)

    def write(read: Callable[[str], Tensor]) -> None:
        if os.path.lexists(folder) and not overwrite:
            raise OutputExistsError(folder, "overwrite=True")
        with staged_folder(folder, check=list_other_files if overwrite else None) as unfinished:
            for path in list_other_files(folder) if overwrite else []:
                _copy_or_link(path, unfinished / path.name)
            files = list(dict.fromkeys(entry.file for entry in entries))
            for file in files:
                members = [entry for entry in entries if entry.file == file]
                write_shard(unfinished / file, members, lambda entry: read(entry.name), {"format": "pt"})
            if len(files) > 1:
                write_index(unfinished / INDEX_NAME, entries, {})
            _write_config(model, config, unfinished)

    if is_sharded_model(model):
        write_from_first(tensors, write)
    else:
        write(tensors.__getitem__)


def list_other_files(folder: Path) -> list[Path]:
    """Return what stays in an adapter's folder when its adapter is replaced.

    Args:
        folder: The folder; it need not be there.

    Returns:
        Its files, but those of an adapter.

    Raises:
        CheckpointError: If it holds folders or a README.md that is no model card, is no adapter's, or is the working
            directory.
    """
    if not os.path.lexists(folder):
        return []
    require_folder(folder)
    if Path.cwd().is_relative_to(folder.resolve()):
        raise CheckpointError(folder, "is in use as the working directory", "name another folder, or go elsewhere")
    found = sorted(folder.iterdir())
    if found and not (folder / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(folder, f"holds no {ADAPTER_CONFIG_FILE}, so it is not an adapter's", "name another one")
    if folders := [path.name for path in found if path.is_dir() and path.name != UNFINISHED]:
        problem = f"holds folders ({list_names(folders)}), and an adapter can be replaced only in a folder of files"
        raise CheckpointError(folder, problem, "save it into a folder of its own")
    if (folder / CARD_FILE).exists():
        read_card(folder / CARD_FILE)
    return [path for path in found if path.name != UNFINISHED and not ADAPTER_NAMES.fullmatch(path.name)]


def _copy_or_link(source: Path, target: Path) -> None:
    """Put a file into another folder of the same disk: the model card, which is written to, as a copy."""
    try:
        if source.name == CARD_FILE:
            shutil.copyfile(source, target)
        else:
            os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def _write_config(model: PeftModel, config: SELConfig, folder: Path) -> None:
    """Write model card and configuration as PeftModel.save_pretrained does."""
    base: Any = model.get_base_model()
    saved = copy.copy(config)
    saved.inference_mode = True
    saved.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    kind = type(base)
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    model.create_or_update_model_card(str(folder))
    saved.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else mapping)


def read_adapter(
    model_id: str | Path, device: Any, key_mapping: dict[str, str] | None, options: dict[str, Any]
) -> SavedTensors | None:
    """Read the tensors of a SEL adapter, mapped from its files, for PEFT to copy into a model.

    What is not SEL's own, such as modules_to_save, is copied to the device: PEFT may put it into the model as it is.

    Args:
        model_id: An adapter's folder, or its id on the hub.
        device: Where PEFT wants the tensors; None for its choice.
        key_mapping: PEFT's: pattern -> replacement, of which the first that is found in a key changes it.
        options: Keyword arguments of hf_hub_download, subfolder among them.

    Returns:
        The tensors by key, and the configuration beside them; None if it is not a SEL adapter.

    Raises:
        CheckpointError: If the files are truncated, corrupt or contradict the index, or none is in safetensors.
    """
    if (folder := _find_folder(model_id, options)) is None:
        return None
    config = SELConfig.from_pretrained(str(folder))
    tensors: dict[str, Tensor] = {}
    with CheckpointReader(folder, ADAPTER_FILE) as reader:
        for name in reader.entries:
            tensor = reader.read(name)
            if f".{PREFIX}" not in name:
                tensor = tensor.to(infer_device() if device is None else device, copy=True)
            tensors[_rename(name, key_mapping or {})] = tensor
    return SavedTensors(tensors, config)


def _find_folder(model_id: str | Path, options: dict[str, Any]) -> Path | None:
    """Return the folder of a SEL adapter, fetched if it is on the hub; None for what PEFT knows better how to read."""
    subfolder = options.get("subfolder") or ""
    folder = Path(model_id, subfolder)
    if folder.is_dir() and not (folder / ADAPTER_CONFIG_FILE).is_file():
        return None
    try:
        kind = PeftConfig._get_peft_type(str(model_id), **options)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if kind != "SYMEXPLIN":
        return None
    if folder.is_dir():
        return folder
    names = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, INDEX_NAME, "adapter_model-*.safetensors")
    known = inspect.signature(snapshot_download).parameters
    fetched = snapshot_download(
        str(model_id),
        allow_patterns=[Path(subfolder, name).as_posix() for name in names],
        **{name: value for name, value in options.items() if name in known},
    )
    return Path(fetched, subfolder)


def _rename(key: str, key_mapping: dict[str, str]) -> str:
    """Apply PEFT's key_mapping to a saved key, which it sees without the prefix."""
    for pattern, replacement in key_mapping.items():
        name, count = re.subn(pattern, replacement, key.removeprefix(KEY_PREFIX))
        if count:
            return f"{KEY_PREFIX}{name}"
    return key
