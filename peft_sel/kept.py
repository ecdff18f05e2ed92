"""Effective weights that an evaluation keeps between forward passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from peft_sel.partitioned import is_split

_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)  # fused optimizers write without raising a tensor's version


class Stamp:
    """The state of the tensors that a weight was computed from.

    A step of any optimizer counts as a write, an assignment to .data as well, and so does freezing or unfreezing one of
    them; a write into .data goes unseen.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        self.sources = sources
        self._objects, self._versions = self._read(sources)

    @staticmethod
    def _read(sources: list[Tensor]) -> tuple[list[object], list[Any]]:
        objects = [*sources, *(tensor.untyped_storage() for tensor in sources)]
        return objects, [_optimizer_steps, *((tensor._version, tensor.requires_grad) for tensor in sources)]

    def is_current(self, sources: list[Tensor]) -> bool:
        """Whether these are the tensors of the stamp, and none was written to since."""
        objects, versions = self._read(sources)
        return versions == self._versions and not any(map(operator.is_not, self._objects, objects))


class _Kept(NamedTuple):
    weight: Tensor
    stamp: Stamp


class KeptWeights:
    """Weights by the adapters they belong to, each valid until one of the tensors it came from is written to.

    See Stamp for what counts as a write. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self.enabled, self.asked_for = True, False
        self._weights: dict[tuple[str, ...], _Kept] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "asked_for": self.asked_for, "_weights": {}}

    def get(
        self,
        adapters: list[str],
        sources: list[Tensor],
        compute: Callable[[], Tensor],
        keeps_unasked: Callable[[], bool] = lambda: True,
    ) -> Tensor:
        """Return the kept weight of some adapters, or compute and keep it.

        Args:
            adapters: Their names.
            sources: Every tensor that the weight depends on.
            compute: Computes the weight.
            keeps_unasked: Says whether to keep it if nobody has asked for that.

        Returns:
            The weight.
        """
        # Tensors of inference count no writes; kept, what is made of split ones would be whole in every process.
        if not self.enabled or any(tensor.is_inference() or is_split(tensor) for tensor in sources):
            return compute()
        kept = self._weights.get(tuple(adapters))
        if kept is None or not kept.stamp.is_current(sources):
            stamp = Stamp(sources)
            kept = _Kept(compute(), stamp)
            if self.asked_for or keeps_unasked():
                self._weights[tuple(adapters)] = kept
        return kept.weight

    def clear(self) -> None:
        """Forget all weights."""
        self._weights.clear()
