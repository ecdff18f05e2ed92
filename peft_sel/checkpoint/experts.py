"""Experts on disk: transformers runs them stacked, and saves one tensor for each expert and projection."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from peft_sel.checkpoint.shards import TensorEntry
from peft_sel.errors import CheckpointError

SPLIT_KEY = re.compile(
    r"(?P<parent>.+\.experts)\.(?P<expert>0|[1-9][0-9]{0,5})\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight"
)
# Stacked parameter -> what its rows consist of, as Qwen and as Mixtral call it.
PROJECTIONS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
PLAIN_OPERATIONS = {"MergeModulelist", "Concatenate"}


@dataclass(frozen=True)
class SplitStack:
    """A stack of experts that is split on disk.

    Attributes:
        entry: The stack as transformers runs it, (num_experts, d_out, d_in); in no file.
        keys: For each expert, the tensors whose rows make up its matrix.
        rows: How many rows each of these has.
    """

    entry: TensorEntry
    keys: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]


def rename_as_loaded(key: str) -> str:
    """Return the name that transformers gives to a tensor of a mixture of experts: Mixtral's block is called mlp."""
    return key.replace(".block_sparse_moe.", ".mlp.")


def find_split_stacks(entries: Mapping[str, TensorEntry]) -> dict[str, SplitStack]:
    """Find the stacks of experts that a checkpoint holds split into matrices.

    Args:
        entries: The tensors of the checkpoint by name.

    Returns:
        By the name of the stacked parameter in memory; incomplete and uneven stacks are left out.
    """
    parents: dict[str, dict[int, set[str]]] = {}
    for key in entries:
        if match := SPLIT_KEY.fullmatch(key):
            parents.setdefault(match["parent"], {}).setdefault(int(match["expert"]), set()).add(match["part"])
    stacks = {}
    for parent, experts in parents.items():
        for name, spellings in PROJECTIONS.items():
            for parts in spellings:
                if sorted(experts) == list(range(len(experts))) and all(
                    set(parts) <= found for found in experts.values()
                ):
                    stacked = f"{rename_as_loaded(parent)}.{name}"
                    stack = _make_stack(entries, parent, stacked, parts, len(experts))
                    stacks.update({stacked: stack} if stack else {})
    return stacks


def _make_stack(
    entries: Mapping[str, TensorEntry], parent: str, name: str, parts: tuple[str, ...], num_experts: int
) -> SplitStack | None:
    """Return the stack of matrices that these parts of each expert make up, None if their shapes differ."""
    keys = tuple(tuple(f"{parent}.{expert}.{part}.weight" for part in parts) for expert in range(num_experts))
    members = [[entries[key] for key in group] for group in keys]
    kinds = {tuple((entry.shape, entry.dtype) for entry in group) for group in members}
    first = members[0]
    if len(kinds) > 1 or any(len(entry.shape) != 2 or entry.shape[1] != first[0].shape[1] for entry in first):
        return None
    rows = tuple(entry.shape[0] for entry in first)
    shape = (num_experts, sum(rows), first[0].shape[1])
    return SplitStack(TensorEntry(name, shape, first[0].dtype, ""), keys, rows)


def check_layout(config: dict[str, Any], names: Iterable[str], folder: Path) -> None:
    """Raise where transformers does more to the named parameters than stack and concatenate them when it loads them.

    Args:
        config: The model's configuration.
        names: Full names of parameters.
        folder: The checkpoint.

    Raises:
        CheckpointError: If it transposes or rearranges one, so that a merge of files would not fit it.
    """
    nested = [part for part in config.values() if isinstance(part, dict)]
    model_types = {str(part.get("model_type")) for part in (config, *nested)}
    for conversion in [item for kind in sorted(model_types) for item in get_checkpoint_conversion_mapping(kind) or []]:
        operations = {type(operation).__name__ for operation in getattr(conversion, "operations", [])}
        targets = {pattern.rpartition(".")[2] for pattern in getattr(conversion, "target_patterns", [])}
        changed = [name for name in names if name.rpartition(".")[2] in targets]
        if changed and not operations <= PLAIN_OPERATIONS:
            raise CheckpointError(
                folder,
                f"stores {changed[0]} in another layout than transformers runs "
                f"({', '.join(sorted(operations - PLAIN_OPERATIONS))})",
                "merge with merge_and_unload",
            )
