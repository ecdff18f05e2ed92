"""The files of an adapter's folder: whether they are whole, and how small ones are replaced."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

from peft_sel.errors import CheckpointError, list_names
from peft_sel.untrusted import check_adapter_file, read_json

INDEX_NAME = f"{SAFETENSORS_WEIGHTS_NAME}.index.json"
SHARD_NAME = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")
UNFINISHED = ".unfinished"


def check_files(folder: Path) -> None:
    """Raise unless the tensors in an adapter's folder are whole, in one file or in shards with an index.

    PEFT converts the model before it opens them, so this has to be known earlier. A folder without any is left to PEFT.

    Args:
        folder: The adapter's folder.

    Raises:
        CheckpointError: If a file is truncated, corrupt or missing, or there are only pickled ones.
    """
    single, index = folder / SAFETENSORS_WEIGHTS_NAME, folder / INDEX_NAME
    shards = sorted(path for path in folder.glob("adapter_model-*.safetensors") if SHARD_NAME.fullmatch(path.name))
    files = [single]
    if not os.path.lexists(single) and (shards or os.path.lexists(index)):
        _check_index(index, {path.name for path in shards})
        files = shards
    for file in files:
        check_adapter_file(file, folder / WEIGHTS_NAME)


def _check_index(index: Path, shards: set[str]) -> None:
    """Raise unless an index names exactly the shards that are there."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(index, "has no weight_map", "save the adapter again")
    named = set(map(str, weight_map.values()))
    if named != shards:
        problem = f"and the shards beside it do not belong together: {list_names(sorted(named ^ shards))}"
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
