"""One effective weight, and one pull back of its gradient, for all micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from peft_sel.errors import AccumulationError, ChangedWeightError
from peft_sel.kept import Stamp


class _SharedWeight:
    """A leaf in the place of an effective weight, and the float32 sum of the gradients that reach it."""

    def __init__(self, name: str, effective: Tensor, dtype: torch.dtype, stamp: Stamp) -> None:
        self.name, self.stamp = name, stamp
        self.leaf = effective.detach().to(dtype)
        self.sum: Tensor | None = None
        self._dtype = effective.dtype
        if effective.requires_grad:
            self._edge = get_gradient_edge(effective)  # and not effective, whose values nobody needs
            self.leaf.requires_grad_()
            self._hook = self.leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        wide = torch.promote_types(self._dtype, torch.float32)
        self.sum = grad.to(wide) if self.sum is None else self.sum.add_(grad)

    def check(self, sources: list[Tensor]) -> bool:
        """Return whether the weight still holds for its sources; raise if gradients wait that belong to other values.

        Args:
            sources: Every tensor that the weight depends on.

        Returns:
            Whether it does.

        Raises:
            ChangedWeightError: If a source has changed since a backward pass.
        """
        current = self.stamp.is_current(sources)
        if not current and self.sum is not None:
            raise ChangedWeightError(self.name)
        return current

    def pull_back(self) -> None:
        """Pull the sum back to raw, scales and residual, whose gradients it adds to."""
        total, self.sum = self.sum, None
        if total is not None:
            torch.autograd.backward(self._edge, total.to(self._dtype))

    def retire(self) -> None:
        """Forget the sum; refuse what reaches the leaf from now on."""
        self.sum = None
        if self.leaf.requires_grad:
            self._hook.remove()  # it holds this object, which holds the leaf
            self.leaf.register_post_accumulate_grad_hook(_Refusal(self.name))


class _Refusal:
    """A hook that says what is wrong with a backward pass through a weight that is shared no longer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, leaf: Tensor) -> None:
        leaf.grad = None
        raise AccumulationError(
            f"a backward pass reaches {self._name} after the weight that its forward pass used was given up",
            "call backward() inside the scope, and before anything writes to the adapter",
        )


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
            ChangedWeightError: If a source has changed since a backward pass.
        """
        shared = self._weights.get(tuple(adapters))
        if shared is not None and not shared.check(sources):
            shared.retire()
            shared = None
        if shared is None:
            # The innermost hooks apply: a checkpoint's own would drop what belongs to all micro-batches.
            with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_keep, _keep):
                shared = _SharedWeight(self._name, compute(), dtype, Stamp(sources))
            self._weights[tuple(adapters)] = shared
        return shared.leaf

    def check(self) -> None:
        """Raise ChangedWeightError if gradients wait for values that are no more."""
        for shared in self._weights.values():
            shared.check(shared.stamp.sources)

    def pull_back(self) -> None:
        """Pull all sums back."""
        for shared in self._weights.values():
            shared.pull_back()

    def zero_grad(self) -> None:
        """Forget all sums."""
        for shared in self._weights.values():
            shared.sum = None

    def retire(self) -> None:
        """Forget all weights; refuse what reaches them from now on."""
        for shared in self._weights.values():
            shared.retire()
        self._weights.clear()


def find_shared_weights(layer: Any) -> SharedWeights | None:
    """Return what a layer shares; None outside a scope, in torch.compile, and in a replica of DataParallel."""
    is_replica = "_is_replica" in vars(layer)  # asking the module for what it lacks takes longer
    return None if torch.compiler.is_compiling() or is_replica else layer.shared_weights


def _keep(tensor: Tensor) -> Tensor:
    return tensor


class Accumulation:
    """The micro-batches of one optimizer step, whose forward passes share effective weights.

    Args:
        layers: The layers that share.

    Raises:
        AccumulationError: If one of them is in another accumulation, or the process is one of several.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        if any(layer.shared_weights is not None for layer in layers):
            raise AccumulationError("accumulate_gradients() is open already for this model", "leave that scope first")
        is_one_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if layers and is_one_of_several and (size := torch.distributed.get_world_size()) > 1:
            raise AccumulationError(
                f"accumulate_gradients() runs in one process, and this is one of {size}",
                "accumulate without it: the gradients would miss the reduction among processes",
            )
        self._layers = list(layers)
        for layer in self._layers:
            layer.shared_weights = SharedWeights(layer.weight_name)

    def zero_grad(self) -> None:
        """Forget the gradients of the micro-batches so far, as optimizer.zero_grad() does outside."""
        for layer in self._layers:
            layer.shared_weights.zero_grad()

    def finish(self) -> None:
        """Pull the gradients back, and end.

        Raises:
            ChangedWeightError: If an adapter has changed since a backward pass; no gradient is there then.
        """
        try:
            for layer in self._layers:
                layer.shared_weights.check()
            for layer in self._layers:
                layer.shared_weights.pull_back()
                layer.shared_weights.retire()  # frees the sum before the next layer's gradient is there
        finally:
            self.discard()

    def discard(self) -> None:
        """End without a pull back."""
        for layer in self._layers:
            if layer.shared_weights is not None:
                layer.shared_weights.retire()
                layer.shared_weights = None


@contextmanager
def share_weights(layers: Sequence[Any]) -> Iterator[Accumulation]:
    """Share the effective weights of some layers until the end, then pull their gradients back; see SELModel."""
    accumulation = Accumulation(layers)
    try:
        yield accumulation
        accumulation.finish()
    finally:
        accumulation.discard()
