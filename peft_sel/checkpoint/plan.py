"""What each tensor of a merged checkpoint is made of."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from peft_sel.checkpoint.adapter import Adapter, is_parameter, shape_error, weight_key
from peft_sel.checkpoint.base_check import BaseCheck
from peft_sel.checkpoint.experts import check_layout, find_split_stacks, rename_as_loaded
from peft_sel.checkpoint.inspect import EMBEDDING
from peft_sel.checkpoint.model_config import (
    find_inner_pairs,
    find_model_class,
    list_parts,
    list_tied_pairs,
    ties_embeddings,
)
from peft_sel.checkpoint.shards import CONFIG_FILE, CheckpointReader, TensorEntry
from peft_sel.conversion import FLOAT_DTYPES, add_differences, rebuild_weight, wide_dtype
from peft_sel.errors import BrokenMergeError, CheckpointError, NonFiniteWeightError, OtherBaseError, list_names
from peft_sel.untrusted import read_json


def match_names(names: list[str], known: Set[str], prefix: str) -> dict[str, str]:
    """Find what a base calls the tensors of an adapter.

    Args:
        names: Names in the adapter's model.
        known: Names in the base.
        prefix: The base model prefix of its class, "" for none.

    Returns:
        Adapter name -> base key: the names as they are, or all with the prefix added or removed, whichever fits best.
    """
    candidates = [{name: name for name in names}]
    if prefix:
        candidates.append({name: f"{prefix}.{name}" for name in names})
        candidates.append({name: name.removeprefix(f"{prefix}.") for name in names})
    return max(candidates, key=lambda mapping: sum(key in known for key in mapping.values()))


def _resolve_names(names: list[str], known: Set[str], prefix: str, adapter_dir: Path, base_dir: Path) -> dict[str, str]:
    """Return adapter name -> base key as match_names does, or raise unless the base has every one."""
    keys = match_names(names, known, prefix)
    homeless = [name for name, key in keys.items() if key not in known]
    if homeless:
        raise CheckpointError(
            adapter_dir,
            f"{len(homeless)} of its {len(names)} tensors have no counterpart in {base_dir}: {list_names(homeless)}",
            "merge into the checkpoint that the adapter was made from (with a newly added head: save that model first)",
        )
    return keys


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no NaN and no infinity, in one pass and without a mask of its size."""
    if tensor.dtype not in FLOAT_DTYPES or tensor.numel() == 0:
        return True
    return all(bool(torch.isfinite(end)) for end in tensor.aminmax())


class Plan:
    """What each tensor of the output is made of; making a plan validates the adapters against the base.

    Args:
        base: The base checkpoint.
        adapters: What is merged into it, in this order.
        dtype: Dtype of the floating-point tensors of the output; None for the base's own.
        check_base: Whether to compare the base with what each adapter was made from.

    Attributes:
        config: Content of the output's config.json.
        untied: Tensor that is not in the base, and is in the output -> its counterpart there, to which it was tied.

    Raises:
        CheckpointError: If an adapter does not fit the base, or two of them replace one tensor.
    """

    def __init__(
        self, base: CheckpointReader, adapters: Sequence[Adapter], dtype: torch.dtype | None, check_base: bool
    ) -> None:
        self.base, self.dtype = base, dtype
        self.checks = {adapter: BaseCheck(adapter, check_base) for adapter in adapters}
        path = base.folder / CONFIG_FILE
        self.config = read_json(path) if os.path.lexists(path) else {}
        if self.config.get("quantization_config"):
            raise CheckpointError(path, "the weights are quantized", "merge into an unquantized copy of the model")
        model_class, self.ties = find_model_class(self.config), ties_embeddings(self.config, path)
        self.has_class = model_class is not None
        pairs = list_tied_pairs(model_class) if self.ties else []
        inner = find_inner_pairs(self.config, path, base.entries)
        absent = {tied: source for pair in pairs for tied, source in (pair, pair[::-1]) if tied not in base.entries}
        self.untied = {tied: source for tied, source in absent.items() if source in base.entries}
        self.stacks = find_split_stacks(base.entries)
        self.prefix = getattr(model_class, "base_model_prefix", "")
        self.folded: dict[str, list[tuple[Adapter, str]]] = {}  # tensor -> the adapters that convert it, and its module
        self.replaced: dict[str, tuple[Adapter, str]] = {}
        self.without_head = False
        for adapter in adapters:
            self._add_adapter(adapter)
        self.members = {  # tensor on disk -> the stack and the expert that its rows are from
            key: (stack, expert)
            for stack in (self.folded.keys() | self.replaced.keys()) & self.stacks.keys()
            for expert, group in enumerate(self.stacks[stack].keys)
            for key in group
        }
        self._last: tuple[tuple[str, int, torch.dtype], Tensor] | None = None
        self._check_tying(pairs, inner)
        for adapter in adapters:
            self._check_smallest(adapter)
        self._update_config()

    def _add_adapter(self, adapter: Adapter) -> None:
        """Enter what an adapter converts and replaces, under the names that the base has for it."""
        weights = {module: weight_key(module) for module in adapter.modules}
        parameters = [name for module, name in weights.items() if is_parameter(module)]
        check_layout(self.config, parameters, self.base.folder)
        loaded = {rename_as_loaded(key): key for key in self.base.entries}
        keys = _resolve_names(
            [*weights.values(), *adapter.replacements, *adapter.base_copies],
            self.base.entries.keys() | self.untied.keys() | self.stacks.keys() | loaded.keys(),
            self.prefix,
            adapter.folder,
            self.base.folder,
        )
        keys = {name: loaded.get(key, key) for name, key in keys.items()}
        self.without_head |= any(len(key) < len(name) for name, key in keys.items())
        modules = {keys[name]: module for module, name in weights.items()}
        replaced = {keys[name]: saved for name, saved in adapter.replacements.items()}
        copies = {keys[name]: saved for name, saved in adapter.base_copies.items()}
        self._check_tensors(adapter, modules, replaced, copies)
        self._check_copies(adapter, copies)
        self._check_conflicts(adapter, modules.keys(), replaced.keys())
        self.replaced |= {key: (adapter, saved) for key, saved in replaced.items()}
        for key, module in modules.items():
            self.folded.setdefault(key, []).append((adapter, module))

    def _check_tying(self, own: Sequence[tuple[str, str]], inner: Set[tuple[str, str]]) -> None:
        """Decide whether tied tensors part: they must where an adapter changes one, and the other keeps its value."""
        touched = self.folded.keys() | self.replaced.keys()
        ends = [re.compile(rf"({end})(\..+)?") for pair in own for end in pair]  # some are of modules, or patterns
        changes_inner = not touched.isdisjoint(end for pair in inner for end in pair)
        self.tied_changed = changes_inner or any(end.fullmatch(key) for end in ends for key in touched)
        if not self.tied_changed:
            self.untied = {}
        is_plain = len(own) == 1 and not inner and all(end.endswith((".weight", ".bias")) for end in own[0])
        changes_embedding = any(EMBEDDING.fullmatch(key.removesuffix(".weight")) for key in touched)
        is_unknown = self.ties and changes_embedding and (self.without_head or not self.has_class)
        if is_unknown or (self.tied_changed and not is_plain):
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
        """Number of tensors of the output whose values come from an adapter."""
        return len((self.folded.keys() | self.replaced.keys()) - self.stacks.keys()) + len(self.members)

    def _check_tensors(
        self, adapter: Adapter, modules: dict[str, str], replaced: dict[str, str], copies: dict[str, str]
    ) -> None:
        """Raise unless every tensor of an adapter fits its base tensor, and no other one of the adapter does."""
        every = {*adapter.modules, *adapter.replacements.values(), *adapter.base_copies.values()}
        hidden = every - {*modules.values(), *replaced.values(), *copies.values()}
        if twice := sorted(hidden | (modules.keys() & replaced.keys())):
            raise CheckpointError(adapter.folder, f"holds {list_names(twice)} twice over", "save the adapter again")
        for key, module in modules.items():
            entry = self._base_entry(key)
            if entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    self.base.folder, f"{key} is stored as {entry.dtype}", "merge into an unquantized copy of the model"
                )
            adapter.check_parts(module, entry.shape)
        for key, saved in replaced.items():
            self._check_shape(adapter, key, saved)

    def _check_shape(self, adapter: Adapter, key: str, saved: str) -> None:
        """Raise unless a tensor that an adapter saved has the shape of the base's, and a dtype that turns into its."""
        entry, found = self._base_entry(key), adapter.reader.entries[saved]
        if found.shape != entry.shape:
            raise shape_error(adapter.folder, saved, found.shape, key, entry.shape)
        if found.dtype != entry.dtype and not {found.dtype, entry.dtype} <= {*FLOAT_DTYPES}:
            problem = f"{saved} is {found.dtype} and in the base {entry.dtype}"
            raise CheckpointError(adapter.folder, problem, "save it again")

    def _check_copies(self, adapter: Adapter, copies: dict[str, str]) -> None:
        """Raise unless an adapter's copies of base tensors are what the base holds."""
        for key, saved in copies.items():
            self._check_shape(adapter, key, saved)
            copy = adapter.reader.read(saved)
            if not torch.equal(self.base.read(self._base_entry(key).name).to(copy.dtype), copy):
                raise CheckpointError(
                    adapter.folder,
                    f"its copy of the base weight {key} differs from the one in {self.base.folder}",
                    "merge into the checkpoint that the adapter was made from",
                )

    def _check_smallest(self, adapter: Adapter) -> None:
        """Compare one tensor of the base with what an adapter was made from, at once and not late in a long merge."""
        check = self.checks[adapter]
        pairs = [
            (key, module)
            for key, sources in self.folded.items()
            for source, module in sources
            if source is adapter and check.has_record(module)
        ]

        def rank(pair: tuple[str, str]) -> tuple[bool, int]:
            shape = self._base_entry(pair[0]).shape
            return len(shape) < 2, math.prod(shape)  # biases last: many models have the same ones, of zeros

        for key, module in [min(pairs, key=rank)] if pairs else []:
            for expert in range(len(self.stacks[key].keys)) if key in self.stacks else (None,):
                self._check_base(adapter, module, key, expert, self._read_base(key, expert))

    def _check_base(self, adapter: Adapter, module: str, key: str, expert: int | None, weight: Tensor) -> None:
        """Raise unless a weight of the base, or one matrix of a stack, is what an adapter was made from."""
        try:
            if expert is None:
                self.checks[adapter].check(module, weight)
            else:
                self.checks[adapter].check_expert(module, expert, len(self.stacks[key].keys), weight)
        except OtherBaseError as error:
            if adapter.config.train_raw or _is_finite(weight):
                raise
            raise NonFiniteWeightError(key, int((~torch.isfinite(weight)).sum())) from error

    def _check_conflicts(self, adapter: Adapter, modules: Set[str], replaced: Set[str]) -> None:
        """Raise if an adapter and one before it replace the same tensor, or one replaces what the other converts."""
        shared = (replaced & (self.replaced.keys() | self.folded.keys())) | (modules & self.replaced.keys())
        for key in sorted(shared):
            other = self.replaced[key][0] if key in self.replaced else self.folded[key][0][0]
            raise CheckpointError(
                adapter.folder,
                f"and {other.folder} both change {key}, which can't be added up (modules_to_save or bias='all')",
                "merge one of the two only, or train the second on the merged first",
            )

    def _update_config(self) -> None:
        """Set the tying and dtype fields of the configuration to what the output holds."""
        nested = [part for name, part in self.config.items() if name.endswith("_config") and isinstance(part, dict)]
        for part in (self.config, *nested):
            if self.tied_changed and (part is self.config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
        if self.dtype:
            fields = {"dtype", "torch_dtype"}
            if fields.isdisjoint(self.config):
                self.config["dtype"] = None
            for part in list_parts(self.config):
                part.update(dict.fromkeys(fields & part.keys(), str(self.dtype).removeprefix("torch.")))

    def outputs(self) -> list[TensorEntry]:
        """Return the tensors of the output, in the files of the base."""
        entries = []
        followers = {source: tied for tied, source in self.untied.items()}
        for entry in self.base.entries.values():
            dtype = self.dtype if self.dtype and entry.dtype in FLOAT_DTYPES else entry.dtype
            entries.append(dataclasses.replace(entry, dtype=dtype))
            if entry.name in followers:
                entries.append(dataclasses.replace(entries[-1], name=followers[entry.name]))
        return entries

    def compute(self, entry: TensorEntry) -> Tensor:
        """Return the value of an output tensor."""
        key = entry.name
        if not any(key in changed for changed in (self.folded, self.members, self.replaced)):
            stored = self.base.read(self._base_entry(key).name)
            result = stored.to(entry.dtype)
            if result is not stored and not _is_finite(result) and _is_finite(stored):
                raise self._overflow(entry)
            return result
        result = self._adapted(key, entry.dtype)
        if not _is_finite(result):
            base_dtype = self._base_entry(key).dtype
            if entry.dtype != base_dtype and _is_finite(self._adapted(key, base_dtype)):
                raise self._overflow(entry)
            raise BrokenMergeError(key, self._name_adapters(key))
        return result

    def _name_adapters(self, key: str) -> list[str]:
        """Return the folders of the adapters that change an output tensor."""
        name = self.members[key][0] if key in self.members else key
        sources = [self.replaced[name]] if name in self.replaced else self.folded[name]
        return [str(adapter.folder) for adapter, _ in sources]

    def _adapted(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor that the adapters change."""
        if key not in self.members:
            return self._apply(key, None, dtype)
        name, expert = self.members[key]  # some rows of an expert's matrix, which is kept for its other rows
        stack = self.stacks[name]
        if self._last is None or self._last[0] != (name, expert, dtype):
            self._last = None  # before the next one is made
            self._last = (name, expert, dtype), self._apply(name, expert, dtype)
        return self._last[1].split(stack.rows)[stack.keys[expert].index(key)]

    def _apply(self, key: str, expert: int | None, dtype: torch.dtype) -> Tensor:
        """Return a weight, or one matrix of a stack, as SELLayer.get_combined_weight does for the same adapters."""
        if key in self.replaced:
            adapter, saved = self.replaced[key]
            return adapter.reader.read(saved, expert).to(dtype)
        sources = self.folded[key]
        needed = len(sources) > 1 or any(self.checks[adapter].needs_base(module) for adapter, module in sources)
        base_weight = self._read_base(key, expert) if needed else None
        name = key if expert is None else f"{key}[{expert}]"

        def fold(adapter: Adapter, module: str, dtype: torch.dtype) -> Tensor:
            if base_weight is not None:
                self._check_base(adapter, module, key, expert, base_weight)
            parts = adapter.read_parts(module) if expert is None else adapter.read_expert(module, expert)
            return rebuild_weight(adapter.config, parts, dtype=dtype, base_weight=base_weight, name=name)

        if base_weight is None or len(sources) == 1:
            return fold(*sources[0], dtype)
        wide = [(adapter, module, wide_dtype(adapter.config)) for adapter, module in sources]
        return add_differences(base_weight, (fold(*source) - base_weight.to(source[2]) for source in wide), dtype)

    def _read_base(self, key: str, expert: int | None) -> Tensor:
        """Return a weight of the base, or one matrix of a stack that is split on disk."""
        if expert is None:
            return self.base.read(self._base_entry(key).name)
        return torch.cat([self.base.read(member) for member in self.stacks[key].keys[expert]])

    def _overflow(self, entry: TensorEntry) -> CheckpointError:
        return CheckpointError(
            self.base.folder, f"{entry.name} has values beyond the range of {entry.dtype}", "choose a wider dtype"
        )
