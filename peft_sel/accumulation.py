"""One effective weight, and one pull back of its gradient, for all micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from peft_sel.errors import ChangedWeightError, NestedAccumulationError
from peft_sel.kept import Stamp


class _SharedWeight:
    """A leaf in the place of an effective weight, and the float32 sum of the gradients that reach it."""

    def __init__(self, effective: Tensor, dtype: torch.dtype, stamp: Stamp) -> None:
        self.stamp = stamp
        self.leaf = effective.detach().to(dtype)
        self._sum: Tensor | None = None
        self._sum_dtype = effective.dtype
        if effective.requires_grad:
            self._edge = get_gradient_edge(effective)  # and not effective, whose values nobody needs
            self.leaf.requires_grad_()
            self._hook = self.leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        self._sum = grad.to(self._sum_dtype) if self._sum is None else self._sum.add_(grad)

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has reached it."""
        return self._sum is not None

    def pull_back(self) -> None:
        """Pull the sum back to raw, scales and residual, whose gradients it adds to."""
        total, self._sum = self._sum, None
        if total is not None:
            torch.autograd.backward(self._edge, total)
        if self.leaf.requires_grad:
            self._hook.remove()  # it holds this object, which holds the leaf


class SharedWeights:
    """The weights of one layer inside accumulate_gradients, by the adapters they belong to.

    A copy of the layer is outside the scope: copies and pickles of this object are None.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._weights: dict[tuple[str, ...], _SharedWeight] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def get(
        self, adapters: list[str], sources: list[Tensor], compute: Callable[[], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return the weight that some adapters run with, computed for the first micro-batch.

        Args:
            adapters: Their names.
            sources: Every tensor that the weight depends on.
            compute: Computes the weight, wide enough for a sum of gradients.
            dtype: Dtype to run with.

        Returns:
            A leaf.

        Raises:
            ChangedWeightError: If a source was written to after a backward pass.
        """
        shared = self._weights.get(tuple(adapters))
        if shared is not None and not shared.stamp.is_current(sources):
            self._check_unused(shared)
            shared = None
        if shared is None:
            # The innermost hooks apply: a checkpoint's own would drop what belongs to all micro-batches.
            with torch.enable_grad(), saved_tensors_hooks(_keep, _keep):
                shared = _SharedWeight(compute(), dtype, Stamp(sources))
            self._weights[tuple(adapters)] = shared
        return shared.leaf

    def _check_unused(self, shared: _SharedWeight) -> None:
        if shared.has_gradient:
            raise ChangedWeightError(self._name)

    def pull_back(self) -> None:
        """Pull all sums back.

        Raises:
            ChangedWeightError: If a source was written to after a backward pass.
        """
        for shared in self._weights.values():
            if not shared.stamp.is_current(shared.stamp.sources):
                self._check_unused(shared)
        for shared in self._weights.values():
            shared.pull_back()
        self._weights.clear()


def _keep(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def share_weights(layers: Sequence[Any]) -> Iterator[None]:
    """Share the effective weights of some layers until the end, then pull their gradients back; see SELModel."""
    if any(layer.shared_weights is not None for layer in layers):
        raise NestedAccumulationError
    for layer in layers:
        layer.shared_weights = SharedWeights(layer.weight_name)
    try:
        yield
        for layer in layers:
            layer.shared_weights.pull_back()
            layer.shared_weights = (
                None  # one after another, so that the sums and the gradients are not all there at once
            )
    finally:
        for layer in layers:
            layer.shared_weights = None
