"""Effective weights that an evaluation keeps between forward passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)  # fused optimizers write without raising a tensor's version


class _Kept(NamedTuple):
    weight: Tensor
    sources: list[object]
    versions: list[int]


class KeptWeights:
    """Weights by the adapters they belong to, each valid until one of the tensors it came from is written to.

    A step of any optimizer counts as a write, an assignment to .data as well; a write into .data goes unseen. Copies
    and pickles are empty.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._weights: dict[tuple[str, ...], _Kept] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "_weights": {}}

    def get(self, adapters: list[str], sources: list[Tensor], compute: Callable[[], Tensor]) -> Tensor:
        """Return the kept weight of some adapters, or compute and keep it.

        Args:
            adapters: Their names.
            sources: Every tensor that the weight depends on.
            compute: Computes the weight.

        Returns:
            The weight.
        """
        if not self.enabled or any(tensor.is_inference() for tensor in sources):  # these do not count writes
            return compute()
        versions = [_optimizer_steps, *(tensor._version for tensor in sources)]
        objects = [*sources, *(tensor.untyped_storage() for tensor in sources)]
        kept = self._weights.get(tuple(adapters))
        if kept is None or kept.versions != versions or any(map(operator.is_not, kept.sources, objects)):
            kept = self._weights[tuple(adapters)] = _Kept(compute(), objects, versions)
        return kept.weight

    def clear(self) -> None:
        """Forget all weights."""
        self._weights.clear()
