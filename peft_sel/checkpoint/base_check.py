"""Whether a base checkpoint is the one that an adapter was made from, found out tensor by tensor."""

from __future__ import annotations

from torch import Tensor

from peft_sel.checkpoint.adapter import Adapter, weight_key
from peft_sel.errors import OtherBaseError
from peft_sel.numerics import choose_hashes, hash_stack, hash_weight, matches_fingerprint

WAY_OUT = "go on with check_base=False (--any-base) all the same"


class BaseCheck:
    """Compares base tensors with the fingerprints in an adapter's configuration, as a merge reads them.

    Args:
        adapter: The adapter; where it records nothing, nothing is compared.
        enabled: Whether to compare at all.
    """

    def __init__(self, adapter: Adapter, enabled: bool) -> None:
        self.adapter = adapter
        self._recorded = adapter.config.base_fingerprint if enabled else {}
        self._experts: dict[str, dict[int, list[str]]] = {}

    def needs_base(self, module: str) -> bool:
        """Whether the base tensor that a key of Adapter.modules converts is to be read: to compare, or to invert it."""
        return self.has_record(module) or not self.adapter.config.train_raw

    def has_record(self, module: str) -> bool:
        """Whether there is something to compare the base tensor with that a key of Adapter.modules converts."""
        return weight_key(module) in self._recorded

    def check(self, module: str, weight: Tensor | None) -> None:
        """Compare a base tensor.

        Args:
            module: The key of Adapter.modules that converts it.
            weight: Its values, in the model's layout; None where it need not be read.

        Raises:
            OtherBaseError: If the adapter was made from other values.
        """
        recorded = self._recorded.get(weight_key(module))
        if recorded and weight is not None:
            stacked = len(self.adapter.reader.entries[self.adapter.modules[module]["beta"]].shape) > 0
            self._require(module, matches_fingerprint(recorded, weight, stacked))

    def check_expert(self, module: str, expert: int, num_experts: int, matrix: Tensor | None) -> None:
        """Take note of one matrix of a stack, and compare the stack once all are known.

        Args:
            module: The key of Adapter.modules that converts the stack.
            expert: Index of the matrix.
            num_experts: How many there are.
            matrix: Its values; None where they need not be read.

        Raises:
            OtherBaseError: If the adapter was made from other values.
        """
        if not self.has_record(module) or matrix is None:
            return
        recorded = choose_hashes(self._recorded[weight_key(module)], matrix.dtype)
        found = self._experts.setdefault(module, {})
        found[expert] = [hash_weight(matrix, precision) for precision in recorded]
        if len(found) == num_experts:
            stacks = zip(*(found[index] for index in range(num_experts)), strict=True)
            pairs = zip(stacks, recorded.values(), strict=True)
            self._require(module, any(hash_stack(members) == digits for members, digits in pairs))

    def _require(self, module: str, is_same: bool) -> None:
        if not is_same:
            config = self.adapter.config
            folder, made_from = str(self.adapter.folder), config.base_model_name_or_path
            raise OtherBaseError(folder, weight_key(module), made_from, config.train_raw, WAY_OUT)
