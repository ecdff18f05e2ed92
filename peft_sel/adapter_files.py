"""The files of an adapter's folder: are they whole, and how small ones are replaced in one step."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from peft_sel.errors import CheckpointError, list_names

INDEX_NAME = f"{SAFETENSORS_WEIGHTS_NAME}.index.json"
SHARD_NAME = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")
CARD_FILE = "README.md"
UNFINISHED = ".unfinished"


def check_files(folder: Path) -> None:
    """Raise unless the tensors in an adapter's folder are whole, in one file or in shards with an index.

    PEFT converts the model before it opens them, so this has to be known earlier. A folder without any is left to PEFT.

    Args:
        folder: The adapter's folder.

    Raises:
        CheckpointError: If a file is truncated, corrupt or missing.
    """
    single, index = folder / SAFETENSORS_WEIGHTS_NAME, folder / INDEX_NAME
    shards = sorted(path for path in folder.glob("adapter_model-*.safetensors") if SHARD_NAME.fullmatch(path.name))
    files = [single] if single.is_file() else shards
    if files == shards and (shards or index.is_file()):
        _check_index(index, {path.name for path in shards})
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(file, f"is truncated or corrupt ({error})", "save the adapter again") from error


def _check_index(index: Path, shards: set[str]) -> None:
    """Raise unless an index names exactly the shards that are there."""
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(index, f"is not a readable index ({error!r})", "save the adapter again") from error
    if named != shards:
        differing = list_names(sorted(map(str, named ^ shards)))
        problem = f"and the shards beside it do not belong together: {differing}"
        raise CheckpointError(index, problem, "fetch or save the adapter again, all of its files")


@contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """Yield a folder for small files that replace those of the same names in another folder, each in one step.

    A process that dies leaves each file either old or new, never cut.

    Args:
        folder: Where they go; made if it is not there.

    Yields:
        A hidden folder inside it, empty.
    """
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that died
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in sorted(unfinished.iterdir()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
